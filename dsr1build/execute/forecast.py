"""What a build would do, without doing it."""

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.store import LocalStore
from dsr1build.digest import encode, sha256_hex
from dsr1build.plan.action import Action, ActionResult

Forecast: TypeAlias = Literal["cached", "run", "unknown"]

_COUNT = {"type": "integer", "minimum": 0}
FORECAST_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Output of `dsr1build build --dry-run --json`",
    "type": "object",
    "properties": {
        "actions": {"type": "object", "additionalProperties": {"enum": ["cached", "run", "unknown"]}},
        "counts": {
            "type": "object",
            "properties": {"cached": _COUNT, "run": _COUNT, "unknown": _COUNT},
            "required": ["cached", "run", "unknown"],
            "additionalProperties": False,
        },
    },
    "required": ["actions", "counts"],
    "additionalProperties": False,
}


def forecast(actions: Mapping[str, Action], store: LocalStore) -> dict[str, Forecast]:
    """For each action, in order, whether its result is in the cache (``cached``) or it has to run (``run``).

    ``unknown`` are those whose key depends on the outputs of an action that has to run: it may write what is cached.
    """
    results: dict[str, ActionResult] = {}
    out: dict[str, Forecast] = {}
    for id, action in actions.items():
        if any(source not in results for source in action.inputs):
            out[id] = "unknown"
            continue
        try:
            fields = action.fields({source: results[source] for source in action.inputs})
        except BlobLost:
            out[id] = "unknown"
            continue
        result = store.lookup(sha256_hex(encode(fields)), peek=True)
        out[id] = "run" if result is None else "cached"
        if result is not None:
            results[id] = result
    return out
