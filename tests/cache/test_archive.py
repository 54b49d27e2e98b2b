"""A cache as one file: written the same from everywhere, read by nobody who is too trusting."""

import dataclasses
import gzip
import io
import json
import os
import random
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from dsr1build.cache.archive import export_archive, import_archive
from dsr1build.cache.eviction import Limits
from dsr1build.cache.record import Record, render_record
from dsr1build.cache.signing import Trust, load_signing_key, new_key_pair, sign_record
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, encode, key_of, sha256_hex
from dsr1build.errors import EnvironmentUnfit, InvalidInput


@pytest.fixture
def filled(tmp_path):
    """A store of results with shared, empty and nested files, and their keys."""
    directory = tmp_path / "filled"
    sources = tmp_path / "sources"
    sources.mkdir()
    for name, data in (("shared", b"shared" * 3000), ("empty", b""), *((f"own-{n}", b"own %d" % n * 700) for n in range(6))):
        (sources / name).write_bytes(data)
    keys = []
    with LocalStore(directory, pytest.fail) as store:
        for n in range(6):
            fields = {"number": n}
            files = {"out": sources / f"own-{n}", "sub/shared": sources / "shared", "empty": sources / "empty"}
            store.publish(key_of(fields), fields, files, n + 0.5, "compile", f"action {n}")
            keys.append(key_of(fields))
    return directory, sorted(keys)


def export(directory, file):
    with LocalStore(directory, pytest.fail) as store:
        return export_archive(store, file)


def take(directory, file, trust=None, limits=None):
    warnings = []
    with LocalStore(directory, pytest.fail, limits) as store:
        return import_archive(store, file, Trust() if trust is None else trust, warnings.append), warnings


def found(directory, keys):
    with LocalStore(directory, pytest.fail) as store:
        return [key for key in keys if store.lookup(key)]


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_an_empty_cache_has_all_results_after_an_import(filled, tmp_path, suffix):
    directory, keys = filled
    file = tmp_path / f"archive.{suffix}"
    moved = export(directory, file)
    assert (moved.results, moved.refused) == (6, 0)
    taken, warnings = take(tmp_path / "a new place with ümlaut", file)
    assert (taken.results, taken.refused, warnings) == (6, 0, [])
    assert found(tmp_path / "a new place with ümlaut", keys) == keys
    with LocalStore(tmp_path / "a new place with ümlaut", pytest.fail) as store, LocalStore(directory, pytest.fail) as old:
        for key in keys:
            # Costs, labels and fields come along: statistics, eviction and explanations need them.
            assert store.record_bytes(key) == old.record_bytes(key)
            assert store.read_blob(BlobRef(key)) == old.read_blob(BlobRef(key))
        assert {e.label for e in store.entries().values()} == {f"action {n}" for n in range(6)}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_equal_caches_give_equal_files(filled, tmp_path, suffix):
    directory, _ = filled
    export(directory, tmp_path / f"one.{suffix}")
    take(tmp_path / "copy", tmp_path / f"one.{suffix}")
    os.utime(tmp_path / "copy/v1", (1, 1))
    export(tmp_path / "copy", tmp_path / f"two.{suffix}")
    assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()


def test_any_tar_can_list_it(filled, tmp_path):
    directory, keys = filled
    export(directory, tmp_path / "archive.tar")
    with tarfile.open(tmp_path / "archive.tar") as archive:
        members = archive.getmembers()
    assert [m.name for m in members if m.name.startswith("records/")] == [f"records/{key}" for key in keys]
    assert len({m.name for m in members}) == len(members) == 6 + 6 + 6 + 2
    assert {(m.mode, m.uid, m.gid, m.uname, m.gname, m.mtime, m.type) for m in members} == {(0o644, 0, 0, "", "", 0, b"0")}


def test_a_damaged_result_is_left_out(filled, tmp_path):
    directory, keys = filled
    victim = sha256_hex(b"own 3" * 700)
    next(directory.rglob(victim)).write_bytes(b"damaged")
    moved = export(directory, tmp_path / "archive.tar")
    assert (moved.results, moved.refused) == (5, 1)
    taken, _ = take(tmp_path / "new", tmp_path / "archive.tar")
    assert taken.results == 5
    assert found(tmp_path / "new", keys) == [key for key in keys if key != key_of({"number": 3})]


