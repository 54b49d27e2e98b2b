"""``dsr1build cache stats``: what the cache did and what it holds."""

import argparse
import json

from dsr1build.cli.caches import add_cache_arguments, chosen_profile, in_words, open_store

SUMMARY = "show hits, misses and why, sizes, and what is largest and costliest"
EPILOG = """examples:
  dsr1build cache stats
  dsr1build cache stats --cache cache/ci.yaml --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--top", type=int, default=5, metavar="N", help="list the N largest and costliest results (default: 5)")
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.checks import survey
    from dsr1build.cache.statistics import REASONS

    config = chosen_profile(arguments)
    with open_store(config.cache_directory, config.profile) as store:
        report = survey(store, max(0, arguments.top))
    if arguments.json:
        print(json.dumps(report))
        return 0
    lookups = report["hits"] + sum(report["misses"].values())
    rate = f" ({100 * report['hits'] / lookups:.1f} %)" if lookups else ""
    print(f"cache at {report['directory']}")
    print(f"{report['builds']} {'build' if report['builds'] == 1 else 'builds'} looked up {lookups} results")
    print(f"  hits {report['hits']}{rate}: {report['seconds_saved']:.1f} s saved, {in_words(report['bytes_served'])} served")
    for reason, count in sorted(report["misses"].items()):
        print(f"  misses {count}: {reason} ({REASONS[reason]})")
    limits = report["limits"]
    print(
        f"holds {report['entries']} results: {in_words(report['bytes'])} of {in_words(limits['max_bytes'])}, "
        f"{report['files']} of {limits['max_files']} files; {report['set_aside']} damaged files set aside"
    )
    for title in ("largest", "costliest"):
        if report[title]:
            print(f"{title}:")
        for item in report[title]:
            name = f"{item['kind']} {item['label']}".strip()
            print(f"  {in_words(item['bytes']):>10}  {item['seconds']:8.2f} s  {item['key'][:16]}  {name}")
    return 0
