"""A build under `make -j N` takes no more places than make has, and gives all of them back."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dsr1build.execute.jobserver import UNAVAILABLE, open_jobserver
from dsr1build.execute.resources import usable_cpus

HERE = Path(__file__).parent
BUILD = """
import json, sys, time
from pathlib import Path
sys.path.insert(0, {here!r})
from dsr1build.cache.store import LocalStore
from dsr1build.execute.engine import run_actions
from dsr1build.execute.options import Options
from dsr1build.execute.events import Started, Finished, Warned
from dsr1build.plan.action import Action

def action(n):
    return Action(f"s{{n}}", "compile", f"s{{n}}", "toy_workers:slow", (), lambda results: {{"n": n, "seconds": 0.25}}, ("text",))

running, most, warnings = 0, 0, []
def emit(event):
    global running, most
    running += isinstance(event, Started) - isinstance(event, Finished)
    most = max(most, running)
    if isinstance(event, Warned):
        warnings.append(event.message)
with LocalStore(Path(sys.argv[1]), print) as store:
    options = Options(jobs={jobs}, import_path=(Path({here!r}),))
    run_actions({{f"s{{n}}": action(n) for n in range(6)}}, store, options, emit)
Path(sys.argv[2]).write_text(json.dumps([most, warnings]))
"""


def pipe(tokens):
    read, write = os.pipe()
    os.write(write, tokens)
    return read, write


def test_one_place_is_free_and_each_more_takes_a_token():
    read, write = pipe(b"abc")
    jobserver, warning = open_jobserver({"MAKEFLAGS": f" -j --jobserver-auth={read},{write} -- X=--jobserver-auth=9,9"})
    assert jobserver is not None and warning == ""
    assert jobserver.acquire(0)
    assert os.get_blocking(read), "the descriptor that make shares must stay as it was"
    assert jobserver.acquire(1) and jobserver.acquire(2) and jobserver.acquire(3)
    assert not jobserver.acquire(4)
    jobserver.release(2)
    os.set_blocking(read, False)
    assert sorted(os.read(read, 10)) == sorted(b"bc")
    jobserver.close()
    assert os.read(read, 10) == b"a"


def test_a_token_is_not_taken_twice_for_one_place():
    read, write = pipe(b"ab")
    jobserver, _ = open_jobserver({"MAKEFLAGS": f"--jobserver-fds={read},{write}"})
    assert jobserver is not None
    assert jobserver.acquire(1) and jobserver.acquire(1)
    os.set_blocking(read, False)
    assert os.read(read, 10) == b"b"
    jobserver.close()


def test_a_fifo(tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR | os.O_NONBLOCK)
    os.write(held, b"x")
    jobserver, warning = open_jobserver({"MAKEFLAGS": f"j4 --jobserver-auth=fifo:{fifo}"})
    assert jobserver is not None and warning == ""
    assert jobserver.acquire(1) and not jobserver.acquire(2)
    jobserver.close()
    assert os.read(held, 10) == b"x"


@pytest.mark.parametrize("flags", ["", "-k", "j4 -- --jobserver-auth=3,4", "--no-print-directory"])
def test_no_jobserver(flags):
    assert open_jobserver({"MAKEFLAGS": flags}) == (None, "")
    assert open_jobserver({}) == (None, "")


@pytest.mark.parametrize("where", ["-2,-2", "77,78", "x", "3", "fifo:/nonexistent/fifo", "fifo:/dev/null", "0,x"])
def test_a_jobserver_that_cannot_be_reached_is_said_once(where):
    assert open_jobserver({"MAKEFLAGS": f"-j4 --jobserver-auth={where}"}) == (None, UNAVAILABLE)


def test_files_that_took_the_numbers_of_the_pipe_are_left_alone(tmp_path):
    with (tmp_path / "file").open("w+b") as file:
        file.write(b"precious")
        file.flush()
        assert open_jobserver({"MAKEFLAGS": f"--jobserver-auth={file.fileno()},{file.fileno()}"}) == (None, UNAVAILABLE)
    assert (tmp_path / "file").read_bytes() == b"precious"


@pytest.mark.skipif(shutil.which("make") is None, reason="GNU make is not installed")
@pytest.mark.parametrize(("line", "jobs", "most"), [("+", 0, 3), ("", 0, None), ("+", 1, 1)])
def test_under_make(tmp_path, line, jobs, most):
    program = tmp_path / "build.py"
    program.write_text(BUILD.format(here=str(HERE), jobs=jobs))
    (tmp_path / "Makefile").write_text(f"all:\n\t{line}{sys.executable} build.py store out.json\n")
    run = subprocess.run(["make", "-j3"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "jobserver tokens" not in run.stderr, "make counts its tokens when it ends"
    at_once, warnings = json.loads((tmp_path / "out.json").read_text())
    if most is None:
        assert warnings == [UNAVAILABLE]
    else:
        assert warnings == []
        assert at_once == (min(most, usable_cpus()) if jobs == 0 else most)