def test_an_archive_cut_at_every_block_gives_whole_results_or_none(filled, tmp_path):
    directory, keys = filled
    export(directory, tmp_path / "archive.tar")
    data = (tmp_path / "archive.tar").read_bytes()
    cut = tmp_path / "cut.tar"
    for length in range(0, len(data), 4096):
        cut.write_bytes(data[:length])
        with pytest.raises(InvalidInput, match="this is not an archive of a cache: it is cut off"):
            take(tmp_path / "new", cut)
    assert set(found(tmp_path / "new", keys)) <= set(keys)
    with LocalStore(tmp_path / "new", pytest.fail) as store:
        assert {store.read_blob(store.lookup(key).outputs["out"])[:4] for key in found(tmp_path / "new", keys)} == {b"own "}


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_a_flipped_byte_never_brings_wrong_bytes_in(filled, tmp_path, suffix):
    directory, keys = filled
    good = tmp_path / f"archive.{suffix}"
    export(directory, good)
    data = good.read_bytes()
    with LocalStore(directory, pytest.fail) as store:
        right = {key: {name: store.read_blob(ref) for name, ref in store.lookup(key).outputs.items()} for key in keys}
    bad = tmp_path / f"bad.{suffix}"
    pick = random.Random(0)
    for number in range(40):
        flipped = bytearray(data)
        flipped[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
        bad.write_bytes(flipped)
        new = tmp_path / f"new-{number}"
        try:
            take(new, bad)
        except InvalidInput as error:
            assert str(bad) in error.render()
        with LocalStore(new, pytest.fail) as store:
            for key in keys:
                if result := store.lookup(key):
                    assert {name: store.read_blob(ref) for name, ref in result.outputs.items()} == right[key]


def member(name, data=b"x", **changes):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for field, value in changes.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + (data + bytes(-len(data) % 512) if info.size else b"")


DIGEST = sha256_hex(b"x")
HOSTILE = {
    "a path upwards": member("blobs/../../" + DIGEST),
    "an absolute path": member("/tmp/" + DIGEST),
    "another folder": member("other/" + DIGEST),
    "a name that is no digest": member("blobs/passwd"),
    "a symbolic link": member("blobs/" + DIGEST, b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": member("blobs/" + DIGEST, b"", type=tarfile.LNKTYPE, linkname="/etc/passwd"),
    "a device": member("blobs/" + DIGEST, b"", type=tarfile.CHRTYPE),
    "a directory": member("blobs/" + DIGEST, b"", type=tarfile.DIRTYPE),
    "a sparse file": member("blobs/" + DIGEST, b"x", type=tarfile.GNUTYPE_SPARSE),
    "a long name": member("././@LongLink", b"blobs/" + DIGEST.encode(), type=tarfile.GNUTYPE_LONGNAME),
    "an owner": member("blobs/" + DIGEST, uid=1000),
    "set-uid": member("blobs/" + DIGEST, mode=0o4755),
    "a time": member("blobs/" + DIGEST, mtime=5),
    "text": b"not a tar at all" * 64,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_archive_with_anything_else_in_it_is_refused(tmp_path, what):
    file = tmp_path / "hostile.tar"
    file.write_bytes(HOSTILE[what] + bytes(1024))
    with pytest.raises(InvalidInput) as error:
        take(tmp_path / "new", file)
    assert error.value.render() == (
        f"{file}: error: this is not an archive of a cache: it holds something else than plain files with the names of results\n"
        "help: Make one with `dsr1build cache export FILE`."
    )
    assert [p for p in (tmp_path / "new").rglob("*") if p.is_file()] == []


def test_a_small_file_that_unpacks_to_a_huge_one_is_refused_before_it_is_unpacked(tmp_path):
    file = tmp_path / "bomb.tar.gz"
    info = tarfile.TarInfo("blobs/" + DIGEST)
    info.size = 1 << 40
    file.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))
    with pytest.raises(InvalidInput, match="it holds more than the cache may, 20000000000 bytes"):
        take(tmp_path / "new", file)
    info = tarfile.TarInfo("records/" + DIGEST)
    info.size = 100 << 20
    file.write_bytes(gzip.compress(info.tobuf(tarfile.GNU_FORMAT) + bytes(1 << 20)))
    with pytest.raises(InvalidInput, match=f"the record {DIGEST} has 104857600 bytes"):
        take(tmp_path / "new", file)


def archive_of(file, *parts):
    out = io.BytesIO()
    for name, data in parts:
        out.write(member(name, data))
    file.write_bytes(out.getvalue() + bytes(1024))


def result_parts(number, content, signer=None):
    fields = encode({"number": number})
    key = sha256_hex(fields)
    record = Record(key, {"out": (BlobRef(sha256_hex(content)), len(content))}, 1.0)
    data = render_record(record if signer is None else sign_record(record, signer))
    return [(f"blobs/{key}", fields), (f"blobs/{sha256_hex(content)}", content), (f"records/{key}", data)]


def test_a_record_that_lies_about_its_files_is_refused_alone(tmp_path):
    file = tmp_path / "lies.tar"
    lie = result_parts(1, b"right")
    lie[1] = (lie[1][0], b"wrong")
    archive_of(file, *lie, *result_parts(2, b"fine"))
    taken, warnings = take(tmp_path / "new", file)
    assert (taken.results, taken.refused) == (1, 1)
    assert warnings == [
        f"the result {key_of({'number': 1})} of {file} is not taken: the file {sha256_hex(b'right')} of "
        f"{key_of({'number': 1})} has other bytes"
    ]
    assert found(tmp_path / "new", [key_of({"number": 1}), key_of({"number": 2})]) == [key_of({"number": 2})]


def test_a_record_under_another_key_is_refused(tmp_path):
    file = tmp_path / "replayed.tar"
    parts = result_parts(1, b"right")
    parts[2] = (f"records/{key_of({'number': 2})}", parts[2][1])
    archive_of(file, *parts)
    taken, warnings = take(tmp_path / "new", file)
    assert (taken.results, taken.refused) == (0, 1) and "belongs to another key" in warnings[0]


def test_signatures_of_the_archive_are_checked(tmp_path, monkeypatch):
    ours, theirs = tmp_path / "ours.pem", tmp_path / "theirs.pem"
    trusted, _ = new_key_pair(ours), new_key_pair(theirs)
    file = tmp_path / "signed.tar"
    archive_of(
        file,
        *result_parts(1, b"shared", load_signing_key(theirs, {})),
        *result_parts(2, b"shared", load_signing_key(ours, {}))[::2],
        *result_parts(3, b"unsigned"),
    )
    keys = [key_of({"number": n}) for n in (1, 2, 3)]
    taken, warnings = take(tmp_path / "new", file, Trust(frozenset({trusted}), accept_unsigned=True))
    assert (taken.results, taken.refused, len(warnings)) == (2, 1, 1) and warnings[0].endswith("unknown signer")
    assert found(tmp_path / "new", keys) == keys[1:]
    taken, _ = take(tmp_path / "strict", file, Trust(frozenset({trusted}), accept_unsigned=False))
    assert (taken.results, taken.refused) == (1, 2)


def test_the_limits_of_the_cache_hold_for_what_is_imported(filled, tmp_path):
    directory, _ = filled
    export(directory, tmp_path / "archive.tar")
    with pytest.raises(InvalidInput, match="it holds more than the cache may, 1000 bytes"):
        take(tmp_path / "new", tmp_path / "archive.tar", limits=Limits(max_bytes=1000))


def test_files_without_a_byte_count_as_well(tmp_path):
    file = tmp_path / "bomb.tar"
    headers = []
    for number in range(1001):
        info = tarfile.TarInfo(f"blobs/{number:064x}")
        headers.append(info.tobuf(tarfile.GNU_FORMAT))
    file.write_bytes(b"".join([*headers, bytes(1024)]))
    with pytest.raises(InvalidInput, match="it holds more files than the cache may, 1000"):
        take(tmp_path / "new", file, limits=Limits(max_files=1000))
    assert list((tmp_path / "new").iterdir()) == []


def test_what_a_killed_import_left_is_removed_by_the_next(filled, tmp_path):
    directory, _ = filled
    export(directory, tmp_path / "archive.tar")
    code = (
        "import os, sys, pathlib\n"
        "from dsr1build.cache.scratch import make_scratch\n"
        "place, _ = make_scratch('import-', pathlib.Path(sys.argv[1]))\n"
        "(place / 'half').write_bytes(b'x')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    (tmp_path / "new").mkdir()
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "new")])
    assert [path.name[:7] for path in (tmp_path / "new").iterdir()] == ["import-"]
    take(tmp_path / "new", tmp_path / "archive.tar")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["v1"]


