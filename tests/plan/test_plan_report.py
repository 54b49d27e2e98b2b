"""``dsr1build plan``: the JSON that others script against, and the text."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsr1build.cli.main import main

MODELS = Path(__file__).resolve().parents[2] / "models"


def build_file(directory: Path, name: str, recipe: str = "deepseek_v3") -> Path:
    path = directory / "BUILD.yaml"
    path.write_text(
        f"version: 1\nname: {name}\nmodel: {{config: {MODELS / name / 'config.json'}, weights: {{random: {{seed: 0}}}}}}\n"
        f"recipe: {recipe}\ntargets: [x86-64-v3]\n"
    )
    return path


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def plan_json(path: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert main(["plan", str(path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert isinstance(report, dict)
    return report


def test_the_json_holds_to_its_schema(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import jsonschema

    from dsr1build.plan.report import PLAN_SCHEMA

    report = plan_json(build_file(tmp_path, "r1-mini"), capsys)
    jsonschema.Draft202012Validator.check_schema(PLAN_SCHEMA)
    jsonschema.validate(report, PLAN_SCHEMA)
    assert report["model"]["parameters"] == 1_537_776  # type: ignore[index]
    assert report["partitions"]["total"] == 64  # type: ignore[index]
    assert report["partitions"]["by_kind"]["expert"] == 51  # type: ignore[index]
    assert report["actions"]["cached"] == 0  # type: ignore[index]
    kernels = {kernel["kind"]: kernel for kernel in report["kernels"] if "prefill" in kernel["modes"]}  # type: ignore[attr-defined]
    assert kernels["expert"]["instances"] == 51
    assert kernels["expert"]["modes"] == {"prefill": 51, "decode": 51}
    assert kernels["expert"]["variants"] == [
        {"guard": "exact", "tokens": 1},
        {"guard": "exact", "tokens": 64},
        {"guard": "range"},
    ]


def test_more_layers_and_another_context_add_no_action(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = plan_json(build_file(tmp_path, "r1-mini"), capsys)
    config = json.loads((MODELS / "r1-mini" / "config.json").read_text())
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 40}))
    path = tmp_path / "large" / "BUILD.yaml"
    path.write_text(
        "version: 1\nname: large\nmodel: {config: config.json, weights: {random: {seed: 0}}}\n"
        "recipe: deepseek_v3\ntargets: [x86-64-v3]\ncontext: 99\n"
    )
    large = plan_json(path, capsys)
    assert large["actions"] == small["actions"]
    assert [k["id"] for k in large["kernels"]] == [k["id"] for k in small["kernels"]]  # type: ignore[attr-defined]
    assert large["partitions"]["total"] == 40 + 1 + 39 * (1 + 17 + 1) + 2  # type: ignore[index]


def test_the_text_tells_kernels_variants_differences_and_actions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(build_file(tmp_path, "r1-mini"))]) == 0
    text = capsys.readouterr().out
    assert text.startswith("r1-mini: deepseek_v3, 1,537,776 parameters in 201 tensors (3.1 MB), context ")
    assert "\n64 partitions in each mode\n" in text
    assert "\n  expert           51\n" in text
    assert "\n    variants   tokens=1, tokens=64, tokens=1..\n" in text
    assert "\n    signature  f32[tokens, 128], 10 weights, state f32[context, 40] -> f32[tokens, 128]\n" in text
    assert "operator 9 is LatentAttentionExpanded in the one and LatentAttentionAbsorbed in the other\n" in text
    assert "\n45 actions (21 lower, 21 compile, 1 runtime, 2 link)\n      0 cached\n" in text


def test_the_true_r1_plans_in_seconds_with_its_counts(tmp_path: Path) -> None:
    path = build_file(tmp_path, "deepseek-r1")
    run = subprocess.run(
        [sys.executable, "-m", "dsr1build", "plan", str(path), "--json"],
        capture_output=True,
        text=True,
        env={**os.environ},
        check=True,
    )
    report = json.loads(run.stdout)
    assert report["partitions"]["total"] == 15_088
    assert report["model"]["parameters"] == 671_026_419_200
    assert report["model"]["tensors"] == 45_395
    assert report["notes"] == []


def test_a_build_file_that_does_not_exist_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "nowhere/BUILD.yaml"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "nowhere/BUILD.yaml" in captured.err
