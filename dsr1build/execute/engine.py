"""Runs an action graph: what the caches hold is taken from them, the rest runs where an executor runs it."""

import contextlib
import shutil
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.store import LocalStore
from dsr1build.digest import Fields, encode, sha256_hex
from dsr1build.errors import EnvironmentUnfit
from dsr1build.execute import reproducer
from dsr1build.execute.action_directory import collect, folder_name, prepare, work_directory
from dsr1build.execute.events import Emit, Failed, Finished, Hit, Started
from dsr1build.execute.executor import Ended
from dsr1build.execute.failure import Failure
from dsr1build.execute.options import Options
from dsr1build.execute.runner import Job, Runner
from dsr1build.plan.action import Action, ActionResult

if TYPE_CHECKING:
    from dsr1build.cache.shared import SharedCache

_TIMES_MADE_AGAIN = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """``results`` of all actions that are done; ``executed``, ``hits``, ``failed`` and ``skipped`` are action ids."""

    results: Mapping[str, ActionResult]
    executed: tuple[str, ...]
    hits: tuple[str, ...]
    failed: tuple[str, ...]
    skipped: tuple[str, ...]


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
    with work_directory() as scratch, contextlib.closing(Runner(scratch, options, store, actions, emit)) as runner:
        return _Run(actions, store, options, emit, {} if contents is None else contents, scratch, runner, shared).run()


