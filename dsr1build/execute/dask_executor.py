"""Runs actions on a Dask cluster: a thin adapter between ``Executor`` and ``distributed.Client.get_executor()``.

``dsr1build.execute.dask_task`` is the other end. A worker is looked at before it is given anything, and refused by name
where it differs from this builder. Dask's threads tell what happens through a queue; everything is decided in the thread
that drives the executor.
"""

import contextlib
import importlib
import logging
import os
import queue
import select
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dsr1build.digest import Fields, encode
from dsr1build.errors import EnvironmentUnfit, InvalidInput
from dsr1build.execute import dask_task
from dsr1build.execute.executor import Ended, Request
from dsr1build.execute.fitness import expectation
from dsr1build.toolchains import pass_groups

# How often the scheduler is asked for its workers.
_LOOK_SECONDS = 0.5
# How long actions wait for a first worker, or for the next one after the last has gone.
NO_WORKER_SECONDS = 30.0
# A scheduler that says nothing for this long, though its connection stands, is taken for gone.
SILENT_SECONDS = 60.0
# How long the news of a worker's death may take when the worker itself is no longer listed.
_ORPHAN_SECONDS = 3.0
_CLOSE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Worker:
    name: str
    threads: int


@dataclass(slots=True)
class _Running:
    """``tried`` are the workers that may run it; ``task`` is None while there is no worker for it. ``orphaned`` is since when
    none of them has been seen."""

    request: Request
    payload: bytes
    task: "Future[bytes] | None" = None
    tried: frozenset[str] = frozenset()
    orphaned: float | None = None


def open_dask(
    url: str,
    *,
    ca: Path | None = None,
    cert: Path | None = None,
    key: Path | None = None,
    features: Iterable[str] = (),
    import_path: Iterable[Path] = (),
    warn: Callable[[str], None] = warnings.warn,
    patience: float = 10.0,
) -> "DaskExecutor":
    """Connect to the scheduler at ``dask://host:port`` or, with TLS, ``dask+tls://host:port``.

    ``ca``, ``cert`` and ``key`` are PEM files: who may sign, and what this builder shows. ``features`` are those that the CPU
    of a worker must have (see ``fitness.expectation``); ``import_path`` is searched for action workers on the Dask workers,
    beside the package. ``warn`` is told of each refused worker, and of a scheduler whose ``allowed-failures`` is not 0; it
    is called in the thread that drives the executor. ``patience`` is how many seconds to wait for the scheduler.

    Raises InvalidInput for a wrong URL or TLS files that are missing, EnvironmentUnfit where ``distributed`` is not installed
    or the scheduler cannot be reached.
    """
    address = _address(url)
    files = {"ca": ca, "cert": cert, "key": key}
    _check_tls(url, address, files)
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise EnvironmentUnfit(
            f"builds on a Dask cluster need the Python package 'distributed': {error}",
            hint="Install it: python -m pip install 'dsr1build[dask]'",
        ) from error
    # What goes wrong with the cluster is told by this module, once.
    for name in ("client", "comm", "core", "utils"):
        logging.getLogger(f"distributed.{name}").setLevel(logging.CRITICAL)
    # Inputs travel with their action: what compiles share is small, and a link is one action.
    importlib.import_module("dask.config").set({"distributed.admin.large-graph-warning-threshold": "4GiB"})
    security = None
    if address.startswith("tls:"):
        tls = {"tls_ca_file": str(ca), "tls_client_cert": str(cert), "tls_client_key": str(key)}
        security = distributed.Security(require_encryption=True, **tls)
    try:
        client = distributed.Client(address, security=security, timeout=patience, set_as_default=False, name="dsr1build")
    except (OSError, TimeoutError) as error:
        raise EnvironmentUnfit(
            f"no Dask scheduler answers at {url}: {error}".rstrip(": "),
            hint="Start one with 'dask scheduler', or build without --executor. docs/farm.md has the commands.",
        ) from error
    executor = DaskExecutor(url, client, expectation(features), tuple(map(str, import_path)), warn)
    executor.check_scheduler()
    return executor


