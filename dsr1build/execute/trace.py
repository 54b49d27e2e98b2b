"""A build as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing show: who ran what when, pass groups inside.

The format is the JSON object format of "Trace Event Format" (Google, 2016): complete events (``"ph": "X"``) with a start and
a duration in microseconds, instants (``"i"``), counters (``"C"``) and metadata (``"M"``) that names the lanes.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsr1build.errors import EnvironmentUnfit, InvalidInput
from dsr1build.execute.events import Emit, Event, Failed, Finished, Hit, Started

_PROCESS = 1
# Hits have a lane of their own, before those of the actions that ran.
_HITS = 0


@contextlib.contextmanager
def traced(path: Path | None, emit: Emit) -> Iterator[Emit]:
    """Yields a function that passes events on to ``emit``; the trace of them is at ``path`` afterwards, also where the build
    fails or is interrupted. Without a path nothing is kept. Raises InvalidInput and EnvironmentUnfit."""
    if path is None:
        yield emit
        return
    if not path.parent.is_dir() or path.is_dir():
        raise InvalidInput(f"no file {path} can be written", where="--profile", hint="Name a file in a directory that exists.")
    trace = Trace()
    try:
        yield trace.watch(emit)
    finally:
        try:
            trace.write(path)
        except OSError as error:
            raise EnvironmentUnfit(f"the trace cannot be written: {error.strerror}", where=str(path)) from error


class Trace:
    """Takes the events of a build as they come."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lanes: list[str] = []
        self._running: dict[str, tuple[int, float]] = {}
        self._events: list[dict[str, Any]] = []

    def watch(self, emit: Emit) -> Emit:
        """Passes events on to ``emit`` and keeps what the trace shows of them."""

        def watched(event: Event) -> None:
            self.add(event, time.monotonic() - self._began)
            emit(event)

        return watched

    def add(self, event: Event, at: float) -> None:
        """``at`` is in seconds since the trace began."""
        match event:
            case Started():
                self._running[event.action] = self._free_lane(event.action), at
                self._count(at)
            case Hit():
                name, source = f"hit {event.kind} {event.label}", {"key": event.key, "source": event.source}
                self._events.append({"name": name, "ph": "i", "s": "t", "ts": _us(at), **_lane(_HITS), "args": source})
            case Finished():
                about: dict[str, Any] = {
                    "key": event.key,
                    "cpu seconds": event.cpu,
                    "peak bytes": event.peak,
                    "place": event.place,
                }
                self._complete(event, at, "finished", about)
            case Failed() if event.action in self._running:
                self._complete(event, at, "failed", {"reason": event.reason, "pass group": event.pass_group})

    def write(self, path: Path) -> None:
        """Write the trace; what still runs ends now. Raises OSError."""
        now = time.monotonic() - self._began
        unfinished = [
            {"name": id, "cat": "unfinished", "ph": "X", "ts": _us(begun), "dur": _us(now - begun), **_lane(lane), "args": {}}
            for id, (lane, begun) in self._running.items()
        ]
        names = ["cache hits", *(f"worker {number}" for number in range(1, len(self._lanes) + 1))]
        named = [{"name": "thread_name", "ph": "M", **_lane(lane), "args": {"name": name}} for lane, name in enumerate(names)]
        title = {"name": "process_name", "ph": "M", "pid": _PROCESS, "args": {"name": "dsr1build build"}}
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": [title, *named, *self._events, *unfinished]})
        half = path.with_name(f"{path.name}.{os.getpid()}")
        try:
            half.write_text(text, "utf-8")
            half.replace(path)
        finally:
            half.unlink(missing_ok=True)

    def _free_lane(self, action: str) -> int:
        """The first lane in which nothing runs; lane 0 is that of the hits."""
        taken = {lane for lane, _ in self._running.values()}
        lane = next(lane for lane in range(1, len(self._lanes) + 2) if lane not in taken)
        if lane > len(self._lanes):
            self._lanes.append(action)
        return lane

    def _complete(self, event: Finished | Failed, at: float, state: str, about: dict[str, Any]) -> None:
        lane, begun = self._running.pop(event.action, (1, at))
        name = f"{event.kind} {event.label}"
        self._events.append(
            {"name": name, "cat": state, "ph": "X", "ts": _us(begun), "dur": _us(at - begun), **_lane(lane), "args": about}
        )
        for group in event.pass_groups if isinstance(event, Finished) else ():
            start = min(begun + group.start, at)
            end = at if group.seconds is None else min(start + group.seconds, at)
            size = {"IR bytes": group.ir_bytes}
            self._events.append(
                {"name": group.name, "cat": "pass group", "ph": "X", "ts": _us(start), "dur": _us(end) - _us(start)}
                | {**_lane(lane), "args": size}
            )
        self._count(at)

    def _count(self, at: float) -> None:
        running = {"actions": len(self._running)}
        self._events.append({"name": "running", "ph": "C", "ts": _us(at), "pid": _PROCESS, "args": running})


def _us(seconds: float) -> int:
    return max(0, round(seconds * 1e6))


def _lane(lane: int) -> dict[str, int]:
    return {"pid": _PROCESS, "tid": lane}
