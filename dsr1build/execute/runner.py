"""Gives actions to executors: which comes next, how many at once, and what happens to one that did not end well."""

import contextlib
import errno
import os
import signal
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dsr1build.cache.store import LocalStore
from dsr1build.digest import Fields
from dsr1build.execute import reproducer
from dsr1build.execute.events import Emit, Warned
from dsr1build.execute.executor import Ended, Executor, Limits, Request
from dsr1build.execute.failure import Failure, judge
from dsr1build.execute.jobserver import open_jobserver
from dsr1build.execute.options import Options
from dsr1build.execute.ready_queue import ReadyQueue, critical_paths
from dsr1build.execute.resources import DEFAULT_MEMORY_SHARE, affordable_jobs, killed_for_memory, usable_cpus, usable_memory
from dsr1build.execute.server import ForkServer
from dsr1build.plan.action import Action
from dsr1build.toolchains.pass_groups import PassGroup, read_groups

if TYPE_CHECKING:
    from dsr1build.execute.history import Cost

# What an action is taken to need where nothing is known of it.
_UNKNOWN_MEMORY = 512 << 20
# An action that was killed for its time is not run again to see whether it happens again, where that costs more than this.
_CHECKED_SECONDS = 60.0
# A single action that ran out of memory may use this many times the limit of the others, as far as the budget goes.
_ALONE_FACTOR = 4
# How many actions in a row an executor may lose before the build goes on without it.
_LOST_IN_A_ROW = 2
# How long to wait before make is asked again for a place.
_JOBSERVER_SECONDS = 0.1
_SWITCH_SECONDS = 0.05


@dataclass(slots=True)
class Job:
    """One action that no cache has: how often it has begun, and what has come of that.

    ``alone``: it runs with nothing beside it. ``here``: it runs on this machine whatever the executor is. ``failure`` is how
    it failed, while one more run shows whether that happens again; ``reproducer`` is where that is kept, ``again`` what that run
    showed, ``groups`` the pass groups of the last run.
    """

    action: Action
    key: str
    fields: Fields
    directory: Path
    temps: bool
    attempts: int = 0
    alone: bool = False
    here: bool = False
    lost: int = 0
    failure: Failure | None = None
    reproducer: str = ""
    again: str = ""
    groups: tuple[PassGroup, ...] = ()


