"""The fork server: a small program that runs each action in a process of its own.

It is started by ``dsr1build.execute.engine`` as ``python -s -P worker.py`` with a scrubbed environment, imports what the
actions ask for once (importing mlir costs half a second), and forks for each action. It stays single-threaded, which
is asserted before each fork. It talks JSON, one object a line, on its standard input and output::

    -> {"run": id, "worker": "module:function", "preload": [module..], "directory": path, "limits": {..}, "temps": bool}
    -> {"kill": id}
    <- {"ended": id, "exit": code or null, "signal": number or null, "seconds": s, "cpu": s, "peak": bytes, "tail": text}

``directory`` holds ``fields`` (their canonical encoding), ``inputs/``, ``outputs/`` and ``work/``, the current directory and
temporary directory of the action; with ``temps`` the worker gets ``temps/`` there for its intermediate files. An action is
its own process group with limits of its own; what is left of the group when its leader ends is killed, and so is a process
that has left its group and lost its parent: it comes to the server, which is the subreaper of all. Its standard output
and error are read by the server, which keeps the last lines. At the end of its input the server kills what runs and ends,
so nothing outlives the builder.
"""

import contextlib
import ctypes
import importlib
import json
import os
import resource
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

TAIL_BYTES = 16384
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_LIBC = ctypes.CDLL(None)


@dataclass(slots=True)
class _Child:
    id: str
    pid: int
    started: float
    log: int
    tail: bytearray = field(default_factory=bytearray)


def main(import_path: list[str]) -> int:
    """Serve until standard input ends. ``import_path`` is put before the interpreter's own module search path."""
    sys.path[:0] = import_path
    for ignored in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(ignored, signal.SIG_IGN)
    # The messages leave through a descriptor of their own: a module that prints while it is imported disturbs nothing.
    answers = os.dup(1)
    os.dup2(2, 1)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    children: dict[str, _Child] = {}
    pending = b""
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(wake_read, selectors.EVENT_READ)
        try:
            while True:
                some_ended = False
                for ready, _ in selector.select():
                    if ready.fd == 0:
                        data = os.read(0, 65536)
                        if not data:
                            return 0
                        *lines, pending = (pending + data).split(b"\n")
                        for line in lines:
                            request = json.loads(line)
                            if "kill" in request:
                                if child := children.get(request["kill"]):
                                    os.killpg(child.pid, signal.SIGKILL)
                            else:
                                child = _start(request)
                                children[child.id] = child
                                selector.register(child.log, selectors.EVENT_READ, child)
                    elif ready.fd == wake_read:
                        os.read(wake_read, 4096)
                        some_ended = True
                    elif not _drain(ready.data):
                        selector.unregister(ready.fd)
                for child in [c for c in children.values() if _has_ended(c.pid)]:
                    if child.log in selector.get_map():
                        selector.unregister(child.log)
                    del children[child.id]
                    _write(answers, _reap(child))
                if some_ended:
                    _end_strays(children)
        finally:
            for child in children.values():
                os.killpg(child.pid, signal.SIGKILL)
            _end_strays({})


def _write(descriptor: int, message: dict[str, Any]) -> None:
    data = json.dumps(message).encode("ascii") + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _drain(child: _Child) -> bool:
    """Read what is there of the action's output; false at its end."""
    while True:
        try:
            data = os.read(child.log, 65536)
        except BlockingIOError:
            return True
        if not data:
            return False
        child.tail += data
        del child.tail[:-TAIL_BYTES]
        # One that prints without end must not keep the server from the others.
        if len(data) == 65536:
            return True


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _reap(child: _Child) -> dict[str, Any]:
    """Kill what is left of the group while its leader's id is still taken, then collect the leader."""
    os.killpg(child.pid, signal.SIGKILL)
    _drain(child)
    os.close(child.log)
    _, status, usage = os.wait4(child.pid, 0)
    return {
        "ended": child.id,
        "exit": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "seconds": time.monotonic() - child.started,
        # Of the process and of all its descendants that were waited for.
        "cpu": usage.ru_utime + usage.ru_stime,
        "peak": usage.ru_maxrss * 1024,
        "tail": child.tail.decode("utf-8", "replace"),
    }


def _end_strays(children: dict[str, _Child]) -> None:
    """Kill the processes that came here because their parent ended, but for those in the group of an action that runs."""
    leaders = {child.pid for child in children.values()}
    while strays := [pid for pid in _own_children() if pid not in leaders]:
        found = False
        for pid in strays:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                if os.getpgid(pid) in leaders:
                    # It ends with its group; until then it may only have ended by itself.
                    found |= os.waitpid(pid, os.WNOHANG)[0] == pid
                else:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                    found = True
        # The children of a stray come here when it has ended.
        if not found:
            return


def _own_children() -> list[int]:
    try:
        return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()]
    except OSError:
        # A kernel without CONFIG_PROC_CHILDREN does not tell; the groups are killed all the same.
        return []


def _start(request: dict[str, Any]) -> _Child:
    for module in request["preload"]:
        if module not in sys.modules:
            try:
                importlib.import_module(module)
            except ImportError:
                # The action imports it again and fails by its own name, with the traceback.
                continue
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads run in the fork server after importing {request['preload']}; forking is not safe")
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    log_read, log_write = os.pipe()
    os.set_blocking(log_read, False)
    pid = os.fork()
    if pid == 0:
        _child(request, mapped, log_write)
    os.close(log_write)
    # Parent and child both set the group, so that neither can come too late.
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)
    return _Child(request["run"], pid, time.monotonic(), log_read)


def _child(request: dict[str, Any], mapped: int, log: int) -> NoReturn:
    code = 1
    try:
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.closerange(3, 4096)
        directory = Path(request["directory"])
        work = directory / "work"
        os.chdir(work)
        os.environ.update(HOME=str(work), TMPDIR=str(work))
        _limit(request["limits"], mapped)
        _call(request["worker"], directory, request["temps"])
        code = 0
    except SystemExit as request_to_exit:
        wanted = request_to_exit.code
        code = 0 if wanted is None else wanted if isinstance(wanted, int) else 1
    except BaseException as error:
        # This is the top of a process: whatever ends it is reported to the builder, and the exit code says so.
        render: Callable[[], str] | None = getattr(error, "render", None)
        if render is not None:
            sys.stderr.write(render() + "\n")
        else:
            traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _limit(limits: dict[str, int], mapped: int) -> None:
    def set_limit(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    set_limit(resource.RLIMIT_AS, mapped + limits["memory"])
    set_limit(resource.RLIMIT_CPU, limits["cpu_seconds"])
    set_limit(resource.RLIMIT_FSIZE, limits["file_size"])
    set_limit(resource.RLIMIT_CORE, 0)


def _call(worker: str, directory: Path, temps: bool) -> None:
    from dsr1build.digest import decode
    from dsr1build.toolchains.pass_groups import begin_groups

    module, _, function = worker.partition(":")
    call = getattr(importlib.import_module(module), function)
    arguments = [decode((directory / "fields").read_bytes()), directory / "inputs", directory / "outputs"]
    if temps:
        (directory / "temps").mkdir()
        arguments.append(directory / "temps")
    begin_groups()
    call(*arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
