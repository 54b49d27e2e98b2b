"""Runs an action graph: what the cache holds is taken from it, the rest runs in processes of its own."""

import contextlib
import os
import resource
import shutil
import signal
import stat
import tempfile
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.scratch import make_scratch
from dsr1build.cache.store import LocalStore
from dsr1build.digest import Fields, blob_refs, encode, sha256_hex
from dsr1build.errors import EnvironmentUnfit
from dsr1build.execute.events import Emit, Failed, Finished, Hit, Started, Warned
from dsr1build.execute.executor import Ended, Executor, Limits, Request
from dsr1build.execute.server import ForkServer
from dsr1build.plan.action import Action, ActionResult

if TYPE_CHECKING:
    from dsr1build.cache.shared import SharedCache

_TIMES_MADE_AGAIN = 3
# File handles that the builder or its fork server needs besides one for each action that runs.
_OWN_HANDLES = 24
_TAIL_LINES = 20
_TAIL_CHARACTERS = 4000
_SCRATCH_PREFIX = "dsr1build-work-"


@dataclass(frozen=True, slots=True)
class Options:
    """``jobs`` actions run at once. With ``keep_going`` a failure stops only what depends on it.

    ``save_temps`` is a directory that takes what the workers of compile actions leave in the directory that they are then
    given as a fourth argument, by the action's label; these actions run even where the cache holds their results.
    ``import_path`` is searched for workers beside the package.
    """

    jobs: int = field(default_factory=lambda: usable_cpus())
    keep_going: bool = False
    limits: Limits = field(default_factory=Limits)
    save_temps: Path | None = None
    import_path: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Outcome:
    """``results`` of all actions that are done; ``executed``, ``hits``, ``failed`` and ``skipped`` are action ids."""

    results: Mapping[str, ActionResult]
    executed: tuple[str, ...]
    hits: tuple[str, ...]
    failed: tuple[str, ...]
    skipped: tuple[str, ...]


@dataclass(slots=True)
class _Job:
    action: Action
    key: str
    fields: Fields
    directory: Path


def run_actions(
    actions: Mapping[str, Action],
    store: LocalStore,
    options: Options,
    emit: Emit,
    contents: Mapping[str, bytes] | None = None,
    shared: "SharedCache | None" = None,
) -> Outcome:
    """Run ``actions`` (id -> action, in an order in which inputs come first) and tell each step to ``emit``.

    ``contents`` holds, by digest, the blobs of fields that no action makes; it may grow while fields are computed.
    ``shared`` has ``store`` as its local store; what it lacks is asked of the remotes while other actions run, and what is
    made here is offered to them. The caller finishes and closes it.
    A failed action publishes nothing. Raises EnvironmentUnfit where there is no room for temporary files; after any
    exception, KeyboardInterrupt among them, no process of the build is left.
    """
    options = replace(options, jobs=_affordable_jobs(options.jobs, emit))
    with _scratch_directory() as scratch, contextlib.closing(ForkServer(scratch, options.import_path)) as server:
        return _Run(actions, store, options, emit, {} if contents is None else contents, scratch, server, shared).run()


