"""The example jobs are what their services read, and each dsr1build command in them is one that the program knows."""

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from dsr1build.cli.cache import SUBVERBS, split_subverb, subverb_parser
from dsr1build.cli.main import VERBS, load_verb, verb_parser

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples/ci"


def github_steps():
    # YAML 1.1 reads the key `on` as a boolean.
    job = yaml.safe_load((EXAMPLES / "github.yml").read_text())
    assert set(job[True]) == {"push", "pull_request", "schedule"}
    (build,) = job["jobs"].values()
    assert set(build) == {"runs-on", "env", "steps"}
    for step in build["steps"]:
        assert ("uses" in step) != ("run" in step) and set(step) <= {"uses", "run", "with", "if"}
    return build["steps"]


def scripts(name):
    if name == "github.yml":
        return [step["run"] for step in github_steps() if "run" in step]
    jobs = yaml.safe_load((EXAMPLES / name).read_text())
    lines = list(jobs.pop("default")["before_script"])
    for job in jobs.values():
        assert set(job) <= {"variables", "cache", "script", "after_script", "artifacts", "rules"}
        variables = job.get("variables", {})
        for line in [*job["script"], *job.get("after_script", ())]:
            lines.append(re.sub(r"\$(\w+)", lambda found: variables[found[1]], line))  # noqa: B023 - used at once
    return lines


def commands(name):
    lines = [part.strip() for script in scripts(name) for part in re.split(r"&&|\n|\|", script)]
    return [shlex.split(line.partition(" > ")[0]) for line in lines if line.startswith("dsr1build ")]


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml"])
def test_every_command_is_understood(name):
    found = commands(name)
    assert len(found) >= 3
    for _, verb, *rest in found:
        assert verb in VERBS
        if verb == "cache":
            subverb, words = split_subverb(rest)
            subverb_parser(subverb, import_module(SUBVERBS[subverb].module)).parse_args(words)
            continue
        arguments = verb_parser(verb, load_verb(verb)).parse_args(rest)
        assert (ROOT / arguments.file).is_file() or arguments.file.startswith(".dsr1build/")


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml"])
def test_the_cache_is_measured_gated_and_checked_on_a_schedule(name):
    found = [" ".join(words) for words in commands(name)]
    for part in ("--min-hit-rate", "--no-cache --check-reproducible", "cache stats", "cache verify --recompute"):
        assert any(part in line for line in found), part
    assert "--junit verify.xml" in " ".join(found) and (EXAMPLES / name).read_text().count("verify.xml") == 2


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml"])
def test_the_cache_that_is_kept_is_the_one_that_is_used(name):
    text = (EXAMPLES / name).read_text()
    assert re.search(r"XDG_CACHE_HOME: \S.*/\.cache$", text, re.MULTILINE)
    assert ".cache/dsr1build" in text and "requirements.lock" in text
    assert (ROOT / "requirements.lock").is_file()
