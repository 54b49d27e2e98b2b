"""What a profile allows in these surroundings: which remotes are read, which are written, and whose results count."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from dsr1build.cache.remote import Remote, Timeouts
from dsr1build.cache.signing import SigningKey, Trust, load_signing_key
from dsr1build.config.schema import Profile, RemoteCache
from dsr1build.errors import EnvironmentUnfit, InvalidInput

# Variables that a CI system sets in a build of a pull request and in no other; some set them to these words elsewhere.
_PULL_REQUEST_VARIABLES = (
    "CI_MERGE_REQUEST_IID",  # GitLab
    "CI_EXTERNAL_PULL_REQUEST_IID",  # GitLab, for a repository elsewhere
    "CI_PULL_REQUEST",  # CircleCI and others
    "CI_PULL_REQUESTS",  # CircleCI
    "CIRCLE_PULL_REQUEST",
    "CIRCLE_PR_NUMBER",
    "CHANGE_ID",  # Jenkins
    "ghprbPullId",  # Jenkins, GitHub pull request builder
    "TRAVIS_PULL_REQUEST",
    "BUILDKITE_PULL_REQUEST",
    "SYSTEM_PULLREQUEST_PULLREQUESTID",  # Azure Pipelines
    "APPVEYOR_PULL_REQUEST_NUMBER",
    "BITBUCKET_PR_ID",
    "CIRRUS_PR",
    "DRONE_PULL_REQUEST",
    "CI_COMMIT_PULL_REQUEST",  # Woodpecker
    "SEMAPHORE_GIT_PR_NUMBER",
)
_NO_PULL_REQUEST = frozenset({"", "false", "0", "none", "null"})
# The variables whose value is the kind of event.
_EVENT_VARIABLES = ("GITHUB_EVENT_NAME", "GITEA_EVENT_NAME", "CI_PIPELINE_SOURCE", "CI_PIPELINE_EVENT", "BUILD_REASON")
_PULL_REQUEST_EVENTS = frozenset({"merge_request_event", "external_pull_request_event", "pullrequest"})


def pull_request_sign(environ: Mapping[str, str]) -> str | None:
    """The variable that says that this is a build of a pull or merge request, as ``NAME=value``; None in other builds."""
    for name in _EVENT_VARIABLES:
        value = environ.get(name, "")
        # pull_request, pull_request_target, pull_request_review, pull_request_closed and more.
        if value.lower() in _PULL_REQUEST_EVENTS or value.lower().startswith("pull_request"):
            return f"{name}={value}"
    for name in _PULL_REQUEST_VARIABLES:
        value = environ.get(name, "")
        if value.lower() not in _NO_PULL_REQUEST:
            return f"{name}={value}"
    return None


def may_upload(
    profile: Profile, profile_file: Path, chosen: bool, workspace: Path, environ: Mapping[str, str], warn: Callable[[str], None]
) -> bool:
    """Whether this build may upload at all.

    A build of a pull request may not, unless ``profile`` allows it and no pull request can have changed it: it was
    ``chosen`` on the command line and lies outside of ``workspace`` (the directory of BUILD.yaml, or the version-controlled
    directory around it).
    """
    sign = pull_request_sign(environ)
    if sign is None:
        return True
    if profile.pull_requests == "read":
        return False
    if chosen and not profile_file.resolve().is_relative_to(_checkout(workspace)):
        return True
    warn(
        f"`pull_requests: read-write` in {profile_file} does not count in a build of a pull request ({sign}): the profile has to"
        " lie outside of the workspace and be named with --cache"
    )
    return False


def _checkout(workspace: Path) -> Path:
    resolved = workspace.resolve()
    for directory in (resolved, *resolved.parents):
        if any((directory / mark).exists() for mark in (".git", ".hg", ".svn", ".jj")):
            return directory
    return resolved


def trust_of(
    profile: Profile, profile_directory: Path, environ: Mapping[str, str], signs: bool
) -> tuple[Trust, SigningKey | None]:
    """Whose results count for remotes, and the key that signs, which only a build that uploads needs (``signs``).

    Raises what ``load_signing_key`` raises, but not for a key that is not needed and not there.
    """
    named = profile.trust.signing_key
    try:
        path = None if named is None else profile_directory / Path(named).expanduser()
    except RuntimeError:
        raise EnvironmentUnfit(
            f"there is no home directory for the signing key {named}", hint="Set HOME, or write an absolute path."
        ) from None
    try:
        signer = load_signing_key(path, environ)
    except EnvironmentUnfit:
        if signs:
            raise
        signer = None
    keys = frozenset(profile.trust.keys) | ({signer.public} if signer is not None else frozenset())
    unsigned = profile.trust.unsigned or ("refuse" if keys else "accept")
    return Trust(keys, unsigned == "accept"), signer


@dataclass(frozen=True, slots=True)
class AttachedRemote:
    """A remote of this build. ``writable``: what is built here is uploaded to it."""

    remote: Remote
    writable: bool
    timeouts: Timeouts


def open_remote(config: RemoteCache, writable: bool, environ: Mapping[str, str] | None = None) -> AttachedRemote:
    """Open a remote of a profile; only the adapter of its protocol is imported. Nothing is sent yet.

    Raises InvalidInput for an address that the protocol does not know, and for a header that cannot be sent.
    """
    environ = os.environ if environ is None else environ
    headers = {name: environ[variable] for name, variable in config.headers_from_env.items() if environ.get(variable)}
    for name, value in headers.items():
        if not (value.isascii() and value.isprintable()):
            # The value itself is a secret.
            raise InvalidInput(
                f"{config.headers_from_env[name]} holds a line end or another character that no header may hold",
                where=config.url,
                hint="Set the environment variable without a line end, and in ASCII.",
            )
    timeouts = Timeouts(config.timeouts.connect, config.timeouts.request)
    remote: Remote
    match config.url.partition("://")[0]:
        case "grpc" | "grpcs":
            from dsr1build.cache.remotes.reapi import open_reapi

            address = f"{config.url.rstrip('/')}/{config.instance}" if config.instance else config.url
            remote = open_reapi(address, timeouts=timeouts, headers=headers)
        case "http" | "https":
            from dsr1build.cache.remotes.http import open_http

            remote = open_http(config.url, timeouts=timeouts, headers=headers)
        case _:
            from dsr1build.cache.remotes.objects import open_objects

            remote = open_objects(config.url, timeouts=timeouts)
    return AttachedRemote(remote, writable and config.mode == "read-write", timeouts)
