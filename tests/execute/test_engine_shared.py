"""Builds with shared caches: waves of look-ups beside what runs, hits from elsewhere, and remotes that fail meanwhile."""

import threading
import time
from pathlib import Path

import jsonschema
import pytest
from directory_remote import DirectoryRemote

from dsr1build.cache.policy import AttachedRemote
from dsr1build.cache.remote import RemoteUnavailable, Timeouts
from dsr1build.cache.shared import Notices, SharedCache
from dsr1build.cache.signing import Trust
from dsr1build.cache.store import LocalStore
from dsr1build.execute.engine import run_actions
from dsr1build.execute.events import EVENT_SCHEMA, Finished, Hit, Started, to_json
from dsr1build.execute.options import Options
from dsr1build.plan.action import Action

HERE = Path(__file__).parent
REMOTE = "remote:dir://shared"


def toy(id, function, inputs=(), outputs=("text",), **fields):
    return Action(
        id, "compile", f"toy {id}", f"toy_workers:{function}", tuple(inputs), lambda results: {"toy": function, **fields}, outputs
    )


def join(id, *parts):
    def fields(results):
        return {"toy": "join", "parts": [results[p].outputs["text"] for p in parts]}

    return Action(id, "link", f"join {id}", "toy_workers:join", parts, fields, ("sub/joined",))


class Build:
    def __init__(self, directory, remote, *actions, writable=True, timeouts=None, **options):
        self.events = []
        self.warnings = []
        self.times = []
        options = {"jobs": 2, "import_path": (HERE,), **options}
        notices = Notices(self.warnings.append, self.warnings.append)
        with LocalStore(directory, self.warnings.append) as store:
            attached = AttachedRemote(remote, writable, timeouts or Timeouts(5, 25))
            with SharedCache(store, [attached], Trust(), None, lambda: True, notices) as shared:
                self.outcome = run_actions({a.id: a for a in actions}, store, Options(**options), self.note, None, shared)
                shared.finish()
            self.contents = {
                id: store.read_blob(next(iter(result.outputs.values()))) for id, result in self.outcome.results.items()
            }
        for event in self.events:
            jsonschema.validate(to_json(event), EVENT_SCHEMA)

    def note(self, event):
        self.events.append(event)
        self.times.append(time.monotonic())

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def sources(self):
        return {event.action: event.source for event in self.of(Hit)}


@pytest.fixture
def remote(tmp_path):
    return DirectoryRemote(tmp_path / "remote")


def chain():
    return [toy("a", "upper", text="left"), toy("b", "upper", text="right"), join("j", "a", "b"), toy("c", "upper", text="c")]


def test_another_machine_takes_everything_in_one_wave_for_each_level(tmp_path, remote):
    first = Build(tmp_path / "one", remote, *chain())
    assert sorted(first.outcome.executed) == ["a", "b", "c", "j"] and len(remote.stored) == 4
    remote.asked.clear()
    second = Build(tmp_path / "two", remote, *chain())
    assert second.outcome.executed == () and not second.of(Started)
    assert second.sources() == dict.fromkeys("abcj", REMOTE)
    assert second.outcome.results == first.outcome.results and second.contents == first.contents
    assert [len(wave) for wave in remote.asked] == [3, 1]
    third = Build(tmp_path / "two", remote, *chain())
    assert third.sources() == dict.fromkeys("abcj", "local") and len(remote.asked) == 2
    assert not (first.warnings or second.warnings or third.warnings)


def test_a_part_from_each_place(tmp_path, remote):
    Build(tmp_path / "one", remote, toy("a", "upper", text="left"))
    Build(tmp_path / "two", DirectoryRemote(tmp_path / "nowhere"), toy("b", "upper", text="right"))
    build = Build(tmp_path / "two", remote, *chain())
    assert build.sources() == {"a": REMOTE, "b": "local"}
    assert sorted(build.outcome.executed) == ["c", "j"]
    assert build.contents["j"] == b"LEFT+RIGHT"


