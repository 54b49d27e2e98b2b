"""The verbs that look after a cache: stats, gc, verify, push, pull, doctor."""

import json
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import jsonschema
import pytest

from dsr1build.cache.checks import STATS_SCHEMA, verify_store
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, key_of, sha256_hex
from dsr1build.execute.options import Options
from dsr1build.execute.recompute import recompute_sample


@pytest.fixture
def cache(tmp_path):
    """A home with a filled cache, and a way to run `dsr1build cache` there."""
    return Cache(tmp_path)


class Cache:
    def __init__(self, root):
        self.root = root
        self.directory = root / ".cache/dsr1build"
        self.keys = []
        with LocalStore(self.directory, pytest.fail) as store:
            for n in range(4):
                fields = {"text": f"text {n}"}
                source = root / f"source-{n}"
                source.write_bytes(f"TEXT {n}".encode() * (n + 1))
                self.keys.append(key_of(fields))
                store.publish(self.keys[-1], fields, {"text": source}, 10.0 - n, "compile", f"action {n}")

    def run(self, *words):
        return subprocess.run(
            [sys.executable, "-m", "dsr1build", "cache", *words],
            env={**os.environ, "HOME": str(self.root), "XDG_CACHE_HOME": ""},
            capture_output=True,
            text=True,
        )

    def json(self, *words):
        return json.loads(self.run(*words, "--json").stdout)

    def profile(self, name, **local):
        path = self.root / f"{name}.yaml"
        path.write_text(f"version: 1\nname: {name}\nlocal: {json.dumps({'directory': str(self.root / name), **local})}\n")
        return str(path)

    def blob(self, content):
        return next(self.directory.rglob(sha256_hex(content)))


def test_statistics_tell_hits_misses_and_why(cache):
    with LocalStore(cache.directory, pytest.fail) as store:
        assert store.lookup(cache.keys[0]) and store.lookup(cache.keys[1])
        assert not store.lookup("0" * 64)
        # Looking ahead is no use of the cache.
        assert store.lookup(cache.keys[2], peek=True)
    cache.blob(b"TEXT 2" * 3).write_bytes(b"damaged")
    cache.blob(b"TEXT 3" * 4).unlink()
    with LocalStore(cache.directory, pytest.fail) as store:
        assert not store.lookup(cache.keys[2]) and not store.lookup(cache.keys[3])
    stats = cache.json("stats")
    jsonschema.validate(stats, STATS_SCHEMA)
    assert (stats["builds"], stats["hits"]) == (2, 2)
    assert stats["misses"] == {"absent": 1, "damaged": 1, "lost": 1}
    assert (stats["seconds_saved"], stats["bytes_served"]) == (19.0, 18)
    assert (stats["entries"], stats["files"], stats["set_aside"]) == (4, 10, 1)
    assert [item["label"] for item in stats["largest"]] == [f"action {n}" for n in (3, 2, 1, 0)]
    assert [item["label"] for item in stats["costliest"]] == [f"action {n}" for n in range(4)]
    text = cache.run("stats", "--top", "1").stdout
    assert "2 builds looked up 5 results\n  hits 2 (40.0 %): 19.0 s saved, 18 bytes served\n" in text
    assert "  misses 1: damaged (a file was not what its name says; it is set aside)\n" in text
    costliest = f"{stats['costliest'][0]['bytes']} bytes     10.00 s  {cache.keys[0][:16]}  compile action 0"
    assert text.endswith(f"costliest:\n   {costliest}\n")


def test_statistics_of_a_cache_that_is_not_there_make_none(cache):
    stats = cache.json("stats", "--cache", cache.profile("none"))
    assert (stats["entries"], stats["builds"], stats["bytes"]) == (0, 0, 0)
    assert not (cache.root / "none").exists()


def test_counters_survive_a_rebuilt_index(cache):
    with LocalStore(cache.directory, pytest.fail) as store:
        store.lookup(cache.keys[0])
        assert store.rebuild_index() == 4
    assert cache.json("stats")["hits"] == 1