def _address(url: str) -> str:
    parts = urlsplit(url)
    hint = "Write dask://host:port, or dask+tls://host:port for a cluster with TLS."
    if parts.scheme not in ("dask", "dask+tls"):
        raise InvalidInput(f"{url!r} does not name a Dask cluster", hint=hint)
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise InvalidInput(f"the executor {url!r} has no valid port", hint=hint) from error
    if not host or not port or parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise InvalidInput(f"the executor {url!r} is not a host and a port", hint=hint)
    host = f"[{host}]" if ":" in host else host
    return f"{'tls' if parts.scheme == 'dask+tls' else 'tcp'}://{host}:{port}"


def _check_tls(url: str, address: str, files: Mapping[str, Path | None]) -> None:
    given = {name: file for name, file in files.items() if file is not None}
    if not address.startswith("tls:"):
        if given:
            raise InvalidInput(f"{url} is without TLS, but a {', '.join(given)} file is given", hint="Write dask+tls:// for TLS.")
        return
    if len(given) < len(files):
        lacking = ", ".join(name for name in files if name not in given)
        hint = "Dask's TLS shows a certificate at both ends: give ca, cert and key."
        raise InvalidInput(f"{url} needs TLS files; lacking: {lacking}", hint=hint)
    for name, file in given.items():
        if not file.is_file():
            raise InvalidInput(f"the {name} file for {url} does not exist", where=str(file))