def test_look_ups_do_not_hold_up_what_runs(tmp_path, remote):
    """While the look-up of the second wave hangs, an action of the first runs to its end and another one starts."""
    release = threading.Event()

    def hang_second(actions):
        if remote.calls["find_records"] > 1:
            release.wait(20)

    remote.faults["find_records"] = hang_second
    actions = [
        toy("quick", "upper", text="q"),
        toy("slow", "slow", seconds=0.4),
        toy("slower", "slow", seconds=0.5),
        join("after", "quick"),
    ]
    done = []

    class Watched(Build):
        def note(self, event):
            super().note(event)
            if isinstance(event, Finished):
                done.append(event.action)
                if event.action == "slower":
                    release.set()

    started = time.monotonic()
    build = Watched(tmp_path / "one", remote, *actions)
    assert done.index("slower") < done.index("after") and time.monotonic() - started < 15
    assert build.outcome.failed == () and build.contents["after"] == b"Q"


def test_downloads_run_beside_what_has_to_be_made(tmp_path, remote):
    """While files of one result come in, which takes until then, another action starts and runs to its end."""
    Build(tmp_path / "one", remote, toy("far", "upper", text="left"))
    made = threading.Event()
    waited = []
    remote.faults["fetch_blobs"] = lambda blobs: waited.append(made.wait(20))

    class Watched(Build):
        def note(self, event):
            super().note(event)
            if isinstance(event, Finished) and event.action == "near":
                made.set()

    build = Watched(tmp_path / "two", remote, toy("far", "upper", text="left"), toy("near", "slow", seconds=0.1))
    assert waited and all(waited)
    assert build.sources() == {"far": REMOTE} and build.outcome.executed == ("near",) and not build.warnings


@pytest.mark.parametrize("method", ["find_records", "fetch_blobs", "missing_blobs", "store_blobs", "store_record"])
@pytest.mark.parametrize("fault", ["unavailable", "hangs"])
def test_whatever_a_remote_does_the_build_is_right_and_warns_once(tmp_path, remote, method, fault):
    Build(tmp_path / "one", remote, *chain()[:3])
    remote.calls.clear()
    release = threading.Event()

    def fail(_):
        if fault == "hangs":
            release.wait(30)
        raise RemoteUnavailable("connection reset")

    remote.faults[method] = fail
    started = time.monotonic()
    try:
        build = Build(tmp_path / "two", remote, *chain(), timeouts=Timeouts(0.1, 0.9))
    finally:
        release.set()
    assert time.monotonic() - started < 20
    assert build.contents["j"] == b"LEFT+RIGHT" and len(build.contents) == 4 and build.outcome.failed == ()
    assert len(build.warnings) == 1 and "dir://shared" in build.warnings[0]
    assert remote.calls[method] == 1


def test_a_blob_missing_behind_a_record_is_made_again_in_the_same_build(tmp_path, remote):
    first = Build(tmp_path / "one", remote, *chain())
    (remote.root / "blobs" / first.outcome.results["a"].outputs["text"].sha256).unlink()
    second = Build(tmp_path / "two", remote, *chain())
    assert second.outcome.executed == ("a",) and second.contents == first.contents
    assert second.sources() == dict.fromkeys("bcj", REMOTE)
    third = Build(tmp_path / "three", remote, *chain())
    assert third.sources() == dict.fromkeys("abcj", REMOTE)


def test_equal_keys_are_asked_for_once(tmp_path, remote):
    actions = [toy("a", "upper", text="same"), toy("b", "upper", text="same")]
    Build(tmp_path / "one", remote, *actions)
    remote.asked.clear()
    second = Build(tmp_path / "two", remote, *actions)
    assert [len(wave) for wave in remote.asked] == [1]
    assert second.sources() == {"a": REMOTE, "b": REMOTE}


def test_results_of_failed_builds_are_shared_too(tmp_path, remote):
    build = Build(tmp_path / "one", remote, toy("a", "upper", text="left"), toy("bad", "crash"), keep_going=True)
    assert build.outcome.failed == ("bad",)
    assert remote.stored == [build.outcome.results["a"].key]