class _Run:
    """The state of one execution of an action graph."""

    def __init__(
        self,
        actions: Mapping[str, Action],
        store: LocalStore,
        options: Options,
        emit: Emit,
        contents: Mapping[str, bytes],
        scratch: Path,
        server: Executor,
        shared: "SharedCache | None",
    ) -> None:
        self.actions = actions
        self.store = store
        self.options = options
        self.emit = emit
        self.contents = contents
        self.scratch = scratch
        self.server = server
        self.shared = shared
        self.wave: dict[str, Fields] = {}
        self.asked: dict[str, str] = {}
        self.results: dict[str, ActionResult] = {}
        self.executed: list[str] = []
        self.hits: list[str] = []
        self.failed: list[str] = []
        self.jobs: dict[str, _Job] = {}
        self.waiting_for_key: dict[str, list[str]] = {}
        self.forced: set[str] = set()
        self.remaking: set[str] = set()
        self.remade: Counter[str] = Counter()
        self.started = 0

    def run(self) -> Outcome:
        self.users: dict[str, list[str]] = {id: [] for id in self.actions}
        for id, action in self.actions.items():
            for source in action.inputs:
                self.users[source].append(id)
        self.awaited = {id: set(action.inputs) for id, action in self.actions.items()}
        self.ready = deque(id for id, sources in self.awaited.items() if not sources)
        self.misses: deque[str] = deque()
        while True:
            stopped = bool(self.failed) and not self.options.keep_going
            while self.ready and not stopped:
                self._look_up(self.ready.popleft())
                stopped = bool(self.failed) and not self.options.keep_going
            if self.wave and not stopped:
                assert self.shared is not None
                self.shared.begin(self.wave)
                self.wave.clear()
            if self._take_answers() and self.ready:
                continue
            while self.misses and not stopped and self.server.running < self.options.jobs:
                self._start(self.misses.popleft())
            if not self.server.running:
                if stopped or not (self.ready or self.misses or self.asked):
                    break
                if self.asked and not self.misses:
                    self._take_answers(wait=True)
                continue
            for ended in self._wait():
                self._end(ended)
        left = tuple(id for id in self.actions if id not in self.results and id not in self.failed)
        return Outcome(self.results, tuple(self.executed), tuple(self.hits), tuple(self.failed), left)

    def _wait(self) -> list[Ended]:
        """The actions that ended since; returns earlier where a shared cache has something to say."""
        if self.shared is None:
            return self.server.wait()
        return self.server.wait(self.shared.patience(), self.shared.wake)

    def _take_answers(self, wait: bool = False) -> bool:
        """Take what the remotes have found and run what they have not; tells whether there was an answer."""
        if self.shared is None:
            return False
        answers = self.shared.collect(wait)
        for key, found in answers:
            id = self.asked.pop(key)
            if found is None:
                self.misses.append(id)
                continue
            del self.jobs[id]
            for user in (id, *self.waiting_for_key.pop(key)):
                self._hit(self.actions[user], found.result, found.source)
        return bool(answers)

    def _look_up(self, id: str) -> None:
        action = self.actions[id]
        try:
            fields = action.fields({source: self.results[source] for source in action.inputs})
        except BlobLost as lost:
            self._make_again(action, lost)
            return
        key = sha256_hex(encode(fields))
        if key in self.waiting_for_key:
            # An action with the same key runs already, for example one kernel for two targets that differ in name alone.
            self.waiting_for_key[key].append(id)
            return
        looked_up = id not in self.forced and not self._keeps_temps(action)
        if looked_up:
            result = self._find(key)
            if result is not None:
                self._hit(action, result)
                return
        self.started += 1
        self.jobs[id] = _Job(action, key, fields, self.scratch / f"action-{self.started}")
        self.waiting_for_key[key] = []
        if looked_up and self.shared is not None:
            self.wave[key] = fields
            self.asked[key] = id
        else:
            self.misses.append(id)

    def _find(self, key: str) -> ActionResult | None:
        if self.shared is None:
            return self.store.lookup(key)
        found = self.shared.lookup_local(key)
        return None if found is None else found.result

    def _hit(self, action: Action, result: ActionResult, source: str = "local") -> None:
        self.hits.append(action.id)
        self.emit(Hit(action.id, action.kind, action.label, result.key, source))
        self._done(action.id, result)

    def _done(self, id: str, result: ActionResult) -> None:
        self.results[id] = result
        self.remaking.discard(id)
        for user in self.users[id]:
            if id in self.awaited[user]:
                self.awaited[user].remove(id)
                if not self.awaited[user]:
                    self.ready.append(user)

    def _start(self, id: str) -> None:
        job = self.jobs[id]
        try:
            self._prepare(job)
        except BlobLost as lost:
            del self.jobs[id]
            self.ready.extend(self.waiting_for_key.pop(job.key))
            self._make_again(job.action, lost)
            return
        except OSError as error:
            raise EnvironmentUnfit(
                f"temporary files cannot be written in {self.scratch.parent}: {error.strerror}",
                hint="free some space there, or set TMPDIR to a directory on another disk",
            ) from error
        self.emit(Started(id, job.action.kind, job.action.label))
        action = job.action
        self.server.start(
            Request(
                id,
                job.key,
                action.kind,
                action.label,
                action.worker,
                job.directory,
                action.preload,
                action.outputs,
                self.options.limits,
                self._keeps_temps(action),
            )
        )

    def _prepare(self, job: _Job) -> None:
        """Lay out the action's directory. Raises BlobLost and OSError."""
        shutil.rmtree(job.directory, ignore_errors=True)
        for name in ("inputs", "outputs", "work"):
            (job.directory / name).mkdir(parents=True)
        (job.directory / "fields").write_bytes(encode(job.fields))
        for ref in blob_refs(job.fields):
            target = job.directory / "inputs" / ref.sha256
            content = self.contents.get(ref.sha256)
            if content is None:
                self.store.materialize(ref, target)
            else:
                target.write_bytes(content)

    def _make_again(self, action: Action, lost: BlobLost) -> None:
        """A file that was there at look-up is gone: run the action that makes it, then come back to ``action``."""
        sources = [s for s in action.inputs if lost.ref in self.results[s].outputs.values() and self._may_run_again(s)]
        if not sources:
            self._fail(action, f"its input {lost.ref.sha256} is missing or damaged and cannot be made again", "")
            return
        self.awaited[action.id].update(sources)
        for source in sources:
            if source in self.remaking:
                continue
            self.remaking.add(source)
            self.remade[source] += 1
            self.forced.add(source)
            if source in self.hits:
                self.hits.remove(source)
            self.ready.append(source)

    def _may_run_again(self, id: str) -> bool:
        """A store that loses the same file again and again must not keep a build busy for ever."""
        return id in self.remaking or self.remade[id] < _TIMES_MADE_AGAIN

    def _end(self, ended: Ended) -> None:
        job = self.jobs.pop(ended.id)
        action = job.action
        reason = _failure(ended, self.options.limits)
        files: dict[str, Path] = {}
        if not reason:
            files, reason = _collect(job.directory / "outputs", action.outputs)
        if reason:
            waiters = self.waiting_for_key.pop(job.key)
            self._fail(action, reason, _last_lines(ended.tail))
            for waiter in waiters:
                self._fail(self.actions[waiter], reason, _last_lines(ended.tail))
        else:
            try:
                result = self.store.publish(job.key, job.fields, files, ended.seconds, action.kind, action.label)
            except OSError as error:
                raise EnvironmentUnfit(
                    f"the outputs of {action.label} cannot be kept: {error.strerror}",
                    hint="free some space in the cache's directory or in the temporary directory (TMPDIR)",
                ) from error
            if self.options.save_temps is not None and self._keeps_temps(action):
                try:
                    _keep_temps(job, self.options.save_temps)
                except OSError as error:
                    raise EnvironmentUnfit(
                        f"the intermediate files of {action.label} cannot be kept: {error.strerror or error}",
                        where=str(self.options.save_temps),
                        hint="name another directory for them",
                    ) from error
            if self.shared is not None:
                self.shared.offer(job.key, job.fields, result, ended.seconds, action.kind, action.label)
            if action.id not in self.executed:
                self.executed.append(action.id)
            self.emit(Finished(action.id, action.kind, action.label, job.key, ended.seconds, ended.peak))
            waiters = self.waiting_for_key.pop(job.key)
            self._done(action.id, result)
            for waiter in waiters:
                self._hit(self.actions[waiter], result)
        shutil.rmtree(job.directory, ignore_errors=True)

    def _keeps_temps(self, action: Action) -> bool:
        return self.options.save_temps is not None and action.kind == "compile"

    def _fail(self, action: Action, reason: str, output: str) -> None:
        self.failed.append(action.id)
        self.emit(Failed(action.id, action.kind, action.label, reason, output))


