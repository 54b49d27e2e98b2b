"""Opens the shared caches that a profile names, as far as this build may use them."""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsr1build.cache.shared import SharedCache
    from dsr1build.cache.store import LocalStore
    from dsr1build.config.load import BuildConfig


@contextlib.contextmanager
def open_shared(
    config: "BuildConfig", store: "LocalStore", warn: Callable[[str], None], alarm: Callable[[str], None], *, read_only: bool
) -> "Iterator[SharedCache | None]":
    """The caches of a build, or None where the profile names neither remotes nor trusted keys; nothing is imported then.

    To be entered before the build is planned: from then on it is watched whether tools and sources change. With
    ``read_only`` nothing is uploaded. Raises InvalidInput for an address that its protocol does not know, and what
    ``load_signing_key`` raises.
    """
    profile = config.profile
    if not profile.remotes and not profile.trust.keys:
        yield None
        return
    from dsr1build.cache.policy import may_upload, open_remote, trust_of
    from dsr1build.cache.shared import Notices, SharedCache
    from dsr1build.cache.unchanged import watch_program

    uploads = not read_only and any(remote.mode == "read-write" for remote in profile.remotes)
    if uploads:
        uploads = may_upload(profile, config.profile_file, config.profile_chosen, config.file.parent, os.environ, warn)
    trust, signer = trust_of(profile, config.profile_file.parent, os.environ, uploads)
    unchanged = watch_program() if uploads else lambda: False
    remotes = [open_remote(remote, uploads) for remote in profile.remotes]
    with SharedCache(store, remotes, trust, signer, unchanged, Notices(warn, alarm)) as shared:
        yield shared
