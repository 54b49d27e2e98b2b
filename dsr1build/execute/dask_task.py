"""What runs inside a Dask worker: an action in a process of its own, its outputs sent back as plain bytes.

Each worker process has one fork server (``dsr1build.execute.server``), which imports the toolchain once and outlives the
actions and the builds; limits and crashes stay in the processes that it forks. What goes over the network is in the
encoding of ``dsr1build.digest``: bytes in, bytes out.
"""

import atexit
import contextlib
import os
import queue
import select
import shutil
import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from dsr1build.cache.scratch import make_scratch
from dsr1build.digest import BlobRef, Fields, decode, encode, sha256_hex
from dsr1build.errors import EnvironmentUnfit
from dsr1build.execute.executor import Ended, Limits, Request
from dsr1build.execute.fitness import package_digest, unfit
from dsr1build.execute.server import ForkServer
from dsr1build.toolchains import pass_groups, tools

# All the outputs of one action; they are held in memory at both ends.
MOST_OUTPUT_BYTES = 1 << 30
MOST_PASS_GROUP_BYTES = 64 << 10
# How often an action that runs looks whether its builder still wants it.
_ASK_SECONDS = 0.2
# A fork server with nothing to do gives its memory back after this.
_IDLE_SECONDS = 600.0
_BUILDS_KNOWN = 32


def inspect(build: str, expected: bytes) -> str:
    """Why this worker may not run actions of the build; "" where it may. ``expected`` is an encoded
    ``fitness.expectation``."""
    return _site().verdict(build, _mapping(decode(expected)), {})