def _collect(outputs: Path, required: tuple[str, ...]) -> tuple[dict[str, Path], str]:
    """The output files by relative path, or why they cannot be taken."""
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(outputs):
        for name in (*folders, *names):
            path = Path(folder) / name
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                files[path.relative_to(outputs).as_posix()] = path
            elif not stat.S_ISDIR(mode):
                return {}, f"left {path.relative_to(outputs)}, which is not a regular file"
    absent = [name for name in required if name not in files]
    if absent:
        return {}, f"left no output {', '.join(absent)}"
    return files, ""


def _failure(ended: Ended, limits: Limits) -> str:
    """How the action failed, or "" where it ended well."""
    if ended.timed_out:
        return f"killed after {limits.seconds:g} seconds, the limit for one action"
    if ended.signal is not None:
        known = ended.signal in signal.valid_signals() and ended.signal < signal.SIGRTMIN
        return f"killed by {signal.Signals(ended.signal).name if known else f'signal {ended.signal}'}"
    if ended.lost:
        return ended.lost
    if ended.exit != 0:
        memory = limits.memory / (1 << 30)
        out_of_memory = "MemoryError" in ended.tail[-_TAIL_CHARACTERS:]
        return f"out of memory at the limit of {memory:g} GiB" if out_of_memory else f"exit code {ended.exit}"
    return ""


