"""Temporary files of two writers never meet, even where process ids, host names, clocks and seeds are the same."""

import os
import random
import time

from dsr1build.cache.blobs import BlobTree
from dsr1build.cache.leases import Leases
from dsr1build.cache.scratch import make_scratch


def names(tmp_path, count):
    tree = BlobTree(tmp_path / "blobs", tmp_path / "tmp", tmp_path / "broken", Leases(tmp_path, lambda text: None).owner)
    return [tree.stage(iter((b"x",))).path.name for _ in range(count)]


def test_nothing_that_two_hosts_have_in_common_is_in_a_name(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    monkeypatch.setattr(time, "time", lambda: 1.7e9)
    found = []
    for host in ("one", "two"):
        random.seed(0)
        found += names(tmp_path / host, 20)
    assert len(set(found)) == 40
    # 128 random bits in each, beside the 64 of its writer.
    assert all(len(name) == 48 and set(name) <= set("0123456789abcdef") for name in found)
    assert len({name[:16] for name in found}) == 2 and len({name[16:] for name in found}) == 40


def test_children_of_one_process_do_not_repeat_each_other(tmp_path):
    read, write = os.pipe()
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            try:
                os.write(write, "".join(f"{name}\n" for name in names(tmp_path, 5)).encode())
            finally:
                os._exit(0)
        children.append(child)
    os.close(write)
    for child in children:
        os.waitpid(child, 0)
    with os.fdopen(read) as told:
        found = told.read().split()
    assert len(found) == 10 == len(set(found))


def test_directories_too(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = [make_scratch("x-") for _ in range(5)]
    assert len({directory for directory, _ in made}) == 5 and all(directory.is_dir() for directory, _ in made)
    for _, lock in made:
        os.close(lock)
