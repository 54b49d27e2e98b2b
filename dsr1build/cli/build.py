"""``dsr1build build``: build the bundles that a BUILD.yaml describes."""

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsr1build.cli.executing import add_execution_arguments, execution_options, native_features
from dsr1build.cli.unchanged import answer, begin, remember
from dsr1build.errors import BuildFailed, VerificationFailed

if TYPE_CHECKING:
    from dsr1build.cache.store import LocalStore
    from dsr1build.cli.planning import PlannedBuild
    from dsr1build.config.load import BuildConfig
    from dsr1build.execute.engine import Outcome
    from dsr1build.execute.events import Emit, Event, Failed, Summary
    from dsr1build.execute.options import Options
    from dsr1build.execute.progress import View
    from dsr1build.plan.action import Action
    from dsr1build.plan.record import BuildRecord

NAME = "build"
SUMMARY = "build the bundles that a BUILD.yaml describes"
EPILOG = """examples:
  dsr1build build BUILD.yaml
  dsr1build build BUILD.yaml --dry-run
  dsr1build build BUILD.yaml --target native --output /tmp/dist -j 4
  dsr1build build BUILD.yaml --json | tail -n 1
  dsr1build build BUILD.yaml --cache-only-read --min-hit-rate 90
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="BUILD.yaml", help="what to build")
    add_execution_arguments(parser)
    parser.add_argument("--target", action="append", metavar="NAME", help="build for this target instead; may be repeated")
    parser.add_argument("--context", type=int, metavar="N", help="longest context, in tokens")
    parser.add_argument("--output", metavar="DIR", help="bundles go to DIR/<name>/<target>/")
    cache = parser.add_mutually_exclusive_group()
    cache.add_argument("--cache", metavar="PROFILE", help="use this cache profile")
    cache.add_argument("--no-cache", action="store_true", help="neither read nor write any cache")
    parser.add_argument("--cache-only-read", action="store_true", help="take results from the caches, and write none")
    parser.add_argument(
        "--min-hit-rate", type=percentage, metavar="PERCENT", help="fail where fewer of the actions were in a cache"
    )
    parser.add_argument(
        "--check-reproducible", action="store_true", help="then run every action twice more and compare what they write"
    )
    parser.add_argument(
        "--verify-outputs", action="store_true", help="read every file of an earlier bundle and make anew what was changed"
    )
    parser.add_argument("--no-link", action="store_true", help="compile the kernels and stop")
    parser.add_argument("--dry-run", action="store_true", help="tell what would run, and run nothing")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="write a trace that Perfetto (ui.perfetto.dev) shows")
    view = parser.add_mutually_exclusive_group()
    view.add_argument("--json", action="store_true", help="print events, one JSON object a line; the last is the summary")
    view.add_argument("--quiet", action="store_true", help="print warnings and failures only")


def percentage(text: str) -> float:
    """A number from 0 to 100. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text.removesuffix("%"))
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not a percentage from 0 to 100")
    return value


