"""The trace of a build: every action in a lane, none over another, pass groups inside their action."""

import json
from itertools import pairwise

import pytest
from test_engine import Build, join, toy

from dsr1build.errors import InvalidInput
from dsr1build.execute.events import Failed, Finished, Hit, Started
from dsr1build.execute.trace import Trace, traced
from dsr1build.toolchains.pass_groups import PassGroup


def written(trace, tmp_path):
    trace.write(tmp_path / "trace.json")
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def spans(events, category):
    return [event for event in events if event["ph"] == "X" and event.get("cat") == category]


def inside(inner, outer):
    return outer["ts"] <= inner["ts"] and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + 2


def test_a_real_build(tmp_path):
    trace = Trace()
    actions = [toy(f"s{number}", "slow", seconds=0.05 + number / 1000) for number in range(5)]
    build = Build(tmp_path / "store", *actions, join("j", ["s0"]), toy("bad", "abort"), jobs=2, keep_going=True)
    at = 0.0
    for event in build.events:
        at += 0.01
        trace.add(event, at)
    events = written(trace, tmp_path)
    assert {event["name"] for event in spans(events, "finished")} == {
        *(f"compile toy s{number}" for number in range(5)),
        "link join j",
    }
    assert [event["name"] for event in spans(events, "failed")] == ["compile toy bad"]
    ran = spans(events, "finished") + spans(events, "failed")
    assert {event["tid"] for event in ran} == {1, 2}
    for lane in (1, 2):
        mine = sorted((event["ts"], event["ts"] + event["dur"]) for event in ran if event["tid"] == lane)
        assert all(before[1] <= after[0] for before, after in pairwise(mine))
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert names == {0: "cache hits", 1: "worker 1", 2: "worker 2"}


def test_pass_groups_lie_inside_their_action(tmp_path):
    trace = Trace()
    groups = (PassGroup("parse", 0.0, 0.25, 7), PassGroup("codegen", 0.25, None, 9), PassGroup("late", 99.0, 5.0, 0))
    trace.add(Started("a", "compile", "a"), 1.0)
    trace.add(Finished("a", "compile", "a", "0" * 64, 1.0, 5, 0.5, "", groups), 2.0)
    events = written(trace, tmp_path)
    (whole,) = spans(events, "finished")
    parts = spans(events, "pass group")
    assert [part["name"] for part in parts] == ["parse", "codegen", "late"]
    assert all(inside(part, whole) and part["tid"] == whole["tid"] for part in parts)
    assert parts[0]["dur"] == 250_000 and parts[0]["args"] == {"IR bytes": 7}


def test_hits_failures_without_a_start_and_what_still_runs(tmp_path):
    trace = Trace()
    trace.add(Hit("h", "lower", "h", "0" * 64, "remote:x"), 0.5)
    trace.add(Failed("remembered", "compile", "r", "exit code 1", ""), 0.6)
    trace.add(Started("a", "compile", "a"), 0.7)
    events = written(trace, tmp_path)
    (hit,) = [event for event in events if event["ph"] == "i"]
    assert hit["name"] == "hit lower h" and hit["tid"] == 0 and hit["args"]["source"] == "remote:x"
    assert not spans(events, "failed")
    assert [event["name"] for event in spans(events, "unfinished")] == ["a"]


def test_nothing_half_written(tmp_path):
    with pytest.raises(OSError):
        Trace().write(tmp_path / "nowhere" / "trace.json")
    (tmp_path / "trace.json").mkdir()
    with pytest.raises(OSError):
        Trace().write(tmp_path / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_the_trace_is_written_whatever_happens(tmp_path):
    seen = []
    with pytest.raises(KeyboardInterrupt), traced(tmp_path / "t.json", seen.append) as emit:
        emit(Started("a", "compile", "a"))
        raise KeyboardInterrupt
    names = [event["name"] for event in json.loads((tmp_path / "t.json").read_text())["traceEvents"]]
    assert "a" in names and len(seen) == 1
    with traced(None, seen.append) as emit:
        emit(Started("b", "compile", "b"))
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["nowhere/t.json", "."])
def test_a_place_that_cannot_be_is_refused_before_anything_runs(tmp_path, name):
    with pytest.raises(InvalidInput) as refused, traced(tmp_path / name, lambda event: None):
        pytest.fail("the build began")
    assert refused.value.render() == (
        f"--profile: error: no file {tmp_path / name} can be written\nhelp: Name a file in a directory that exists."
    )
