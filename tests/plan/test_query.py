"""Answers over the plan of the scaled-down R1."""

import shutil
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from dsr1build.config.load import load_build
from dsr1build.errors import InvalidInput
from dsr1build.plan.query import (
    QUERY_SCHEMA,
    changed_answer,
    graph_answer,
    kernels_answer,
    render_answer,
    render_dot,
    users_answer,
)

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "dsr1build"


def changed(planner, file, config=None, directory=""):
    answer = changed_answer(config or planner.config, directory, ("tokenizer.json",), planner.plan(), [str(file)])
    jsonschema.validate(answer, QUERY_SCHEMA)
    (entry,) = answer["files"]
    return entry, {key: {id.split(":")[0] for id in entry[key]} for key in ("runs", "may_run")}


def test_kernels_tell_their_users_and_variants(planner):
    answer = kernels_answer("x", planner.partitioned, planner.plan())
    jsonschema.validate(answer, QUERY_SCHEMA)
    assert [k["id"] for k in answer["kernels"]] == list(planner.partitioned.kernels)
    (expert,) = [k for k in answer["kernels"] if k["kind"] == "expert"]
    assert expert["modes"] == {"prefill": 51, "decode": 51}
    assert expert["variants"] == ["tokens=1", "tokens=64", "tokens=1.."]


def test_a_layer_has_its_own_kernels(planner):
    dense = kernels_answer("x", planner.partitioned, planner.plan(), 0)
    jsonschema.validate(dense, QUERY_SCHEMA)
    assert [k["kind"] for k in dense["kernels"]] == ["attention", "ffn", "attention"]
    routed = kernels_answer("x", planner.partitioned, planner.plan(), 1)
    assert {k["kind"]: k["modes"] for k in routed["kernels"]}["expert"] == {"prefill": 17, "decode": 17}


def test_users_of_a_kernel_by_the_beginning_of_its_id(planner):
    (ffn,) = [k.id for k in planner.partitioned.kernels.values() if k.kind == "ffn"]
    answer = users_answer("x", planner.partitioned, ffn[:6])
    jsonschema.validate(answer, QUERY_SCHEMA)
    assert (answer["kernel"], answer["kind"]) == (ffn, "ffn")
    assert answer["partitions"] == [{"mode": mode, "name": "model.layers.0.mlp"} for mode in ("prefill", "decode")]


@pytest.mark.parametrize(
    ("file", "runs", "may_run"),
    [
        ("ops/dense.py", {"lower"}, {"compile", "tables", "link"}),
        ("lower/action.py", {"lower"}, {"compile", "tables", "link"}),
        ("toolchains/schedule.py", {"compile", "runtime", "tables", "link"}, set()),
        ("graph/signature.py", {"lower", "compile", "runtime", "tables", "link"}, set()),
        ("runtime/c/program.h", {"runtime", "tables"}, {"link"}),
        ("partition/cut.py", set(), {"lower", "compile", "runtime", "tables", "link"}),
        ("execute/engine.py", set(), set()),
    ],
)
def test_a_change_of_our_own_sources(planner, file, runs, may_run):
    entry, kinds = changed(planner, PACKAGE / file)
    assert kinds == {"runs": runs, "may_run": may_run}
    assert bool(entry["bundles"]) == bool(runs | may_run)


def test_what_a_source_is_said_to_run_is_what_the_keys_hold(planner, monkeypatch):
    """Held to the files that are read for the digests in the keys."""
    from dsr1build.lower.action import SOURCE_ROOMS
    from dsr1build.lower.sources import sources_digest
    from dsr1build.toolchains.tools import adapter_digest

    read_bytes, seen = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: seen.append(path) or read_bytes(path))
    sources_digest.__wrapped__(SOURCE_ROOMS)
    in_lower = {path.resolve() for path in seen}
    seen.clear()
    adapter_digest.__wrapped__()
    in_adapter = {path.resolve() for path in seen}
    monkeypatch.undo()
    sources = sorted(PACKAGE.rglob("*.py"))
    assert in_lower | in_adapter <= set(sources)
    answer = changed_answer(planner.config, "", (), planner.plan(), [str(path) for path in sources])
    for path, entry in zip(sources, answer["files"], strict=True):
        kinds = {id.split(":")[0] for id in entry["runs"]}
        assert ("lower" in kinds) == (path in in_lower), path
        assert ("compile" in kinds) == (path in in_adapter), path


