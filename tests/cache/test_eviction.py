"""What goes when a store has grown too large, and what never does."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsr1build.cache.eviction import Limits, worth
from dsr1build.cache.index import Entry
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, key_of


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "store"


@pytest.fixture
def publish(tmp_path):
    def publish(store, number, size=10_000, seconds=1.0, content=None):
        fields = {"number": number}
        source = tmp_path / f"source-{number}"
        source.write_bytes(bytes([number % 256]) * size if content is None else content)
        store.publish(key_of(fields), fields, {"out": source}, seconds, "compile", f"action {number}")
        return key_of(fields)

    return publish


def open_store(directory, limits=None):
    warnings = []
    return LocalStore(directory, warnings.append, limits), warnings


def present(directory, keys):
    """Which of ``keys`` a new process would find."""
    store, _ = open_store(directory)
    with store:
        return [key for key in keys if store.lookup(key, peek=True)]


def blobs_of(directory):
    return sorted(path.name for path in (directory / "v1/blobs").rglob("*") if path.is_file())


def entry(size=1000, files=3, seconds=1.0, used=0.0):
    return Entry(BlobRef("0" * 64), size, files, seconds, used)


def test_worth_is_seconds_by_share_of_the_limits_halved_each_week():
    limits = Limits(max_bytes=1_000_000, max_files=1000)
    assert worth(entry(), limits, 0.0) == pytest.approx(1.0 / (1000 / 1_000_000 + 3 / 1000))
    week = 7 * 24 * 3600.0
    assert worth(entry(), limits, week) == pytest.approx(worth(entry(), limits, 0.0) / 2)
    assert worth(entry(seconds=60.0), limits, 0.0) > worth(entry(), limits, 0.0)
    assert worth(entry(size=100_000), limits, 0.0) < worth(entry(), limits, 0.0)
    assert worth(entry(files=300), limits, 0.0) < worth(entry(), limits, 0.0)
    # A clock that ran ahead makes nothing worth more than one that is used now.
    assert worth(entry(used=1e12), limits, 0.0) == worth(entry(), limits, 0.0)
    assert worth(entry(seconds=0.0), limits, 0.0) > 0


def test_what_is_cheap_to_make_for_its_size_goes_first(directory, publish):
    store, _ = open_store(directory)
    with store:
        costly = [publish(store, n, seconds=100.0) for n in range(3)]
        cheap = [publish(store, n, seconds=0.01) for n in range(3, 6)]
    store, _ = open_store(directory)
    with store:
        done = store.evict(Limits(max_bytes=35_000))
    assert present(directory, costly) == costly and present(directory, cheap) == []
    assert (done.entries, done.held) == (3, 0)
    assert done.left_bytes <= 35_000


def test_what_was_not_used_for_long_goes_first(directory, publish):
    store, _ = open_store(directory)
    with store:
        keys = [publish(store, n) for n in range(4)]
        store._open_index().touch(keys[:2], time.time() - 60 * 24 * 3600)
    assert present(directory, keys) == keys
    store, _ = open_store(directory)
    with store:
        # A hit makes an entry young again, in the index that the next process reads.
        assert store.lookup(keys[0])
    store, _ = open_store(directory)
    with store:
        store.evict(Limits(max_bytes=33_000))
    assert present(directory, keys) == [keys[0], keys[2], keys[3]]


def test_files_are_limited_as_well_as_bytes(directory, publish):
    store, _ = open_store(directory)
    with store:
        keys = [publish(store, n, seconds=n + 1) for n in range(10)]
    store, _ = open_store(directory)
    with store:
        # Each has an output, its fields and a manifest.
        done = store.evict(Limits(max_files=15))
    assert present(directory, keys) == keys[5:]
    assert done.left_files == 15


def test_a_store_over_its_limits_shrinks_when_a_build_ends(directory, publish):
    limits = Limits(max_bytes=100_000)
    store, warnings = open_store(directory, limits)
    with store:
        keys = [publish(store, n, seconds=n) for n in range(15)]
        # All of it is held as long as this build runs, however far over the limits it is.
        assert all(store.lookup(key) for key in keys)
    left = present(directory, keys)
    assert 0 < len(left) <= 9 and left == keys[-len(left) :]
    assert sum(p.stat().st_size for p in (directory / "v1/blobs").rglob("*") if p.is_file()) <= 90_000
    assert warnings == []


def test_a_file_that_several_results_share_goes_with_the_last_of_them(directory, publish):
    store, _ = open_store(directory)
    with store:
        one = publish(store, 1, content=b"shared" * 1000, seconds=1.0)
        two = publish(store, 2, content=b"shared" * 1000, seconds=100.0)
    store, _ = open_store(directory)
    with store:
        store.evict(Limits(max_bytes=6_400))
    assert present(directory, [one, two]) == [two]
    store, _ = open_store(directory)
    with store:
        store.evict(Limits(max_bytes=0))
    assert present(directory, [one, two]) == [] and blobs_of(directory) == []


def test_nothing_is_deleted_by_a_dry_run(directory, publish):
    store, _ = open_store(directory)
    with store:
        keys = [publish(store, n) for n in range(3)]
    store, _ = open_store(directory)
    before = blobs_of(directory)
    with store:
        done = store.evict(Limits(max_bytes=0), dry_run=True)
    assert (done.entries, done.left_files) == (3, 0)
    assert blobs_of(directory) == before and present(directory, keys) == keys


def test_leftovers_of_killed_writers_go_and_fresh_files_stay(directory, publish):
    store, _ = open_store(directory)
    with store:
        key = publish(store, 1)
        old, fresh = (store.files.blobs.write(data) for data in (b"old", b"fresh"))
        os.utime(store.files.blobs.path(old), (1, 1))
        replaced = publish(store, 1, content=b"the same key with other bytes")
    store, _ = open_store(directory)
    with store:
        store.evict(Limits())
        names = blobs_of(directory)
        manifests = list((directory / "v1/manifests").rglob("*/*"))
    assert key == replaced and len(manifests) == 1
    assert old.sha256 not in names and fresh.sha256 in names
    assert present(directory, [key]) == [key]


HOLDER = """
import sys, time
from pathlib import Path
from dsr1build.cache.store import LocalStore
store = LocalStore(Path(sys.argv[1]), print)
found = store.lookup(sys.argv[2])
print("holds" if found else "lacks", flush=True)
sys.stdin.read()
print(store.read_blob(found.outputs["out"])[:3], flush=True)
"""


def holder(directory, key):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory), key], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "holds\n"
    return process


def test_what_a_running_build_found_stays_until_it_ends(directory, publish):
    store, _ = open_store(directory)
    with store:
        held, other = (publish(store, n) for n in (1, 2))
    process = holder(directory, held)
    store, _ = open_store(directory)
    with store:
        done = store.evict(Limits(max_bytes=0))
    assert done.held == 1
    assert present(directory, [held, other]) == [held]
    assert process.communicate("")[0] == "b'\\x01\\x01\\x01'\n"
    store, _ = open_store(directory)
    with store:
        store.evict(Limits(max_bytes=0))
    assert present(directory, [held]) == []


def test_a_killed_build_holds_nothing_and_leaves_no_lock(directory, publish):
    store, _ = open_store(directory)
    with store:
        key = publish(store, 1)
    process = holder(directory, key)
    assert len(list((directory / "v1/leases").iterdir())) == 1
    process.kill()
    process.wait()
    started = time.monotonic()
    store, warnings = open_store(directory)
    with store:
        store.evict(Limits(max_bytes=0))
    assert time.monotonic() - started < 5 and warnings == []
    assert present(directory, [key]) == []
    assert list((directory / "v1/leases").iterdir()) == []


LOCKER = """
import sys
from pathlib import Path
from dsr1build.cache.leases import Leases
with Leases(Path(sys.argv[1]) / "v1", print).exclusive():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_who_waits_for_an_evictor_is_told_its_process_and_host(directory, publish):
    store, _ = open_store(directory)
    with store:
        key = publish(store, 1)
    process = subprocess.Popen(
        [sys.executable, "-c", LOCKER, str(directory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "locked\n"
    warnings = []

    def warn(text):
        warnings.append(text)
        process.stdin.close()

    with LocalStore(directory, warn) as store:
        assert store.lookup(key)
    process.wait()
    assert warnings == [
        f"waiting for process {process.pid} on {os.uname().nodename}, which evicts entries of the cache at {directory}"
    ]


def test_temporary_files_of_a_killed_writer_go_when_the_next_build_starts(directory, publish):
    store, _ = open_store(directory)
    with store:
        publish(store, 1)
    tmp = directory / "v1/tmp"
    (tmp / ("0123456789abcdef" + "0" * 32)).write_bytes(b"half a file")
    living, _ = open_store(directory)
    owner = living._leases.begin()
    (tmp / (owner + "1" * 32)).write_bytes(b"being written")
    store, _ = open_store(directory)
    with store:
        store.lookup("0" * 64)
    assert [path.name for path in tmp.iterdir()] == [owner + "1" * 32]
    living.close()


EVICTOR = """
import sys, time
from pathlib import Path
from dsr1build.cache.eviction import Limits
from dsr1build.cache.store import LocalStore
end = time.monotonic() + 4
rounds = 0
while time.monotonic() < end:
    with LocalStore(Path(sys.argv[1]), print) as store:
        store.evict(Limits(max_bytes=20_000))
    rounds += 1
print(rounds)
"""
BUILDER = """
import sys, random, time
from pathlib import Path
from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of
directory, seed = Path(sys.argv[1]), int(sys.argv[2])
pick = random.Random(seed)
lost = hits = 0
end = time.monotonic() + 4
while time.monotonic() < end:
    with LocalStore(directory, print) as store:
        results = []
        for number in pick.sample(range(12), 4):
            fields = {"number": number}
            found = store.lookup(key_of(fields))
            if found is None:
                source = directory.parent / f"{seed}-{number}"
                source.write_bytes(bytes([number]) * 5000)
                found = store.publish(key_of(fields), fields, {"out": source}, 1.0)
            else:
                hits += 1
            results.append((number, found))
        for number, found in results:
            assert store.read_blob(found.outputs["out"]) == bytes([number]) * 5000
print(hits)
"""


def test_builds_keep_what_they_found_while_others_evict(directory, tmp_path):
    """Each builder reads all that it found or published after the evictors had their chance; BlobLost would end it."""
    scripts = [(EVICTOR, "0"), (EVICTOR, "0"), *((BUILDER, str(n)) for n in range(3))]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(directory), n], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for script, n in scripts
    ]
    ended = [(process.communicate(timeout=60), process.returncode) for process in running]
    assert [(error, code) for (_, error), code in ended] == [("", 0)] * 5
    assert all(int(output.split()[-1]) > 0 for (output, _), _ in ended)
    assert all(len(output.split()) == 1 for (output, _), _ in ended), "there were warnings"
    assert list(Path(directory / "v1/leases").iterdir()) == []