class DaskExecutor:
    """A Dask cluster as an executor; made by ``open_dask``."""

    def __init__(
        self, url: str, client: Any, expected: Fields, import_path: tuple[str, ...], warn: Callable[[str], None]
    ) -> None:
        self.name = url
        self._client = client
        # Not pure: every submission is a task of its own. No retries: whether an action runs again is the caller's to say.
        self._pool = client.get_executor(pure=False, retries=0)
        self._expected = expected
        self._import_path = import_path
        self._warn = warn
        self._build = uuid.uuid4().hex
        self._running: dict[str, _Running] = {}
        self._ended: list[Ended] = []
        self._workers: dict[str, _Worker] = {}
        self._asked: set[str] = set()
        self._fit: set[str] = set()
        self._refused: dict[str, str] = {}
        self._without_worker = time.monotonic()
        self._grown = False
        self._answered = time.monotonic()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._closing = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="dsr1build-dask", daemon=True)
        self._watcher.start()

    @property
    def slots(self) -> int:
        """The threads of all workers that are fit, now."""
        self._take_events()
        return sum(self._workers[address].threads for address in self._fit) if self._connected else 0

    @property
    def running(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def _connected(self) -> bool:
        return bool(self._client.status == "running")

    def start(self, request: Request) -> None:
        try:
            payload = dask_task.pack(request, self._build, self._expected, self._import_path)
        except OSError as error:
            self._ended.append(_lost(request.id, f"its inputs cannot be read: {error.strerror or error}"))
            return
        self._running[request.id] = _Running(request, payload)
        self._take_events()
        self._submit(request.id)

    def wait(self, timeout: float | None = None, wake: int | None = None) -> list[Ended]:
        """See ``Executor.wait``. Returns early with nothing where the cluster has got more workers."""
        give_up = None if timeout is None else time.monotonic() + timeout
        while self.running:
            self._take_events()
            self._lose_what_nobody_runs()
            if self._ended or self._grown:
                break
            now = time.monotonic()
            seconds = _LOOK_SECONDS if give_up is None else min(_LOOK_SECONDS, give_up - now)
            if seconds <= 0:
                break
            readable, _, _ = select.select([self._wake_read, *([] if wake is None else [wake])], [], [], seconds)
            if wake in readable:
                self._take_events()
                break
        self._grown = False
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Leave the cluster. It drops what runs for this builder, and the workers kill it."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._running.clear()
        self._ended.clear()
        with contextlib.suppress(OSError, TimeoutError, RuntimeError, CancelledError):
            self._client.close(timeout=_CLOSE_SECONDS)
        self._watcher.join(_CLOSE_SECONDS)
        if not self._watcher.is_alive():
            os.close(self._wake_read)
            os.close(self._wake_write)

    def check_scheduler(self) -> None:
        """Warn of a scheduler that would run an action again by itself after a worker has died. That cannot be set from here."""
        dask_config: Any = importlib.import_module("dask.config")
        try:
            # A function of Dask itself, so that it says nothing of whether our package is installed there.
            allowed = self._client.run_on_scheduler(dask_config.get, "distributed.scheduler.allowed-failures", None)
        except (OSError, TimeoutError, ValueError, TypeError, AttributeError, ImportError):
            # A scheduler that does not tell is taken as it is.
            return
        if allowed not in (None, 0):
            self._warn(
                f"the scheduler of {self.name} runs an action again, up to {allowed} times, after the death of its worker; "
                "start it with DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES=0 to be told at once"
            )

    def _watch(self) -> None:
        """Ask for the workers, again and again; runs in a thread of its own."""
        while not self._closing.is_set():
            if self._connected:
                try:
                    info = self._client.scheduler_info()
                except (OSError, TimeoutError, RuntimeError, AttributeError, CancelledError):
                    # The connection went while it was asked: the next round sees the client's status.
                    self._closing.wait(_LOOK_SECONDS)
                    continue
                # A client that is being closed answers with nothing.
                if "workers" in info:
                    workers = {str(a): _Worker(str(w["name"]), int(w["nthreads"])) for a, w in info["workers"].items()}
                    self._tell(partial(self._see_workers, workers))
            else:
                self._tell(partial(self._see_workers, {}))
            self._closing.wait(_LOOK_SECONDS)

    def _tell(self, event: Callable[[], None]) -> None:
        """Have ``event`` called in the thread that drives the executor."""
        self._events.put(event)
        if not self._closing.is_set():
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"x")

    def _take_events(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake_read, 65536)
        while True:
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                return
            event()

    def _see_workers(self, workers: dict[str, _Worker]) -> None:
        self._answered = time.monotonic()
        self._workers = workers
        self._asked &= workers.keys()
        self._refused = {address: reason for address, reason in self._refused.items() if address in workers}
        if self._fit:
            self._without_worker = self._answered
        self._fit &= workers.keys()
        for address in workers.keys() - self._asked:
            self._asked.add(address)
            told = partial(self._see_verdict, address)
            self._call(told, "inspect", frozenset({address}), build=self._build, expected=encode(self._expected))

    def _see_verdict(self, address: str, task: "Future[str]") -> None:
        if address not in self._workers:
            return
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or _dead_worker(error):
            self._asked.discard(address)
            return
        reason = str(task.result()) if error is None else f"dsr1build cannot be used there ({_told(error)})"
        if reason:
            self._refuse(address, reason)
            return
        self._fit.add(address)
        self._grown = True
        for id in [id for id, running in self._running.items() if running.task is None]:
            self._submit(id)

    def _refuse(self, address: str, reason: str) -> None:
        name = self._workers[address].name if address in self._workers else address
        self._fit.discard(address)
        if address not in self._refused:
            self._refused[address] = f"{name}: {reason}"
            self._warn(f"the Dask worker {name} is refused: {reason}")

    def _submit(self, id: str) -> None:
        """Give the action to the workers that are fit, or let it wait for one."""
        running = self._running[id]
        running.task, running.tried = None, frozenset(self._fit)
        if not running.tried or not self._connected:
            return
        running.task = self._call(partial(self._see_end, id), "run", running.tried, payload=running.payload)

    def _call(self, told: Callable[[Any], None], function: str, workers: frozenset[str], **arguments: bytes | str) -> Any:
        """Have a function of ``dask_task`` called on one of ``workers``, and ``told`` called with the task when it has ended."""
        # A worker ends when it cannot unpickle what it is sent, so it is sent nothing but built-in names: where our package
        # is missing or broken, this task alone fails. The scheduler needs no package of ours at all.
        expression = f"__import__('importlib').import_module({dask_task.__name__!r}).{function}({', '.join(arguments)})"
        key = f"dsr1build-{function}-{uuid.uuid4().hex}"
        task = self._pool.submit(eval, expression, arguments, workers=sorted(workers), key=key)
        task.add_done_callback(lambda done: self._tell(partial(told, done)))
        return task

    def _see_end(self, id: str, task: "Future[bytes]") -> None:
        running = self._running.get(id)
        if running is None or running.task is not task:
            return
        if task.cancelled():
            gone = not self._connected
            self._lose(id, f"the scheduler of {self.name} is gone" if gone else f"the cluster {self.name} dropped the action")
            return
        error = task.exception()
        if error is not None:
            # Dask raises here what went wrong at the other end. None of it is the action's own doing: that is an answer.
            worker = _dead_worker(error)
            reason = f"the cluster {self.name} could not run it: {_told(error)}"
            self._lose(id, f"the Dask worker {worker} died while it ran the action" if worker else reason, worker)
            return
        try:
            answer = dask_task.unpack(task.result(), id, running.request.limits)
        except ValueError as invalid:
            self._lose(id, f"what came back is not valid: {invalid}")
            return
        if answer.refused:
            self._refuse(answer.address, answer.refused)
            self._submit(id)
            return
        try:
            _fill(running.request.directory, answer)
        except OSError as failure:
            self._lose(id, f"its outputs cannot be written: {failure.strerror or failure}", answer.place)
            return
        del self._running[id]
        self._ended.append(answer.ended)

    def _lose(self, id: str, reason: str, place: str = "") -> None:
        running = self._running.pop(id)
        if running.task is not None:
            # Where somebody still runs it after all, it is for nobody.
            running.task.cancel()
        self._ended.append(_lost(id, reason, place))

    def _lose_what_nobody_runs(self) -> None:
        """Give up actions whose workers have all gone, and all of them where the cluster is no more."""
        now = time.monotonic()
        reason = ""
        if not self._connected:
            reason = f"the scheduler of {self.name} is gone"
        elif now - self._answered > SILENT_SECONDS:
            reason = f"the scheduler of {self.name} has not answered for {SILENT_SECONDS:g} seconds"
        if reason:
            for id in list(self._running):
                self._lose(id, reason)
            return
        known = self._workers.keys()
        for id, running in list(self._running.items()):
            if running.task is not None:
                # The scheduler tells of a worker's death itself; what it could give to none of them would wait for ever.
                if running.tried & known:
                    running.orphaned = None
                elif running.orphaned is None:
                    running.orphaned = now
                elif now - running.orphaned > _ORPHAN_SECONDS:
                    self._lose(id, f"the Dask workers that could run it have gone from {self.name}")
            elif self._refused and known <= self._refused.keys():
                self._lose(id, "every Dask worker is refused: " + "; ".join(sorted(self._refused.values())))
            elif not self._fit and now - self._without_worker > NO_WORKER_SECONDS:
                self._lose(id, f"{self.name} has had no worker for {NO_WORKER_SECONDS:g} seconds")


def _fill(directory: Path, answer: dask_task.Answer) -> None:
    """Write what came back into ``directory``. What was no regular file becomes a dangling link, which no builder takes."""
    outputs = directory / "outputs"
    for name, content in answer.files.items():
        path = outputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    for name in answer.others:
        path = outputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to("/nonexistent")
    if answer.groups:
        (directory / "work" / pass_groups.FILE).write_bytes(answer.groups)


def _lost(id: str, reason: str, place: str = "") -> Ended:
    return Ended(id, None, None, 0.0, 0, "", lost=reason, place=place)


def _dead_worker(error: BaseException | None) -> str:
    """The name of the worker of which Dask says that it died; "" where that is not what went wrong."""
    worker = getattr(error, "last_worker", None)
    return "" if worker is None else str(worker.name)


def _told(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
