"""The example jobs are what their services read, and each dsr1build command in them is one that the program knows."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

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
        assert set(job) <= {"variables", "cache", "script", "artifacts", "rules"}
        lines += job["script"]
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
        arguments = verb_parser(verb, load_verb(verb)).parse_args(rest)
        assert (ROOT / arguments.file).is_file() or arguments.file.startswith(".dsr1build/")


@pytest.mark.parametrize("name", ["github.yml", "gitlab.yml"])
def test_the_cache_that_is_kept_is_the_one_that_is_used(name):
    text = (EXAMPLES / name).read_text()
    assert re.search(r"XDG_CACHE_HOME: \S.*/\.cache$", text, re.MULTILINE)
    assert ".cache/dsr1build" in text and "requirements.lock" in text
    assert (ROOT / "requirements.lock").is_file()
