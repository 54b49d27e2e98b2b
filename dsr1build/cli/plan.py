"""``dsr1build plan``: show what a build consists of and what is cached, without building."""

import argparse

from dsr1build.cli.caches import print_warning

NAME = "plan"
SUMMARY = "show what a build consists of and what is cached, without building"
EPILOG = """examples:
  dsr1build plan BUILD.yaml
  dsr1build plan BUILD.yaml --json
  dsr1build plan BUILD.yaml --target native
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="BUILD.yaml", help="what to build")
    parser.add_argument("--target", action="append", metavar="NAME", help="plan for this target instead; may be repeated")
    parser.add_argument("--context", type=int, metavar="N", help="longest context, in tokens")
    parser.add_argument("--cache", metavar="PROFILE", help="look into the caches of this profile")
    parser.add_argument("--json", action="store_true", help="print one JSON object (`dsr1build schema plan` describes it)")


def run(arguments: argparse.Namespace) -> int:
    import json

    from dsr1build.cache.store import LocalStore
    from dsr1build.cli.planning import plan_build
    from dsr1build.config.load import load_build
    from dsr1build.execute.forecast import forecast
    from dsr1build.plan.report import plan_report, render_report

    config = load_build(arguments.file, context=arguments.context, cache=arguments.cache, targets=arguments.target)
    with LocalStore(config.cache_directory, print_warning) as store:
        build = plan_build(config, store)
        forecasts = forecast(build.plan.actions, store)
    report = plan_report(config.build.name, build.partitioned, build.plan, forecasts)
    print(json.dumps(report) if arguments.json else render_report(report), end="\n" if arguments.json else "")
    return 0
