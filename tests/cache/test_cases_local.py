"""What users of other caches ran into on one machine, held by behaviour: real builders, real files, real faults."""

import errno
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsr1build.cache.eviction import Limits
from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
STRESS = ROOT / "bench" / "cache_stress.py"

BUILD = """
import json, os, sys, time
from pathlib import Path
sys.path[:0] = [sys.argv[2]]
from cache_stress import expected
from stress_workers import HERE, leaf, pair
from dsr1build.cache.store import LocalStore
from dsr1build.execute.engine import run_actions
from dsr1build.execute.options import Options
from dsr1build.execute.events import Warned
numbers = json.loads(sys.argv[3])
pairs = [pair(numbers[0], number) for number in numbers[1:]]
actions = {action.id: action for action in [*map(leaf, numbers), *pairs]}
warnings = []
note = lambda event: warnings.append(event.message) if isinstance(event, Warned) else None
BEFORE
with LocalStore(Path(sys.argv[1]), warnings.append) as store:
    outcome = run_actions(actions, store, Options(jobs=JOBS, import_path=(HERE,)), note)
    wrong = [id for id, result in outcome.results.items() if store.read_blob(result.outputs["out"]) != expected(id)]
print(json.dumps({"ran": len(outcome.executed), "hits": len(outcome.hits), "failed": outcome.failed + outcome.skipped,
                  "wrong": wrong, "warnings": warnings}))
"""