def run(payload: bytes) -> bytes:
    """Run the action that ``payload`` holds (see ``pack``) and return how it ended (see ``unpack``). The task of Dask that
    calls this blocks until then; where its builder does not want it any more, the action is killed."""
    from distributed import get_worker

    given = _mapping(decode(payload))
    worker = get_worker()
    place, address = str(worker.name), str(worker.address)
    fields = _mapping(decode(given["fields"]))
    site = _site()
    refused = site.verdict(given["build"], given["expected"], fields)
    if refused:
        return _answer(place, address, refused=refused)
    directory = Path(mkdtemp(dir=site.scratch, prefix="action-"))
    try:
        request = _lay_out(directory, given)
        if request is None:
            return _answer(place, address, lost="an input arrived damaged")
        server, future = site.start(tuple(given["import_path"]), request)
        key = worker.get_current_task()
        while not future.done():
            try:
                future.result(_ASK_SECONDS)
            except TimeoutError:
                if not _is_wanted(worker, key):
                    server.kill(request.id)
        return _outcome(place, address, future.result(), directory)
    except OSError as error:
        return _answer(place, address, lost=f"its files cannot be written there: {error.strerror or error}")
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def pack(request: Request, build: str, expected: Fields, import_path: tuple[str, ...]) -> bytes:
    """The payload of an action that is laid out in ``request.directory``. Raises OSError."""
    inputs = {path.name: path.read_bytes() for path in (request.directory / "inputs").iterdir()}
    return encode(
        {
            "build": build,
            "expected": expected,
            "import_path": list(import_path),
            "fields": (request.directory / "fields").read_bytes(),
            "inputs": inputs,
            "key": request.key,
            "kind": request.kind,
            "label": request.label,
            "worker": request.worker,
            "preload": list(request.preload),
            "outputs": list(request.outputs),
            "memory": request.limits.memory,
            "seconds": float(request.limits.seconds),
            "file_size": request.limits.file_size,
        }
    )


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back. ``refused`` says why the worker did not run the action; otherwise ``ended`` is how it ended.

    ``files`` are its outputs, by relative path and verified; ``others`` names what it left there that is no regular file.
    """

    place: str
    address: str
    refused: str
    ended: Ended
    files: Mapping[str, bytes]
    others: tuple[str, ...]
    groups: bytes


def unpack(data: bytes, id: str, limits: Limits) -> Answer:
    """Read an answer and hold it against all that the builder can check: types, names, sizes, digests. Raises ValueError."""
    answer = _mapping(decode(data))
    text = {name: _typed(answer, name, str) for name in ("place", "address", "refused", "tail", "lost")}
    exit, signal = answer.get("exit"), answer.get("signal")
    if not (exit is None or type(exit) is int) or not (signal is None or type(signal) is int):
        raise ValueError("an exit code or signal is no number")
    if not text["refused"] and not text["lost"] and (exit is None) == (signal is None):
        raise ValueError("it does not say how the action ended")
    files: dict[str, bytes] = {}
    for name, entry in _mapping(answer.get("files")).items():
        content = _typed(_mapping(entry), "data", bytes)
        if len(content) > limits.file_size:
            raise ValueError(f"the output {name!r} is larger than a file may be")
        if BlobRef(sha256_hex(content)) != _mapping(entry).get("content"):
            raise ValueError(f"the output {name!r} does not have its digest")
        files[_relative(name)] = content
    others = answer.get("others")
    if not isinstance(others, tuple):
        raise ValueError("others is no list")
    groups = _typed(answer, "groups", bytes)
    if len(groups) > MOST_PASS_GROUP_BYTES:
        raise ValueError("the record of pass groups is too long")
    ended = Ended(
        id,
        exit,
        signal,
        _typed(answer, "seconds", float),
        _typed(answer, "peak", int),
        text["tail"],
        _typed(answer, "timed_out", bool),
        text["lost"],
        text["place"],
        _typed(answer, "cpu", float),
    )
    return Answer(text["place"], text["address"], text["refused"], ended, files, tuple(_relative(str(n)) for n in others), groups)


def _mapping(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a mapping is expected")
    return value


def _typed(values: Mapping[str, Any], name: str, kind: type) -> Any:
    value = values.get(name)
    if type(value) is not kind:
        raise ValueError(f"{name} is not of type {kind.__name__}")
    return value


def _relative(name: str) -> str:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts) or len(name.encode("utf-8")) > 1000:
        raise ValueError(f"the output name {name[:100]!r} is not a relative path")
    return name


def _lay_out(directory: Path, given: Mapping[str, Any]) -> Request | None:
    """The directory of the action as the builder had it; None where an input is not what its name says."""
    for name in ("inputs", "outputs", "work"):
        (directory / name).mkdir()
    (directory / "fields").write_bytes(given["fields"])
    for name, content in given["inputs"].items():
        if sha256_hex(content) != name:
            return None
        (directory / "inputs" / name).write_bytes(content)
    return Request(
        directory.name,
        given["key"],
        given["kind"],
        given["label"],
        given["worker"],
        directory,
        given["preload"],
        given["outputs"],
        Limits(given["memory"], given["seconds"], given["file_size"]),
    )


def _is_wanted(worker: Any, key: Any) -> bool:
    """Whether the builder still waits for the task and the worker is not about to end."""
    task = worker.state.tasks.get(key)
    return task is not None and task.state != "cancelled" and worker.status.name in ("running", "paused", "closing_gracefully")


def _outcome(place: str, address: str, ended: Ended, directory: Path) -> bytes:
    """The answer for an action that has run; outputs travel only where it ended well."""
    files: dict[str, Any] = {}
    others: list[str] = []
    size = 0
    if ended.exit == 0:
        outputs = directory / "outputs"
        for folder, folders, names in os.walk(outputs):
            for path in sorted(Path(folder) / name for name in (*folders, *names)):
                name = path.relative_to(outputs).as_posix()
                if path.is_symlink() or not (path.is_dir() or path.is_file()):
                    others.append(name)
                elif path.is_file():
                    size += path.stat().st_size
                    if size > MOST_OUTPUT_BYTES:
                        reason = f"its outputs are more than the {MOST_OUTPUT_BYTES >> 30} GiB that Dask is asked to carry"
                        return _answer(place, address, lost=reason)
                    content = path.read_bytes()
                    files[name] = {"content": BlobRef(sha256_hex(content)), "data": content}
    groups = b""
    record = directory / "work" / pass_groups.FILE
    if record.is_file() and not record.is_symlink():
        with record.open("rb") as file:
            groups = file.read(MOST_PASS_GROUP_BYTES)
    return _answer(place, address, ended, ended.lost, files=files, others=others, groups=groups)


def _answer(
    place: str,
    address: str,
    ended: Ended | None = None,
    lost: str = "",
    refused: str = "",
    files: Mapping[str, Any] | None = None,
    others: list[str] | None = None,
    groups: bytes = b"",
) -> bytes:
    return encode(
        {
            "place": place,
            "address": address,
            "refused": refused,
            "lost": lost,
            "exit": ended.exit if ended else None,
            "signal": ended.signal if ended else None,
            "seconds": ended.seconds if ended else 0.0,
            "cpu": ended.cpu if ended else 0.0,
            "peak": ended.peak if ended else 0,
            "tail": ended.tail if ended else "",
            "timed_out": ended.timed_out if ended else False,
            "files": files or {},
            "others": others or [],
            "groups": groups,
        }
    )


class _Server:
    """A fork server and the thread that drives it for all the threads of a worker."""

    def __init__(self, scratch: Path, import_path: tuple[str, ...]) -> None:
        self._server = ForkServer(scratch, map(Path, import_path))
        self._orders: queue.SimpleQueue[tuple[str, Request | None, Future[Ended]]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._waiting: dict[str, Future[Ended]] = {}
        self._thread = threading.Thread(target=self._drive, name="dsr1build", daemon=True)
        self._thread.start()

    @property
    def usable(self) -> bool:
        return self._thread.is_alive()

    def start(self, request: Request) -> Future[Ended]:
        """Run the action; its end is the future's result."""
        future: Future[Ended] = Future()
        self._order(request.id, request, future)
        return future

    def kill(self, id: str) -> None:
        self._order(id, None, Future())

    def retire(self) -> None:
        """End once nothing runs any more; nothing may be started afterwards."""
        self._order("", None, Future())

    def _order(self, id: str, request: Request | None, future: Future[Ended]) -> None:
        self._orders.put((id, request, future))
        # A full pipe wakes the thread as well as one more byte would.
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"x")

    def _drive(self) -> None:
        retired = False
        try:
            while self._waiting or not retired:
                if self._waiting:
                    for ended in self._server.wait(None, self._wake_read):
                        self._waiting.pop(ended.id).set_result(ended)
                elif not select.select([self._wake_read], [], [], _IDLE_SECONDS)[0]:
                    self._server.close()
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                while not self._orders.empty():
                    id, request, future = self._orders.get()
                    if request is not None:
                        self._start(id, request, future)
                    elif id:
                        self._server.kill(id)
                    else:
                        retired = True
        finally:
            self._server.close()
            for id, future in self._waiting.items():
                future.set_result(_lost(id, "its fork server was lost"))

    def _start(self, id: str, request: Request, future: Future[Ended]) -> None:
        try:
            self._server.start(request)
        except OSError as error:
            # The server itself could not be started, so nothing else runs in it.
            self._server.close()
            future.set_result(_lost(id, f"no process can be started there: {error.strerror}"))
        else:
            self._waiting[id] = future


