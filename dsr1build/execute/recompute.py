"""Makes results of the cache again and compares them bit by bit: what a cache holds must be what a compile gives."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.scratch import scratch_directory
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, Fields, blob_refs, decode
from dsr1build.execute.engine import run_actions
from dsr1build.execute.options import Options
from dsr1build.lower.action import WORKER as LOWER_WORKER
from dsr1build.plan.action import Action, ActionKind, Results

# The steps whose inputs are all in the cache; those that read C sources of the package are not.
WORKERS: Mapping[str, str] = {"lower": LOWER_WORKER, "compile": "dsr1build.toolchains.compile:compile_kernel"}


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A result that was made again. ``differs`` says how it differs, and is empty where it does not."""

    key: str
    kind: str
    label: str
    differs: str


def recompute_sample(
    store: LocalStore,
    count: int,
    seed: int,
    options: Options,
    workers: Mapping[str, str] = WORKERS,
    made_by_these: Callable[[Fields], bool] | None = None,
) -> list[Recomputed]:
    """Make ``count`` results of the store again, chosen by ``seed``, in order of their keys. ``workers`` by kind.

    Only results that these tools and this version of dsr1build made are chosen (``made_by_these``): others may well have
    other bytes. Nothing is written to ``store``.
    """
    made_by_these = tools_of_this_machine if made_by_these is None else made_by_these
    chosen = sorted(key for key, entry in store.entries().items() if entry.kind in workers)
    random.Random(seed).shuffle(chosen)
    actions: dict[str, Action] = {}
    contents: dict[str, bytes] = {}
    expected: dict[str, Mapping[str, BlobRef]] = {}
    for key in chosen:
        if len(actions) == count:
            break
        record = store.record(key, counted=False)
        if record is None:
            continue
        try:
            fields = cast("Fields", decode(store.read_blob(BlobRef(key))))
            if not made_by_these(fields):
                continue
            needed = {ref.sha256: store.read_blob(ref) for ref in blob_refs(fields)}
        except (BlobLost, ValueError):
            # Inputs that were evicted cannot be had; another result is taken in its place.
            continue
        contents.update(needed)
        worker = workers[record.kind]
        kind = cast("ActionKind", record.kind)
        actions[key] = Action(key, kind, record.label, worker, (), _constant(fields), (), (worker.partition(":")[0],))
        expected[key] = {name: ref for name, (ref, _) in record.outputs.items()}
    with scratch_directory("dsr1build-recompute-") as directory, LocalStore(directory, lambda text: None) as again:
        outcome = run_actions(actions, again, options, lambda event: None, contents)
        found = []
        for key in sorted(actions):
            if key in outcome.results:
                differs = _difference(expected[key], outcome.results[key].outputs)
            else:
                differs = "it cannot be made again"
            found.append(Recomputed(key, actions[key].kind, actions[key].label, differs))
    return found


def tools_of_this_machine(fields: Fields) -> bool:
    """Whether the fields of a lower or compile action name the sources and tools that are installed here."""
    from dsr1build.lower.action import SOURCE_ROOMS
    from dsr1build.lower.sources import sources_digest
    from dsr1build.toolchains import tools

    if fields.get("action") == "lower":
        return fields.get("sources") == sources_digest(SOURCE_ROOMS)
    return fields.get("tools") == tools.identity("kernel") and fields.get("adapter") == tools.adapter_digest()


def _constant(fields: Fields) -> Callable[[Results], Fields]:
    return lambda results: fields


def _difference(expected: Mapping[str, BlobRef], made: Mapping[str, BlobRef]) -> str:
    names = [name for name in sorted({*expected, *made}) if expected.get(name) != made.get(name)]
    return f"other bytes in {', '.join(names)}" if names else ""
