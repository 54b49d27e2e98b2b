"""``dsr1build inspect``: show what a bundle holds."""

import argparse
from pathlib import Path

NAME = "inspect"
SUMMARY = "show what a bundle holds"
EPILOG = """examples:
  dsr1build inspect dist/r1-mini/x86-64-v3
  dsr1build inspect dist/r1-mini/x86-64-v3 --json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path, help="directory of a bundle, as printed by `dsr1build build`")
    parser.add_argument("--json", action="store_true", help="print one JSON object (`dsr1build schema inspect` describes it)")


def run(arguments: argparse.Namespace) -> int:
    from dsr1build.link.inspection import inspect_bundle, render_inspection
    from dsr1build.runtime.session import missing_features

    found = inspect_bundle(arguments.bundle, missing_features)
    print(found.model_dump_json() if arguments.json else render_inspection(found))
    return 0
