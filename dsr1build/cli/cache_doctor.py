"""``dsr1build cache doctor``: does the cache work here?"""

import argparse
import json
from dataclasses import asdict

from dsr1build.cli.caches import add_cache_arguments, chosen_profile, print_warning

SUMMARY = "try out the cache's directory and the shared caches of a profile"
EPILOG = """A small store is made beside the cache and removed again. Shared caches that may be written get one small result.

examples:
  dsr1build cache doctor
  dsr1build cache doctor --cache cache/ci.yaml --json

exit codes: 3 the surroundings are not fit, 4 wrong bytes came back
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_cache_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.cache.checks import check_directory
    from dsr1build.cache.policy import open_remote
    from dsr1build.cache.transfer import check_remote

    config = chosen_profile(arguments)
    checks = check_directory(config.cache_directory)
    for described in config.profile.remotes:
        checks += check_remote(open_remote(described, writable=True), print_warning)
    if arguments.json:
        print(json.dumps({"checks": [asdict(check) for check in checks]}))
    else:
        width = max(len(check.name) for check in checks)
        subject = ""
        for check in checks:
            if check.subject != subject:
                subject = check.subject
                print(subject)
            print(f"  {check.verdict:<5}  {check.name:<{width}}  {check.seconds * 1000:7.0f} ms  {check.detail}")
    verdicts = {check.verdict for check in checks}
    return 4 if "wrong" in verdicts else 3 if "unfit" in verdicts else 0
