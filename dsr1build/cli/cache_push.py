"""``dsr1build cache push``: send what the cache holds to other caches."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from dsr1build.cli.caches import add_cache_arguments, chosen_profile, in_words, open_store, print_warning
from dsr1build.errors import EnvironmentUnfit

SUMMARY = "send the results of the cache to the caches of another profile"
EPILOG = """Results go to the other profile's cache on this machine, if it is another one, and to its shared caches that may be
written. --list writes the names of the results, which `dsr1build cache pull` takes: shared caches cannot be listed.

examples:
  dsr1build cache push --to cache/shared.yaml
  dsr1build cache push --to cache/shared.yaml --list keys.txt
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--to", required=True, metavar="PROFILE", help="the profile of the caches that receive")
    parser.add_argument(
        "--list", type=Path, metavar="FILE", help="write a line for each result: its key and the size of its fields"
    )
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.policy import may_upload, open_remote, trust_of
    from dsr1build.cache.transfer import copy_results, names_of, push_results
    from dsr1build.config.load import load_profile

    source, target = chosen_profile(arguments), load_profile(arguments.to, "--to")
    uploads = may_upload(target.profile, target.file, True, Path.cwd(), os.environ, print_warning)
    if not uploads and target.profile.remotes:
        print_warning("this is a build of a pull request: nothing is sent to shared caches")
    remotes = [r for r in (open_remote(described, uploads) for described in target.profile.remotes) if r.writable]
    _, signer = trust_of(target.profile, target.file.parent, os.environ, signs=bool(remotes))
    report = {}
    with open_store(source.cache_directory, source.profile) as store:
        if target.cache_directory != source.cache_directory:
            with open_store(target.cache_directory, target.profile) as other:
                report[str(target.cache_directory)] = copy_results(store, other)
        for remote in remotes:
            report[remote.remote.name] = push_results(store, remote, signer)
        if arguments.list is not None:
            lines = [f"{name.key} {name.size}\n" for name in names_of(store)]
            try:
                arguments.list.write_text("".join(lines), encoding="ascii")
            except OSError as error:
                raise EnvironmentUnfit(
                    f"the list cannot be written: {error.strerror}",
                    where=str(arguments.list),
                    hint="Name a file in a directory that you may write.",
                ) from None
    if arguments.json:
        print(json.dumps({place: asdict(moved) for place, moved in report.items()}))
        return 0
    for place, moved in report.items():
        print(f"{moved.results} results, {in_words(moved.bytes)}, to {place}; {moved.refused} not")
    if not report:
        print(f"the profile {arguments.to} has no other cache that may be written")
    return 0
