"""``dsr1build cache``: look after caches. Each subverb is a module of its own, imported when it is used.

A subverb's module has ``SUMMARY``, ``EPILOG``, ``add_arguments(parser)`` and ``run(arguments)``, as a verb's does.
"""

import argparse
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import Any

from dsr1build.cli.main import VerbEntry
from dsr1build.errors import InvalidInput

NAME = "cache"
SUMMARY = "look after caches: statistics, size, checks, moving, keys"

# In the order of the overview. The words of a subverb are its name.
SUBVERBS: Mapping[str, VerbEntry] = {
    "stats": VerbEntry("dsr1build.cli.cache_stats", "show hits, misses and why, sizes, and what is largest and costliest"),
    "gc": VerbEntry("dsr1build.cli.cache_gc", "delete what is of no use and, over the limits, what is worth least"),
    "verify": VerbEntry("dsr1build.cli.cache_verify", "read every file of the cache and, on demand, compile a sample again"),
    "export": VerbEntry("dsr1build.cli.cache_export", "write the cache to one file, for another machine or another path"),
    "import": VerbEntry("dsr1build.cli.cache_import", "take the results of an exported file into the cache"),
    "push": VerbEntry("dsr1build.cli.cache_push", "send the results of the cache to the caches of another profile"),
    "pull": VerbEntry("dsr1build.cli.cache_pull", "take results from the caches of another profile into the cache"),
    "doctor": VerbEntry("dsr1build.cli.cache_doctor", "try out the cache's directory and the shared caches of a profile"),
    "key new": VerbEntry("dsr1build.cli.cache_key", "make a pair of keys that signs results"),
}
EPILOG = """subverbs:
{subverbs}
examples:
  dsr1build cache stats
  dsr1build cache gc --max-bytes 5GB
  dsr1build cache key new --output ~/.config/dsr1build/signing.pem
  dsr1build cache key new --help
"""
EPILOG = EPILOG.format(subverbs="".join(f"  {name:<10}{entry.summary}\n" for name, entry in SUBVERBS.items()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subverb", nargs=argparse.REMAINDER, metavar="SUBVERB ...", help="one of those below, with its options")


def run(arguments: argparse.Namespace) -> int:
    name, rest = split_subverb(arguments.subverb)
    subverb: Any = import_module(SUBVERBS[name].module)
    parser = subverb_parser(name, subverb)
    code: int = subverb.run(parser.parse_args(rest))
    return code


def subverb_parser(name: str, subverb: Any) -> argparse.ArgumentParser:
    """The parser of one subverb, with its options and examples."""
    from dsr1build.cli.main import ArgumentParser

    parser = ArgumentParser(
        prog=f"dsr1build cache {name}",
        description=f"{subverb.SUMMARY[:1].upper()}{subverb.SUMMARY[1:]}.",
        epilog=subverb.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    subverb.add_arguments(parser)
    return parser


def split_subverb(words: Sequence[str]) -> tuple[str, list[str]]:
    """The subverb that ``words`` begin with, and the words that follow. Raises InvalidInput where there is none."""
    for length in (1, 2):
        name = " ".join(words[:length])
        if name in SUBVERBS:
            return name, list(words[length:])
    given = " ".join(words[:2] if words[:1] == ["key"] else words[:1])
    close = get_close_matches(given, SUBVERBS, n=1)
    lead = f"Did you mean `dsr1build cache {close[0]}`? " if close else ""
    raise InvalidInput(
        f"unknown subverb `{given}`" if given else "no subverb is given",
        where="dsr1build cache",
        hint=f"{lead}The subverbs are {', '.join(SUBVERBS)}.",
    )