def test_gc_shrinks_to_the_size_that_is_asked_for(cache):
    before = cache.json("stats")
    dry = cache.json("gc", "--max-bytes", "1kB", "--dry-run")
    assert cache.json("stats") == before
    done = cache.json("gc", "--max-bytes", "1kB")
    assert {**dry, "dry_run": False} == done and done["left_bytes"] <= 1000 and done["entries"] > 0
    left = cache.json("stats")
    assert (left["bytes"], left["files"]) == (done["left_bytes"], done["left_files"])
    wrong = cache.run("gc", "--max-bytes", "1 parsec")
    assert (wrong.returncode, wrong.stderr) == (
        2,
        '--max-bytes: error: the text "1 parsec" is not a number of bytes\n'
        "help: Write a whole number of bytes, or a number with its unit: '20 GB', 512MiB.\n",
    )


def test_the_limits_of_a_profile_hold_without_any_verb(cache):
    profile = cache.profile("small", max_bytes="1 kB")
    assert cache.json("stats", "--cache", profile)["limits"] == {"max_bytes": 1000, "max_files": 1_000_000}


def test_verify_finds_every_damaged_file_and_sets_it_aside(cache, tmp_path):
    good = cache.run("verify")
    assert (good.returncode, good.stdout) == (0, "4 results read, 0 files wrong\n")
    cache.blob(b"TEXT 1" * 2).write_bytes(b"damaged")
    fields = next(cache.directory.rglob(cache.keys[2]))
    fields.write_bytes(fields.read_bytes()[:-1])
    junit = tmp_path / "verify.xml"
    bad = cache.run("verify", "--junit", str(junit))
    assert bad.returncode == 4
    assert sorted(bad.stdout.splitlines()) == sorted(
        [
            "4 results read, 2 files wrong",
            f"damaged: text of compile action 1, {cache.keys[1]}",
            f"damaged: its fields of compile action 2, {cache.keys[2]}",
        ]
    )
    suite = ElementTree.parse(junit).getroot()
    assert (suite.get("tests"), suite.get("failures"), len(suite.findall("testcase/failure"))) == ("3", "2", 2)
    assert not fields.exists()
    again = cache.run("verify", "--repair")
    assert again.returncode == 0 and "the index was made again: 4 results" in again.stdout


def test_repair_makes_the_index_from_the_files(cache):
    import sqlite3

    connection = sqlite3.connect(cache.directory / "v1/index/cache.db")
    connection.execute("delete from Cache where length(key) = 32")
    connection.commit()
    connection.close()
    assert cache.json("stats")["entries"] == 0
    assert cache.json("verify", "--repair")["indexed"] == 4
    assert [item["label"] for item in cache.json("stats")["costliest"]] == [f"action {n}" for n in range(4)]


def test_a_sample_that_is_made_again_has_the_same_bytes(cache):
    """By toy workers here; the end-to-end tests do it with those that lower and compile."""
    workers = {"compile": "toy_workers:upper"}
    options = Options(jobs=1, import_path=(Path(__file__).parents[1] / "execute",))
    with LocalStore(cache.directory, pytest.fail) as store:
        same = recompute_sample(store, 3, 7, options, workers, lambda fields: True)
        assert same == recompute_sample(store, 3, 7, options, workers, lambda fields: True)
        assert len(same) == 3
        everything = recompute_sample(store, 10, 0, options, workers, lambda fields: True)
        # The toy writes the text once, so only the first action's result is what it would make.
        assert {one.label: one.differs for one in everything} == {
            "action 0": "",
            **{f"action {n}": "other bytes in text" for n in (1, 2, 3)},
        }
        assert recompute_sample(store, 10, 0, options, workers, lambda fields: fields["text"] == "text 0") == [
            one for one in everything if one.label == "action 0"
        ]


def test_a_cache_is_pushed_to_and_pulled_from_another_profile(cache, tmp_path):
    other = cache.profile("other")
    listed = tmp_path / "keys.txt"
    pushed = cache.json("push", "--to", other, "--list", str(listed))
    assert pushed == {str(tmp_path / "other"): {"results": 4, "bytes": 60, "refused": 0}}
    assert [line.split()[0] for line in listed.read_text().splitlines()] == sorted(cache.keys)
    assert cache.json("push", "--to", other)[str(tmp_path / "other")]["results"] == 0
    third = cache.profile("third")
    assert cache.json("pull", "--from", other, "--cache", third)[str(tmp_path / "other")]["results"] == 4
    with LocalStore(tmp_path / "third", pytest.fail) as store:
        assert all(store.lookup(key) for key in cache.keys)
        assert store.read_blob(BlobRef(cache.keys[0]))


