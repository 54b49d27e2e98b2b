"""What a build consists of, as one JSON object (``PLAN_SCHEMA``) and as text for people."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dsr1build.graph.model import Mode
from dsr1build.graph.signature import Signature, Specialization
from dsr1build.partition.explain import look_alikes
from dsr1build.partition.model import Kernel, PartitionedModel
from dsr1build.plan.build_plan import BuildPlan

_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_COUNTS: dict[str, Any] = {"type": "object", "additionalProperties": _COUNT}


def _object(properties: Mapping[str, Any], optional: Sequence[str] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


_CUT = {"total": _COUNT, "by_kind": {**_COUNTS, "description": "Number of partitions by kind."}}

PLAN_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Output of `dsr1build plan --json`",
    **_object(
        {
            "version": {"const": 1},
            "name": {"type": "string", "description": "Name of the build."},
            "model": _object(
                {
                    "architecture": {"type": "string"},
                    "parameters": {**_COUNT, "description": "Elements of the main model's tensors, without block scales."},
                    "tensors": {**_COUNT, "description": "Tensors of the main model, without block scales."},
                    "bytes": {**_COUNT, "description": "Bytes of these tensors as stored."},
                    "context": {**_COUNT, "description": "Longest context in tokens."},
                    "skipped": {
                        "type": "array",
                        "description": "Groups of tensors that are recognised and left out.",
                        "items": _object({"what": {"type": "string"}, "tensors": _COUNT}),
                    },
                }
            ),
            "partitions": _object(
                {
                    **_CUT,
                    "modes": {
                        "type": "object",
                        "description": "Total and kinds of each mode; those above are the first mode's.",
                        "additionalProperties": _object(_CUT),
                    },
                }
            ),
            "kernels": {
                "type": "array",
                "description": "Distinct kernels of both modes in the order of first use.",
                "items": _object(
                    {
                        "id": {"type": "string", "description": "First 16 digits of the structural digest."},
                        "digest": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
                        "kind": {"type": "string"},
                        "instances": {**_COUNT, "description": "Partitions of one mode that are this kernel."},
                        "modes": {**_COUNTS, "description": "Instances by mode."},
                        "variants": {
                            "type": "array",
                            "description": "What the kernel is compiled for, on every target.",
                            "items": _object(
                                {
                                    "guard": {"enum": ["exact", "padded", "range"]},
                                    "tokens": {**_COUNT, "description": "Absent for `range`."},
                                },
                                optional=("tokens",),
                            ),
                        },
                        "signature": {"type": "object", "description": "Arguments in order and run-time dimensions."},
                    }
                ),
            },
            "differences": {
                "type": "array",
                "description": "What tells kernels of one kind apart.",
                "items": _object(
                    {
                        "kind": {"type": "string"},
                        "kernels": {"type": "array", "items": {"type": "string"}, "minItems": 2, "maxItems": 2},
                        "difference": {"type": "string"},
                    }
                ),
            },
            "actions": _object(
                {
                    "total": _COUNT,
                    "by_kind": _COUNTS,
                    "cached": {**_COUNT, "description": "Actions whose results are in the cache."},
                    "to_run": _COUNT,
                    "unknown": {**_COUNT, "description": "Actions whose keys depend on results that are not there yet."},
                    "cached_by_kind": _COUNTS,
                }
            ),
            "notes": {"type": "array", "items": {"type": "string"}},
        }
    ),
}


def plan_report(
    name: str,
    partitioned: PartitionedModel,
    plan: BuildPlan,
    forecasts: Mapping[str, str],
) -> dict[str, Any]:
    """The object that ``PLAN_SCHEMA`` describes. ``forecasts`` has ``cached``, ``run`` or ``unknown`` for each action."""
    model, actions = partitioned.model, plan.actions
    variants: dict[str, dict[Specialization, None]] = {id: {} for id in partitioned.kernels}
    for variant in plan.variants:
        variants[variant.kernel][variant.specialization] = None
    cuts = {
        mode: {"total": len(partitions), "by_kind": dict(sorted(Counter(p.kind for p in partitions).items()))}
        for mode, partitions in partitioned.partitions.items()
    }
    instances = {mode: Counter(p.kernel for p in partitions) for mode, partitions in partitioned.partitions.items()}
    states = Counter(forecasts[id] for id in actions)
    return {
        "version": 1,
        "name": name,
        "model": {
            "architecture": model.architecture,
            "parameters": model.counts.parameters,
            "tensors": model.counts.tensors,
            "bytes": model.counts.bytes,
            "context": model.max_context,
            "skipped": [{"what": what, "tensors": count} for what, count in model.skipped],
        },
        "partitions": {**next(iter(cuts.values())), "modes": cuts},
        "kernels": [_kernel(kernel, variants[kernel.id], instances) for kernel in partitioned.kernels.values()],
        "differences": [
            {"kind": second.kind, "kernels": [first.id, second.id], "difference": why}
            for first, second, why in look_alikes(list(partitioned.kernels.values()))
        ],
        "actions": {
            "total": len(actions),
            "by_kind": dict(Counter(action.kind for action in actions.values())),
            "cached": states["cached"],
            "to_run": states["run"],
            "unknown": states["unknown"],
            "cached_by_kind": dict(Counter(a.kind for id, a in actions.items() if forecasts[id] == "cached")),
        },
        "notes": [*model.notes, *partitioned.notes],
    }


def _kernel(kernel: Kernel, variants: Iterable[Specialization], instances: Mapping[Mode, Counter[str]]) -> dict[str, Any]:
    modes = {mode: counts[kernel.id] for mode, counts in instances.items() if counts[kernel.id]}
    return {
        "id": kernel.id,
        "digest": kernel.digest,
        "kind": kernel.kind,
        "instances": max(modes.values()),
        "modes": modes,
        "variants": [{"guard": v.guard} if v.guard == "range" else {"guard": v.guard, "tokens": v.tokens} for v in variants],
        "signature": kernel.signature.to_json(),
    }


def render_report(report: Mapping[str, Any]) -> str:
    """The report as text, one fact a line."""
    model, partitions, actions = report["model"], report["partitions"], report["actions"]
    lines = [
        f"{report['name']}: {model['architecture']}, {model['parameters']:,} parameters in {model['tensors']:,} tensors"
        f" ({_size(model['bytes'])}), context {model['context']:,}",
    ]
    lines += [f"  left out: {s['what']} ({s['tensors']:,} tensors)" for s in model["skipped"]]
    lines += ["", f"{partitions['total']:,} partitions in each mode"]
    if len({cut["total"] for cut in partitions["modes"].values()}) > 1:
        lines[-1] = ", ".join(f"{cut['total']:,} partitions in {mode}" for mode, cut in partitions["modes"].items())
    lines += [f"  {kind:<10} {count:>8,}" for kind, count in partitions["by_kind"].items()]
    lines += ["", f"{len(report['kernels'])} kernels"]
    for kernel in report["kernels"]:
        used = " and ".join(f"{count:,} in {mode}" for mode, count in kernel["modes"].items())
        lines += [
            f"  {kernel['id']}  {kernel['kind']:<10} {used}",
            f"    variants   {', '.join(_variant(v) for v in kernel['variants'])}",
            f"    signature  {_signature(Signature.from_json(kernel['signature']))}",
        ]
    if report["differences"]:
        lines += ["", "kernels of one kind, and what tells them apart"]
    for entry in report["differences"]:
        lines.append(f"  {entry['kind']} {' and '.join(entry['kernels'])}: {entry['difference']}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in actions["by_kind"].items())
    lines += ["", f"{actions['total']} actions ({kinds})"]
    for state, meaning in (("cached", "cached"), ("to_run", "to run"), ("unknown", "not known before others have run")):
        lines.append(f"  {actions[state]:>5} {meaning}")
    if report["notes"]:
        lines += ["", "notes", *(f"  {note}" for note in report["notes"])]
    return "\n".join(lines) + "\n"


def _variant(variant: Mapping[str, Any]) -> str:
    return str(Specialization(variant["guard"], variant.get("tokens", 0)))


def _signature(signature: Signature) -> str:
    """What goes in and out, on one line; weights are counted."""
    by_role: dict[str, list[str]] = {"input": [], "weight": [], "state": [], "output": []}
    for argument in signature.arguments:
        by_role[argument.role].append(str(argument.type))
    parts = list(by_role["input"])
    if by_role["weight"]:
        parts.append(f"{len(by_role['weight'])} weights" if len(by_role["weight"]) > 1 else "1 weight")
    parts += [f"state {text}" for text in by_role["state"]]
    return f"{', '.join(parts)} -> {', '.join(by_role['output'])}"


def _size(size: int) -> str:
    for unit, scale in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if size >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size} bytes"
