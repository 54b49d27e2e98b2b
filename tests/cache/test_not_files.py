"""Something else than a file in the place of any file of a store: no build waits for it, trusts it, or fails because of it."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsr1build.cache import scratch
from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.scratch import make_scratch, scratch_directory
from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of

CONTENT = b"object code" * 100


@pytest.fixture(autouse=True)
def patience():
    """A test that waits for a named pipe ends with an error after 20 seconds."""

    def out_of_time(number, frame):
        raise TimeoutError("waited for something that is not a file")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put_socket(path):
    # A socket's name may have 107 bytes at most, so it is made where names are short and moved.
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(path.parent)
        try:
            listener.bind(path.name[:80])
        finally:
            os.chdir(here)
    (path.parent / path.name[:80]).replace(path)


THINGS = {
    "pipe": os.mkfifo,
    "directory": lambda path: (path.mkdir(), (path / "inside").write_text("x")),
    "socket": put_socket,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/tty"),
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link to itself": lambda path: path.symlink_to(path.name),
    "file of holes": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "link to a pipe": lambda path: (os.mkfifo(path.with_name("a pipe")), path.symlink_to("a pipe")),
}


def publish(directory, source, warnings):
    fields = {"kernel": "k"}
    source.write_bytes(CONTENT)
    with LocalStore(directory, warnings.append) as store:
        result = store.lookup(key_of(fields))
        if result is None:
            result = store.publish(key_of(fields), fields, {"kernel.o": source}, 1.0, "compile", "k")
        return store.read_blob(result.outputs["kernel.o"])


def replace_by(path, put):
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    put(path)


@pytest.mark.parametrize("thing", THINGS)
def test_in_the_place_of_any_file_of_the_store(tmp_path, thing):
    publish(tmp_path / "first", tmp_path / "source", [])
    places = sorted(
        str(path.relative_to(tmp_path / "first"))
        for path in (tmp_path / "first").rglob("*")
        if path.is_file() and path.parent.name != "leases"
    )
    assert {place.split("/")[1] for place in places} >= {"blobs", "manifests", "index", "index.lock", "evict.lock"}
    # One of the blobs and one of the manifests stand for the others.
    distinct = {place if "/index/" in place else place.split("/")[1]: place for place in places}
    for number, place in enumerate([*distinct.values(), "v1/index", "v1/leases", "v1/tmp", "v1/blobs", "v1/manifests", "v1"]):
        store = tmp_path / f"store-{number}"
        shutil.copytree(tmp_path / "first", store)
        replace_by(store / place, THINGS[thing])
        for _ in range(2):
            warnings = []
            assert publish(store, tmp_path / "source", warnings) == CONTENT, place
            assert len(warnings) <= 1, (place, warnings)
        with LocalStore(store, warnings.append) as opened:
            opened.entries()
            opened.counters()


@pytest.mark.parametrize("thing", THINGS)
def test_a_blob_is_healed_by_the_build_that_finds_it(tmp_path, thing):
    publish(tmp_path / "store", tmp_path / "source", [])
    (blob,) = (p for p in (tmp_path / "store/v1/blobs").rglob("*") if p.is_file() and p.read_bytes() == CONTENT)
    replace_by(blob, THINGS[thing])
    warnings = []
    assert publish(tmp_path / "store", tmp_path / "source", warnings) == CONTENT
    assert warnings == []
    assert blob.is_file() and not blob.is_symlink() and blob.read_bytes() == CONTENT


@pytest.mark.parametrize("thing", THINGS)
def test_when_it_is_used(tmp_path, thing):
    publish(tmp_path / "store", tmp_path / "source", [])
    with LocalStore(tmp_path / "store", [].append) as store:
        result = store.lookup(key_of({"kernel": "k"}))
        ref = result.outputs["kernel.o"]
        for use in (lambda: store.read_blob(ref), lambda: store.materialize(ref, tmp_path / "out")):
            path = tmp_path / "store/v1/blobs" / ref.sha256[:2] / ref.sha256
            if path.exists() or path.is_symlink():
                replace_by(path, THINGS[thing])
            else:
                (path.parent / "a pipe").unlink(missing_ok=True)
                THINGS[thing](path)
            with pytest.raises(BlobLost):
                use()


# Temporary directories of builds that were killed.

KILLED = """
import sys, time
from pathlib import Path
from dsr1build.cache.scratch import make_scratch
from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of
Path(sys.argv[1]).write_text("x")
store = LocalStore(Path(sys.argv[1]), lambda text: None)
Path(sys.argv[2]).write_bytes(b"y" * 1000)
store.publish(key_of({"a": 1}), {"a": 1}, {"out": Path(sys.argv[2])})
make_scratch("dsr1build-work-")
make_scratch("dsr1build-shared-")
print("ready", flush=True)
time.sleep(60)
"""


def test_what_killed_builds_leave_goes_with_the_next_and_living_ones_keep_theirs(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", None)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "store"), str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as builder:
        assert builder.stdout.readline() == "ready\n"
        prefixes = ("dsr1build-results-", "dsr1build-work-", "dsr1build-shared-")
        left = {path for prefix in prefixes for path in (tmp_path / "tmp").glob(f"{prefix}*")}
        assert len(left) == 3
        for prefix in prefixes:
            with scratch_directory(prefix):
                assert all(path.is_dir() for path in left), "a living build lost its directory"
        builder.kill()
    for prefix in prefixes:
        with scratch_directory(prefix) as own:
            assert list((tmp_path / "tmp").glob(f"{prefix}*")) == [own]
    assert list((tmp_path / "tmp").iterdir()) == []


def test_directories_without_a_lock_go_after_a_day(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for name, age in (("x-young", 3600), ("x-old", 25 * 3600)):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    with scratch_directory("x-") as own:
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["x-young", own.name])


def test_nothing_of_other_users_is_touched(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "x-free").mkdir()
    (tmp_path / "x-free" / "lock").touch()
    monkeypatch.setattr(scratch.os, "getuid", lambda: os.geteuid() + 1)
    with scratch_directory("x-"):
        assert (tmp_path / "x-free" / "lock").exists()


@pytest.mark.parametrize("thing", THINGS)
def test_whatever_stands_in_the_temporary_directory_is_no_obstacle(tmp_path, monkeypatch, thing):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    THINGS[thing](tmp_path / "x-itself")
    (tmp_path / "x-inside").mkdir()
    THINGS[thing](tmp_path / "x-inside" / "lock")
    directory, lock = make_scratch("x-")
    os.close(lock)
    assert directory.is_dir()