def build(directory, numbers=(1, 2, 3, 4), jobs=2, before="", **options):
    """One build of toy actions in a process of its own; gives what it says about itself."""
    script = BUILD.replace("BEFORE", before).replace("JOBS", str(jobs))
    command = [sys.executable, "-c", script, str(directory), str(STRESS.parent), json.dumps(list(numbers))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def good(report):
    return report["failed"] == [] and report["wrong"] == []


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture(scope="module")
def faulty_files(tmp_path_factory):
    """A library to preload, which makes the C library's functions fail."""
    library = tmp_path_factory.mktemp("preload") / "faulty_files.so"
    command = [sys.executable, "-m", "ziglang", "cc", "-shared", "-fPIC", "-O1", str(HERE / "faulty_files.c"), "-o", str(library)]
    subprocess.run(command, check=True, capture_output=True)
    return str(library)


@pytest.mark.slow
def test_builders_that_are_killed_on_one_crowded_store(tmp_path):
    """The stress test at a small size."""
    rows = tmp_path / "rows.json"
    done = subprocess.run(
        [sys.executable, str(STRESS), "--size", "4", "8", "10", "150", "--json", str(rows)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {row["what"]: row["measured"] for row in json.loads(rows.read_text())}
    assert (found["builds on one store"], found["builders killed with SIGKILL"]) == (32, 10)
    for name in ("builds that did not end", "failed actions", "wrong artifacts", "warnings", "locks and temporary files left"):
        assert found[name] == 0, name
    assert found["damaged files taken for right ones"] == 0 and found["files cut at every 4 KiB"] > 100
    if "full disk: builds" not in found:
        assert "not measured: a full disk" in done.stdout


@pytest.mark.parametrize("number", [errno.EBUSY, errno.ESTALE])
def test_a_busy_or_stale_file_is_tried_again(directory, faulty_files, number):
    """A file server that is busy for a moment costs nothing."""
    build(directory)
    fault = {"FAULT_PATH": "/v1/blobs/", "FAULT_ERRNO": str(number), "FAULT_COUNT": "2", "LD_PRELOAD": faulty_files}
    report = build(directory, env={**os.environ, **fault})
    assert good(report) and (report["ran"], report["hits"], report["warnings"]) == (0, 7, [])


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_a_file_that_stays_unreadable_is_a_miss(directory, faulty_files, number):
    """Nothing can be read from the store, so all is made again, and the build succeeds."""
    build(directory)
    fault = {"FAULT_PATH": "/v1/manifests/", "FAULT_ERRNO": str(number), "FAULT_COUNT": "1000", "LD_PRELOAD": faulty_files}
    report = build(directory, env={**os.environ, **fault})
    assert report["failed"] == [] and report["wrong"] == [] and report["ran"] == 7
    # The store itself took no harm.
    assert build(directory)["hits"] == 7


@pytest.mark.parametrize("handles", [26, 30, 40])
def test_a_build_with_few_file_handles_is_slower_and_right(directory, handles):
    """Also the builds after it find whole files."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({handles}, {handles}))"
    report = build(directory, numbers=range(10), jobs=32, before=limit)
    assert good(report) and report["ran"] == 19
    assert report["warnings"][0] == (
        f"there are only {handles} file handles (`ulimit -n`); {handles - 24} actions run at once instead of 32"
    )
    again = build(directory, numbers=range(10))
    assert good(again) and again["hits"] == 19


def test_a_low_limit_on_file_handles_is_raised_where_it_may_be(directory):
    limit = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (26, 4096))"
    report = build(directory, jobs=32, before=limit)
    assert good(report) and report["warnings"] == []


def test_a_store_that_vanishes_in_the_middle_of_a_build(directory):
    """Every other action starts with a store that somebody has just removed: all is made again in the same build."""
    vanish = """
import shutil
from dsr1build.execute.events import Started
count = 0
def note(event):
    global count
    if isinstance(event, Started):
        count += 1
        if count in (2, 4, 6):
            shutil.rmtree(sys.argv[1], ignore_errors=True)
    elif isinstance(event, Warned):
        warnings.append(event.message)
"""
    report = build(directory, numbers=range(6), jobs=1, before=vanish)
    assert good(report) and len(report["warnings"]) <= 1
    assert good(build(directory, numbers=range(6)))


def test_a_build_under_a_path_that_is_a_forest_of_links(directory, tmp_path):
    """The store may be a link, its path may hold blanks, letters of all kinds, quotes and a line end."""
    real = tmp_path / "a real plaçe, with 'quotes' and\na line end"
    real.mkdir()
    (tmp_path / "first").symlink_to(real)
    (tmp_path / "second").symlink_to(tmp_path / "first")
    report = build(tmp_path / "second" / "störe")
    assert good(report) and report["ran"] == 7
    assert build(real / "störe")["hits"] == 7


def test_a_link_to_nowhere_in_the_place_of_the_store_costs_one_warning(directory):
    directory.symlink_to(directory.with_name("nowhere"))
    report = build(directory)
    assert good(report) and report["ran"] == 7 and len(report["warnings"]) <= 1


@pytest.mark.parametrize("seconds", [1, 4_000_000_000])
def test_a_wrong_clock_makes_no_stale_hit_and_no_miss(directory, seconds):
    """The times of all files and of the index are far in the past or in the future."""
    build(directory)
    for path in directory.rglob("*"):
        if "index" not in path.parts:
            os.utime(path, (seconds, seconds))
    with LocalStore(directory, pytest.fail) as store:
        store._open_index().touch(store.entries(), float(seconds))
    report = build(directory)
    assert good(report) and report["hits"] == 7
    with LocalStore(directory, pytest.fail) as store:
        assert store.evict(Limits()).entries == 0


def test_no_daemon_is_left_and_no_port_is_opened(directory):
    """With every port refused a build works, and none of its processes outlives it."""
    no_sockets = """
import socket
def refuse(*arguments, **options):
    raise OSError("no sockets here")
socket.socket.bind = socket.socket.connect = refuse
"""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        report = build(directory, before=no_sockets, env={**os.environ, "DSR1_MARK": str(directory)})
    assert good(report) and report["ran"] == 7
    mark = f"DSR1_MARK={directory}".encode()
    left = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in environment.read_bytes():
                left.append(environment)
        except OSError:
            continue
    assert left == []


def test_a_builder_that_is_stopped_holds_up_nobody(directory):
    """The lock of a process that lives but does nothing (SIGSTOP) is not one that others wait for."""
    script = (
        BUILD.replace("BEFORE", "")
        .replace("JOBS", "1")
        .replace("    wrong =", "    print('ready', flush=True); time.sleep(60)\n    wrong =")
    )
    command = [sys.executable, "-c", script, str(directory), str(STRESS.parent), "[1, 2, 3, 4]"]
    stopped = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert stopped.stdout.readline() == "ready\n"
        stopped.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        report = build(directory, numbers=(1, 2, 3, 4, 5))
        with LocalStore(directory, pytest.fail) as store:
            done = store.evict(Limits(max_bytes=0))
        assert time.monotonic() - started < 20
        assert good(report) and report["hits"] == 7 and done.held > 0
    finally:
        stopped.kill()
        stopped.wait()


def test_temporary_files_have_one_place_and_no_build_leaves_any(directory, tmp_path):
    """Below the store and below TMPDIR nothing is left, after a build that ended and after one that was killed."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TMPDIR": str(scratch)}
    build(directory, env=environment)
    assert list(scratch.iterdir()) == [] and list((directory / "v1/tmp").iterdir()) == []
    script = BUILD.replace("BEFORE", "").replace("JOBS", "2")
    pick = random.Random(3)
    for _ in range(5):
        shutil.rmtree(directory)
        command = [sys.executable, "-c", script, str(directory), str(STRESS.parent), "[1, 2, 3, 4]"]
        victim = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
        time.sleep(pick.uniform(0.2, 0.7))
        victim.kill()
        victim.wait()
        report = build(directory, env=environment)
        assert good(report)
        assert list(scratch.iterdir()) == [] and list((directory / "v1/tmp").iterdir()) == []


def test_an_unreproducible_action_is_never_mixed(directory, tmp_path):
    """Writers whose files differ each time race for one key; every reader sees the files of one of them."""
    script = """
import sys
from pathlib import Path
from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of
directory, mark = Path(sys.argv[1]), sys.argv[2]
work = directory.parent / mark
work.mkdir()
for round in range(25):
    for name in "abc":
        (work / name).write_text(f"{mark} {round}")
    with LocalStore(directory, print) as store:
        store.publish(key_of({"same": 1}), {"same": 1}, {name: work / name for name in "abc"}, 1.0)
        found = store.lookup(key_of({"same": 1}))
        seen = {store.read_blob(ref) for ref in found.outputs.values()}
        assert len(seen) == 1, seen
"""
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(directory), f"writer-{n}"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for n in range(3)
    ]
    assert [(*writer.communicate(), writer.returncode) for writer in writers] == [(b"", b"", 0)] * 3
    with LocalStore(directory, pytest.fail) as store:
        found = store.lookup(key_of({"same": 1}))
        assert len({store.read_blob(ref) for ref in found.outputs.values()}) == 1


def test_doctor_sees_locks_that_do_not_hold(tmp_path, faulty_files):
    """A file system that grants every lock, as some network file systems do."""
    (tmp_path / "p.yaml").write_text(f"version: 1\nname: p\nlocal: {{directory: '{tmp_path}/cache'}}\n")
    done = subprocess.run(
        [sys.executable, "-m", "dsr1build", "cache", "doctor", "--cache", str(tmp_path / "p.yaml"), "--json"],
        env={**os.environ, "LD_PRELOAD": faulty_files, "FAULT_FLOCK": "1"},
        capture_output=True,
        text=True,
    )
    locks = next(check for check in json.loads(done.stdout)["checks"] if check["name"] == "locks")
    assert (done.returncode, locks["verdict"]) == (3, "unfit")
    assert "what builds use may be evicted" in locks["detail"]


def test_a_read_only_file_system_serves_look_ups(directory):
    """By a mount that is read-only for root, too."""
    build(directory)
    if subprocess.run(["mount", "--bind", str(directory), str(directory)], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(directory)], check=True)
        report = build(directory, numbers=(1, 2, 3, 4, 5))
        assert good(report) and (report["hits"], report["ran"]) == (7, 2)
        assert len(report["warnings"]) == 1 and "the results of this build are not kept" in report["warnings"][0]
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)
