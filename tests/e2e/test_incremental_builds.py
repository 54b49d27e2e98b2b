"""The sample built once, then again after one change each: what runs is what the change touches."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsr1build.cache.store import LocalStore

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def copy_workspace(target):
    for name in ("BUILD.yaml", "models/r1-mini/config.json", "recipes", "targets", "cache"):
        to = target / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / name, to) if (ROOT / name).is_dir() else shutil.copyfile(ROOT / name, to)
    return target


def run_build(workspace, cache, *arguments, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "dsr1build", "build", "BUILD.yaml", *arguments],
        cwd=workspace,
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def summary(out):
    return json.loads(out.splitlines()[-1])


def finished(out):
    events = [json.loads(line) for line in out.splitlines()]
    return [(event["kind"], event["label"]) for event in events if event["event"] == "finished"]


def replace_in(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def generate(bundle):
    command = [sys.executable, "-m", "dsr1build", "run", str(bundle), "--ids", "1,2,3", "--max-new", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(workspace, cache directory, summary) of the sample's first build."""
    directory = tmp_path_factory.mktemp("incremental")
    workspace = copy_workspace(directory / "workspace")
    made = summary(run_build(workspace, directory / "cache", "--json"))
    return workspace, directory / "cache", made


@pytest.fixture
def again(first, tmp_path):
    """A fresh copy of the workspace, and the function that builds it with the first build's cache."""
    workspace = copy_workspace(tmp_path / "workspace")
    return workspace, lambda *arguments, **environment: run_build(workspace, first[1], *arguments, **environment)


def test_the_first_build_compiles_every_variant(first):
    workspace, _, made = first
    plan = subprocess.run(
        [sys.executable, "-m", "dsr1build", "plan", "BUILD.yaml", "--json"], cwd=workspace, capture_output=True, text=True
    )
    assert made["compiled"] == json.loads(plan.stdout)["actions"]["by_kind"]["compile"]
    assert made["hits"] == {"local": 0, "remote": 0}
    assert made["artifacts"] == [str(workspace / "dist/r1-mini/x86-64-v3")]


def test_a_second_build_runs_nothing_says_so_and_leaves_the_bundle_alone(first):
    workspace, cache, made = first
    bundle = workspace / "dist/r1-mini/x86-64-v3"
    before = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in bundle.rglob("*")}
    out = run_build(workspace, cache)
    assert out.splitlines() == [f"nothing to compile: {made['executed']} actions cached", str(bundle)]
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in bundle.rglob("*")} == before


def test_another_context_runs_nothing(again):
    workspace, build = again
    replace_in(workspace / "BUILD.yaml", "context: 512", "context: 300")
    made = summary(build("--json"))
    assert made["executed"] == 0
    assert json.loads(Path(made["artifacts"][0], "manifest.json").read_text())["context"] == 300


def test_other_weights_run_nothing(first, again):
    workspace, build = again
    replace_in(workspace / "BUILD.yaml", "seed: 0", "seed: 1")
    made = summary(build("--json"))
    assert made["executed"] == 0
    assert generate(made["artifacts"][0]) != generate(first[2]["artifacts"][0])


def test_more_layers_compile_nothing(again):
    workspace, build = again
    config = workspace / "models/r1-mini/config.json"
    data = json.loads(config.read_text())
    config.write_text(json.dumps({**data, "num_hidden_layers": 40}))
    out = build("--json")
    assert summary(out)["compiled"] == 0
    assert finished(out) == [("link", "tables for x86-64-v3"), ("link", "library for x86-64-v3")]
    assert len(generate(summary(out)["artifacts"][0]).split(",")) == 8


def test_a_schedule_option_compiles_only_the_kernels_it_touches(again):
    workspace, build = again
    recipe = workspace / "recipes/deepseek_v3.yaml"
    recipe.write_text(recipe.read_text() + "\npipelines: {x86-64-v3: {ffn: {schedules: {dot: {rows: 8}}}}}\n")
    out = build("--json")
    ran = finished(out)
    compiled = [label for kind, label in ran if kind == "compile"]
    assert compiled and all(label.startswith("ffn ") for label in compiled)
    assert {kind for kind, _ in ran} == {"compile", "link"}
    assert summary(out)["compiled"] == len(compiled)