def _last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


def _keep_temps(job: _Job, directory: Path) -> None:
    shutil.copytree(job.directory / "temps", directory / temps_name(job.action), dirs_exist_ok=True)


def temps_name(action: Action) -> str:
    """The folder of ``Options.save_temps`` that takes what this action keeps."""
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in action.label)


@contextlib.contextmanager
def _scratch_directory() -> Iterator[Path]:
    """A temporary directory that is gone afterwards; those of builders that were killed are removed first."""
    try:
        scratch, lock = make_scratch(_SCRATCH_PREFIX)
    except OSError as error:
        raise EnvironmentUnfit(
            f"no temporary directory can be made in {tempfile.gettempdir()}: {error.strerror}",
            hint="free some space there, or set TMPDIR to a directory on another disk",
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _affordable_jobs(jobs: int, emit: Emit) -> int:
    """As many of ``jobs`` as the limit on file handles allows, at least 1; a lower limit than may be is raised first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < jobs + _OWN_HANDLES and soft != hard:
        soft = jobs + _OWN_HANDLES if hard == resource.RLIM_INFINITY else min(hard, jobs + _OWN_HANDLES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= jobs + _OWN_HANDLES:
        return jobs
    fewer = max(1, soft - _OWN_HANDLES)
    if fewer < jobs:
        emit(Warned(f"there are only {soft} file handles (`ulimit -n`); {fewer} actions run at once instead of {jobs}"))
    return fewer


def usable_cpus(groups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """CPUs that this process may use: its affinity mask, and the least quota of its control group and of those above it,
    rounded up, at least 1. ``groups`` is where version 2 is mounted, or version 1 with its ``cpu`` below; ``membership``
    names the process's own group."""
    cpus = len(os.sched_getaffinity(0))
    for directory in _control_groups(groups, membership):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join((directory / name).read_text("ascii") for name in names).split()
                # Without a limit version 2 says `max` and version 1 says -1.
                if quota != "max" and int(quota) > 0 and int(period) > 0:
                    cpus = min(cpus, -(-int(quota) // int(period)))
    return max(1, cpus)


def _control_groups(groups: Path, membership: Path) -> list[Path]:
    """The directories of the process's control group and of all above it. In a container the mount may begin at the
    process's own group, so the mount itself is one of them."""
    found = [groups, groups / "cpu"]
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in membership.read_text("utf-8").splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            root = groups / "cpu" if "cpu" in controllers.split(",") else groups
            if controllers and root == groups:
                continue
            parts = [part for part in path.split("/") if part]
            if ".." not in parts:
                found += [root.joinpath(*parts[: depth + 1]) for depth in range(len(parts))]
    return found
