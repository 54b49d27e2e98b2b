"""A small model built for real: what each build records, explains and tells its CI, and the cache options of a build."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest

from dsr1build.execute.events import EVENT_SCHEMA
from dsr1build.plan.record import RECORD_PATH, RECORD_SCHEMA

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow
RECIPE = "specializations: {decode: [], prefill: [], expert: []}\n"


def make_workspace(directory):
    directory.mkdir(parents=True)
    shutil.copyfile(ROOT / "models/llama-mini/config.json", directory / "config.json")
    shutil.copyfile(ROOT / "targets/x86-64-v3.yaml", directory / "target.yaml")
    shutil.copyfile(ROOT / "cache/local.yaml", directory / "profile.yaml")
    recipe = (ROOT / "recipes/llama.yaml").read_text().split("specializations:")[0] + RECIPE
    (directory / "recipe.yaml").write_text(recipe)
    (directory / "BUILD.yaml").write_text(
        "version: 1\nname: small\nmodel: {config: config.json, weights: {random: {seed: 0}}}\n"
        "recipe: ./recipe.yaml\ntargets: [./target.yaml]\ncontext: 64\ncache: ./profile.yaml\n"
    )
    return directory


def dsr1build(workspace, cache, *arguments, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("GITHUB_", "CI"))}
    return subprocess.run(
        [sys.executable, "-m", "dsr1build", *arguments],
        cwd=workspace,
        env={**clean, "XDG_CACHE_HOME": str(cache), **environment},
        capture_output=True,
        text=True,
    )


def build(workspace, cache, *arguments, **environment):
    done = dsr1build(workspace, cache, "build", "BUILD.yaml", "--json", *arguments, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    for event in events:
        jsonschema.validate(event, EVENT_SCHEMA)
    return events[-1]


def record_of(workspace):
    record = json.loads((workspace / RECORD_PATH).read_text())
    jsonschema.validate(record, RECORD_SCHEMA)
    return record


def kinds_that_ran(workspace):
    return {action["kind"] for action in record_of(workspace)["actions"].values() if action["outcome"] == "ran"}


def files(directory):
    return {p.relative_to(directory): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(workspace, cache, summary) of the first build; the cache is not to be changed."""
    directory = tmp_path_factory.mktemp("explained")
    workspace = make_workspace(directory / "workspace")
    return workspace, directory / "cache", build(workspace, directory / "cache")


@pytest.fixture
def again(first, tmp_path):
    """A copy of the workspace with the record of the first build, and a copy of the cache after it."""
    shutil.copytree(first[0], tmp_path / "workspace")
    shutil.copytree(first[1], tmp_path / "cache")
    return tmp_path / "workspace", tmp_path / "cache"


def test_the_record_of_a_first_build(first):
    workspace, _, made = first
    record = record_of(workspace)
    actions = record["actions"].values()
    assert (record["version"], record["name"], len(actions)) == (1, "small", made["executed"])
    for action in actions:
        assert action["outcome"] == "ran" and action["seconds"] > 0 and action["explanation"]["reason"] in ("first", "changed")
    assert (workspace / RECORD_PATH).stat().st_size <= (64 << 10) + (4 << 10) * len(actions)
    text = (workspace / RECORD_PATH).read_text()
    assert str(workspace) not in text and str(Path.home()) + "/" not in text


def test_a_warm_build_is_fast_records_hits_and_passes_any_hit_rate(first, again):
    workspace, cache = again
    made = build(workspace, cache, "--min-hit-rate", "100")
    assert made["executed"] == 0 and made["seconds"] < first[2]["seconds"] / 2
    assert {a["outcome"] for a in record_of(workspace)["actions"].values()} == {"local hit"}
    assert not any("explanation" in a for a in record_of(workspace)["actions"].values())