def test_a_wrong_list_of_keys_is_an_error_at_its_line(cache, tmp_path):
    (tmp_path / "keys.txt").write_text("0" * 64 + " 5\nnonsense\n")
    result = cache.run("pull", "--from", cache.profile("other"), "--keys", str(tmp_path / "keys.txt"))
    assert (result.returncode, result.stderr) == (
        2,
        f"{tmp_path}/keys.txt: error: this is not a list of results: line 2 is not a key and a size\n"
        "help: Make one with `dsr1build cache push --list FILE`.\n",
    )


def test_results_go_through_a_directory_that_is_a_remote(cache, tmp_path):
    """An object store that is a directory: no server, but the whole way there and back, signed."""
    pytest.importorskip("obstore")
    (tmp_path / "bucket").mkdir()
    public = cache.run("key", "new", "--output", str(tmp_path / "key.pem")).stdout.strip()
    shared = tmp_path / "shared.yaml"
    shared.write_text(
        f"version: 1\nname: shared\nlocal: {{directory: '{tmp_path}/elsewhere'}}\n"
        f"remotes: [{{url: 'file://{tmp_path}/bucket', mode: read-write}}]\n"
        f"trust: {{keys: ['{public}'], signing_key: '{tmp_path}/key.pem'}}\n"
    )
    pushed = cache.json("push", "--to", str(shared), "--list", str(tmp_path / "keys.txt"))
    remote = next(place for place in pushed if "bucket" in place)
    assert pushed[remote] == {"results": 4, "bytes": 60, "refused": 0}
    fresh = tmp_path / "fresh.yaml"
    fresh.write_text(shared.read_text().replace(f"{tmp_path}/elsewhere", f"{tmp_path}/fresh"))
    pulled = cache.json("pull", "--from", str(fresh), "--cache", str(fresh), "--keys", str(tmp_path / "keys.txt"))
    assert pulled == {remote: {"results": 4, "bytes": 60, "refused": 0}}
    with LocalStore(tmp_path / "fresh", pytest.fail) as store:
        assert all(store.lookup(key) for key in cache.keys)
    report = cache.run("doctor", "--cache", str(shared), "--json")
    checks = json.loads(report.stdout)["checks"]
    assert report.returncode == 0, checks
    assert {check["name"] for check in checks if check["subject"] == remote} == {"look-up", "upload", "round trip"}


def test_doctor_tries_the_directory_and_leaves_nothing(cache):
    before = sorted(path for path in cache.directory.rglob("*"))
    result = cache.run("doctor")
    assert result.returncode == 0, result.stdout
    lines = result.stdout.splitlines()
    assert lines[0] == str(cache.directory)
    names = ("round trip", "corruption", "relocation", "read-only", "concurrent writers", "locks", "latency", "room")
    assert [line[: 9 + len(name)] for line, name in zip(lines[1:], names, strict=True)] == [f"  ok     {name}" for name in names]
    assert sorted(path for path in cache.directory.rglob("*")) == before


def test_doctor_says_what_is_not_fit(cache, tmp_path):
    (tmp_path / "taken").write_text("a file")
    result = cache.run("doctor", "--cache", cache.profile("taken"))
    assert result.returncode == 3
    assert "unfit  writable" in result.stdout and "File exists" in result.stdout


def test_verify_reads_files_that_nothing_names(cache):
    with LocalStore(cache.directory, pytest.fail) as store:
        ref = store.files.blobs.write(b"named by nothing")
        store.files.blobs.path(ref).write_bytes(b"damaged")
        assert verify_store(store) == (4, [])
        assert not store.files.blobs.path(ref).exists()


def test_an_interrupted_doctor_leaves_no_writer_and_no_directory(tmp_path):
    # The interrupt comes when the writers are under way, and reaches the doctor alone.
    code = (
        "import os, signal, sys, threading, time, pathlib\n"
        "from dsr1build.cache import checks\n"
        "place = pathlib.Path(sys.argv[1])\n"
        "def interrupt():\n"
        "    while not list(place.glob('doctor-*/4/store/v1')):\n"
        "        time.sleep(0.01)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "checks._WRITER = '''import pathlib, sys, time\\nwhile True:\\n"
        "    (pathlib.Path(sys.argv[1]) / 'store' / 'v1').mkdir(parents=True, exist_ok=True)\\n    time.sleep(0.01)'''\n"
        "checks.check_directory(place)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "cache")], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    time.sleep(0.5)
    assert list((tmp_path / "cache").iterdir()) == []
