"""What an action is expected to cost comes from earlier ones: of its own name, else of its kind, else from what is usual."""

import pytest

from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of
from dsr1build.execute.history import expected_costs
from dsr1build.plan.action import Action


def action(id, kind, label):
    return Action(id, kind, label, "toy_workers:upper", (), lambda results: {}, ("out",))


@pytest.fixture
def store(tmp_path):
    with LocalStore(tmp_path / "store", pytest.fail) as opened:
        yield opened


def publish(store, tmp_path, kind, label, seconds, version=0, peak=0):
    source = tmp_path / "source"
    source.write_bytes(b"x")
    fields = {"kind": kind, "label": label, "version": version}
    store.publish(key_of(fields), fields, {"out": source}, seconds, kind, label, peak)


def seconds(store, *actions):
    return {id: cost.seconds for id, cost in expected_costs(store, {one.id: one for one in actions}).items()}


def test_of_the_same_name_else_of_the_kind_else_what_is_usual(store, tmp_path):
    publish(store, tmp_path, "compile", "expert", 9.0)
    publish(store, tmp_path, "compile", "norm", 1.0)
    publish(store, tmp_path, "compile", "head", 4.0)
    known, other = action("a", "compile", "expert"), action("b", "compile", "attention")
    same_label, linked = action("c", "lower", "expert"), action("d", "link", "library")
    found = seconds(store, known, other, same_label, linked)
    assert (found["a"], found["b"]) == (9.0, 4.0)
    empty = seconds_in_an_empty_store(tmp_path, known, other, same_label, linked)
    assert (found["c"], found["d"]) == (empty["c"], empty["d"])
    assert empty["a"] == empty["b"] > empty["c"] > 0


def seconds_in_an_empty_store(tmp_path, *actions):
    with LocalStore(tmp_path / "empty", pytest.fail) as opened:
        return seconds(opened, *actions)


def test_of_several_of_one_name_the_one_used_last_counts(store, tmp_path):
    for version, cost in enumerate((5.0, 2.0, 7.0)):
        publish(store, tmp_path, "compile", "expert", cost, version)
    used = {entry.used: entry.seconds for entry in store.entries().values()}
    assert seconds(store, action("a", "compile", "expert")) == {"a": used[max(used)]}


def test_memory_is_that_of_the_same_name_else_the_most_of_the_kind(store, tmp_path):
    publish(store, tmp_path, "compile", "expert", 9.0, peak=300 << 20)
    publish(store, tmp_path, "compile", "head", 1.0, peak=900 << 20)
    asked = (action("a", "compile", "expert"), action("b", "compile", "attention"), action("c", "link", "library"))
    found = expected_costs(store, {one.id: one for one in asked})
    assert {id: cost.peak for id, cost in found.items()} == {"a": 300 << 20, "b": 900 << 20, "c": 0}


def test_memory_outlives_the_index(store, tmp_path):
    publish(store, tmp_path, "compile", "expert", 9.0, peak=300 << 20)
    store.rebuild_index()
    (entry,) = store.entries().values()
    assert entry.peak == 300 << 20
