"""What a profile allows in a build of a pull request, whose results count, and how remotes are opened."""

import json
import subprocess
import sys

import pytest

from dsr1build.cache.policy import may_upload, open_remote, pull_request_sign, trust_of
from dsr1build.cache.remote import Timeouts
from dsr1build.cache.signing import KEY_FILE_VARIABLE, Trust, new_key_pair
from dsr1build.config.schema import Profile, RemoteCache
from dsr1build.errors import EnvironmentUnfit, InvalidInput


@pytest.mark.parametrize(
    "environ",
    [
        {"GITHUB_EVENT_NAME": "pull_request"},
        {"GITHUB_EVENT_NAME": "pull_request_target"},
        {"GITHUB_EVENT_NAME": "pull_request_review"},
        {"CI_MERGE_REQUEST_IID": "7"},
        {"CI_PIPELINE_SOURCE": "merge_request_event"},
        {"CI_PIPELINE_SOURCE": "external_pull_request_event"},
        {"CI_PULL_REQUEST": "https://example.org/pull/7"},
        {"CIRCLE_PULL_REQUEST": "https://example.org/pull/7"},
        {"CHANGE_ID": "7"},
        {"TRAVIS_PULL_REQUEST": "7"},
        {"BUILDKITE_PULL_REQUEST": "7"},
        {"BUILD_REASON": "PullRequest"},
        {"SYSTEM_PULLREQUEST_PULLREQUESTID": "7"},
        {"APPVEYOR_PULL_REQUEST_NUMBER": "7"},
        {"BITBUCKET_PR_ID": "7"},
        {"DRONE_PULL_REQUEST": "7"},
        {"CI_PIPELINE_EVENT": "pull_request_closed"},
    ],
    ids=str,
)
def test_builds_of_pull_requests_are_recognised(environ):
    ((name, value),) = environ.items()
    assert pull_request_sign({"CI": "true", **environ}) == f"{name}={value}"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"CI": "true", "GITHUB_EVENT_NAME": "push"},
        {"GITHUB_EVENT_NAME": "schedule", "GITHUB_HEAD_REF": ""},
        {"CI_PIPELINE_SOURCE": "push", "CI_MERGE_REQUEST_IID": ""},
        {"TRAVIS_PULL_REQUEST": "false", "BUILDKITE_PULL_REQUEST": "false"},
        {"BUILD_REASON": "IndividualCI"},
    ],
    ids=str,
)
def test_other_builds_are_not(environ):
    assert pull_request_sign(environ) is None


PULL = {"GITHUB_EVENT_NAME": "pull_request"}
OPEN = Profile(version=1, name="p", pull_requests="read-write")


@pytest.fixture
def places(tmp_path):
    """The workspace (a directory inside a checkout) and an administrator's directory beside it."""
    (tmp_path / "checkout" / ".git").mkdir(parents=True)
    (tmp_path / "checkout" / "model").mkdir()
    (tmp_path / "admin").mkdir()
    return tmp_path / "checkout" / "model", tmp_path / "admin" / "ci.yaml"


def test_uploads_of_pull_requests_are_an_administrators_to_allow(places):
    workspace, admin_file = places
    warnings = []
    assert may_upload(OPEN, admin_file, True, workspace, PULL, warnings.append)
    assert may_upload(Profile(version=1, name="p"), admin_file, True, workspace, {}, warnings.append)
    assert not may_upload(Profile(version=1, name="p"), admin_file, True, workspace, PULL, warnings.append)
    assert warnings == []


@pytest.mark.parametrize("case", ["named by BUILD.yaml", "beside BUILD.yaml", "elsewhere in the checkout", "linked"])
def test_a_pull_request_cannot_allow_itself_to_upload(places, case):
    workspace, admin_file = places
    file, chosen = {
        "named by BUILD.yaml": (admin_file, False),
        "beside BUILD.yaml": (workspace / "ci.yaml", True),
        "elsewhere in the checkout": (workspace.parent / "cache" / "ci.yaml", True),
        "linked": (admin_file.parent / "link.yaml", True),
    }[case]
    (admin_file.parent / "link.yaml").symlink_to(workspace / "ci.yaml")
    warnings = []
    assert not may_upload(OPEN, file, chosen, workspace, PULL, warnings.append)
    assert warnings == [
        f"`pull_requests: read-write` in {file} does not count in a build of a pull request (GITHUB_EVENT_NAME=pull_request):"
        " the profile has to lie outside of the workspace and be named with --cache"
    ]


