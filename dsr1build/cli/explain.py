"""``dsr1build explain``: say why actions are cached or not, for a build as it stands, or from build records."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsr1build.errors import InvalidInput

if TYPE_CHECKING:
    from dsr1build.plan.action import Action

NAME = "explain"
SUMMARY = "say why actions are cached or not"
EPILOG = """examples:
  dsr1build explain BUILD.yaml
  dsr1build explain BUILD.yaml expert
  dsr1build explain BUILD.yaml link:x86-64-v3 --json
  dsr1build explain .dsr1build/last-build.json
  dsr1build explain here.json there.json

A build writes its record to .dsr1build/last-build.json beside its BUILD.yaml.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="BUILD.yaml|RECORD.json", help="what would be built, or the record of a build")
    parser.add_argument(
        "other",
        nargs="?",
        default="",
        metavar="ACTION|RECORD.json",
        help="only this action (its id, or a part of what it is called); or the record to compare the first one with",
    )
    parser.add_argument("--target", action="append", metavar="NAME", help="explain for this target instead; may be repeated")
    parser.add_argument("--context", type=int, metavar="N", help="longest context, in tokens")
    parser.add_argument("--cache", metavar="PROFILE", help="look into the caches of this profile")
    parser.add_argument("--json", action="store_true", help="print one JSON object (`dsr1build schema explain` describes it)")


def run(arguments: argparse.Namespace) -> int:
    import json

    from dsr1build.plan.explain_report import compare_records, explain_record, render_report
    from dsr1build.plan.record import read_record

    other: str = arguments.other
    if not arguments.file.endswith(".json"):
        if other.endswith(".json"):
            raise InvalidInput(
                "a build record is compared with another build record",
                where="dsr1build explain",
                hint=f"Write `dsr1build explain A.json {other}`.",
            )
        report = explain_build(arguments)
    elif other.endswith(".json"):
        report = compare_records(read_record(Path(arguments.file)), read_record(Path(other)))
    else:
        report = explain_record(read_record(Path(arguments.file)), other)
    print(json.dumps(report) + "\n" if arguments.json else render_report(report, arguments.file, other), end="")
    return 0


def explain_build(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report of what a build would find now."""
    from dsr1build.cache.store import LocalStore
    from dsr1build.cli.explaining import earlier_entries
    from dsr1build.cli.planning import plan_build
    from dsr1build.config.load import load_build
    from dsr1build.execute.forecast import forecast
    from dsr1build.plan.explain import Known, explain_miss
    from dsr1build.plan.explain_report import choose
    from dsr1build.plan.record import explanation_to_json, last_record, watch_fields

    config = load_build(arguments.file, context=arguments.context, cache=arguments.cache, targets=arguments.target)

    def warn(message: str) -> None:
        print(f"warning: {message}", file=sys.stderr)

    entries: list[dict[str, Any]] = []
    with LocalStore(config.cache_directory, warn) as store:
        actions = plan_build(config, store).plan.actions
        wanted = choose(actions, arguments.other)
        seen: dict[str, bytes] = {}
        states = forecast(watch_fields(actions, seen), store)
        record = last_record(config.file)
        last = list(record.known("last build")) if record else []
        earlier = earlier_entries(store, seen)
        for id in wanted:
            action = actions[id]
            entry: dict[str, Any] = {"action": id, "kind": action.kind, "label": action.label}
            entries.append(entry)
            if states[id] == "unknown":
                entry |= {"state": "waits", "waits_for": awaited(id, actions, states)}
                continue
            now = Known.from_encoded(seen[id], "this build", id, action.label)
            entry |= {"state": "hit" if states[id] == "cached" else "miss", "key": now.key}
            if states[id] == "run":
                entry["explanation"] = explanation_to_json(explain_miss(now, last, earlier))
    return {"version": 1, "what": "build", "name": config.build.name, "actions": entries}


def awaited(id: str, actions: "Mapping[str, Action]", states: Mapping[str, str]) -> str:
    """The first action that has to run before the key of ``id`` is known, or ``id`` itself where its inputs are damaged."""
    for source in actions[id].inputs:
        if states[source] == "run":
            return source
        if states[source] == "unknown":
            return awaited(source, actions, states)
    return id
