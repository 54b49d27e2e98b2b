import contextlib
import os
import random
import resource
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.record import check_output_path
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, encode, key_of


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "a store with ümlauts and $HOME"[:24]


@pytest.fixture
def publish(tmp_path):
    def publish(store, number, files=None):
        fields = {"number": number}
        sources = {}
        for name, data in (files or {"out": f"content {number}".encode(), "sub/list.json": b"[]"}).items():
            source = tmp_path / f"source-{number}-{name.replace('/', '-')}"
            source.write_bytes(data)
            sources[name] = source
        return store.publish(key_of(fields), fields, sources)

    return publish


def open_store(directory):
    warnings = []
    store = LocalStore(directory, warnings.append)
    return store, warnings


def files_of(directory, *trees):
    return sorted(p for tree in trees for p in (directory / "v1" / tree).rglob("*") if p.is_file())


def test_what_was_published_is_found_with_its_bytes(directory, publish, tmp_path):
    store, warnings = open_store(directory)
    assert store.lookup(key_of({"number": 1})) is None
    result = publish(store, 1)
    store.close()
    store, _ = open_store(directory)
    found = store.lookup(result.key)
    assert found == result
    assert store.read_blob(found.outputs["out"]) == b"content 1"
    store.materialize(found.outputs["sub/list.json"], tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == b"[]"
    assert warnings == []


def test_a_lookup_makes_no_directory(directory):
    store, _ = open_store(directory)
    assert store.lookup("0" * 64) is None
    assert not directory.exists()


def test_the_fields_are_a_blob_whose_digest_is_the_key(directory, publish):
    store, _ = open_store(directory)
    result = publish(store, 7)
    assert store.read_blob(BlobRef(result.key)) == encode({"number": 7})


def test_a_key_that_is_not_that_of_the_fields_is_refused(directory, tmp_path):
    store, _ = open_store(directory)
    with pytest.raises(ValueError, match="is not the key of the given fields"):
        store.publish("0" * 64, {"number": 1}, {})


@pytest.mark.parametrize("name", ["", ".", "/etc/passwd", "../x", "a/../b", "a//b", "a/", "./a", "a\0b"])
def test_output_paths_stay_inside(name):
    with pytest.raises(ValueError, match="is not a relative path inside the outputs"):
        check_output_path(name)


def test_a_blob_cut_anywhere_or_with_any_bit_flipped_is_a_miss(directory, publish):
    store, _ = open_store(directory)
    result = publish(store, 1)
    random.seed(0)
    for file in files_of(directory, "blobs", "manifests"):
        good = file.read_bytes()
        if file.name == result.key:
            continue
        for _ in range(6):
            at = random.randrange(len(good))
            flipped = bytearray(good)
            flipped[at] ^= 1 << random.randrange(8)
            for bad in (good[:at], bytes(flipped), good + b"x", b""):
                file.write_bytes(bad)
                assert store.lookup(result.key) is None
                assert not file.exists()
                publish(store, 1)
                assert store.lookup(result.key) == result
    assert len(files_of(directory, "broken")) == 3 * 6 * 4


def test_damage_is_seen_when_a_blob_is_used(directory, publish, tmp_path):
    store, _ = open_store(directory)
    result = publish(store, 1)
    ref = result.outputs["out"]
    for use in (store.read_blob, lambda ref: store.materialize(ref, tmp_path / "x")):
        file = next(directory.rglob(ref.sha256))
        file.write_bytes(b"content 2")
        with pytest.raises(BlobLost):
            use(ref)
        assert not (tmp_path / "x").exists()
        publish(store, 1)


def test_files_of_two_writers_are_never_mixed(directory, publish):
    """An action that is not reproducible: whichever manifest wins, all its files are of one run."""
    one, _ = open_store(directory)
    two, _ = open_store(directory)
    publish(one, 1, {"a": b"one", "b": b"one"})
    publish(two, 1, {"a": b"two", "b": b"two"})
    found = one.lookup(key_of({"number": 1}))
    assert {one.read_blob(ref) for ref in found.outputs.values()} in ({b"one"}, {b"two"})


@pytest.mark.parametrize("damage", ["lost", "garbage", "cut", "middle", "empty"])
def test_an_index_that_is_lost_or_damaged_is_made_again(directory, publish, damage):
    store, _ = open_store(directory)
    results = [publish(store, number) for number in range(40)]
    store.close()
    index = directory / "v1/index"
    table = index / "cache.db"
    for extra in index.glob("cache.db-*"):
        extra.unlink()
    data = table.read_bytes()
    if damage == "lost":
        shutil.rmtree(index)
    elif damage == "garbage":
        table.write_bytes(b"not a database" * 1000)
    elif damage == "cut":
        table.write_bytes(data[: len(data) // 2])
    elif damage == "middle":
        table.write_bytes(data[:8192] + bytes(len(data) - 8192))
    else:
        table.write_bytes(b"")
    store, warnings = open_store(directory)
    assert [store.lookup(r.key) for r in results] == results
    assert warnings == []


def _sql(statement):
    def run(index):
        with contextlib.closing(sqlite3.connect(index / "cache.db")) as connection:
            connection.executescript(statement)

    return run


OTHER_INDEXES = {
    "a file": lambda index: (shutil.rmtree(index), index.write_text("x")),
    "a directory for a table": lambda index: ((index / "cache.db").unlink(), (index / "cache.db").mkdir()),
    "a directory for a log": lambda index: ((index / "cache.db-wal").unlink(missing_ok=True), (index / "cache.db-wal").mkdir()),
    "a pipe": lambda index: ((index / "cache.db").unlink(), os.mkfifo(index / "cache.db")),
    "pickled rows": _sql("UPDATE Cache SET mode = 4"),
    "rows that name files": _sql("UPDATE Cache SET filename = '/etc/passwd', mode = 2"),
    "other columns": _sql("ALTER TABLE Cache RENAME COLUMN mode TO modus"),
    "no tables": _sql("DROP TABLE Cache; DROP TABLE Settings"),
    "a setting that is none": _sql("UPDATE Settings SET value = 'xyz'"),
}


@pytest.mark.parametrize("what", OTHER_INDEXES)
def test_something_else_in_the_place_of_the_index_is_moved_aside(directory, publish, what):
    store, _ = open_store(directory)
    results = [publish(store, number) for number in range(3)]
    store.close()
    OTHER_INDEXES[what](directory / "v1/index")
    store, warnings = open_store(directory)
    assert [store.lookup(r.key) for r in results] == results
    results.append(publish(store, 3))
    store.close()
    store, _ = open_store(directory)
    assert [store.lookup(r.key) for r in results] == results
    store.close()
    assert warnings == []


def test_a_wrong_row_of_the_index_is_a_miss(directory, publish):
    import sqlite3

    store, _ = open_store(directory)
    one, two, three = (publish(store, number) for number in (1, 2, 3))
    victim = directory / "victim"
    victim.write_text("stays")
    store.close()
    connection = sqlite3.connect(directory / "v1/index/cache.db")
    row = connection.execute("select value from Cache where key = ?", (bytes.fromhex(two.key),)).fetchone()[0]
    for key, value, mode, filename in ((one.key, row, 1, None), (two.key, None, 4, str(victim)), (three.key, b"short", 1, None)):
        connection.execute(
            "update Cache set value=?, mode=?, filename=? where key=?", (value, mode, filename, bytes.fromhex(key))
        )
    connection.commit()
    connection.close()
    store, _ = open_store(directory)
    for number, result in ((1, one), (2, two), (3, three)):
        assert store.lookup(result.key) is None
        publish(store, number)
        assert store.lookup(result.key) == result
    assert victim.read_text() == "stays"


def test_nothing_is_unpickled(directory, publish, tmp_path):
    """A row that would run code when unpickled, as value and as key, is a miss and runs nothing."""
    import pickle
    import sqlite3

    class Evil:
        def __reduce__(self):
            return Path.write_text, (tmp_path / "evil", "ran")

    store, _ = open_store(directory)
    result = publish(store, 1)
    store.close()
    connection = sqlite3.connect(directory / "v1/index/cache.db")
    connection.execute("update Cache set value=?, mode=4 where key=?", (pickle.dumps(Evil()), bytes.fromhex(result.key)))
    connection.execute("insert into Cache(key, raw, value, mode) values (?, 0, ?, 1)", (pickle.dumps(Evil()), b""))
    connection.commit()
    connection.close()
    store, _ = open_store(directory)
    assert store.lookup(result.key) is None
    assert not (tmp_path / "evil").exists()


def test_the_index_takes_bytes_only(tmp_path):
    from dsr1build.cache.index import BytesDisk

    disk = BytesDisk(str(tmp_path))
    for refused in ("text", 1, 1.5, None, ("a",)):
        with pytest.raises(ValueError, match="the index takes bytes"):
            disk.put(refused)
        with pytest.raises(ValueError, match="the index takes bytes"):
            disk.store(refused, read=False)


HEAD = """
import os, sys, tempfile
from pathlib import Path
import dsr1build.cache.index
from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of
directory = Path(sys.argv[1])
"""
# Modes stop nobody who is root; the modules are imported by then, for another user may not read them.
AS_NOBODY = "if os.getuid() == 0: os.setresuid(65534, 65534, 65534)\n"


def run_script(script, directory):
    done = subprocess.run([sys.executable, "-c", HEAD + script, str(directory)], capture_output=True, text=True, cwd="/")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


READER = (
    AS_NOBODY
    + """
warnings = []
store = LocalStore(directory, warnings.append)
found = store.lookup(key_of({"number": 1}))
print(found and store.read_blob(found.outputs["out"]), store.lookup(key_of({"number": 2})))
here = Path(tempfile.mkdtemp()) / "f"
here.write_bytes(b"mine")
for number in (5, 6):
    result = store.publish(key_of({"number": number}), {"number": number}, {"out": here})
    print(store.read_blob(result.outputs["out"]))
print(len(warnings), warnings[0].partition(" (")[2])
"""
)


@pytest.fixture
def open_tmp(tmp_path):
    """pytest's temporary directories are closed to others; this one is open down to the test's."""
    changed = []
    for parent in [tmp_path, *tmp_path.parents]:
        mode = parent.stat().st_mode
        if mode & 0o005 != 0o005:
            parent.chmod(mode | 0o055)
            changed.append((parent, mode))
    yield tmp_path
    for parent, mode in changed:
        parent.chmod(mode)


def test_a_read_only_store_serves_look_ups_and_is_left_alone(open_tmp, publish):
    directory = open_tmp / "store"
    store, _ = open_store(directory)
    publish(store, 1)
    store.close()
    for path in [directory, *directory.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = {p: p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]}
    out = run_script(READER, directory)
    assert out[:4] == ["b'content 1' None", "b'mine'", "b'mine'", "1 it is read-only); the results of this build are not kept"]
    assert {p: p.stat().st_mtime_ns for p in [directory, *directory.rglob("*")]} == before


def test_a_store_that_cannot_be_made_costs_one_warning(open_tmp):
    closed = open_tmp / "closed"
    closed.mkdir(mode=0o555)
    out = run_script(READER, closed / "store")
    assert out == ["None None", "b'mine'", "b'mine'", "1 Permission denied); the results of this build are not kept"]


def test_a_file_in_the_place_of_the_store_costs_one_warning(tmp_path, publish):
    (tmp_path / "store").write_text("a file")
    store, warnings = open_store(tmp_path / "store")
    result = publish(store, 1)
    assert store.read_blob(result.outputs["out"]) == b"content 1"
    assert warnings == [
        f"the cache at {tmp_path}/store cannot be written (Not a directory); the results of this build are not kept"
    ]


def test_a_full_disk_costs_one_warning(directory, publish, tmp_path):
    """No file may grow beyond 64 KiB, which fails a write in its middle as a full disk does."""
    store, _ = open_store(directory)
    small = publish(store, 1)
    big = tmp_path / "big"
    big.write_bytes(os.urandom(100_000))
    script = f"""
import resource
warnings = []
store = LocalStore(directory, warnings.append)
assert store.lookup({small.key!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
try:
    store.publish(key_of({{"number": 2}}), {{"number": 2}}, {{"big": Path({str(big)!r})}})
except OSError as error:
    print(type(error).__name__)
resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))
result = store.publish(key_of({{"number": 3}}), {{"number": 3}}, {{"small": Path("/proc/self/comm")}})
print(store.read_blob(result.outputs["small"]), warnings)
"""
    assert run_script(script, directory) == [
        "OSError",
        f"b'python\\n' ['the cache at {directory} cannot be written (File too large); the results of this build are not kept']",
    ]
    assert files_of(directory, "tmp") == []
    assert store.lookup(key_of({"number": 2})) is None
    assert store.lookup(small.key) == small


def test_a_store_that_vanishes_costs_no_build(directory, publish):
    store, warnings = open_store(directory)
    first = publish(store, 1)
    shutil.rmtree(directory)
    assert store.lookup(first.key) is None
    second = publish(store, 2)
    assert store.read_blob(second.outputs["out"]) == b"content 2"
    assert len(warnings) <= 1
    store.close()
    store, _ = open_store(directory)
    publish(store, 3)
    assert store.lookup(key_of({"number": 3})) is not None


def test_too_few_file_handles_are_misses(directory, publish):
    store, _ = open_store(directory)
    result = publish(store, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        assert store.lookup(result.key) is None
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert store.lookup(result.key) == result
    assert files_of(directory, "broken") == []


def test_temporary_files_of_killed_writers_are_swept_when_old(directory, publish):
    store, _ = open_store(directory)
    publish(store, 1)
    store.close()
    old, young = directory / "v1/tmp/old", directory / "v1/tmp/young"
    old.write_text("x")
    young.write_text("x")
    os.utime(old, (1, 1))
    store, _ = open_store(directory)
    store.lookup("0" * 64)
    assert not old.exists() and young.exists()


def test_a_store_can_be_moved(directory, publish, tmp_path):
    store, _ = open_store(directory)
    result = publish(store, 1)
    store.close()
    directory.rename(tmp_path / "elsewhere")
    store, _ = open_store(tmp_path / "elsewhere")
    assert store.lookup(result.key) == result


def test_a_store_without_hits_does_not_import_diskcache(tmp_path):
    script = (
        "import sys\nfrom pathlib import Path\nfrom dsr1build.cache.store import LocalStore\n"
        f"LocalStore(Path({str(tmp_path / 'none')!r}), print).lookup('0' * 64)\nprint('diskcache' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "False\n"
