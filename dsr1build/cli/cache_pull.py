"""``dsr1build cache pull``: take in what other caches hold."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from dsr1build.cli.caches import add_cache_arguments, chosen_profile, in_words, open_store, print_warning
from dsr1build.errors import InvalidInput

SUMMARY = "take results from the caches of another profile into the cache"
EPILOG = """All results of the other profile's cache on this machine are taken, if it is another one. Shared caches cannot be
listed: of those, the results are taken that a file of `dsr1build cache push --list` names.

examples:
  dsr1build cache pull --from /mnt/old/profile.yaml
  dsr1build cache pull --from cache/shared.yaml --keys keys.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", required=True, dest="source", metavar="PROFILE", help="the profile of the caches to take from")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="what to ask the shared caches for, as `push --list` writes it")
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.policy import open_remote, trust_of
    from dsr1build.cache.transfer import copy_results, parse_names, pull_results
    from dsr1build.config.load import load_profile

    target, source = chosen_profile(arguments), load_profile(arguments.source, "--from")
    names = []
    if arguments.keys is not None:
        try:
            names = parse_names(arguments.keys.read_text(encoding="ascii"))
        except OSError as error:
            raise InvalidInput(
                f"the list cannot be read: {error.strerror}", where=str(arguments.keys), hint="Check the path."
            ) from None
        except ValueError as error:
            raise InvalidInput(
                f"this is not a list of results: {error}",
                where=str(arguments.keys),
                hint="Make one with `dsr1build cache push --list FILE`.",
            ) from None
    trust, _ = trust_of(source.profile, source.file.parent, os.environ, signs=False)
    report = {}
    with open_store(target.cache_directory, target.profile) as store:
        if target.cache_directory != source.cache_directory:
            with open_store(source.cache_directory, source.profile, read_only=True) as other:
                report[str(source.cache_directory)] = copy_results(other, store)
        for described in source.profile.remotes if names else ():
            remote = open_remote(described, writable=False)
            report[remote.remote.name] = pull_results(store, remote, names, trust, print_warning)
    if arguments.json:
        print(json.dumps({place: asdict(moved) for place, moved in report.items()}))
    else:
        for place, moved in report.items():
            print(f"{moved.results} results, {in_words(moved.bytes)}, from {place}; {moved.refused} refused")
        if not report:
            print(f"the profile {arguments.source} has no other cache; shared caches need --keys")
    return 4 if any(moved.refused for moved in report.values()) else 0
