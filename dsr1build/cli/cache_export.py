"""``dsr1build cache export``: the cache as one file."""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from dsr1build.cli.caches import add_cache_arguments, chosen_profile, in_words, open_store

SUMMARY = "write the cache to one file, for another machine or another path"
EPILOG = """Equal caches give equal files. A name that ends in .gz or .xz asks for compression.

examples:
  dsr1build cache export cache.tar
  dsr1build cache export /mnt/backup/cache.tar.xz --cache cache/ci.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the archive to write; it is replaced if it exists")
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.archive import export_archive

    config = chosen_profile(arguments)
    with open_store(config.cache_directory, config.profile) as store:
        moved = export_archive(store, arguments.file)
    if arguments.json:
        print(json.dumps(asdict(moved)))
        return 0
    print(f"{moved.results} results, {in_words(moved.bytes)}, are in {arguments.file}")
    if moved.refused:
        print(f"{moved.refused} results are damaged and were left out; `dsr1build cache verify` names them")
    return 0
