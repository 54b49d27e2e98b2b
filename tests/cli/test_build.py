"""The build verb: options, refusals, failures. No test here needs a finished compile."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from dsr1build.execute.events import EVENT_SCHEMA
from dsr1build.execute.forecast import FORECAST_SCHEMA

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workspace(tmp_path):
    for name in ("BUILD.yaml", "models/r1-mini/config.json", "recipes", "targets", "cache"):
        source, target = ROOT / name, tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copyfile(source, target)
    return tmp_path


def start(workspace, *arguments):
    environment = {**os.environ, "XDG_CACHE_HOME": str(workspace / "xdg")}
    command = [sys.executable, "-m", "dsr1build", "build", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=workspace, env=environment, stdout=pipe, stderr=pipe, text=True)


def build(workspace, *arguments):
    process = start(workspace, *arguments)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def replace_in(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def nothing_is_left(workspace):
    return not (workspace / "dist").exists()


def test_a_dry_run_tells_what_would_run_and_runs_nothing(workspace):
    code, out, err = build(workspace, "BUILD.yaml", "--dry-run")
    lines = out.splitlines()
    lowers = [line for line in lines if line.startswith("run  lower ")]
    compiles = [line for line in lines if line.startswith("run? compile ")]
    assert (code, err) == (0, "")
    assert len(lowers) == len(compiles) >= 7
    assert lines[-1] == f"0 cached, {len(lowers) + 1} to run, {len(compiles) + 2} known after those have run"
    assert nothing_is_left(workspace)
    assert not list(workspace.glob("xdg/dsr1build/v1"))


def test_a_dry_run_as_json(workspace):
    code, out, _ = build(workspace, "BUILD.yaml", "--dry-run", "--json")
    found = json.loads(out)
    assert code == 0
    jsonschema.validate(found, FORECAST_SCHEMA)
    assert found["actions"]["runtime:x86-64-v3"] == "run" and found["actions"]["link:x86-64-v3"] == "unknown"
    assert sum(found["counts"].values()) == len(found["actions"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["BUILD.yaml", "-j", "0"], "dsr1build build: error: -j 0 runs nothing\nhelp: Write a number from 1.\n"),
        (
            ["BUILD.yaml", "--json", "--quiet"],
            "dsr1build build: error: argument --quiet: not allowed with argument --json\n"
            "help: `dsr1build build --help` shows the options and examples.\n",
        ),
        (
            ["BUILD.yaml", "--context", "100000"],
            "--context: error: the context of 100000 tokens is longer than the model's own, 512 (max_position_embeddings)\n"
            "help: Set it to 512 or less.\n",
        ),
        (["BULD.yaml"], "BULD.yaml: error: the file does not exist\nhelp: Did you mean BUILD.yaml?\n"),
    ],
)
def test_wrong_input_is_refused(workspace, arguments, message):
    longest = json.loads((workspace / "models/r1-mini/config.json").read_text())["max_position_embeddings"]
    assert build(workspace, *arguments) == (2, "", message.replace("512", str(longest)))
    assert nothing_is_left(workspace)


def test_a_context_beyond_the_model_is_shown_in_the_build_file(workspace):
    replace_in(workspace / "BUILD.yaml", "context: 512", "context: 100000")
    code, _, err = build(workspace, "BUILD.yaml")
    assert code == 2
    assert err.splitlines()[0].startswith("BUILD.yaml:9:10: error: the context of 100000 tokens is longer than the model's own")
    assert err.splitlines()[1:3] == ["    context: 100000", "             ^"]


def test_a_recipe_for_another_architecture_is_refused(workspace):
    replace_in(workspace / "BUILD.yaml", "recipes/deepseek_v3.yaml", "recipes/llama.yaml")
    assert build(workspace, "BUILD.yaml") == (
        2,
        "",
        f"{workspace}/BUILD.yaml: error: the recipe `llama` is for llama, the model is of type deepseek_v3\n"
        "help: Write `recipe: deepseek_v3`, which ships with dsr1build.\n",
    )


def test_an_unknown_pass_fails_the_build_by_the_name_of_the_kernel(workspace):
    target = workspace / "targets/x86-64-v3.yaml"
    target.write_text(target.read_text() + "passes: {parse: no-such-pass}\n")
    code, out, err = build(workspace, "BUILD.yaml", "-j", "1", "--json")
    events = [json.loads(line) for line in out.splitlines()]
    for event in events:
        jsonschema.validate(event, EVENT_SCHEMA)
    (failed,) = [event for event in events if event["event"] == "failed"]
    assert code == 1
    assert failed["kind"] == "compile" and failed["label"].endswith("for x86-64-v3")
    assert failed["output"].splitlines()[0] == (
        "no-such-pass: error: the pass group 'parse' cannot be read: MLIR Textual PassPipeline Parser:1:1: "
        "error: 'no-such-pass' does not refer to a registered pass or pass pipeline"
    )
    assert failed["output"].splitlines()[-1] == "help: The passes are those of the target or of the recipe's `pipelines`."
    assert failed["pass_group"] == "parse"
    assert failed["again"] == "it failed in the same way when it was run again"
    kept = workspace / failed["reproducer"]
    assert kept.parent == workspace / ".dsr1build/failures" and (kept / "request.json").is_file()
    summary = events[-1]
    assert (summary["event"], summary["compiled"], summary["failed"], summary["artifacts"]) == ("summary", 0, 1, [])
    assert summary["skipped"] > 0
    assert nothing_is_left(workspace)
    code, out, err = build(workspace, "BUILD.yaml", "-k")
    finished = sum(event["event"] == "finished" for event in events)
    assert code == 1
    assert err.count(" failed in pass group parse: exit code 1\n") >= 7
    assert f"{finished} cached, 2 not started, in " in out.splitlines()[-1]
    remembered = "it has failed twice in this way in an earlier build and was not run; --retry-failed runs it"
    assert err.count(remembered) == 1
    code, out, err = build(workspace, "BUILD.yaml", "-k", "--no-link")
    assert code == 1 and err.count(remembered) >= 7 and "it failed in the same way" not in err
    code, out, err = build(workspace, "BUILD.yaml", "--no-link", "--retry-failed")
    assert code == 1 and remembered not in err and "it failed in the same way" in err


def test_ctrl_c_stops_at_once_and_finished_actions_are_kept(workspace):
    process = start(workspace, "BUILD.yaml", "--no-link")
    seen = ""
    for line in process.stdout:
        seen = line
        if " compile " in line:
            break
    assert " compile " in seen
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (130, "interrupted\n")
    _, out, _ = build(workspace, "BUILD.yaml", "--dry-run")
    assert int(out.splitlines()[-1].split()[0]) > 7
    assert nothing_is_left(workspace)


@pytest.mark.parametrize(("place", "reason"), [("BUILD.yaml", "Not a directory"), ("/proc/none", "No such file or directory")])
def test_save_temps_where_nothing_can_be_kept(workspace, place, reason):
    code, _, err = build(workspace, "BUILD.yaml", "--no-link", "-j", "1", "--save-temps", place)
    assert code == 3
    assert err.startswith(f"{place}: error: the intermediate files of embedding ")
    assert err.endswith(f" cannot be kept: {reason}\nhelp: name another directory for them\n")


def test_save_temps_keeps_the_ir_of_each_pass_group(workspace):
    recipe = (workspace / "recipes/deepseek_v3.yaml").read_text().split("specializations:")[0]
    (workspace / "recipes/deepseek_v3.yaml").write_text(recipe + "specializations: {decode: [], prefill: [], expert: []}\n")
    process = start(workspace, "BUILD.yaml", "--no-link", "-j", "1", "--save-temps", "temps")
    for line in process.stdout:
        if " compile " in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    (kept, *_) = sorted((workspace / "temps").iterdir())
    names = [path.name for path in sorted(kept.iterdir())]
    assert {"assembly.s"} < set(names)
    assert any(name.endswith("-parse.mlir") for name in names) and any(name.endswith("-lower.mlir") for name in names)
