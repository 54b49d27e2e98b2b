"""``dsr1build cache gc``: make the cache smaller."""

import argparse
import json
from dataclasses import asdict

from dsr1build.cli.caches import add_cache_arguments, bytes_option, chosen_profile, in_words, open_store, profile_limits

SUMMARY = "delete what is of no use and, over the limits, what is worth least"
EPILOG = """What costs least to make again for its size and was not used lately goes first. What a running build uses stays.

examples:
  dsr1build cache gc
  dsr1build cache gc --max-bytes 5GB --dry-run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--max-bytes", metavar="N", help="shrink to this size, as 5000000000 or 5GB (default: the profile's)")
    parser.add_argument("--max-files", type=int, metavar="N", help="shrink to this number of files (default: the profile's)")
    parser.add_argument("--dry-run", action="store_true", help="tell what would go, and delete nothing")
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.eviction import Limits
    from dsr1build.errors import InvalidInput

    config = chosen_profile(arguments)
    limits = profile_limits(config.profile)
    if arguments.max_files is not None and arguments.max_files < 0:
        raise InvalidInput("the number of files is negative", where="--max-files", hint="Write a number from 0.")
    limits = Limits(
        limits.max_bytes if arguments.max_bytes is None else bytes_option(arguments.max_bytes, "--max-bytes"),
        limits.max_files if arguments.max_files is None else arguments.max_files,
    )
    with open_store(config.cache_directory, config.profile) as store:
        done = store.evict(limits, arguments.dry_run)
    if arguments.json:
        print(json.dumps({**asdict(done), "dry_run": arguments.dry_run}))
        return 0
    verb = "would delete" if arguments.dry_run else "deleted"
    print(f"{verb} {done.entries} results, {done.files} files, {in_words(done.bytes)}")
    print(f"left: {in_words(done.left_bytes)} in {done.left_files} files")
    if done.held:
        print(f"{done.held} results stay although the cache is over its limits: running builds use them")
    return 0
