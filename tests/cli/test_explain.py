"""The explain verb over a cache that holds all that a small build lowers; no test here compiles."""

import json

import jsonschema
import pytest
from test_build import ROOT

from dsr1build.cache.store import LocalStore
from dsr1build.cli.main import main
from dsr1build.cli.planning import plan_build
from dsr1build.config.load import load_build
from dsr1build.execute.engine import run_actions
from dsr1build.execute.options import Options
from dsr1build.plan.explain_report import EXPLAIN_SCHEMA
from dsr1build.plan.record import RECORD_PATH, Done, make_record, watch_fields, write_record

RECIPE = "specializations: {decode: [], prefill: [], expert: []}\n"


@pytest.fixture
def build_file(tmp_path, monkeypatch):
    """A build of the small Llama whose lower actions are in the cache and in the record of the last build."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_bytes((ROOT / "models/llama-mini/config.json").read_bytes())
    (tmp_path / "recipe.yaml").write_text((ROOT / "recipes/llama.yaml").read_text().split("specializations:")[0] + RECIPE)
    path = tmp_path / "BUILD.yaml"
    path.write_text(
        "version: 1\nname: small\nmodel: {config: config.json, weights: {random: {seed: 0}}}\n"
        "recipe: ./recipe.yaml\ntargets: [x86-64-v3]\n"
    )
    config = load_build(path)
    with LocalStore(config.cache_directory, pytest.fail) as store:
        actions = {id: a for id, a in plan_build(config, store).plan.actions.items() if a.kind == "lower"}
        seen = {}
        outcome = run_actions(watch_fields(actions, seen), store, Options(1), lambda event: None)
        assert set(outcome.executed) == set(actions)
        done = {id: Done("ran", 0.01) for id in actions}
        write_record(make_record("small", actions, seen, done, {}), path, pytest.fail)
    return path


def explain(capsys, *arguments):
    assert main(["explain", *map(str, arguments), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    jsonschema.validate(report, EXPLAIN_SCHEMA)
    return {entry["action"]: entry for entry in report["actions"]}


def change_width(build_file, width=96):
    config = json.loads((build_file.parent / "config.json").read_text())
    (build_file.parent / "config.json").write_text(json.dumps({**config, "intermediate_size": width}))
    return config["intermediate_size"]


def states(found):
    return {state: sum(e["state"] == state for e in found.values()) for state in ("hit", "miss", "waits")}


def test_each_action_is_a_hit_a_miss_or_waits(build_file, capsys):
    found = explain(capsys, build_file)
    lowers = sum(e["kind"] == "lower" for e in found.values())
    assert lowers >= 4
    assert states(found) == {"hit": lowers, "miss": lowers + 1, "waits": 2}
    assert all(e["explanation"] == {"reason": "first"} for e in found.values() if e["state"] == "miss")
    assert main(["explain", str(build_file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"{2 * lowers + 3} actions: {lowers} hits, {lowers + 1} misses, 2 wait"
    assert any(line.startswith("lower ffn ") and line.endswith(" tokens=1..: hit") for line in lines)
    assert any(line.startswith("link library for x86-64-v3: its key depends on what compile:x86-64-v3:") for line in lines)


@pytest.mark.parametrize("recorded", [True, False])
def test_another_shape_is_named_with_both_values(build_file, capsys, recorded):
    old = change_width(build_file)
    if not recorded:
        (build_file.parent / RECORD_PATH).unlink()
    found = explain(capsys, build_file, "lower ffn")
    (entry,) = found.values()
    assert (entry["state"], entry["explanation"]["reason"]) == ("miss", "changed")
    told = entry["explanation"]
    assert (told["field"], told["before"], told["after"]) == ("signature.arguments[2].shape[0]", str(old), "96")
    assert told["against"]["origin"] == ("last build" if recorded else "cache")
    assert main(["explain", str(build_file), "lower ffn"]) == 0
    line = capsys.readouterr().out.splitlines()[0]
    assert f"tokens=1..: miss: signature.arguments[2].shape[0] was {old}, is 96 (compared with " in line
    assert line.endswith(" of the last build)" if recorded else " of the cache)")


def test_a_result_that_left_the_cache_is_gone(build_file, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(build_file.parent / "another cache"))
    found = explain(capsys, build_file, "lower")
    assert {e["explanation"]["reason"] for e in found.values()} == {"gone"}


def test_explaining_writes_nothing(build_file, capsys):
    def tree():
        return {p: p.stat().st_mtime_ns for p in build_file.parent.rglob("*") if p.is_file() and "/v1/index" not in str(p)}

    explain(capsys, build_file)
    before = tree()
    change_width(build_file)
    explain(capsys, build_file)
    after = tree()
    assert {p.name for p in before if before[p] != after.get(p)} == {"config.json"} and before.keys() == after.keys()


def test_records_are_told_and_compared(build_file, capsys, tmp_path):
    record = build_file.parent / RECORD_PATH
    assert main(["explain", str(record)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("lower embedding ") and out[0].endswith(": ran for 0.01 s")
    data = json.loads(record.read_text())
    other = tmp_path / "other machine.json"
    for action in data["actions"].values():
        action["key"] = "0" * 64
        action["fields"]["specialization"] = "1" * 64
    data["values"]["1" * 64] = {"fields": {"guard": "exact", "tokens": 7}}
    other.write_text(json.dumps(data))
    assert main(["explain", str(record), str(other)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == f"0 of {len(data['actions'])} actions have equal keys"
    assert {line.split(": ", 1)[1] for line in out[:-1]} == {
        'specialization.guard was "range", is "exact"',
        "specialization.tokens was 1, is 7",
    }
    found = explain(capsys, record, other)
    assert {e["field"] for e in found.values()} == {"specialization.guard", "specialization.tokens"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["{dir}/BUILD.yaml", "lower fnn"],
            "dsr1build explain: error: no action is called `lower fnn`\nhelp: Did you mean `lower ffn`?\n",
        ),
        (
            ["{dir}/BUILD.yaml", "x.json"],
            "dsr1build explain: error: a build record is compared with another build record\n"
            "help: Write `dsr1build explain A.json x.json`.\n",
        ),
        (["{dir}/none.json"], "{dir}/none.json: error: the build record cannot be read: No such file or directory\n"),
        (["{dir}/config.json"], "{dir}/config.json: error: the file is not a build record\nhelp: Each build writes one to "),
    ],
)
def test_what_cannot_be_explained_is_refused(build_file, capsys, arguments, message):
    here = str(build_file.parent)
    assert main(["explain", *(a.format(dir=here) for a in arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(message.format(dir=here))
