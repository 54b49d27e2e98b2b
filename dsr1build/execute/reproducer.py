"""What is kept of a failed action: all that is needed to run it again without a build, and what came of one more run.

``<failures>/<first 16 digits of the key>-<label>/`` holds ``fields``, ``inputs/`` and ``request.json`` for
``python -m dsr1build.execute.once DIRECTORY``, for a compile ``temps/`` with the IR after each pass group, and, written
last, ``failure.json``::

    {"key", "kind", "label", "reason", "output", "pass_group", "again": what came of the second run, "same": true or false}

Only a failure that came twice in the same way is remembered, under the whole key, which names the tools as well.
"""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from dsr1build.execute.action_directory import folder_name
from dsr1build.execute.failure import Failure
from dsr1build.plan.action import Action

FAILURE = "failure.json"
NOT_AGAIN = "it was not run again"
_REMEMBERED = "it has failed twice in this way in an earlier build and was not run; --retry-failed runs it"
# How many failed actions are kept, and the bytes of the inputs of one.
_KEPT = 100
_MOST_INPUT_BYTES = 64 << 20
_MOST_RECORD_BYTES = 1 << 20


def keep(failures: Path, action: Action, key: str, directory: Path, failure: Failure) -> Path:
    """Copy what the action was given out of the directory in which it ran. Raises OSError."""
    place = failures / f"{key[:16]}-{folder_name(action.label)}"
    shutil.rmtree(place, ignore_errors=True)
    if sum(path.stat().st_size for path in (directory / "inputs").iterdir()) > _MOST_INPUT_BYTES:
        raise OSError(f"the inputs of {action.label} are too large to be kept")
    place.mkdir(parents=True)
    shutil.copyfile(directory / "fields", place / "fields")
    shutil.copytree(directory / "inputs", place / "inputs")
    request = {
        "kind": action.kind,
        "label": action.label,
        "worker": action.worker,
        "preload": list(action.preload),
        "outputs": list(action.outputs),
    }
    (place / "request.json").write_text(json.dumps(request, indent=1) + "\n", "utf-8")
    record = {
        "key": key,
        "kind": failure.kind,
        "label": action.label,
        "reason": failure.reason,
        "output": failure.output,
        "pass_group": failure.pass_group,
        "again": NOT_AGAIN,
        "same": False,
    }
    _write(place, record)
    _drop_oldest(failures)
    return place


def complete(place: Path, directory: Path, second: Failure | None) -> str:
    """Note what came of the second run, in ``directory``, and say it in one line. Raises OSError."""
    first = json.loads((place / FAILURE).read_text("utf-8"))
    temps = directory / "temps"
    if temps.is_dir():
        shutil.copytree(temps, place / "temps", dirs_exist_ok=True)
    # How much memory was used is not the same every time.
    same = second is not None and second.kind == first["kind"] and (second.reason == first["reason"] or second.kind == "memory")
    if second is None:
        again = "it did not fail when it was run again"
    elif same:
        again = "it failed in the same way when it was run again"
    else:
        again = f"it failed in another way when it was run again: {second.reason}"
    _write(place, {**first, "again": again, "same": same})
    return again


def recall(failures: Path, key: str) -> tuple[Failure, str, str] | None:
    """The failure of the action of this key, where it came twice in the same way and its cause may be the action itself; with
    where it is kept, and a line that says so."""
    try:
        places = [place for place in failures.iterdir() if place.name.startswith(f"{key[:16]}-")]
    except OSError:
        return None
    for place in places:
        try:
            with (place / FAILURE).open("rb") as file:
                found = json.loads(file.read(_MOST_RECORD_BYTES))
            if found["key"] != key or found["same"] is not True:
                continue
            failure = Failure(found["kind"], str(found["reason"]), str(found["output"]), str(found["pass_group"]))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            continue
        if failure.may_be_deterministic:
            return failure, str(place), _REMEMBERED
    return None


def _write(place: Path, record: Mapping[str, object]) -> None:
    half = place / f"{FAILURE}.new"
    half.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    half.replace(place / FAILURE)


def _drop_oldest(failures: Path) -> None:
    with os.scandir(failures) as found:
        places = sorted((entry for entry in found if entry.is_dir(follow_symlinks=False)), key=lambda e: e.stat().st_mtime_ns)
    for place in places[:-_KEPT]:
        shutil.rmtree(place.path, ignore_errors=True)