@pytest.mark.parametrize("name", ["a\nb", "a\x1b[2Jb", "a\u202eb", "a\ud800", "a\0"])
def test_a_name_of_an_output_that_cannot_be_shown_is_refused(name):
    with pytest.raises(ValueError, match="is not a relative path inside the outputs"):
        render_record(Record(DIGEST, {name: (BlobRef(DIGEST), 1)}))


def test_an_archive_that_cannot_be_written_leaves_nothing_behind(filled, tmp_path):
    directory, _ = filled
    place = tmp_path / "place"
    (place / "archive.tar").mkdir(parents=True)
    with pytest.raises(EnvironmentUnfit, match="the archive cannot be written: Is a directory"):
        export(directory, place / "archive.tar")
    with pytest.raises(EnvironmentUnfit, match="the archive cannot be written: No such file or directory"):
        export(directory, place / "none" / "archive.tar")
    assert [path.name for path in place.iterdir()] == ["archive.tar"]


def test_the_verbs_move_a_cache_between_two_homes(filled, tmp_path):
    directory, keys = filled
    profile = tmp_path / "here.yaml"
    profile.write_text(f"version: 1\nname: here\nlocal: {{directory: '{directory}'}}\n")
    file = tmp_path / "archive.tar.xz"

    def verb(*words, home):
        return subprocess.run(
            [sys.executable, "-m", "dsr1build", "cache", *words, "--json"],
            env={**os.environ, "HOME": str(home), "XDG_CACHE_HOME": ""},
            capture_output=True,
            text=True,
        )

    home = tmp_path / "another höme"
    assert json.loads(verb("export", str(file), "--cache", str(profile), home=tmp_path).stdout)["results"] == 6
    assert dataclasses.asdict(take(tmp_path / "direct", file)[0]) == json.loads(verb("import", str(file), home=home).stdout)
    assert found(home / ".cache/dsr1build", keys) == keys
    stats = json.loads(verb("stats", home=home).stdout)
    assert stats["entries"] == 6 and Path(stats["directory"]) == home / ".cache/dsr1build"
    missing = verb("import", str(tmp_path / "none.tar"), home=home)
    assert (missing.returncode, missing.stdout) == (3, "")
    assert missing.stderr.startswith(f"{tmp_path}/none.tar: error: the archive cannot be imported: No such file or directory\n")
