"""An executor that loses actions: they run once more, or on this machine, and no finished result is lost."""

from pathlib import Path

import pytest
from test_engine import HERE, Build, toy

from dsr1build.execute.events import Failed, Finished, Warned
from dsr1build.execute.executor import Ended, Request
from dsr1build.execute.server import ForkServer


class Unreliable:
    """A fork server behind a bad line: the first ``losses`` actions are lost, those in ``refused`` always."""

    name = "farm:8980"
    slots = 2

    def __init__(self, scratch: Path, losses: int, refused: tuple[str, ...] = ()) -> None:
        self.server = ForkServer(scratch, (HERE,))
        self.losses = losses
        self.refused = refused
        self.dropped: list[Ended] = []
        self.closed = False

    @property
    def running(self) -> int:
        return self.server.running + len(self.dropped)

    def start(self, request: Request) -> None:
        if self.losses > 0 or request.id in self.refused:
            self.losses -= 1
            self.dropped.append(Ended(request.id, None, None, 0.1, 0, "", lost="the connection broke", place="worker-1"))
        else:
            self.server.start(request)

    def wait(self, timeout: float | None = None, wake: int | None = None) -> list[Ended]:
        if self.dropped:
            ended, self.dropped = self.dropped, []
            return ended
        return self.server.wait(timeout, wake)

    def close(self) -> None:
        self.closed = True
        self.server.close()


@pytest.fixture
def farm():
    opened: list[Unreliable] = []

    def opener(losses: int, refused: tuple[str, ...] = ()):
        def open_farm(scratch, warn):
            opened.append(Unreliable(scratch, losses, refused))
            return opened[-1]

        return open_farm

    yield opener
    assert opened and all(executor.closed for executor in opened)


ACTIONS = [toy(f"a{number}", "upper", text=f"t{number}") for number in range(6)]


def test_a_lost_action_runs_once_more(tmp_path, farm):
    build = Build(tmp_path / "store", *ACTIONS, executor=farm(2))
    assert set(build.outcome.executed) == {action.id for action in ACTIONS}
    assert not build.of((Failed, Warned))


def test_one_that_is_lost_twice_fails_alone(tmp_path, farm):
    build = Build(tmp_path / "store", *ACTIONS, executor=farm(0, ("a3",)), keep_going=True)
    assert build.failure.action == "a3" and build.failure.reason == "the connection broke"
    assert len(build.of(Finished)) == 5


def test_with_fallback_it_runs_here_and_that_is_said(tmp_path, farm):
    build = Build(tmp_path / "store", *ACTIONS, executor=farm(0, ("a3",)), fallback=True)
    assert set(build.outcome.executed) == {action.id for action in ACTIONS}
    assert [event.message for event in build.of(Warned)] == [
        "farm:8980: the connection broke; toy a3 runs on this machine instead"
    ]


def test_with_fallback_a_dead_executor_is_left_and_that_is_said_once(tmp_path, farm):
    build = Build(tmp_path / "store", *ACTIONS, executor=farm(1000), fallback=True, jobs=1)
    assert set(build.outcome.executed) == {action.id for action in ACTIONS}
    assert [event.message for event in build.of(Warned)] == [
        "farm:8980: the connection broke; toy a0 runs on this machine instead",
        "farm:8980: the connection broke; the build goes on without it",
    ]


def test_a_lost_action_is_neither_kept_nor_remembered(tmp_path, farm):
    failures = tmp_path / "failures"
    Build(tmp_path / "store", *ACTIONS, executor=farm(0, ("a3",)), failures=failures)
    assert not failures.exists()


def test_the_executors_places_bound_what_runs_there(tmp_path, farm):
    most = 0
    running = 0
    actions = [toy(f"s{number}", "slow", seconds=0.1 + number / 1000) for number in range(6)]
    for event in Build(tmp_path / "store", *actions, executor=farm(0), jobs=0).events:
        running += {"started": 1, "finished": -1}.get(event.event, 0)
        most = max(most, running)
    assert most == 2