@pytest.mark.parametrize(
    ("edit", "ran"),
    [
        (lambda w: rewrite_json(w / "config.json", lambda c: dict(reversed(c.items())), indent=7), set()),
        (
            lambda w: rewrite_json(w / "config.json", lambda c: {**c, "_name_or_path": "other", "transformers_version": "9"}),
            set(),
        ),
        (lambda w: rewrite_lines(w / "BUILD.yaml", lambda lines: ["# comment", *reversed(lines), "", "# end"]), set()),
        (lambda w: rewrite_lines(w / "target.yaml", lambda lines: [f"{line}   # why" for line in reversed(lines)]), set()),
        (lambda w: rewrite_lines(w / "recipe.yaml", lambda x: ["# comment", x[-1], *(f"{y}  # why" for y in x[:-1])]), set()),
        (lambda w: rewrite_lines(w / "BUILD.yaml", lambda lines: [x.replace("small", "another_name") for x in lines]), set()),
        (lambda w: rewrite_json(w / "config.json", lambda c: {**c, "num_hidden_layers": 9}), {"link"}),
    ],
    ids=[
        "order of the configuration",
        "unused keys",
        "order of BUILD.yaml",
        "comments in the target",
        "order of the recipe",
        "name",
        "more layers",
    ],
)
def test_what_changes_no_kernel_costs_no_compile(again, edit, ran):
    workspace, cache = again
    edit(workspace)
    made = build(workspace, cache)
    assert made["compiled"] == 0 and kinds_that_ran(workspace) == ran


def test_one_letter_of_the_names_of_nodes_costs_nothing(again, tmp_path):
    """Names of nodes come from the reader of a model, and a recipe finds modules by them; here both spell them otherwise."""
    workspace, cache = again
    package = tmp_path / "package" / "dsr1build"
    shutil.copytree(ROOT / "dsr1build", package, ignore=shutil.ignore_patterns("__pycache__"))
    reader, recipe = package / "frontends/checkpoint/blueprint.py", workspace / "recipe.yaml"
    spelt = 'name=name.replace("layernorm", "layernorn")'
    assert reader.read_text().count("name=name, **attributes))") == 1 and reader.read_text().count('"module", name=name)') == 1
    text = reader.read_text().replace("name=name, **attributes))", f"{spelt}, **attributes))")
    reader.write_text(text.replace('"module", name=name)', f'"module", {spelt})'))
    words = ("build", "BUILD.yaml", "--dry-run", "--json")
    other = json.loads(dsr1build(workspace, cache, *words, PYTHONPATH=str(package.parent)).stdout)
    assert other["counts"]["run"] > 0, "the recipe finds what has another name"
    recipe.write_text(recipe.read_text().replace("layernorm", "layernorn"))
    made = build(workspace, cache, PYTHONPATH=str(package.parent))
    assert (made["executed"], made["compiled"], kinds_that_ran(workspace)) == (0, 0, set())


def rewrite_json(path, change, indent=None):
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=indent))


def rewrite_lines(path, change):
    text = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    path.write_text("\n".join(change(text)) + "\n")


def test_a_touched_file_costs_nothing_and_a_change_under_an_old_time_is_seen(again):
    workspace, cache = again
    config = workspace / "config.json"
    os.utime(config, (0, 0))
    assert build(workspace, cache)["executed"] == 0
    os.utime(config, (2**32, 2**32))
    assert build(workspace, cache)["executed"] == 0
    data = json.loads(config.read_text())
    config.write_text(json.dumps({**data, "rms_norm_eps": 0.125}))
    os.utime(config, (0, 0))
    found = dsr1build(workspace, cache, "explain", "BUILD.yaml", "lower", "--json")
    missed = [e for e in json.loads(found.stdout)["actions"] if e["state"] == "miss"]
    assert missed and all(e["explanation"]["field"].endswith(".attributes.epsilon") for e in missed)


def test_a_changed_target_is_explained_before_and_recorded_after(again):
    workspace, cache = again
    target = workspace / "target.yaml"
    target.write_text(target.read_text().replace("cpu: x86-64-v3", "cpu: x86-64-v2"))
    expected = 'miss: target.cpu was "x86-64-v3", is "x86-64-v2"'
    found = dsr1build(workspace, cache, "explain", "BUILD.yaml", "compile").stdout.splitlines()
    assert len(found) > 4 and all(line.endswith(expected) for line in found[:-1])
    low = dsr1build(workspace, cache, "build", "BUILD.yaml", "--min-hit-rate", "90")
    hits = int(low.stderr.split(" of ")[0].split()[-1])
    assert low.returncode == 1
    assert low.stderr.startswith(f"BUILD.yaml: error: {hits} of ") and "fewer than --min-hit-rate 90 % asks for\n" in low.stderr
    assert low.stderr.endswith("help: `dsr1build explain .dsr1build/last-build.json` says why the others were not.\n")
    recorded = dsr1build(workspace, cache, "explain", ".dsr1build/last-build.json", "compile").stdout.splitlines()
    assert all(line.endswith(expected[6:]) and ": ran for " in line for line in recorded[:-1])


