"""``dsr1build cache import``: take in what ``dsr1build cache export`` wrote."""

import argparse
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from dsr1build.cli.caches import add_cache_arguments, chosen_profile, in_words, open_store, print_warning

SUMMARY = "take the results of an exported file into the cache"
EPILOG = """Nothing counts before its digest was compared. Signed results count only if the profile trusts their key.

examples:
  dsr1build cache import cache.tar
  dsr1build cache import cache.tar.xz --cache cache/ci.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the archive to read")
    parser.add_argument("--require-signed", action="store_true", help="refuse results without a signature")
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.archive import import_archive
    from dsr1build.cache.policy import trust_of

    config = chosen_profile(arguments)
    trust, _ = trust_of(config.profile, config.file.parent, os.environ, signs=False)
    trust = replace(trust, accept_unsigned=not arguments.require_signed)
    with open_store(config.cache_directory, config.profile) as store:
        moved = import_archive(store, arguments.file, trust, print_warning)
    if arguments.json:
        print(json.dumps(asdict(moved)))
    else:
        print(f"{moved.results} results, {in_words(moved.bytes)}, were taken into {config.cache_directory}")
        if moved.refused:
            print(f"{moved.refused} results were refused")
    return 4 if moved.refused else 0
