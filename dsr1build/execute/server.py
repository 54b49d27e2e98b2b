"""The builder's side of the fork server: start it, ask it to run an action, hear how the action ended."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsr1build.execute import worker as worker_program
from dsr1build.execute.executor import Ended, Request

# All that an action sees of the environment, with HOME and TMPDIR, which name its own empty directory.
ENVIRONMENT: Mapping[str, str] = {
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PATH": "/nonexistent",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONHASHSEED": "0",
    "TZ": "UTC",
}
_PACKAGE_ROOT = Path(worker_program.__file__).resolve().parents[2]


@dataclass(slots=True)
class _Running:
    deadline: float
    started: float
    timed_out: bool = False


class ForkServer:
    """The local executor: one fork server, started at the first action and again after it was lost."""

    name = "local"
    slots = 0

    def __init__(self, scratch: Path, import_path: Iterable[Path] = ()) -> None:
        self._scratch = scratch
        self._import_path = [str(_PACKAGE_ROOT), *map(str, import_path)]
        self._process: subprocess.Popen[bytes] | None = None
        self._running: dict[str, _Running] = {}
        self._pending = b""

    @property
    def running(self) -> int:
        return len(self._running)

    def start(self, request: Request) -> None:
        """Start an action in its directory (see ``dsr1build.execute.worker``); ``wait`` tells its end."""
        now = time.monotonic()
        self._running[request.id] = _Running(now + request.limits.seconds, now)
        limits = {
            "memory": request.limits.memory,
            "cpu_seconds": max(1, int(request.limits.seconds)),
            "file_size": request.limits.file_size,
        }
        self._send(
            {
                "run": request.id,
                "worker": request.worker,
                "preload": list(request.preload),
                "directory": str(request.directory),
                "limits": limits,
                "temps": request.temps,
            }
        )

    def kill(self, id: str) -> None:
        """End an action; ``wait`` tells its end. Nothing happens where it has ended already."""
        if id in self._running:
            self._send({"kill": id})

    def wait(self, timeout: float | None = None, wake: int | None = None) -> list[Ended]:
        """The actions that ended since; waits for the first, at most ``timeout`` seconds, and not beyond the moment when the
        file descriptor ``wake`` can be read. Kills those out of time."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while self._running:
            now = time.monotonic()
            for id, running in self._running.items():
                if now >= running.deadline and not running.timed_out:
                    running.timed_out = True
                    self._send({"kill": id})
            deadlines = [r.deadline for r in self._running.values() if not r.timed_out]
            if give_up is not None:
                deadlines.append(give_up)
            ended, woken = self._read(max(0.0, min(deadlines) - now) if deadlines else None, wake)
            if ended or woken or (give_up is not None and time.monotonic() >= give_up):
                return ended
        return []

    def close(self) -> None:
        """End the server and every action that still runs."""
        process, self._process = self._process, None
        self._running.clear()
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def _send(self, request: Mapping[str, object]) -> None:
        if self._process is None:
            with (self._scratch / "fork-server.log").open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-s", "-P", worker_program.__file__, *self._import_path],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=dict(ENVIRONMENT),
                    cwd=self._scratch,
                    umask=0o022,
                    # A session of its own: Ctrl-C reaches the builder alone, which then ends the server in order.
                    start_new_session=True,
                )
            self._pending = b""
        assert self._process.stdin is not None
        # A server that is gone shows at the next read, which is the one place that handles it.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self._process.stdin.flush()

    def _read(self, timeout: float | None, wake: int | None) -> tuple[list[Ended], bool]:
        """The actions that ended, and whether ``wake`` can be read."""
        assert self._process is not None and self._process.stdout is not None
        server = self._process.stdout.fileno()
        with selectors.DefaultSelector() as selector:
            for descriptor in (server,) if wake is None else (server, wake):
                selector.register(descriptor, selectors.EVENT_READ)
            readable = {key.fd for key, _ in selector.select(timeout)}
        if server not in readable:
            return [], bool(readable)
        data = os.read(server, 65536)
        if not data:
            return self._lost(), False
        *lines, self._pending = (self._pending + data).split(b"\n")
        return [self._ended(json.loads(line)) for line in lines], False

    def _ended(self, message: dict[str, Any]) -> Ended:
        running = self._running.pop(message["ended"])
        return Ended(
            message["ended"],
            message["exit"],
            message["signal"],
            message["seconds"],
            message["peak"],
            message["tail"],
            running.timed_out,
            cpu=message["cpu"],
        )

    def _lost(self) -> list[Ended]:
        """The server died and took the running actions with it; the next action starts another one."""
        now = time.monotonic()
        lost = dict(self._running)
        self.close()
        log = (self._scratch / "fork-server.log").read_bytes()[-worker_program.TAIL_BYTES :].decode("utf-8", "replace")
        reason = "its fork server was lost"
        return [Ended(id, None, None, now - run.started, 0, log, run.timed_out, reason) for id, run in lost.items()]
