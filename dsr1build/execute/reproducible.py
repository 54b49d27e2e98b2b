"""Runs actions twice from nothing and compares what they write, with each other and with what the build uses."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import cast

from dsr1build.cache.scratch import scratch_directory
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, Fields, blob_refs, decode
from dsr1build.errors import BuildFailed
from dsr1build.execute.action_directory import folder_name
from dsr1build.execute.engine import run_actions
from dsr1build.execute.options import Options
from dsr1build.plan.action import Action, ActionResult, Results

_RUNS = ("one", "two")


def find_differences(
    actions: Mapping[str, Action],
    encoded_fields: Mapping[str, bytes],
    results: Mapping[str, ActionResult],
    read_blob: Callable[[BlobRef], bytes],
    options: Options,
) -> list[str]:
    """One line for each output that is not the same every time, in the order of ``actions``.

    ``encoded_fields`` and ``results`` are those of the build, by id; actions that have none are left out. ``read_blob``
    gives the content of the blobs of fields. Raises BuildFailed where an action fails that had not failed before.
    """
    alone: dict[str, Action] = {}
    contents: dict[str, bytes] = {}
    for id, action in actions.items():
        if id in encoded_fields and id in results:
            fields = cast("Fields", decode(encoded_fields[id]))
            contents.update({ref.sha256: read_blob(ref) for ref in blob_refs(fields) if ref.sha256 not in contents})
            alone[id] = replace(action, inputs=(), fields=_constant(fields))
    with scratch_directory("dsr1build-reproducible-") as root:
        made: list[Results] = []
        for run in _RUNS:
            again = replace(options, save_temps=root / run / "temps", keep_going=False)
            with LocalStore(root / run / "store", lambda text: None) as store:
                outcome = run_actions(alone, store, again, lambda event: None, contents)
            if outcome.failed:
                action = alone[outcome.failed[0]]
                raise BuildFailed("an action failed when it ran once more", where=f"{action.kind} {action.label}")
            made.append(outcome.results)
        return [line for id, action in alone.items() for line in _compare(action, results[id], made[0][id], made[1][id], root)]


def _constant(fields: Fields) -> Callable[[Results], Fields]:
    return lambda results: fields


def _compare(action: Action, used: ActionResult, first: ActionResult, second: ActionResult, root: Path) -> list[str]:
    lines: list[str] = []
    for name in sorted({*used.outputs, *first.outputs, *second.outputs}):
        head = f"{action.kind} {action.label}: {name}"
        if first.outputs.get(name) != second.outputs.get(name):
            group = _first_group(*(_temps(root / run / "temps", action) for run in _RUNS))
            lines.append(f"{head} differs from run to run" + (f"; the first pass group that differs is {group}" if group else ""))
        elif used.outputs.get(name) != first.outputs.get(name):
            lines.append(f"{head} is not what the build took from the cache")
    return lines


def _temps(directory: Path, action: Action) -> dict[str, bytes]:
    """What a compile kept of its steps, by file name in order; the names begin with the number of the step."""
    folder = directory / folder_name(action.label)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())} if folder.is_dir() else {}


def _first_group(first: Mapping[str, bytes], second: Mapping[str, bytes]) -> str:
    for name in sorted({*first, *second}):
        if first.get(name) != second.get(name):
            # opt and llc keep the assembly alone.
            return "optimize or codegen" if name == "assembly.s" else Path(name).stem.partition("-")[2]
    return ""
