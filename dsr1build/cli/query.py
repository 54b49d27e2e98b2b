"""``dsr1build query``: answer questions over the plan of a build, without building."""

import argparse
from typing import TYPE_CHECKING, Any

from dsr1build.cli.caches import print_warning
from dsr1build.errors import InvalidInput

if TYPE_CHECKING:
    from dsr1build.cli.planning import PlannedBuild

NAME = "query"
SUMMARY = "answer questions over the plan: kernels, their users, what a change runs"
EPILOG = """examples:
  dsr1build query BUILD.yaml
  dsr1build query BUILD.yaml --layer 3
  dsr1build query BUILD.yaml --kernel 6d8e
  dsr1build query BUILD.yaml --changed BUILD.yaml
  dsr1build query BUILD.yaml --format dot > graph.dot
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="BUILD.yaml", help="what would be built")
    question = parser.add_mutually_exclusive_group()
    question.add_argument("--layer", type=int, metavar="N", help="the kernels of this layer; the first is 0")
    question.add_argument("--kernel", metavar="ID", help="the partitions that use this kernel; the beginning of its id is enough")
    question.add_argument(
        "--changed", action="append", metavar="FILE", help="the actions that a change of this file runs anew; may be repeated"
    )
    question.add_argument("--format", choices=("text", "json", "dot"), help="the graph of partitions, collapsed by kernel")
    parser.add_argument("--full", action="store_true", help="with --format: every partition instead of every kernel")
    parser.add_argument("--target", action="append", metavar="NAME", help="plan for this target instead; may be repeated")
    parser.add_argument("--context", type=int, metavar="N", help="longest context, in tokens")
    parser.add_argument("--cache", metavar="PROFILE", help="use the caches of this profile")
    parser.add_argument("--json", action="store_true", help="print one JSON object (`dsr1build schema query` describes it)")


def run(arguments: argparse.Namespace) -> int:
    import json

    from dsr1build.cache.store import LocalStore
    from dsr1build.cli.planning import plan_build
    from dsr1build.config.load import load_build
    from dsr1build.plan.query import render_answer, render_dot

    if arguments.full and not arguments.format:
        raise InvalidInput("--full is for the graph", where="dsr1build query", hint="Add `--format text`, `json` or `dot`.")
    if arguments.json and arguments.format in ("text", "dot"):
        hint = "Leave one out, or write `--format json`."
        raise InvalidInput(f"--json and --format {arguments.format} exclude each other", where="dsr1build query", hint=hint)
    config = load_build(arguments.file, context=arguments.context, cache=arguments.cache, targets=arguments.target)
    with LocalStore(config.cache_directory, print_warning) as store:
        build = plan_build(config, store)
    answer = answer_of(arguments, build)
    if arguments.json or arguments.format == "json":
        print(json.dumps(answer))
    else:
        print(render_dot(answer) if arguments.format == "dot" else render_answer(answer), end="")
    return 0


def answer_of(arguments: argparse.Namespace, build: "PlannedBuild") -> dict[str, Any]:
    """The answer to the question that the options ask. Raises InvalidInput for a layer, kernel or file that is not there."""
    from dsr1build.link.bundle import TOKENIZER_FILES
    from dsr1build.plan.query import changed_answer, graph_answer, kernels_answer, users_answer

    name = build.config.build.name
    if arguments.kernel is not None:
        return users_answer(name, build.partitioned, arguments.kernel)
    if arguments.changed:
        return changed_answer(build.config, build.model.directory, TOKENIZER_FILES, build.plan, arguments.changed)
    if arguments.format:
        return graph_answer(name, build.partitioned, arguments.full)
    return kernels_answer(name, build.partitioned, build.plan, arguments.layer)
