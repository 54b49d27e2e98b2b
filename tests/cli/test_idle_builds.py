"""A build that has nothing to do says so without planning; every change that could matter is seen."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = """\
version: 1
name: idle
model:
  config: config.json
  weights: {random: {seed: 1}}
recipe: ./recipe.yaml
targets: [./target.yaml]
cache: ./profile.yaml
context: 64
"""
# Nothing but what has to be compiled for a model of one dense layer; no variant beyond the general one.
HEAVY = ("pydantic", "yaml", "numpy", "onnx", "networkx", "joblib", "diskcache", "sqlite3", "mlir")


def write_workspace(workspace):
    config = json.loads((ROOT / "models/r1-mini/config.json").read_text())
    config.update(num_hidden_layers=1, first_k_dense_replace=1)
    (workspace / "config.json").write_text(json.dumps(config) + "\n")
    recipe = (ROOT / "recipes/deepseek_v3.yaml").read_text().split("specializations:")[0]
    (workspace / "recipe.yaml").write_text(recipe + "specializations: {decode: [], prefill: [], expert: []}\n")
    shutil.copyfile(ROOT / "targets/x86-64-v3.yaml", workspace / "target.yaml")
    shutil.copyfile(ROOT / "cache/local.yaml", workspace / "profile.yaml")
    (workspace / "BUILD.yaml").write_text(SAMPLE)
    for path in workspace.iterdir():
        # As if everything had been written long before the first build.
        os.utime(path, ns=(1, 1))


def build(workspace, *words, **environment):
    command = [sys.executable, "-X", "importtime", "-m", "dsr1build", "build", "BUILD.yaml", *words]
    surroundings = {**os.environ, "XDG_CACHE_HOME": str(workspace.parent / "xdg"), **environment}
    run = subprocess.run(command, cwd=workspace, env=surroundings, capture_output=True, text=True, timeout=300)
    modules = {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}
    errors = "\n".join(line for line in run.stderr.splitlines() if not line.startswith("import time:"))
    assert run.returncode == 0, errors
    return run.stdout, modules


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    workspace = tmp_path_factory.mktemp("idle") / "workspace"
    workspace.mkdir()
    write_workspace(workspace)
    time.sleep(2.5)
    build(workspace)
    return workspace


@pytest.fixture
def workspace(built):
    """The built workspace, whose next build has nothing to do."""
    # A build right after a change is made in full and vouches for nothing, the next one is made in full and vouches.
    assert any(is_short(*build(built)) for _ in range(3))
    return built


def is_short(output, modules):
    assert output.startswith("nothing to compile: ")
    return "dsr1build.config.load" not in modules


def test_nothing_heavy_is_imported_and_the_answer_is_that_of_a_full_build(workspace):
    short, modules = build(workspace)
    full, all_modules = build(workspace, "--verify-outputs")
    assert short == full
    assert not [name for name in HEAVY if name in modules] and "pydantic" in all_modules
    assert "dsr1build.plan.fingerprint" in modules and is_short(short, modules)


def test_views(workspace):
    assert build(workspace, "--quiet")[0] == ""
    output, modules = build(workspace, "--json")
    summary = json.loads(output)
    assert summary["event"] == "summary" and summary["executed"] == summary["compiled"] == 0
    assert summary["hits"]["local"] > 3 and summary["artifacts"] == [str(workspace / "dist/idle/x86-64-v3")]
    assert "pydantic" not in modules


@pytest.mark.parametrize("words", [["--no-link"], ["--cache-only-read"], ["--verify-outputs"], ["--min-hit-rate", "1"]])
def test_options_that_ask_for_more_get_a_full_build(workspace, words):
    assert not is_short(*build(workspace, *words))


@pytest.mark.parametrize("name", ["BUILD.yaml", "recipe.yaml", "target.yaml", "profile.yaml", "config.json"])
def test_an_edit_that_keeps_size_and_time_is_seen(workspace, name):
    path = workspace / name
    before, content = path.stat(), path.read_bytes()
    # Trailing white space changes nothing that is built; the same bytes in another order would.
    path.write_bytes(content[:-1] + b" ")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    try:
        assert not is_short(*build(workspace))
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("name", ["BUILD.yaml", "config.json"])
def test_a_touched_file_with_the_same_bytes_is_no_change(workspace, name):
    (workspace / name).touch()
    assert is_short(*build(workspace))


def test_a_tokenizer_that_appears_is_seen(workspace):
    (workspace / "generation_config.json").write_text("{}")
    try:
        assert not is_short(*build(workspace))
    finally:
        (workspace / "generation_config.json").unlink()


def test_a_bundle_that_was_changed_gets_a_full_build(workspace):
    bundle = workspace / "dist/idle/x86-64-v3"
    manifest = (bundle / "manifest.json").read_bytes()
    (bundle / "weights.bind").write_bytes(b"")
    assert not is_short(*build(workspace))
    (bundle / "weights.bind").unlink()
    assert not is_short(*build(workspace))
    shutil.rmtree(bundle)
    assert not is_short(*build(workspace))
    assert (bundle / "manifest.json").read_bytes() == manifest and (bundle / "weights.bind").read_bytes()


def test_another_question_has_another_answer(workspace):
    assert not is_short(*build(workspace, "--context", "32"))
    assert not is_short(*build(workspace))
    assert is_short(*build(workspace))


def test_github_gets_its_summary(workspace, tmp_path):
    assert not is_short(*build(workspace, GITHUB_STEP_SUMMARY=str(tmp_path / "summary")))
    assert (tmp_path / "summary").read_text()


def test_another_home_is_another_question(workspace, tmp_path):
    assert not is_short(*build(workspace, HOME=str(tmp_path)))


@pytest.mark.parametrize("damage", [b"{", b"[" * 100_000, b'{"format": 1}', b"\xff", b"null", None, "directory"])
def test_a_damaged_record_is_a_full_build(workspace, damage):
    (record,) = [p for p in (workspace / ".dsr1build/unchanged").iterdir() if is_the_plain_one(p)]
    content = record.read_bytes()
    if damage is None:
        entry = json.loads(content)
        record.write_text(json.dumps({**entry, "files": {path: [1] for path in entry["files"]}}))
    elif damage == "directory":
        record.unlink()
        record.mkdir()
    else:
        record.write_bytes(damage)
    assert not is_short(*build(workspace))
    if record.is_dir():
        record.rmdir()
    record.write_bytes(content)


def is_the_plain_one(path):
    entry = json.loads(path.read_bytes())
    return entry["question"][1][1] is None and entry["question"][3][1] == os.environ.get("HOME")


def test_the_first_build_after_an_edit_vouches_for_nothing(workspace):
    path = workspace / "BUILD.yaml"
    content = path.read_bytes()
    path.write_bytes(content + b"# now\n")
    assert not is_short(*build(workspace))
    path.write_bytes(content)


def test_a_cache_that_is_gone_is_filled_again(workspace):
    cache = workspace.parent / "xdg" / "dsr1build"
    cache.rename(cache.with_name("away"))
    try:
        command = [sys.executable, "-m", "dsr1build", "build", "BUILD.yaml", "--dry-run"]
        surroundings = {**os.environ, "XDG_CACHE_HOME": str(workspace.parent / "xdg")}
        run = subprocess.run(command, cwd=workspace, env=surroundings, capture_output=True, text=True, timeout=60)
        assert "to run" in run.stdout
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        cache.with_name("away").rename(cache)
