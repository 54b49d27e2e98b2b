"""A kept action runs again alone, with what it had in the build."""

import json
import subprocess
import sys

import pytest
from test_engine import HERE, Build, toy

from dsr1build.execute.executor import Limits

TOYS = ("--import-path", HERE)


def once(*words):
    command = [sys.executable, "-m", "dsr1build.execute.once", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def kept(tmp_path, action):
    Build(tmp_path / "store", action, failures=tmp_path / "failures", limits=Limits(memory=64 << 20))
    (place,) = (tmp_path / "failures").iterdir()
    return place


def test_a_crash_comes_again_with_its_pass_group_and_ir(tmp_path):
    run = once(kept(tmp_path, toy("bad", "die_in_group")), *TOYS)
    told, _, place = run.stdout.strip().rpartition("; what it left is in ")
    assert run.returncode == 1
    assert told.startswith("compile toy bad failed in pass group bufferize: killed by SIGABRT after ")
    assert [path.name for path in (type(tmp_path)(place) / "temps").iterdir()] == ["00-parse.mlir"]


def test_what_it_prints_is_shown_and_limits_can_be_given(tmp_path):
    place = kept(tmp_path, toy("bad", "write_then_fail", kind="lower"))
    run = once(place, *TOYS)
    assert run.returncode == 1 and "RuntimeError: no good" in run.stderr and "exit code 1" in run.stdout
    hungry = kept(tmp_path / "hungry", toy("hungry", "exhaust", kind="lower"))
    assert "out of memory at the limit of 64 MiB" in once(hungry, *TOYS, "--memory", "64").stdout


def test_one_that_fails_no_more_ends_well(tmp_path):
    run = once(kept(tmp_path, toy("flaky", "fail_once", kind="lower", mark=str(tmp_path / "mark"))), *TOYS)
    assert run.returncode == 0 and run.stdout.startswith("lower toy flaky ended well after ")


@pytest.mark.parametrize("content", [None, "{", "[]", json.dumps({"kind": 1}), "[" * 100_000])
def test_a_directory_without_an_action_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "request.json").write_text(content)
    run = once(tmp_path)
    assert run.returncode == 2 and run.stdout == ""
    assert run.stderr.startswith(f"{tmp_path}: error: no action is kept here (")
    assert run.stderr.endswith(")\nhelp: Name a directory of .dsr1build/failures.\n")


def test_a_worker_of_a_stranger_is_not_run(tmp_path):
    place = kept(tmp_path, toy("bad", "abort", kind="lower"))
    run = once(place)
    assert (run.returncode, run.stdout) == (2, "")
    assert "(the module 'toy_workers' is no part of dsr1build)" in run.stderr
