"""How the build verb opens shared caches: nothing is loaded for a profile without any, and policy decides on uploads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dsr1build.cache.store import LocalStore
from dsr1build.cli.sharing import open_shared
from dsr1build.config.load import load_build
from dsr1build.digest import key_of

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"toy": "upper", "text": "a"}


@pytest.fixture
def project(tmp_path):
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "BUILD.yaml").write_text(
        f"version: 1\nname: x\nmodel: {{config: '{ROOT}/models/r1-mini/config.json', weights: {{random: {{seed: 0}}}}}}\n"
        "recipe: deepseek_v3\ntargets: [x86-64-v3]\ncache: profile.yaml\n"
    )
    return tmp_path / "project"


def upload(project, profile, cache=None, read_only=False):
    """One build of one result with this profile; gives the warnings and the records of the remote."""
    profile_file = Path(cache or project / "profile.yaml")
    remote = project.parent / "remote"
    url = json.dumps(f"file://{remote}")
    profile_file.write_text(f"version: 1\nname: p\nremotes: [{{url: {url}, mode: read-write}}]\n{profile}")
    config = load_build(project / "BUILD.yaml", cache=cache)
    warnings = []
    with (
        LocalStore(project.parent / "store", warnings.append) as store,
        open_shared(config, store, warnings.append, warnings.append, read_only=read_only) as shared,
    ):
        (project.parent / "text").write_text("A")
        result = store.publish(key_of(FIELDS), FIELDS, {"text": project.parent / "text"})
        shared.offer(key_of(FIELDS), FIELDS, result, 1.0, "compile", "a")
        shared.finish()
    return warnings, [path.name for path in remote.glob("ac/*")]


@pytest.fixture(autouse=True)
def no_pull_request(monkeypatch):
    for name in ("GITHUB_EVENT_NAME", "CI_PIPELINE_SOURCE", "CI_MERGE_REQUEST_IID"):
        monkeypatch.delenv(name, raising=False)


def test_a_build_uploads_what_it_made(project):
    assert upload(project, "") == ([], [key_of(FIELDS)])


def test_an_option_forbids_uploads(project):
    assert upload(project, "", read_only=True) == ([], [])


def test_a_pull_request_uploads_only_where_an_administrator_allows_it(project, tmp_path, monkeypatch):
    monkeypatch.setenv("CI_MERGE_REQUEST_IID", "7")
    assert upload(project, "") == ([], [])
    warnings, records = upload(project, "pull_requests: read-write\n")
    assert len(warnings) == 1 and "does not count in a build of a pull request (CI_MERGE_REQUEST_IID=7)" in warnings[0]
    assert records == []
    (tmp_path / "admin").mkdir()
    assert upload(project, "pull_requests: read-write\n", str(tmp_path / "admin" / "ci.yaml")) == ([], [key_of(FIELDS)])


def test_a_build_file_cannot_speak_for_an_administrator(project):
    build = project / "BUILD.yaml"
    build.write_text(build.read_text() + "pull_requests: read-write\n")
    with pytest.raises(Exception, match="unknown key `pull_requests`"):
        load_build(build)


def test_a_profile_without_remotes_costs_no_import(project):
    (project / "profile.yaml").write_text("version: 1\nname: p\n")
    code = (
        "import sys\n"
        "from dsr1build.config.load import load_build\n"
        "import dsr1build.cache.store\n"
        "from dsr1build.cli.sharing import open_shared\n"
        "import dsr1build.execute.engine\n"
        "with open_shared(load_build(sys.argv[1]), None, print, print, read_only=False) as shared:\n"
        "    assert shared is None\n"
        "unwanted = {'grpc', 'urllib3', 'obstore', 'cryptography', 'dsr1build.cache.shared', 'dsr1build.cache.policy'}\n"
        "print(sorted(unwanted & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(project / "BUILD.yaml")], capture_output=True, text=True, env=os.environ
    )
    assert (done.stdout, done.stderr) == ("[]\n", "")
