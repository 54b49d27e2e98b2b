"""``dsr1build build``: build the bundles that a BUILD.yaml describes."""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dsr1build.errors import InvalidInput

if TYPE_CHECKING:
    from dsr1build.cache.store import LocalStore
    from dsr1build.cli.planning import PlannedBuild
    from dsr1build.execute.engine import Outcome
    from dsr1build.execute.progress import View
    from dsr1build.plan.action import Action

NAME = "build"
SUMMARY = "build the bundles that a BUILD.yaml describes"
EPILOG = """examples:
  dsr1build build BUILD.yaml
  dsr1build build BUILD.yaml --dry-run
  dsr1build build BUILD.yaml --target native --output /tmp/dist -j 4
  dsr1build build BUILD.yaml --json | tail -n 1
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="BUILD.yaml", help="what to build")
    parser.add_argument("-j", "--jobs", type=int, metavar="N", help="run N actions at once (default: the CPUs that may be used)")
    parser.add_argument("-k", "--keep-going", action="store_true", help="after a failure go on with what does not depend on it")
    parser.add_argument("--target", action="append", metavar="NAME", help="build for this target instead; may be repeated")
    parser.add_argument("--context", type=int, metavar="N", help="longest context, in tokens")
    parser.add_argument("--output", metavar="DIR", help="bundles go to DIR/<name>/<target>/")
    parser.add_argument("--cache", metavar="PROFILE", help="use this cache profile")
    parser.add_argument("--no-link", action="store_true", help="compile the kernels and stop")
    parser.add_argument("--dry-run", action="store_true", help="tell what would run, and run nothing")
    parser.add_argument("--save-temps", type=Path, metavar="DIR", help="keep the IR after each pass group; compiles again")
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--json", action="store_true", help="print events, one JSON object a line; the last is the summary")
    view.add_argument("--quiet", action="store_true", help="print warnings and failures only")


def run(arguments: argparse.Namespace) -> int:
    started = time.monotonic()
    if arguments.jobs is not None and arguments.jobs < 1:
        raise InvalidInput(f"-j {arguments.jobs} runs nothing", where="dsr1build build", hint="Write a number from 1.")
    from dsr1build.cache.store import LocalStore
    from dsr1build.cli.planning import plan_build
    from dsr1build.config.load import load_build
    from dsr1build.execute.engine import Options, run_actions, usable_cpus
    from dsr1build.execute.events import Summary, Warned
    from dsr1build.execute.progress import show_events

    config = load_build(
        arguments.file,
        context=arguments.context,
        output=arguments.output,
        cache=arguments.cache,
        targets=arguments.target,
    )
    early: list[str] = []
    report: Callable[[str], None] = early.append
    with LocalStore(config.cache_directory, lambda text: report(text)) as store:
        build = plan_build(config, store)
        actions = {id: a for id, a in build.plan.actions.items() if not arguments.no_link or a.kind in ("lower", "compile")}
        if arguments.dry_run:
            print_forecast(actions, store, arguments.json)
            return 0
        with show_events(choose_view(arguments), len(actions)) as emit:
            report = lambda text: emit(Warned(text))  # noqa: E731 - the store's warnings go to the view from here on
            for text in early:
                report(text)
            options = Options(
                jobs=arguments.jobs or usable_cpus(), keep_going=arguments.keep_going, save_temps=arguments.save_temps
            )
            outcome = run_actions(actions, store, options, emit, build.plan.contents)
            complete = not outcome.failed and not arguments.no_link
            emit(
                Summary(
                    compiled=sum(actions[id].kind == "compile" for id in outcome.executed),
                    executed=len(outcome.executed),
                    hits={"local": len(outcome.hits), "remote": 0},
                    failed=len(outcome.failed),
                    skipped=len(outcome.skipped),
                    artifacts=tuple(str(path) for path in assemble(build, store, outcome)) if complete else (),
                    seconds=round(time.monotonic() - started, 3),
                )
            )
    return 1 if outcome.failed else 0


def choose_view(arguments: argparse.Namespace) -> "View":
    if arguments.json:
        return "json"
    if arguments.quiet:
        return "quiet"
    return "live" if sys.stdout.isatty() and os.environ.get("TERM") != "dumb" else "plain"


def print_forecast(actions: "Mapping[str, Action]", store: "LocalStore", as_json: bool) -> None:
    """One line for each action that is not cached, then the counts; or one JSON object."""
    from dsr1build.execute.forecast import forecast

    found = forecast(actions, store)
    counts = {state: list(found.values()).count(state) for state in ("cached", "run", "unknown")}
    if as_json:
        print(json.dumps({"actions": found, "counts": counts}))
        return
    for id, state in found.items():
        if state != "cached":
            mark = "run " if state == "run" else "run?"
            print(f"{mark} {actions[id].kind} {actions[id].label}")
    print(f"{counts['cached']} cached, {counts['run']} to run, {counts['unknown']} known after those have run")


def assemble(build: "PlannedBuild", store: "LocalStore", outcome: "Outcome") -> "list[Path]":
    """Write the bundle of each target, in order. Raises what ``assemble_bundle`` raises."""
    from dsr1build.link.bundle import assemble_bundle
    from dsr1build.link.manifest import TargetInfo
    from dsr1build.plan.build_plan import LIBRARY

    config = build.config
    bundles: list[Path] = []
    for name, spec in build.plan.targets.items():
        program = build.programs[name]
        target = TargetInfo(
            name=name, triple=spec.triple, cpu=spec.cpu, features=tuple(spec.features), cpuinfo_flags=program.features
        )
        with tempfile.TemporaryDirectory(prefix="dsr1build-link-") as directory:
            library = Path(directory) / LIBRARY
            store.materialize(outcome.results[build.plan.links[name]].outputs[LIBRARY], library)
            destination = config.output / config.build.name / name
            bundles.append(
                assemble_bundle(destination, config.build.name, target, program, build.model, build.model.max_context, library)
            )
    return bundles
