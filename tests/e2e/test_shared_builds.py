"""The sample built on one machine and taken from a shared cache on others, by the command line and with signatures."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_incremental_builds import copy_workspace, generate, replace_in, run_build, summary

pytestmark = pytest.mark.slow


def write_profile(workspace, remote, public, key, mode="read-write"):
    (workspace / "cache" / "local.yaml").write_text(
        f"version: 1\nname: shared\nremotes:\n  - url: file://{remote}\n    mode: {mode}\n"
        f"trust:\n  keys: [{public}]\n  signing_key: {key}\n"
    )


def dsr1build(*arguments, **options):
    return subprocess.run([sys.executable, "-m", "dsr1build", *arguments], capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A directory with the signing key, the remote, and a workspace that was built and uploaded; and the build's summary."""
    root = tmp_path_factory.mktemp("first")
    made = dsr1build("cache", "key", "new", "--output", str(root / "key.pem"))
    assert made.returncode == 0, made.stderr
    (root / "public").write_text(made.stdout.strip())
    workspace = copy_workspace(root / "workspace")
    write_profile(workspace, root / "remote", made.stdout.strip(), root / "key.pem")
    return root, summary(run_build(workspace, root / "xdg", "--json"))


def files_of(directory):
    return {path.relative_to(directory): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()}


def test_a_machine_with_other_names_for_everything_compiles_nothing(first, tmp_path):
    root, built = first
    assert built["compiled"] > 0 and built["executed"] == len(list((root / "remote" / "ac").iterdir()))
    workspace = copy_workspace(tmp_path / "Größe und 'Ort'")
    write_profile(workspace, root / "remote", (root / "public").read_text(), "/nonexistent/key.pem", "read")
    other = {"HOME": str(tmp_path), "TZ": "Pacific/Chatham", "USER": "other", "LC_ALL": "C", "TMPDIR": str(tmp_path)}
    done = summary(run_build(workspace, tmp_path / "xdg", "--json", **other))
    assert (done["executed"], done["hits"]) == (0, {"local": 0, "remote": built["executed"]})
    bundle, original = workspace / "dist/r1-mini/x86-64-v3", root / "workspace/dist/r1-mini/x86-64-v3"
    assert (bundle / "manifest.json").read_bytes() == (original / "manifest.json").read_bytes()
    assert generate(bundle) == generate(original)
    again = summary(run_build(workspace, tmp_path / "xdg", "--json", **other))
    assert (again["executed"], again["hits"]) == (0, {"local": built["executed"], "remote": 0})


def test_a_pull_request_reads_and_does_not_write(first, tmp_path):
    root, _ = first
    before = files_of(root / "remote")
    workspace = copy_workspace(tmp_path / "workspace")
    write_profile(workspace, root / "remote", (root / "public").read_text(), root / "key.pem")
    with (workspace / "cache" / "local.yaml").open("a") as file:
        file.write("pull_requests: read-write\n")
    replace_in(workspace / "recipes/deepseek_v3.yaml", "prefill:\n    - tokens: chunk", "prefill:\n    - tokens: 2")
    done = run_build(workspace, tmp_path / "xdg", "--json", "--no-link", GITHUB_EVENT_NAME="pull_request")
    assert summary(done)["executed"] > 0 and summary(done)["hits"]["remote"] > 0
    assert "does not count in a build of a pull request (GITHUB_EVENT_NAME=pull_request)" in done
    assert files_of(root / "remote") == before


def test_the_private_key_is_nowhere_but_in_its_file(first):
    root, _ = first
    secret = (root / "key.pem").read_bytes().splitlines()[1]
    holders = [path for path in root.rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert holders == [root / "key.pem"]


def test_a_key_that_others_can_read_stops_the_build(first, tmp_path):
    root, _ = first
    workspace = copy_workspace(tmp_path / "workspace")
    shutil.copyfile(root / "key.pem", tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(0o644)
    write_profile(workspace, root / "remote", (root / "public").read_text(), tmp_path / "key.pem")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    done = dsr1build("build", "BUILD.yaml", cwd=workspace, env=environment)
    assert done.returncode == 3
    assert done.stderr.startswith(f"{tmp_path / 'key.pem'}: error: other users can read or replace the signing key\n")
    assert not Path(workspace / "dist").exists()
