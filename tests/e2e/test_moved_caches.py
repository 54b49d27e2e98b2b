"""The cache of the sample's build on another machine: exported, taken in under other surroundings, and made again in part."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def copy_workspace(target):
    for name in ("BUILD.yaml", "models/r1-mini/config.json", "recipes", "targets", "cache"):
        to = target / name
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(ROOT / name, to) if (ROOT / name).is_dir() else shutil.copyfile(ROOT / name, to)
    return target


def dsr1build(*words, workspace, **environment):
    done = subprocess.run(
        [sys.executable, "-m", "dsr1build", *words],
        cwd=workspace,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(workspace, *words, **environment):
    """The keys of all actions by their ids, the summary, and the seconds of a build."""
    started = time.monotonic()
    out = dsr1build("build", "BUILD.yaml", "--json", *words, workspace=workspace, **environment)
    seconds = time.monotonic() - started
    events = [json.loads(line) for line in out.splitlines()]
    keys = {event["action"]: event["key"] for event in events if event["event"] in ("hit", "finished")}
    return keys, events[-1], seconds


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """(workspace, HOME, keys, seconds, archive) of the sample's first build, and of its exported cache."""
    root = tmp_path_factory.mktemp("first")
    workspace = copy_workspace(root / "workspace")
    home = root / "home"
    keys, summary, seconds = build(workspace, HOME=str(home), XDG_CACHE_HOME="", TZ="UTC")
    assert summary["executed"] == len(keys)
    archive = root / "cache.tar"
    dsr1build("cache", "export", str(archive), workspace=workspace, HOME=str(home), XDG_CACHE_HOME="")
    return workspace, home, keys, seconds, archive


SURROUNDINGS = {
    "HOME": "another höme with blanks",
    "XDG_CACHE_HOME": "",
    "USER": "nobody",
    "LOGNAME": "nobody",
    "TZ": "Pacific/Kiritimati",
    "LC_ALL": "C",
    "LANG": "tr_TR.UTF-8",
    "SHELL": "/bin/false",
    "CI": "1",
    "CFLAGS": "-O0",
    "OMP_NUM_THREADS": "3",
    "DSR1_ANYTHING": "else",
}


def test_another_machine_finds_everything_in_the_exported_cache(first, tmp_path):
    """Another HOME, user, time zone, locale, umask, working tree with blanks and letters of all kinds: every key is equal."""
    _, _, keys, _, archive = first
    workspace = copy_workspace(tmp_path / "eine Kopie — 副本")
    environment = {**SURROUNDINGS, "HOME": str(tmp_path / SURROUNDINGS["HOME"])}
    umask = os.umask(0o077)
    try:
        dsr1build("cache", "import", str(archive), workspace=workspace, **environment)
        moved, summary, _ = build(workspace, **environment)
    finally:
        os.umask(umask)
    assert moved == keys
    assert (summary["executed"], summary["hits"]["local"], summary["failed"]) == (0, len(keys), 0)
    stats = json.loads(dsr1build("cache", "stats", "--json", workspace=workspace, **environment))
    assert (stats["hits"], stats["misses"]) == (len(keys), {})
    assert stats["seconds_saved"] > 0


# An interpreter below a home that is closed to others runs only where files can be read in spite of their modes; what is
# written is written as the other user all the same.
AS_NOBODY = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
READING = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")