class _Run:
    """The state of one execution of an action graph: which actions are done, awaited, asked for and running."""

    def __init__(
        self,
        actions: Mapping[str, Action],
        store: LocalStore,
        options: Options,
        emit: Emit,
        contents: Mapping[str, bytes],
        scratch: Path,
        runner: Runner,
        shared: "SharedCache | None",
    ) -> None:
        self.actions = actions
        self.store = store
        self.options = options
        self.emit = emit
        self.contents = contents
        self.scratch = scratch
        self.runner = runner
        self.shared = shared
        self.wave: dict[str, Fields] = {}
        self.asked: dict[str, str] = {}
        self.results: dict[str, ActionResult] = {}
        self.executed: list[str] = []
        self.hits: list[str] = []
        self.failed: list[str] = []
        self.jobs: dict[str, Job] = {}
        self.waiting_for_key: dict[str, list[str]] = {}
        self.forced: set[str] = set()
        self.remaking: set[str] = set()
        self.remade: Counter[str] = Counter()
        self.begun: list[Started] = []
        self.started = 0
        self.users: dict[str, list[str]] = {id: [] for id in actions}
        for id, action in actions.items():
            for source in action.inputs:
                self.users[source].append(id)
        self.awaited = {id: set(action.inputs) for id, action in actions.items()}
        self.ready = deque(id for id, sources in self.awaited.items() if not sources)

    @property
    def stopped(self) -> bool:
        """Nothing new may start, because an action has failed."""
        return not self.options.keep_going and (bool(self.failed) or self.runner.checking)

    def run(self) -> Outcome:
        while True:
            while self.ready and not self.stopped:
                self._look_up(self.ready.popleft())
            if self.wave and not self.stopped:
                assert self.shared is not None
                self.shared.begin(self.wave)
                self.wave.clear()
            if self._take_answers() and self.ready:
                continue
            self._start_what_may()
            self._tell_begun()
            if self.ready and not self.stopped:
                continue
            if not self.runner.running:
                if self.stopped or not (self.ready or self.runner.waiting or self.asked):
                    break
                if self.asked and not self.runner.waiting:
                    self._take_answers(wait=True)
                continue
            patience, wake = (None, None) if self.shared is None else (self.shared.patience(), self.shared.wake)
            done = [found for ended in self.runner.wait(patience, wake) if (found := self._end(ended)) is not None]
            # What comes next runs while the results of what has ended are written to the disk.
            try:
                self._start_what_may(bool(done))
            finally:
                for job, ended, files in done:
                    self._keep(job, ended, files)
            self._tell_begun()
            self.runner.bring_back()
        left = tuple(id for id in self.actions if id not in self.results and id not in self.failed)
        return Outcome(self.results, tuple(self.executed), tuple(self.hits), tuple(self.failed), left)

    def _take_answers(self, wait: bool = False) -> bool:
        """Take what the remotes have found and run what they have not; tells whether there was an answer."""
        if self.shared is None:
            return False
        answers = self.shared.collect(wait)
        for key, found in answers:
            id = self.asked.pop(key)
            if found is None:
                self._must_run(self.jobs[id])
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
        job = Job(action, key, fields, self.scratch / f"action-{self.started}", temps=self._keeps_temps(action))
        self.jobs[id] = job
        self.waiting_for_key[key] = []
        if looked_up and self.shared is not None:
            self.wave[key] = fields
            self.asked[key] = id
        else:
            self._must_run(job)

    def _find(self, key: str) -> ActionResult | None:
        if self.shared is None:
            return self.store.lookup(key)
        found = self.shared.lookup_local(key)
        return None if found is None else found.result

    def _must_run(self, job: Job) -> None:
        """No cache has the result."""
        if self.options.failures is not None and not self.options.retry_failed:
            remembered = reproducer.recall(self.options.failures, job.key)
            if remembered is not None:
                failure, job.reproducer, job.again = remembered
                self._fail(job, failure)
                return
        self.runner.add(job)

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

    def _start_what_may(self, room_is_coming: bool = False) -> None:
        while (job := self.runner.next(checks_only=self.stopped)) is not None:
            id = job.action.id
            try:
                prepare(job.directory, job.fields, self.store, self.contents)
            except BlobLost as lost:
                self.runner.give_up(job)
                del self.jobs[id]
                self.ready.extend(self.waiting_for_key.pop(job.key))
                self._make_again(job.action, lost)
                continue
            except OSError as error:
                if self.runner.put_off(job, error, room_is_coming):
                    return
                raise EnvironmentUnfit(
                    f"temporary files cannot be written in {self.scratch.parent}: {error.strerror}",
                    hint="free some space there, or set TMPDIR to a directory on another disk",
                ) from error
            if job.attempts == 0:
                self.begun.append(Started(id, job.action.kind, job.action.label))
            self.runner.start(job)

    def _tell_begun(self) -> None:
        """Tell what has begun, once what it has taken the places of is told to have finished."""
        for event in self.begun:
            self.emit(event)
        self.begun.clear()

    def _make_again(self, action: Action, lost: BlobLost) -> None:
        """A file that was there at look-up is gone: run the action that makes it, then come back to ``action``."""
        sources = [s for s in action.inputs if lost.ref in self.results[s].outputs.values() and self._may_run_again(s)]
        if not sources:
            self._emit_failure(
                action, Failure("lost", f"its input {lost.ref.sha256} is missing or damaged and cannot be made again", "")
            )
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

    def _end(self, ended: Ended) -> tuple[Job, Ended, Mapping[str, Path]] | None:
        """What an action made, where it ended well; otherwise it has failed or runs again."""
        job = self.jobs[ended.id]
        files, absent = collect(job.directory / "outputs", job.action.outputs)
        verdict = self.runner.judge(job, ended, absent)
        if verdict is None:
            return job, ended, files
        if verdict != "again":
            self._fail(job, verdict)
            shutil.rmtree(job.directory, ignore_errors=True)
        return None

    def _keep(self, job: Job, ended: Ended, files: Mapping[str, Path]) -> None:
        """Publish what the action made, and go on with what waits for it."""
        action = job.action
        try:
            result = self.store.publish(job.key, job.fields, files, ended.seconds, action.kind, action.label, ended.peak)
        except OSError as error:
            raise EnvironmentUnfit(
                f"the outputs of {action.label} cannot be kept: {error.strerror}",
                hint="free some space in the cache's directory or in the temporary directory (TMPDIR)",
            ) from error
        if self.options.save_temps is not None and job.temps:
            try:
                shutil.copytree(job.directory / "temps", self.options.save_temps / folder_name(action.label), dirs_exist_ok=True)
            except OSError as error:
                raise EnvironmentUnfit(
                    f"the intermediate files of {action.label} cannot be kept: {error.strerror or error}",
                    where=str(self.options.save_temps),
                    hint="name another directory for them",
                ) from error
        if self.shared is not None:
            self.shared.offer(job.key, job.fields, result, ended.seconds, action.kind, action.label, ended.peak)
        if action.id not in self.executed:
            self.executed.append(action.id)
        self.emit(
            Finished(action.id, action.kind, action.label, job.key, ended.seconds, ended.peak, ended.cpu, ended.place, job.groups)
        )
        shutil.rmtree(job.directory, ignore_errors=True)
        del self.jobs[action.id]
        waiters = self.waiting_for_key.pop(job.key)
        self._done(action.id, result)
        for waiter in waiters:
            self._hit(self.actions[waiter], result)

    def _keeps_temps(self, action: Action) -> bool:
        return self.options.save_temps is not None and action.kind == "compile"

    def _fail(self, job: Job, failure: Failure) -> None:
        """The action, and those of the same key that wait for it, have failed."""
        del self.jobs[job.action.id]
        for action in (job.action, *(self.actions[waiter] for waiter in self.waiting_for_key.pop(job.key))):
            self._emit_failure(action, failure, job.reproducer, job.again)

    def _emit_failure(self, action: Action, failure: Failure, kept: str = "", again: str = "") -> None:
        self.failed.append(action.id)
        self.emit(Failed(action.id, action.kind, action.label, failure.reason, failure.output, failure.pass_group, kept, again))
