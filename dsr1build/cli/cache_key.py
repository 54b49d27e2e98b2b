"""``dsr1build cache key new``: make a pair of keys that signs results."""

import argparse
from pathlib import Path

SUMMARY = "make a pair of keys that signs results"
EPILOG = """The private key is written for its owner alone. Name it as `trust: signing_key` in the profile of the machines
that upload, or in DSR1_CACHE_KEY_FILE. The line that is printed goes to `trust: keys` in the profiles of all that download.

examples:
  dsr1build cache key new --output ~/.config/dsr1build/signing.pem
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="new file for the private key")


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.signing import new_key_pair

    print(new_key_pair(arguments.output))
    return 0