def words_of_another_user():
    """The words before a command that another user runs; skips the test where there is no way to become one."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if shutil.which("setpriv") is None:
        pytest.skip("there is no setpriv, which gives a command to another user")
    for prefix in (AS_NOBODY, (*AS_NOBODY, *READING)):
        if subprocess.run([*prefix, sys.executable, "-c", "import dsr1build"], cwd="/", capture_output=True).returncode == 0:
            return prefix
    pytest.skip(f"user 65534 cannot run {sys.executable}")


def test_another_user_finds_everything_in_the_exported_cache(first):
    """Another user id, HOME, time zone, and a workspace of that user under a path with blanks and letters of all kinds."""
    workspace, _, keys, _, archive = first
    prefix = words_of_another_user()
    with tempfile.TemporaryDirectory(prefix="größere Wohnung 家 ") as root:
        theirs, home, taken = copy_workspace(Path(root, "Kopie — 副本")), Path(root, "hö me"), Path(root, "their cache.tar")
        home.mkdir()
        shutil.copyfile(archive, taken)
        for path in (Path(root), *Path(root).rglob("*")):
            os.chown(path, 65534, 65534)
        environment = {**os.environ, **SURROUNDINGS, "HOME": str(home)}

        def ours(*words):
            command = [*prefix, sys.executable, "-m", "dsr1build", *words]
            done = subprocess.run(command, cwd=theirs, env=environment, capture_output=True, text=True)
            assert done.returncode == 0, done.stdout + done.stderr
            return done.stdout

        ours("cache", "import", str(taken))
        events = [json.loads(line) for line in ours("build", "BUILD.yaml", "--json").splitlines()]
        moved = {event["action"]: event["key"] for event in events if event["event"] == "hit"}
        assert moved == keys
        assert (events[-1]["executed"], events[-1]["hits"]["local"]) == (0, len(keys))
        assert {path.stat().st_uid for path in (theirs / "dist").rglob("*")} == {65534}
        assert built_files(theirs) == built_files(workspace)


def built_files(workspace):
    dist = workspace / "dist"
    return {str(path.relative_to(dist)): path.read_bytes() for path in dist.rglob("*") if path.is_file()}


def test_bundles_of_both_machines_have_the_same_bytes(first, tmp_path):
    workspace, _, _, _, archive = first
    other = copy_workspace(tmp_path / "other")
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    dsr1build("cache", "import", str(archive), workspace=other, **environment)
    build(other, **environment)
    assert built_files(other) == built_files(workspace) and built_files(other)


def test_a_warm_build_is_much_faster_than_the_first(first):
    workspace, home, keys, cold, _ = first
    _, summary, warm = build(workspace, HOME=str(home), XDG_CACHE_HOME="")
    assert summary["hits"]["local"] == len(keys)
    assert warm < cold / 4


def test_a_sample_lowered_and_compiled_again_has_the_same_bytes(first, tmp_path):
    workspace, home, *_ = first
    report = json.loads(
        dsr1build(
            "cache", "verify", "--recompute", "3", "--seed", "2", "--json", workspace=workspace, HOME=str(home), XDG_CACHE_HOME=""
        )
    )
    assert report["faults"] == [] and len(report["recomputed"]) == 3
    assert [one["differs"] for one in report["recomputed"]] == ["", "", ""]


def test_a_result_that_a_compile_would_not_give_is_found(first, tmp_path):
    """A stale or forged result, whole in itself: only making it again tells."""
    from dsr1build.cache.store import LocalStore
    from dsr1build.digest import BlobRef, decode

    workspace, _, _, _, archive = first
    environment = {"HOME": str(tmp_path), "XDG_CACHE_HOME": ""}
    dsr1build("cache", "import", str(archive), workspace=workspace, **environment)
    forged = tmp_path / "forged"
    with LocalStore(tmp_path / ".cache/dsr1build", pytest.fail) as store:
        # Only what is lowered is left, which takes a moment to be made again.
        for entry in store.entries().values():
            if entry.kind != "lower":
                store.files.manifests.remove(entry.manifest)
        key, entry = next((key, entry) for key, entry in sorted(store.entries().items()) if entry.kind == "lower")
        record = store.record(key)
        forged.write_bytes(b"// other text\n")
        files = dict.fromkeys(record.outputs, forged)
        store.publish(key, decode(store.read_blob(BlobRef(key))), files, 1.0, entry.kind, entry.label)
    done = subprocess.run(
        [sys.executable, "-m", "dsr1build", "cache", "verify", "--recompute", "45", "--json"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
    )
    different = [one for one in json.loads(done.stdout)["recomputed"] if one["differs"]]
    assert done.returncode == 4 and [one["key"] for one in different] == [key]