def test_a_comment_in_a_lowering_lowers_again_and_compiles_nothing(again, tmp_path):
    _, build = again
    package = tmp_path / "package"
    shutil.copytree(ROOT / "dsr1build", package / "dsr1build", ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "dsr1build/ops/dense.py").open("a") as source:
        source.write("\n# A comment.\n")
    out = build("--json", PYTHONPATH=str(package))
    kinds = [kind for kind, _ in finished(out)]
    assert kinds and set(kinds) == {"lower"}
    assert summary(out)["compiled"] == 0


def test_a_change_in_a_lowering_compiles_what_it_changes(again, tmp_path):
    """The copy's own code runs in the workers too: the kernels whose text it changes reach the compiler, no others."""
    _, build = again
    package = tmp_path / "package"
    shutil.copytree(ROOT / "dsr1build", package / "dsr1build", ignore=shutil.ignore_patterns("__pycache__"))
    changed = '"// changed\\n" if any(node["op"] == "CombineSlots" for node in fields["nodes"]) else ""'
    replace_in(package / "dsr1build/lower/action.py", "write_text(source.text,", f"write_text(source.text + ({changed}),")
    out = build("--json", PYTHONPATH=str(package))
    compiled = [label for kind, label in finished(out) if kind == "compile"]
    assert compiled and all(label.startswith("combine ") for label in compiled)


def test_the_workspace_can_move_and_its_user_can_change(first, tmp_path):
    workspace = copy_workspace(tmp_path / "ein Ordner mit Leerzeichen, größer")
    out = run_build(workspace, first[1], "--json", HOME=str(tmp_path), USER="somebody", TZ="Asia/Kathmandu", LANG="de_DE.UTF-8")
    assert summary(out)["executed"] == 0
    assert generate(summary(out)["artifacts"][0]) == generate(first[2]["artifacts"][0])
    moved = tmp_path / "moved cache"
    shutil.copytree(first[1], moved)
    assert summary(run_build(workspace, moved, "--json"))["executed"] == 0


def test_a_damaged_object_is_compiled_again_in_the_same_build(first, again):
    _, build = again
    objects = [p for p in (first[1] / "dsr1build/v1/blobs").rglob("*") if p.is_file() and p.read_bytes()[:4] == b"\x7fELF"]
    kernels = [p for p in objects if b"k" in p.read_bytes() and b"__plan" in p.read_bytes()]
    damaged = min(kernels, key=lambda p: p.stat().st_size)
    good = damaged.read_bytes()
    damaged.write_bytes(good[: len(good) // 2])
    made = summary(build("--json"))
    assert made["executed"] == 1 and made["failed"] == 0
    assert damaged.read_bytes() == good


def test_generated_weights_that_somebody_changed_are_found_on_request(again):
    workspace, build = again
    build()
    weights = workspace / "dist/r1-mini/x86-64-v3/weights/random.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    out = build("--json", "--verify-outputs")
    messages = [event["message"] for event in map(json.loads, out.splitlines()) if event["event"] == "warning"]
    assert messages == [f"{weights} was changed after the build that made it; it is made anew"]
    assert weights.read_bytes() == before and summary(out)["executed"] == 0
    assert "warning" not in build("--verify-outputs")


def test_where_only_results_downstream_are_cached_nothing_is_compiled(first, tmp_path):
    shutil.copytree(first[1], tmp_path / "cache")
    with LocalStore(tmp_path / "cache" / "dsr1build", pytest.fail) as store:
        entries = store.entries()
        for entry in entries.values():
            if entry.kind == "lower":
                store.files.manifests.path(entry.manifest).unlink()
    copy = copy_workspace(tmp_path / "workspace")
    again = run_build(copy, tmp_path / "cache", "--json")
    assert {kind for kind, _ in finished(again)} == {"lower"}
    assert (summary(again)["executed"], summary(again)["compiled"]) == (len(finished(again)), 0)
