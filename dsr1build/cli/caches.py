"""What the verbs that look after caches share: which cache is meant, and how sizes are written."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from dsr1build.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

    from dsr1build.cache.eviction import Limits
    from dsr1build.cache.store import LocalStore
    from dsr1build.config.load import ProfileConfig
    from dsr1build.config.schema import Profile


def add_cache_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every one of these verbs has."""
    parser.add_argument("--cache", metavar="PROFILE", default="local", help="the cache of this profile (default: local)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def chosen_profile(arguments: argparse.Namespace) -> "ProfileConfig":
    """The profile that ``--cache`` names. Raises InvalidInput."""
    from dsr1build.config.load import load_profile

    return load_profile(arguments.cache)


def open_store(
    directory: "Path", profile: "Profile", warn: Callable[[str], None] | None = None, *, read_only: bool = False
) -> "LocalStore":
    """The local store of a profile, with the profile's limits. By default warnings go to standard error."""
    from dsr1build.cache.store import LocalStore

    return LocalStore(directory, print_warning if warn is None else warn, profile_limits(profile), read_only=read_only)


def profile_limits(profile: "Profile") -> "Limits":
    from dsr1build.cache.eviction import Limits

    return Limits(profile.local.max_bytes, profile.local.max_files)


def print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr)


def bytes_option(text: str, option: str) -> int:
    """The value of an option that takes a number of bytes. Raises InvalidInput."""
    from dsr1build.config.schema import parse_bytes

    try:
        return parse_bytes(int(text) if text.isascii() and text.isdigit() else text)
    except ValueError as error:
        raise InvalidInput(
            str(error), where=option, hint="Write a whole number of bytes, or a number with its unit: '20 GB', 512MiB."
        ) from None


def in_words(size: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