def test_files_of_the_build(planner):
    build_file, recipe, target, profile = planner.config.files
    everything = {"lower", "compile", "runtime", "tables", "link"}
    assert changed(planner, build_file)[1] == {"runs": set(), "may_run": everything}
    assert changed(planner, recipe)[1]["may_run"] == everything - {"runtime"}
    entry, kinds = changed(planner, target)
    assert (kinds["may_run"], entry["bundles"]) == (everything - {"lower"}, [planner.target.name])
    assert changed(planner, planner.config.model.config)[1]["may_run"] == everything - {"runtime"}
    entry, kinds = changed(planner, profile)
    assert (entry["role"], kinds["may_run"], entry["bundles"]) == ("cache profile", set(), [])


@pytest.mark.parametrize(
    ("name", "role"), [("model-00001-of-000163.safetensors", "weight file"), ("tokenizer.json", "tokenizer")]
)
def test_weights_and_tokenizer_reach_the_bundle_alone(planner, tmp_path, name, role):
    from dsr1build.config.load import CheckpointSource

    shutil.copy(planner.config.model.config, tmp_path / "config.json")
    config = replace(planner.config, model=CheckpointSource(tmp_path))
    entry, kinds = changed(planner, tmp_path / name, config, str(tmp_path))
    assert (entry["role"], kinds) == (role, {"runs": set(), "may_run": set()})
    assert entry["bundles"] == [planner.target.name]
    with pytest.raises(InvalidInput, match="does not read this file"):
        changed(planner, tmp_path / name)


@pytest.mark.parametrize("full", [False, True])
def test_the_graph_joins_experts_to_gating_and_combine(planner, full):
    graph = graph_answer("x", planner.partitioned, full)
    jsonschema.validate(graph, QUERY_SCHEMA)
    assert sum(node["partitions"] for node in graph["nodes"] if node["mode"] == "prefill") == 64
    assert len(graph["nodes"]) == (128 if full else 14)
    kinds = {node["id"]: node["kind"] for node in graph["nodes"]}
    flows = {}
    for edge in graph["edges"]:
        if edge["source"].startswith("prefill:"):
            pair = kinds[edge["source"]], kinds[edge["sink"]]
            flows[pair] = flows.get(pair, 0) + edge["count"]
    assert flows["gating", "expert"] == flows["expert", "combine"] == 51
    assert flows["combine", "head"] == 1


def test_names_of_strangers_cannot_leave_their_quotes():
    evil = 'a"]; b -> c [label="\\N\n\x1b[31m'
    node = {"id": evil, "mode": "prefill", "kind": "ffn", "kernel": "k", "partitions": 2}
    answer = {"what": "graph", "name": evil, "full": True, "nodes": [node], "edges": []}
    quoted = '"a\\"]; b -> c [label=\\"\\\\N\\\\n\\\\x1b[31m'
    assert render_dot(answer) == (f'digraph {quoted}" {{\n  node [shape=box];\n  {quoted}" [label={quoted}: ffn"];\n}}\n')
    assert "\x1b" not in render_answer(answer)


def test_every_partition_of_the_true_r1_is_in_the_full_graph():
    from dsr1build.frontends.load import load_model
    from dsr1build.partition.cut import partition_model

    model = load_model(checkpoint=None, config=ROOT / "models/deepseek-r1/config.json", seed=0, context=512)
    partitioned = partition_model(model, load_build(ROOT / "BUILD.yaml").recipe)
    graph = graph_answer("r1", partitioned, full=True)
    assert render_dot(graph).count(" [label=") == 2 * 15_088
