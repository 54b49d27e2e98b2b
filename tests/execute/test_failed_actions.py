"""What a failed action costs the others, what is kept of it, and which failures are remembered."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from test_engine import Build, content, join, toy

from dsr1build.execute import reproducer
from dsr1build.execute.events import Failed, Started, Warned
from dsr1build.execute.executor import Limits


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def failures(tmp_path):
    return tmp_path / "failures"


def kept(failures):
    (place,) = failures.iterdir()
    return place, json.loads((place / "failure.json").read_text())


def test_a_crash_is_kept_run_once_more_and_its_pass_group_named(store, failures):
    build = Build(store, toy("bad", "die_in_group"), toy("good", "upper", text="g"), failures=failures, keep_going=True)
    place, record = kept(failures)
    assert (build.failure.reason, build.failure.pass_group) == ("killed by SIGABRT", "bufferize")
    assert build.failure.reproducer == str(place)
    assert build.failure.again == record["again"] == "it failed in the same way when it was run again"
    assert record["same"] is True and record["pass_group"] == "bufferize" and record["label"] == "toy bad"
    assert (place / "temps" / "00-parse.mlir").read_text() == "module {}"
    assert build.outcome.executed == ("good",)
    assert len([e for e in build.of(Started) if e.action == "bad"]) == 1


def test_inputs_of_a_failed_action_are_kept(store, failures):
    Build(store, toy("a", "upper", text="left"), toy_join_that_fails("j", ["a"]), failures=failures)
    place, _ = kept(failures)
    assert [path.read_bytes() for path in (place / "inputs").iterdir()] == [b"LEFT"]


def toy_join_that_fails(id, parts):
    action = join(id, parts)
    return type(action)(action.id, action.kind, action.label, "toy_workers:abort", action.inputs, action.fields, action.outputs)


def test_a_failure_that_came_twice_is_remembered_until_it_is_retried(store, failures):
    Build(store, toy("bad", "die_in_group"), failures=failures)
    second = Build(store, toy("bad", "die_in_group"), toy("good", "upper", text="g"), failures=failures, keep_going=True)
    assert [e.action for e in second.of(Started)] == ["good"]
    assert second.failure.reason == "killed by SIGABRT" and second.failure.pass_group == "bufferize"
    assert second.failure.again == ("it has failed twice in this way in an earlier build and was not run; --retry-failed runs it")
    third = Build(store, toy("bad", "die_in_group"), failures=failures, retry_failed=True)
    assert [e.action for e in third.of(Started)] == ["bad"]
    assert third.failure.again == "it failed in the same way when it was run again"


def test_another_key_is_not_remembered(store, failures):
    Build(store, toy("bad", "abort", version=1), failures=failures)
    again = Build(store, toy("bad", "abort", version=2), failures=failures)
    assert again.of(Started)


def test_a_failure_that_did_not_come_again_is_told_and_not_remembered(store, failures, tmp_path):
    action = toy("flaky", "fail_once", kind="lower", mark=str(tmp_path / "mark"))
    first = Build(store, action, failures=failures)
    assert first.failure.reason == "killed by SIGABRT"
    assert first.failure.again == "it did not fail when it was run again"
    assert first.outcome.executed == ()
    assert kept(failures)[1]["same"] is False
    second = Build(store, action, failures=failures)
    assert second.outcome.executed == ("flaky",)


@pytest.mark.parametrize(
    ("action", "limits"),
    [
        (toy("bad", "take_signal", kind="lower", signal=int(signal.SIGKILL)), Limits()),
        (toy("bad", "take_signal", kind="lower", signal=int(signal.SIGTERM)), Limits()),
        (toy("bad", "exhaust", kind="lower"), Limits(memory=64 << 20)),
        (toy("bad", "slow", kind="lower", seconds=60), Limits(seconds=1)),
    ],
    ids=["SIGKILL", "SIGTERM", "memory", "time"],
)
def test_what_others_or_the_machine_did_is_not_remembered(store, failures, action, limits):
    Build(store, action, failures=failures, limits=limits)
    assert kept(failures)[1]["same"] is True
    assert Build(store, action, failures=failures, limits=limits).of(Started)


def test_damaged_records_are_no_memory(store, failures):
    Build(store, toy("bad", "abort"), failures=failures)
    place, record = kept(failures)
    for damaged in (b"", b"[]", b"{", b"[" * 100_000, json.dumps({**record, "key": "0" * 64}).encode(), b"\xff"):
        (place / "failure.json").write_bytes(damaged)
        assert Build(store, toy("bad", "abort"), failures=failures).of(Started)


def test_only_so_many_are_kept(store, failures, monkeypatch):
    monkeypatch.setattr(reproducer, "_KEPT", 3)
    actions = [toy(f"bad{number}", "leave_nothing", kind="lower", number=number) for number in range(5)]
    Build(store, *actions, failures=failures, keep_going=True, jobs=1)
    assert sorted(place.name[17:] for place in failures.iterdir()) == ["toy-bad2", "toy-bad3", "toy-bad4"]


def test_a_place_that_cannot_be_written_costs_the_reproducer_alone(store, tmp_path):
    (tmp_path / "file").write_text("")
    build = Build(store, toy("bad", "abort"), failures=tmp_path / "file")
    assert build.failure.reason == "killed by SIGABRT" and build.failure.reproducer == ""


def test_memory_running_out_is_tried_once_more_alone(store, tmp_path):
    log = tmp_path / "log"
    build = Build(store, toy("hungry", "hungry", log=str(log)), limits=Limits(memory=200 << 20))
    assert build.outcome.executed == ("hungry",)
    assert log.read_text() == "xx"


def test_memory_running_out_alone_fails_with_peak_and_limit(store, tmp_path):
    log = tmp_path / "log"
    build = Build(store, toy("hungry", "hungry", log=str(log)), limits=Limits(memory=50 << 20))
    assert build.failure.reason.startswith("out of memory at the limit of 200 MiB, ")
    assert build.failure.reason.endswith(" used")
    assert log.read_text() == "xx"


def test_a_daemon_that_an_action_left_is_killed_with_it(store, tmp_path):
    pid_file = tmp_path / "pid"
    build = Build(store, toy("d", "daemonize", pid_file=str(pid_file)), toy("u", "upper", text="u"), jobs=1)
    assert set(build.outcome.executed) == {"d", "u"}
    assert ended(int(pid_file.read_text()))


def test_an_action_that_forks_leaves_none_of_its_children(store, tmp_path):
    pid_file = tmp_path / "pids"
    build = Build(store, toy("s", "spread", pid_file=str(pid_file)))
    assert build.failure.reason == "exit code 1"
    pids = [int(line) for line in pid_file.read_text().split()]
    assert len(pids) == 30 and all(ended(pid) for pid in pids)


def ended(pid):
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_an_action_that_fills_the_disk_fails_alone(store, tmp_path, monkeypatch):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", small], capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    monkeypatch.setenv("TMPDIR", str(small))
    monkeypatch.setattr("tempfile.tempdir", None)
    try:
        good = [toy(f"good{number}", "slow", seconds=0.2 + number / 100) for number in range(4)]
        build = Build(store, good[0], toy("bad", "fill_disk"), *good[1:], keep_going=True)
        assert build.failure.action == "bad"
        assert "No space left on device" in build.failure.output
        assert set(build.outcome.executed) == {action.id for action in good}
        assert content(store, build.outcome, "good3") == b"slow"
    finally:
        subprocess.run(["umount", small], check=True)


def test_ending_well_without_an_output_is_a_failure(store):
    build = Build(store, toy("bad", "no_exit"))
    assert build.failure.reason == "left no output text"


def test_a_warning_is_no_event_of_a_good_build(store):
    assert not Build(store, toy("a", "upper", text="a")).of((Warned, Failed))