class Runner:
    """The executors of one build and what waits for them. Close it to end all that runs."""

    def __init__(self, scratch: Path, options: Options, store: LocalStore, actions: Mapping[str, Action], emit: Emit) -> None:
        self._scratch = scratch
        self._options = options
        self._store = store
        self._actions = actions
        self._emit = emit
        self._local: ForkServer | None = None
        self._remote = None if options.executor is None else options.executor(scratch, lambda text: emit(Warned(text)))
        self._fallen_back = False
        self._lost_in_a_row = 0
        self._jobserver = None
        if options.jobs == 0 and self._remote is None:
            self._jobserver, warning = open_jobserver(os.environ)
            if warning:
                emit(Warned(warning))
        self._local_jobs = affordable_jobs(options.jobs or usable_cpus(), emit)
        self._memory = options.memory or int(usable_memory() * DEFAULT_MEMORY_SHARE)
        self._killed_for_memory = killed_for_memory()
        self._queue = ReadyQueue(self._memory)
        self._checks: deque[Job] = deque()
        self._put_off: list[Job] = []
        self._jobs: dict[str, Job] = {}
        self._running_checks: set[str] = set()
        self._costs: Mapping[str, Cost] = {}
        self._priorities: Mapping[str, float] = {}

    @property
    def running(self) -> int:
        return len(self._running_checks) + self._queue.running

    @property
    def waiting(self) -> int:
        return len(self._queue) + len(self._checks) + len(self._put_off)

    @property
    def checking(self) -> bool:
        """An action has failed and is run, or will be run, once more to see whether it fails again."""
        return bool(self._checks or self._running_checks)

    def add(self, job: Job) -> None:
        """The action waits for a place from now on."""
        self._jobs[job.action.id] = job
        if not self._costs:
            self._forecast()
        memory = 0 if self._executor(job) is self._remote else self._costs[job.action.id].peak or _UNKNOWN_MEMORY
        self._queue.add(job.action.id, self._priorities[job.action.id], memory, job.alone)

    def next(self, checks_only: bool = False) -> Job | None:
        """The action to start now; ``start``, ``give_up`` or ``put_off`` has to follow. None where all wait."""
        if not self.waiting or not self._may_start():
            return None
        if self._checks and self.running < self._places:
            job = self._checks.popleft()
            self._running_checks.add(job.action.id)
            return job
        id = None if checks_only else self._queue.take(self._places - len(self._running_checks))
        if id is not None:
            return self._jobs[id]
        # The place that was asked for is not taken.
        if self._jobserver is not None:
            self._jobserver.release(self.running)
        return None

    def start(self, job: Job) -> None:
        action = job.action
        limits = self._limits(job)
        job.attempts += 1
        temps = job.temps or (job.failure is not None and action.kind == "compile")
        executor = self._executor(job)
        executor.start(
            Request(
                action.id,
                job.key,
                action.kind,
                action.label,
                action.worker,
                job.directory,
                action.preload,
                action.outputs,
                limits,
                temps and executor is self._local,
            )
        )

    def give_up(self, job: Job) -> None:
        """The action cannot start: an input of it has to be made again."""
        self._leave(job)
        del self._jobs[job.action.id]

    def put_off(self, job: Job, error: OSError, room_is_coming: bool) -> bool:
        """The action has no room on the disk: it waits until another one has ended and its directory is gone, where that is to
        come. Tells whether it does."""
        self._leave(job)
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not (self.running or room_is_coming):
            return False
        self._put_off.append(job)
        return True

    def bring_back(self) -> None:
        """Some room on the disk may have become free."""
        for job in self._put_off:
            self.add(job)
        self._put_off.clear()

    def wait(self, timeout: float | None, wake: int | None) -> list[Ended]:
        """The actions that ended since; waits for the first as an executor does."""
        if self._jobserver is not None and self._queue:
            timeout = _JOBSERVER_SECONDS if timeout is None else min(timeout, _JOBSERVER_SECONDS)
        both = [executor for executor in (self._remote, self._local) if executor is not None and executor.running]
        if len(both) == 1:
            ended = both[0].wait(timeout, wake)
        else:
            ended = [one for executor in both for one in executor.wait(_SWITCH_SECONDS, wake)]
        for one in ended:
            self._leave(self._jobs[one.id])
        if ended and self._jobserver is not None:
            self._jobserver.release(self.running)
        return ended

    def judge(self, job: Job, ended: Ended, absent: str) -> Failure | Literal["again"] | None:
        """What has come of an action that ended: None where it is done, its failure, or that it runs again.

        ``absent`` says what is wrong with its outputs, "" where nothing is.
        """
        job.groups = read_groups(job.directory / "work")
        failure = judge(ended, self._limits(job), job.groups, ended.signal == signal.SIGKILL and self._memory_ran_out())
        if failure is None and absent:
            failure = Failure("output", absent, "")
        if job.failure is not None:
            return self._checked(job, failure)
        if self._executor(job) is self._remote and (failure is None or failure.kind != "lost"):
            self._lost_in_a_row = 0
        if failure is None:
            return None
        if failure.kind == "lost" and self._runs_elsewhere(job, failure):
            return "again"
        if failure.kind == "memory" and not job.alone:
            job.alone = True
            self.add(job)
            return "again"
        return self._keep_reproducer(job, failure)

    def close(self) -> None:
        for executor in (self._remote, self._local):
            if executor is not None:
                executor.close()
        if self._jobserver is not None:
            self._jobserver.close()

    @property
    def _places(self) -> int:
        if self._remote is None or self._fallen_back:
            return self._local_jobs
        return self._options.jobs or max(1, self._remote.slots)

    def _may_start(self) -> bool:
        return self._jobserver is None or self.running >= self._places or self._jobserver.acquire(self.running)

    def _executor(self, job: Job) -> Executor:
        if self._remote is not None and not job.here and not self._fallen_back:
            return self._remote
        if self._local is None:
            self._local = ForkServer(self._scratch, self._options.import_path)
        return self._local

    def _memory_ran_out(self) -> bool:
        """Whether the kernel has killed a process of this control group for memory since the last question."""
        before, self._killed_for_memory = self._killed_for_memory, killed_for_memory()
        return self._killed_for_memory > before

    def _limits(self, job: Job) -> Limits:
        """No run may use more than the whole budget; one alone may use more than one of many."""
        limits = self._options.limits
        factor = _ALONE_FACTOR if job.alone else 1
        return replace(limits, memory=min(limits.memory * factor, max(self._memory, 1)))

    def _leave(self, job: Job) -> None:
        if job.action.id in self._running_checks:
            self._running_checks.remove(job.action.id)
        else:
            self._queue.end(job.action.id)

    def _forecast(self) -> None:
        """What each action is expected to cost, once something has to run at all."""
        from dsr1build.execute.history import expected_costs

        self._costs = expected_costs(self._store, self._actions)
        seconds = {id: self._costs[id].seconds for id in self._actions}
        self._priorities = critical_paths({id: action.inputs for id, action in self._actions.items()}, seconds)

    def _runs_elsewhere(self, job: Job, failure: Failure) -> bool:
        """The executor lost the action, which says nothing of it: it runs once more, here where that may be."""
        job.lost += 1
        remote = self._remote
        if remote is None or job.here or not self._options.fallback:
            if job.lost > 1:
                return False
        else:
            job.here = True
            self._lost_in_a_row += 1
            if self._lost_in_a_row == 1:
                self._emit(Warned(f"{remote.name}: {failure.reason}; {job.action.label} runs on this machine instead"))
            elif self._lost_in_a_row == _LOST_IN_A_ROW:
                self._fallen_back = True
                self._emit(Warned(f"{remote.name}: {failure.reason}; the build goes on without it"))
        self.add(job)
        return True

    def _keep_reproducer(self, job: Job, failure: Failure) -> Failure | Literal["again"]:
        """Keep what is needed to run a failed action again, and run it again once where that says something."""
        if self._options.failures is None or failure.kind == "lost":
            return failure
        with contextlib.suppress(OSError):
            job.reproducer = str(reproducer.keep(self._options.failures, job.action, job.key, job.directory, failure))
        job.again = reproducer.NOT_AGAIN
        if not job.reproducer or (failure.kind == "time" and self._options.limits.seconds > _CHECKED_SECONDS):
            return failure
        job.failure = failure
        self._checks.append(job)
        return "again"

    def _checked(self, job: Job, second: Failure | None) -> Failure:
        """The failed action has run once more."""
        first = job.failure
        assert first is not None
        with contextlib.suppress(OSError):
            job.again = reproducer.complete(Path(job.reproducer), job.directory, second)
        return first