def run(arguments: argparse.Namespace) -> int:
    began = begin()
    if answer(arguments, began):
        return 0
    from dsr1build.cli.explaining import earlier_entries, explained_record, follow
    from dsr1build.cli.planning import plan_build
    from dsr1build.cli.sharing import open_shared
    from dsr1build.config.load import load_build
    from dsr1build.execute.ci import hit_rate
    from dsr1build.execute.engine import run_actions
    from dsr1build.execute.events import Summary, Warned
    from dsr1build.execute.progress import show_events
    from dsr1build.execute.trace import traced
    from dsr1build.plan.record import RECORD_PATH, Done, last_record, watch_fields, write_record

    options = execution_options(arguments, Path(arguments.file), lambda: native_features(config.targets))
    config = load_build(
        arguments.file,
        context=arguments.context,
        output=arguments.output,
        cache=arguments.cache,
        targets=arguments.target,
    )
    early: list[str] = []
    report: Callable[[str], None] = early.append
    alarm: Callable[[str], None] = early.append
    with (
        open_store(config, arguments, lambda text: report(text)) as (config, store),
        open_shared(
            config,
            store,
            lambda text: report(text),
            lambda text: alarm(text),
            read_only=arguments.cache_only_read or arguments.dry_run,
        ) as shared,
    ):
        build = plan_build(config, store)
        actions = {id: a for id, a in build.plan.actions.items() if not arguments.no_link or a.kind in ("lower", "compile")}
        if arguments.dry_run:
            print_forecast(actions, store, arguments.json)
            return 0
        seen: dict[str, bytes] = {}
        done: dict[str, Done] = {}
        failures: list[Failed] = []
        with (
            show_events(choose_view(arguments), len(actions)) as show,
            traced(arguments.profile, follow(annotating(show, failures), done)) as emit,
        ):
            report = lambda text: emit(Warned(text))  # noqa: E731 - warnings go to the view from here on
            alarm = lambda text: emit(Warned(text, security=True))  # noqa: E731
            for text in early:
                report(text)
            outcome = run_actions(watch_fields(actions, seen), store, options, emit, build.plan.contents, shared)
            earlier = None if arguments.no_cache else earlier_entries(store, seen)
            record = explained_record(config.build.name, actions, seen, done, last_record(config.file), earlier)
            write_record(record, config.file, report)
            complete = not outcome.failed and not arguments.no_link
            changed = report if arguments.verify_outputs else None
            artifacts = tuple(str(path) for path in assemble(build, store, outcome, changed)) if complete else ()
            if shared is not None:
                shared.finish()
            summary = Summary(
                compiled=sum(actions[id].kind == "compile" for id in outcome.executed),
                executed=len(outcome.executed),
                hits={place: sum(one.outcome == f"{place} hit" for one in done.values()) for place in ("local", "remote")},
                failed=len(outcome.failed),
                skipped=len(outcome.skipped),
                artifacts=artifacts,
                seconds=round(time.monotonic() - began.seconds, 3),
            )
            summarize_step(record, summary, failures, report)
            emit(summary)
        if arguments.check_reproducible and not outcome.failed:
            check_reproducible(actions, seen, outcome, store, build, options)
        remember(arguments, config, summary, began)
    if outcome.failed:
        return 1
    if arguments.min_hit_rate is not None and hit_rate(summary) < arguments.min_hit_rate:
        written = Path(arguments.file).parent / RECORD_PATH
        raise BuildFailed(
            f"{sum(summary.hits.values())} of {len(done)} actions were cached ({hit_rate(summary):.1f} %), "
            f"fewer than --min-hit-rate {arguments.min_hit_rate:g} % asks for",
            where=arguments.file,
            hint=f"`dsr1build explain {written}` says why the others were not.",
        )
    return 0


@contextlib.contextmanager
def open_store(
    config: "BuildConfig", arguments: argparse.Namespace, warn: Callable[[str], None]
) -> "Iterator[tuple[BuildConfig, LocalStore]]":
    """The store that the options ask for, and the configuration that goes with it.

    With ``--no-cache`` results are kept in a temporary directory as long as the build runs, and no shared cache is asked.
    """
    from dsr1build.cache.scratch import scratch_directory
    from dsr1build.cache.store import LocalStore
    from dsr1build.cli.caches import profile_limits

    if arguments.no_cache:
        with scratch_directory("dsr1build-no-cache-") as directory:
            alone = replace(config, cache_directory=directory, profile=config.profile.model_copy(update={"remotes": ()}))
            with LocalStore(alone.cache_directory, warn) as store:
                yield alone, store
    else:
        with LocalStore(
            config.cache_directory, warn, profile_limits(config.profile), read_only=arguments.cache_only_read
        ) as store:
            yield config, store