def test_builds_of_two_machines_are_compared(first, again, tmp_path):
    workspace, cache = again
    target = workspace / "target.yaml"
    target.write_text(target.read_text() + "schedules: {dot: {rows: 8}}\n")
    build(workspace, cache, "--no-link")
    one, two = first[0] / RECORD_PATH, workspace / RECORD_PATH
    done = dsr1build(workspace, cache, "explain", str(one), str(two), "--json")
    entries = json.loads(done.stdout)["actions"]
    differing = [e for e in entries if "field" in e]
    assert differing and {e["field"] for e in differing} == {"schedules.dot.rows"}
    assert all(e["kind"] == "compile" and (e["before"], e["after"]) == ("4", "8") for e in differing)
    assert {e["kind"] for e in entries if "only_in" in e} == {"runtime", "link"}


def test_read_only_use_writes_nothing_into_the_cache(again):
    workspace, cache = again
    before = files(cache)
    assert build(workspace, cache, "--cache-only-read")["executed"] == 0
    data = json.loads((workspace / "config.json").read_text())
    (workspace / "config.json").write_text(json.dumps({**data, "num_hidden_layers": 7}))
    assert build(workspace, cache, "--cache-only-read")["executed"] == 2
    assert files(cache) == before


def test_without_a_cache_nothing_is_read_or_written(first, again):
    workspace, cache = again
    shutil.rmtree(workspace / "dist")
    before = files(cache)
    made = build(workspace, cache, "--no-cache", "--check-reproducible")
    assert made["executed"] == first[2]["executed"] and made["hits"] == {"local": 0, "remote": 0}
    assert files(cache) == before
    assert {a["explanation"]["reason"] for a in record_of(workspace)["actions"].values()} == {"unread"}
    assert files(workspace / "dist") == files(first[0] / "dist")
    refused = dsr1build(workspace, cache, "build", "BUILD.yaml", "--no-cache", "--cache", "local")
    assert refused.returncode == 2 and "not allowed with argument" in refused.stderr


def test_a_record_that_cannot_be_written_is_one_warning(again):
    workspace, cache = again
    shutil.rmtree(workspace / ".dsr1build")
    (workspace / ".dsr1build").write_text("")
    done = dsr1build(workspace, cache, "build", "BUILD.yaml")
    assert done.returncode == 0
    assert done.stderr == (
        "warning: the build record .dsr1build/last-build.json cannot be written (File exists); "
        "explanations will know the cache alone\n"
    )


def test_github_actions_gets_a_summary_and_annotations(again, tmp_path):
    workspace, cache = again
    target, summary = workspace / "target.yaml", tmp_path / "summary.md"
    surroundings = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_WORKSPACE": str(tmp_path)}
    build(workspace, cache, **surroundings)
    assert "| hit rate | 100.0 % |" in summary.read_text()
    good = target.read_text()
    target.write_text(good + "passes: {parse: no-such-pass}\n")
    done = dsr1build(workspace, cache, "build", "BUILD.yaml", "-j", "1", **surroundings)
    assert done.returncode == 1
    assert "::error title=compile " in done.stderr and "no-such-pass" in done.stderr
    assert "pipeline.parse was " in summary.read_text() and " failed: `exit code 1`" in summary.read_text()
    target.write_text(good + "cpuu: x\n")
    done = dsr1build(workspace, cache, "build", "BUILD.yaml", **surroundings)
    line = len(good.splitlines()) + 1
    assert done.returncode == 2
    assert f"::error file=workspace/target.yaml,line={line},col=1,title=dsr1build::" in done.stderr


def test_a_lottery_in_the_compiler_is_found_by_its_pass_group(again, tmp_path):
    workspace, cache = again
    package = tmp_path / "package"
    shutil.copytree(ROOT / "dsr1build", package / "dsr1build", ignore=shutil.ignore_patterns("__pycache__"))
    source = package / "dsr1build/toolchains/compile.py"
    text = source.read_text()
    schedule = '        keep("schedule", str(module))\n'
    assert text.count(schedule) == 1
    source.write_text(text.replace(schedule, schedule + "        symbol += __import__('os').urandom(2).hex()\n"))
    done = dsr1build(
        workspace, cache, "build", "BUILD.yaml", "--no-link", "--no-cache", "--check-reproducible", PYTHONPATH=str(package)
    )
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("--check-reproducible: error: outputs are not reproducible\n    compile ")
    assert "kernel.o differs from run to run; the first pass group that differs is outline\n" in done.stderr
    assert "lower " not in done.stderr