def _lost(id: str, reason: str) -> Ended:
    return Ended(id, None, None, 0.0, 0, "", lost=reason)


class _Site:
    """What the actions of all builds share in a worker process: fork servers, and what is known of the builders."""

    def __init__(self) -> None:
        self.scratch, self._lock_file = make_scratch("dsr1build-dask-")
        self._lock = threading.Lock()
        self._servers: dict[tuple[str, ...], _Server] = {}
        self._verdicts: OrderedDict[str, dict[bytes, str]] = OrderedDict()
        self._installed: tuple[object, ...] = ()

    def verdict(self, build: str, expected: Fields, fields: Fields) -> str:
        """Why actions with the tools of ``fields`` may not run here; "" where they may."""
        tools_wanted = encode({"tools": fields.get("tools")})
        with self._lock:
            verdicts = self._verdicts.get(build)
            if verdicts is None:
                self._look_at_installation()
                verdicts = self._verdicts[build] = {}
                while len(self._verdicts) > _BUILDS_KNOWN:
                    self._verdicts.popitem(last=False)
            if tools_wanted not in verdicts:
                verdicts[tools_wanted] = unfit(expected, fields, self.scratch / "tools.json")
            return verdicts[tools_wanted]

    def start(self, import_path: tuple[str, ...], request: Request) -> tuple[_Server, Future[Ended]]:
        with self._lock:
            server = self._servers.get(import_path)
            if server is None or not server.usable:
                server = self._servers[import_path] = _Server(self.scratch, import_path)
            # Under the lock, so that nobody retires the server in between.
            return server, server.start(request)

    def close(self) -> None:
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _look_at_installation(self) -> None:
        """A worker lives long. What its fork servers have imported is let go when the files are others now, so that
        code and tools that were looked at for a verdict are those that run."""
        tools.identity.cache_clear()
        try:
            stats = [(str(path), path.stat()) for path in tools.tool_files()]
        except EnvironmentUnfit:
            stats = []
        installed = (package_digest(), *((name, s.st_size, s.st_mtime_ns, s.st_ino) for name, s in stats))
        if installed != self._installed:
            self._installed = installed
            for server in self._servers.values():
                server.retire()
            self._servers.clear()


_the_site: _Site | None = None
_site_lock = threading.Lock()


def _site() -> _Site:
    global _the_site
    with _site_lock:
        if _the_site is None:
            _the_site = _Site()
            atexit.register(_the_site.close)
        return _the_site
