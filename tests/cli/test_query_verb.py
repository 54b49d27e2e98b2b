"""The verb ``query``: its messages, its text, and JSON that holds to the schema."""

import json

import jsonschema
import pytest
from test_build import ROOT

from dsr1build.cli.main import main
from dsr1build.plan.query import QUERY_SCHEMA


@pytest.fixture
def build_file(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_bytes((ROOT / "models/r1-mini/config.json").read_bytes())
    path = tmp_path / "BUILD.yaml"
    path.write_text(
        "version: 1\nname: small\nmodel: {config: config.json, weights: {random: {seed: 0}}}\n"
        "recipe: deepseek_v3\ntargets: [x86-64-v3]\n"
    )
    return path


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layer", "9"], "--layer: error: the model has no layer 9\nhelp: Its layers are 0 to 3.\n"),
        (
            ["--kernel", "zz"],
            "--kernel: error: no kernel's id begins with `zz`\nhelp: `dsr1build query BUILD.yaml` lists the kernels.\n",
        ),
        (
            ["--changed", "other.txt"],
            "other.txt: error: the build `small` does not read this file\n"
            "help: It reads BUILD.yaml, the files that it names, those of the model, and dsr1build's own sources.\n",
        ),
        (["--full"], "dsr1build query: error: --full is for the graph\nhelp: Add `--format text`, `json` or `dot`.\n"),
        (
            ["--json", "--format", "dot"],
            "dsr1build query: error: --json and --format dot exclude each other\n"
            "help: Leave one out, or write `--format json`.\n",
        ),
    ],
)
def test_what_cannot_be_answered_is_told(build_file, capsys, options, message):
    assert main(["query", str(build_file), *options]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", message)


def test_an_ambiguous_beginning_is_told_with_the_kernels(build_file, capsys):
    assert main(["query", str(build_file), "--json"]) == 0
    ids = [kernel["id"] for kernel in json.loads(capsys.readouterr().out)["kernels"]]
    assert main(["query", str(build_file), "--kernel", ""]) == 2
    listed = ", ".join(ids)
    expected = f"--kernel: error: the ids of {len(ids)} kernels begin with ``\nhelp: Write more of it: {listed}.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("options", [[], ["--layer", "1"], ["--format", "json"], ["--format", "json", "--full"]])
def test_the_json_holds_to_its_schema(build_file, capsys, options):
    assert main(["query", str(build_file), *options, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    jsonschema.validate(answer, QUERY_SCHEMA)
    assert answer["name"] == "small"


def test_the_text_names_actions_of_each_changed_file(build_file, capsys):
    files = ["--changed", str(build_file.parent / "config.json"), "--changed", str(ROOT / "dsr1build/execute/engine.py")]
    assert main(["query", str(build_file), *files]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("config.json: model configuration; shapes and layers follow from it")
    assert "  may run link:x86-64-v3" in lines
    assert "  assembles the bundle of x86-64-v3" in lines
    assert lines[-2:] == [f"{ROOT}/dsr1build/execute/engine.py: own source; no key holds it", "  nothing runs"]


def test_the_graph_as_text_and_dot(build_file, capsys):
    assert main(["query", str(build_file), "--format", "text"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("prefill:6a2eb99ef9048908  embedding  1 partition\n  -> prefill:")
    assert main(["query", str(build_file), "--format", "dot"]) == 0
    dot = capsys.readouterr().out
    assert dot.startswith('digraph "small" {\n  node [shape=box];\n  "prefill:')
    assert dot.endswith("}\n")
