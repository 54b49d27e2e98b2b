"""``dsr1build schema``: the JSON Schemas of the files that a user writes and of what the verbs print."""

import argparse
import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any

NAME = "schema"
SUMMARY = "print the JSON Schema of a file or of a verb's output"
EPILOG = """examples:
  dsr1build schema build > build.schema.json
  dsr1build schema events
"""

# The schemas of outputs stand beside the code that makes the output.
OUTPUTS: Mapping[str, tuple[str, str]] = {
    "plan": ("dsr1build.plan.report", "PLAN_SCHEMA"),
    "events": ("dsr1build.execute.events", "EVENT_SCHEMA"),
    "forecast": ("dsr1build.execute.forecast", "FORECAST_SCHEMA"),
    "record": ("dsr1build.plan.record", "RECORD_SCHEMA"),
    "explain": ("dsr1build.plan.explain_report", "EXPLAIN_SCHEMA"),
    "query": ("dsr1build.plan.query", "QUERY_SCHEMA"),
    "cache-stats": ("dsr1build.cache.checks", "STATS_SCHEMA"),
    "inspect": ("dsr1build.link.inspection", "INSPECT_SCHEMA"),
    "manifest": ("dsr1build.link.manifest", "MANIFEST_SCHEMA"),
    "run": ("dsr1build.cli.run", "RUN_SCHEMA"),
}
FILES: tuple[str, ...] = ("build", "recipe", "target", "profile")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what",
        choices=(*FILES, *OUTPUTS),
        help="a file: build, recipe, target, profile; or an output: plan (`plan --json`), events (one line of `build --json`), "
        "record (.dsr1build/last-build.json), explain (`explain --json`), query (`query --json`), "
        "cache-stats (`cache stats --json`), inspect (`inspect --json`), manifest (manifest.json of a bundle), "
        "forecast (`build --dry-run --json`), run (`run --json`)",
    )


def run(arguments: argparse.Namespace) -> int:
    print(json.dumps(schema_of(arguments.what), indent=2))
    return 0


def schema_of(what: str) -> Mapping[str, Any]:
    """The schema of one of ``FILES`` or ``OUTPUTS``."""
    if what in OUTPUTS:
        module, name = OUTPUTS[what]
        schema: Mapping[str, Any] = getattr(import_module(module), name)
        return schema
    from dsr1build.config.json_schema import json_schema

    return json_schema(what)