def profile(**trust):
    return Profile(version=1, name="p", trust=trust)


OTHER = "ed25519:" + "aa" * 32


def test_unsigned_results_are_refused_as_soon_as_there_is_a_key(tmp_path):
    ours = new_key_pair(tmp_path / "key.pem")
    assert trust_of(profile(), tmp_path, {}, True) == (Trust(), None)
    assert trust_of(profile(keys=(OTHER,)), tmp_path, {}, True) == (Trust(frozenset({OTHER}), False), None)
    assert trust_of(profile(keys=(OTHER,), unsigned="accept"), tmp_path, {}, True)[0] == Trust(frozenset({OTHER}), True)
    trust, signer = trust_of(profile(signing_key="key.pem"), tmp_path, {}, True)
    assert (trust, signer.public) == (Trust(frozenset({ours}), False), ours)
    trust, signer = trust_of(profile(keys=(OTHER,)), tmp_path, {KEY_FILE_VARIABLE: str(tmp_path / "key.pem")}, True)
    assert (trust, signer.public) == (Trust(frozenset({ours, OTHER}), False), ours)


def test_a_key_that_is_not_needed_may_be_missing(tmp_path):
    with pytest.raises(EnvironmentUnfit, match="cannot be read"):
        trust_of(profile(signing_key="none.pem"), tmp_path, {}, True)
    assert trust_of(profile(signing_key="none.pem", keys=(OTHER,)), tmp_path, {}, False)[1] is None


def test_home_in_the_path_of_a_key(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    new_key_pair(tmp_path / "key.pem")
    assert trust_of(profile(signing_key="~/key.pem"), tmp_path / "other", {}, True)[1] is not None


def test_a_remote_is_written_only_where_profile_and_build_allow_it(tmp_path):
    for mode, writable, expected in (
        ("read", True, False),
        ("read-write", False, False),
        ("read-write", True, True),
    ):
        attached = open_remote(RemoteCache(url=f"file://{tmp_path}", mode=mode), writable)
        assert attached.writable is expected and attached.timeouts == Timeouts(2.0, 10.0)
        assert attached.remote.name == f"file://{tmp_path}"
        attached.remote.close()


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:9", "http://127.0.0.1:9/cache", "s3://bucket/prefix", "file:///nonexistent"])
def test_only_the_adapter_of_a_protocol_is_imported_and_no_secret_is_shown(url):
    code = (
        "import os, sys, json\n"
        "from dsr1build.cache.policy import open_remote\n"
        "from dsr1build.config.schema import RemoteCache\n"
        "before = set(sys.modules)\n"
        "headers = {'authorization': 'CACHE_TOKEN', 'x-more': 'NOT_SET'} if sys.argv[1][0] in 'gh' else {}\n"
        "config = RemoteCache(url=sys.argv[1], headers_from_env=headers)\n"
        "remote = open_remote(config, False, {'CACHE_TOKEN': 'Bearer secret'}).remote\n"
        "print(json.dumps([remote.name, repr(remote), sorted({'grpc', 'urllib3', 'obstore'} & set(sys.modules) - before)]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, url], capture_output=True, text=True, check=True)
    name, shown, loaded = json.loads(done.stdout)
    assert name.startswith(url.split("/cache")[0]) and "secret" not in name + shown
    assert loaded == [{"grpc": "grpc", "http": "urllib3"}.get(url.partition(":")[0], "obstore")]


@pytest.mark.parametrize("url", ["grpc://127.0.0.1:9", "http://127.0.0.1:9/cache"])
@pytest.mark.parametrize("value", ["Bearer secret\n", "Bearer secret\r\nX-Other: y", "Bearer secrét", "secret\0"])
def test_a_header_that_cannot_be_sent_is_named_and_not_shown(url, value):
    config = RemoteCache(url=url, headers_from_env={"authorization": "CACHE_TOKEN"})
    with pytest.raises(InvalidInput) as error:
        open_remote(config, False, {"CACHE_TOKEN": value})
    assert error.value.render() == (
        f"{url}: error: CACHE_TOKEN holds a line end or another character that no header may hold\n"
        "help: Set the environment variable without a line end, and in ASCII."
    )