def annotating(emit: "Emit", failures: "list[Failed]") -> "Emit":
    """Passes events on to ``emit`` and keeps the failures; in GitHub Actions failures and warnings become annotations."""
    from dsr1build.execute.ci import event_annotation, github_actions
    from dsr1build.execute.events import Failed

    annotate = github_actions()

    def annotated(event: "Event") -> None:
        emit(event)
        if isinstance(event, Failed):
            failures.append(event)
        text = event_annotation(event) if annotate else ""
        if text:
            print(text, file=sys.stderr, flush=True)

    return annotated


def summarize_step(record: "BuildRecord", summary: "Summary", failures: "list[Failed]", warn: Callable[[str], None]) -> None:
    """Append the build to the step's summary where GITHUB_STEP_SUMMARY names one."""
    from dsr1build.execute.ci import StepSummary, append_step_summary, render_step_summary
    from dsr1build.plan.explain import render_explanation

    if os.environ.get("GITHUB_STEP_SUMMARY"):
        misses = [
            (f"{action.kind} {action.label}", render_explanation(action.explanation, id))
            for id, action in record.actions.items()
            if action.explanation is not None
        ]
        problem = append_step_summary(render_step_summary(StepSummary(record.name, summary, misses, failures)))
        if problem:
            warn(problem)


def check_reproducible(
    actions: "Mapping[str, Action]",
    seen: Mapping[str, bytes],
    outcome: "Outcome",
    store: "LocalStore",
    build: "PlannedBuild",
    options: "Options",
) -> None:
    """Raises VerificationFailed where an action does not write the same bytes every time."""
    from dsr1build.digest import BlobRef
    from dsr1build.execute.reproducible import find_differences

    def read_blob(ref: BlobRef) -> bytes:
        content = build.plan.contents.get(ref.sha256)
        return store.read_blob(ref) if content is None else content

    found = find_differences(actions, seen, outcome.results, read_blob, options)
    if found:
        raise VerificationFailed(
            "outputs are not reproducible\n" + "\n".join(f"    {line}" for line in found),
            where="--check-reproducible",
            hint="An action that draws on more than its fields makes the cache wrong; please report it.",
        )


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


def assemble(
    build: "PlannedBuild", store: "LocalStore", outcome: "Outcome", changed: Callable[[str], None] | None = None
) -> "list[Path]":
    """Write the bundle of each target, in order. ``changed``, if given, is told which files of the bundles that stand there
    are not what the build made; to find them, all are read.

    Raises what ``assemble_bundle`` raises, and BuildFailed where the linked library has left the store since it was found
    there.
    """
    from dsr1build.cache.blobs import BlobLost
    from dsr1build.cache.scratch import scratch_directory
    from dsr1build.link.bundle import assemble_bundle
    from dsr1build.link.manifest import TargetInfo
    from dsr1build.link.verify import changed_files
    from dsr1build.plan.build_plan import LIBRARY

    config = build.config
    bundles: list[Path] = []
    for name, spec in build.plan.targets.items():
        program = build.programs[name]
        target = TargetInfo(
            name=name, triple=spec.triple, cpu=spec.cpu, features=tuple(spec.features), cpuinfo_flags=program.features
        )
        with scratch_directory("dsr1build-link-") as directory:
            library = directory / LIBRARY
            try:
                store.materialize(outcome.results[build.plan.links[name]].outputs[LIBRARY], library)
            except BlobLost as error:
                raise BuildFailed(
                    f"the linked library was removed from the cache while the bundle was made ({error})",
                    where=f"{config.build.name} for {name}",
                    hint="Build again; it is linked anew.",
                ) from None
            destination = config.output / config.build.name / name
            wrong = () if changed is None else changed_files(destination)
            for file in wrong:
                assert changed is not None
                changed(f"{destination / file} was changed after the build that made it; it is made anew")
            bundles.append(
                assemble_bundle(
                    destination, config.build.name, target, program, build.model, build.model.max_context, library, wrong
                )
            )
    return bundles
