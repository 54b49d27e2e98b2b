"""Which pass group a compile is in, and for how long: written by the worker as it goes, read when it has ended.

The file ``pass-groups`` in the worker's current directory has one line for each group as it begins, and one with an empty
name at the end::

    {"name": "bufferize", "at": 0.0123, "ir_bytes": 48211}

``at`` is seconds since the worker began, ``ir_bytes`` the size of the IR that goes into the group (text; 0 where it is not
known). It is no output: it says nothing of what is compiled. A file without the last line names where the worker died.
"""

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

FILE = "pass-groups"
# A worker may write what it likes; the builder reads no more than this.
_MOST_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class PassGroup:
    """One group: begun ``start`` seconds after the worker, over after ``seconds``, or not over where that is None."""

    name: str
    start: float
    seconds: float | None
    ir_bytes: int


def begin_groups() -> None:
    """Start the clock; from now on groups are noted in the current directory. Called by the process of an action."""
    global _began
    _began = time.monotonic()


_began: float | None = None


def enter_group(name: str, ir_bytes: int = 0) -> None:
    """The worker begins ``name`` now; "" is the end. One write, so that a crash at any later moment leaves the line. Nothing
    is noted outside the process of an action."""
    if _began is None:
        return
    line = json.dumps({"name": name, "at": round(time.monotonic() - _began, 6), "ir_bytes": ir_bytes})
    descriptor = os.open(FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode("ascii") + b"\n")
    finally:
        os.close(descriptor)


def read_groups(work: Path) -> tuple[PassGroup, ...]:
    """The groups of the worker whose current directory was ``work``, in order; those that can be read."""
    try:
        with (work / FILE).open("rb") as file:
            lines = file.read(_MOST_BYTES).split(b"\n")
    except OSError:
        return ()
    entries: list[tuple[str, float, int]] = []
    for line in lines:
        try:
            entry = json.loads(line)
            entries.append((str(entry["name"])[:100], float(entry["at"]), int(entry["ir_bytes"])))
        except (ValueError, TypeError, KeyError, RecursionError):
            # The last line of a killed worker may be cut.
            break
    ends: list[float | None] = [*(at for _, at, _ in entries[1:]), None]
    return tuple(
        PassGroup(name, at, None if end is None else max(0.0, end - at), size)
        for (name, at, size), end in zip(entries, ends, strict=True)
        if name
    )
