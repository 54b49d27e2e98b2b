"""Answers over a plan: its kernels, who uses them, what a changed file makes run anew, and the graph of the partitions.

Every answer is one JSON object that ``QUERY_SCHEMA`` describes; ``render_answer`` and ``render_dot`` make text of it.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsr1build.errors import InvalidInput
from dsr1build.graph.signature import Specialization
from dsr1build.partition.model import Partition, PartitionedModel
from dsr1build.plan.build_plan import BuildPlan

if TYPE_CHECKING:
    from dsr1build.config.load import BuildConfig

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")
_PACKAGE = Path(__file__).resolve().parents[1]
_WEIGHT_INDEX = "model.safetensors.index.json"
# Rooms whose code decides what is planned, and those that no output depends on.
_PLANNING_ROOMS = ("config", "frontends", "partition", "plan", "link")

_COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
_TEXT: dict[str, Any] = {"type": "string"}
_TEXTS: dict[str, Any] = {"type": "array", "items": _TEXT}
_MODES: dict[str, Any] = {"type": "object", "additionalProperties": _COUNT, "description": "Partitions that use it, by mode."}


def _object(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list_of(**properties: Any) -> dict[str, Any]:
    return {"type": "array", "items": _object(**properties)}


def _answer(what: str, **properties: Any) -> dict[str, Any]:
    return _object(version={"const": 1}, what={"const": what}, name=_TEXT, **properties)


_KERNELS = _list_of(id=_TEXT, kind=_TEXT, modes=_MODES, variants=_TEXTS)
_PARTITIONS = _list_of(mode=_TEXT, name=_TEXT)

QUERY_SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Output of `dsr1build query --json` and `dsr1build query --format json`",
    "oneOf": [
        _answer("kernels", kernels=_KERNELS),
        _answer("layer", layer=_COUNT, kernels=_KERNELS),
        _answer("kernel", kernel=_TEXT, kind=_TEXT, partitions=_PARTITIONS),
        _answer(
            "changed",
            files=_list_of(
                file=_TEXT,
                role=_TEXT,
                why=_TEXT,
                runs={**_TEXTS, "description": "Actions whose keys hold the file's content."},
                may_run={**_TEXTS, "description": "Actions that run anew if the change reaches what their keys hold."},
                bundles={**_TEXTS, "description": "Targets whose bundles are assembled again."},
            ),
        ),
        _answer(
            "graph",
            full={"type": "boolean", "description": "Whether a node is a partition; else it is a kernel in one mode."},
            nodes=_list_of(id=_TEXT, mode=_TEXT, kind=_TEXT, kernel=_TEXT, partitions=_COUNT),
            edges={
                "type": "array",
                "items": _object(source=_TEXT, sink=_TEXT, count=_COUNT),
                "description": "Data that flows between nodes; `count` is the number of pairs of partitions.",
            },
        ),
    ],
}


def kernels_answer(name: str, partitioned: PartitionedModel, plan: BuildPlan, layer: int | None = None) -> dict[str, Any]:
    """The kernels in the order of first use, all or those of one layer, with the partitions (of that layer) that use them.

    Raises InvalidInput for a layer that the model does not have.
    """
    layers = {int(n) for ps in partitioned.partitions.values() for p in ps for n in _layers(p)}
    if layer is not None and layer not in layers:
        hint = f"Its layers are {min(layers)} to {max(layers)}." if layers else "No partition belongs to a layer."
        raise InvalidInput(f"the model has no layer {layer}", where="--layer", hint=hint)
    uses = {
        mode: Counter(p.kernel for p in partitions if layer is None or layer in _layers(p))
        for mode, partitions in partitioned.partitions.items()
    }
    variants: dict[str, dict[Specialization, None]] = {}
    for variant in plan.variants:
        variants.setdefault(variant.kernel, {})[variant.specialization] = None
    kernels = [
        {
            "id": kernel.id,
            "kind": kernel.kind,
            "modes": {mode: count[kernel.id] for mode, count in uses.items() if count[kernel.id]},
            "variants": [str(specialization) for specialization in variants.get(kernel.id, ())],
        }
        for kernel in partitioned.kernels.values()
        if any(count[kernel.id] for count in uses.values())
    ]
    if layer is None:
        return {"version": 1, "what": "kernels", "name": name, "kernels": kernels}
    return {"version": 1, "what": "layer", "name": name, "layer": layer, "kernels": kernels}


def users_answer(name: str, partitioned: PartitionedModel, prefix: str) -> dict[str, Any]:
    """The partitions that use the kernel whose id begins with ``prefix``. Raises InvalidInput unless that is one kernel."""
    fitting = [id for id in partitioned.kernels if id.startswith(prefix)]
    # An id that two forms share has a serial after it, so a whole id can be the beginning of another.
    found = [prefix] if prefix in fitting else fitting
    if not found:
        hint = "`dsr1build query BUILD.yaml` lists the kernels."
        raise InvalidInput(f"no kernel's id begins with `{prefix}`", where="--kernel", hint=hint)
    if len(found) > 1:
        message = f"the ids of {len(found)} kernels begin with `{prefix}`"
        raise InvalidInput(message, where="--kernel", hint=f"Write more of it: {', '.join(found)}.")
    users = [
        {"mode": mode, "name": partition.name}
        for mode, partitions in partitioned.partitions.items()
        for partition in partitions
        if partition.kernel == found[0]
    ]
    kind = partitioned.kernels[found[0]].kind
    return {"version": 1, "what": "kernel", "name": name, "kernel": found[0], "kind": kind, "partitions": users}


def changed_answer(
    config: "BuildConfig", directory: str, tokenizer_files: Collection[str], plan: BuildPlan, files: Sequence[str]
) -> dict[str, Any]:
    """What runs anew when these files change; they need not exist, since a removed file has changed too.

    ``directory`` is the checkpoint's, or empty; ``tokenizer_files`` are the names of those of its files that a bundle takes.
    Raises InvalidInput for a file that the build does not read.
    """
    entries = [_change(config, directory, tokenizer_files, plan, file) for file in files]
    return {"version": 1, "what": "changed", "name": config.build.name, "files": entries}


def _change(
    config: "BuildConfig", directory: str, tokenizer_files: Collection[str], plan: BuildPlan, file: str
) -> dict[str, Any]:
    ids = plan.actions
    lowers, compiles, runtimes, links = (_of_kind(plan, kind) for kind in ("lower", "compile", "runtime", "link"))
    every = tuple(plan.targets)

    def entry(
        role: str, why: str, runs: Collection[str] = (), may_run: Collection[str] = (), bundles: Sequence[str] = every
    ) -> dict[str, Any]:
        return {
            "file": file,
            "role": role,
            "why": why,
            "runs": [id for id in ids if id in runs],
            "may_run": [id for id in ids if id in may_run and id not in runs],
            "bundles": list(bundles),
        }

    build_file, recipe_file, *target_files, profile_file = config.files
    if _same(file, build_file):
        return entry("build file", "it names everything else", may_run=ids)
    if _same(file, recipe_file):
        return entry("recipe", "it decides partitions, variants and pipelines", may_run=lowers | compiles | links)
    of_targets = [t.name for t, path in zip(config.targets, target_files, strict=True) if _same(file, path)]
    if of_targets:
        own = {id for target in of_targets for id in _of_target(plan, target)}
        return entry("target", "CPU, features, pass groups and schedules are in the keys", may_run=own, bundles=of_targets)
    if _same(file, profile_file):
        return entry("cache profile", "no key holds it; another cache may lack results", bundles=())
    path = _real(file)
    if found := _model_file(config, directory, tokenizer_files, path):
        role, why = found
        return entry(role, why, may_run=lowers | compiles | links if role == "model configuration" else ())
    if not path.is_relative_to(_PACKAGE) or not path.is_file() or path.suffix not in (".py", ".c", ".h"):
        raise _unknown(config, file)
    relative = path.relative_to(_PACKAGE)
    room, folder = relative.parts[0], relative.parent.as_posix()
    if folder == "runtime/c" and path.suffix in (".c", ".h"):
        tables = {id for id in links if id.startswith("tables:")} if path.name == "program.h" else set()
        return entry("C runtime", "the keys hold its sources", runs=runtimes | tables, may_run=links)
    in_lower = room in ("graph", "ops", "lower") and path.suffix == ".py"
    in_adapter = (folder == "toolchains" and path.suffix == ".py") or relative.as_posix() in (
        "digest.py",
        "graph/signature.py",
    )
    if in_lower or in_adapter:
        runs = (lowers if in_lower else frozenset()) | (compiles | runtimes | links if in_adapter else frozenset())
        may_run = compiles | links if in_lower else lowers if room == "digest.py" else ()
        return entry("own source", "the keys hold the digest of these sources", runs, may_run)
    if room in _PLANNING_ROOMS:
        return entry("own source", "it decides what is planned; no key holds it", may_run=ids)
    return entry("own source", "no key holds it", bundles=())


def _model_file(config: "BuildConfig", directory: str, tokenizer_files: Collection[str], path: Path) -> tuple[str, str] | None:
    from dsr1build.config.load import CheckpointSource

    source = config.model
    config_file = source.directory / "config.json" if isinstance(source, CheckpointSource) else source.config
    if _same(config_file, path):
        return "model configuration", "shapes and layers follow from it"
    if not directory or path.parent != Path(directory).resolve():
        return None
    if path.name in tokenizer_files:
        return "tokenizer", "only the bundle holds it"
    if path.suffix == ".safetensors" or path.name == _WEIGHT_INDEX:
        return "weight file", "no key holds values of weights; other names, types or shapes are another model"
    return None


def _unknown(config: "BuildConfig", file: str) -> InvalidInput:
    return InvalidInput(
        f"the build `{config.build.name}` does not read this file",
        where=file,
        hint="It reads BUILD.yaml, the files that it names, those of the model, and dsr1build's own sources.",
    )


def _of_kind(plan: BuildPlan, kind: str) -> frozenset[str]:
    return frozenset(id for id, action in plan.actions.items() if action.kind == kind)


def _of_target(plan: BuildPlan, target: str) -> frozenset[str]:
    compiles = {variant.compile for variant in plan.variants if variant.target == target}
    return frozenset({*compiles, *(f"{kind}:{target}" for kind in ("runtime", "tables", "link"))})


def _real(path: str | Path) -> Path:
    """The absolute path; links of folders are followed, a link that is itself the file is not (checkpoints are full of them)."""
    return Path(path).parent.resolve() / Path(path).name


def _same(first: str | Path, second: str | Path) -> bool:
    return _real(first) == _real(second)


def _layers(partition: Partition) -> frozenset[int]:
    return frozenset(int(found[1]) for module in partition.modules if (found := _LAYER.search(module)))


def graph_answer(name: str, partitioned: PartitionedModel, full: bool = False) -> dict[str, Any]:
    """The graph of partitions of each mode, collapsed by kernel unless ``full``. Routed experts read the gating partition of
    their layer and are read by its combine partition."""
    nodes: list[dict[str, Any]] = []
    edges: Counter[tuple[str, str]] = Counter()
    for mode, partitions in partitioned.partitions.items():
        node_of = {p.name: f"{mode}:{p.name if full else p.kernel}" for p in partitions}
        counts = Counter(node_of.values())
        shown = {node_of[p.name]: p for p in reversed(partitions)}
        for id in counts:
            partition = shown[id]
            kind = partitioned.kernels[partition.kernel].kind if not full else partition.kind
            nodes.append({"id": id, "mode": mode, "kind": kind, "kernel": partition.kernel, "partitions": counts[id]})
        edges.update((node_of[source], node_of[sink]) for source, sink in _flows(partitioned, mode, partitions))
    arrows = [{"source": source, "sink": sink, "count": count} for (source, sink), count in edges.items()]
    return {"version": 1, "what": "graph", "name": name, "full": full, "nodes": nodes, "edges": arrows}


def _flows(partitioned: PartitionedModel, mode: Any, partitions: Sequence[Partition]) -> Iterable[tuple[str, str]]:
    """Pairs of partitions (source, sink) of one mode between which a value flows, each once, in the order of sinks."""
    producers: dict[str, str] = {}
    pairs: dict[tuple[str, str], None] = {}
    roles = {id: [a.role for a in kernel.signature.arguments] for id, kernel in partitioned.kernels.items()}
    for partition in partitions:
        for role, value in zip(roles[partition.kernel], partition.arguments, strict=True):
            if role == "output":
                producers[value] = partition.name
    dispatched: dict[str, list[str]] = {}
    for dispatch in partitioned.dispatches.get(mode, ()):
        gates = [producers[value] for value in (dispatch.weights, dispatch.mask) if value in producers]
        for expert in dispatch.experts:
            dispatched.setdefault(expert, []).extend(gates)
        dispatched.setdefault(dispatch.combine, []).extend(dispatch.experts)
    for partition in partitions:
        for role, value in zip(roles[partition.kernel], partition.arguments, strict=True):
            if role == "input" and value in producers:
                pairs[producers[value], partition.name] = None
        pairs.update(dict.fromkeys((source, partition.name) for source in dispatched.get(partition.name, ())))
    return pairs


def render_answer(answer: Mapping[str, Any]) -> str:
    """The answer as text, one fact a line."""
    lines: list[str] = []
    if answer["what"] in ("kernels", "layer"):
        for kernel in answer["kernels"]:
            used = " and ".join(f"{count:,} in {mode}" for mode, count in kernel["modes"].items())
            lines.append(f"{kernel['id']}  {kernel['kind']:<10} {used}  [{', '.join(kernel['variants'])}]")
    elif answer["what"] == "kernel":
        lines.append(f"{answer['kernel']}  {answer['kind']}: {len(answer['partitions']):,} uses")
        lines += [f"  {user['mode']:<8} {user['name']}" for user in answer["partitions"]]
    elif answer["what"] == "changed":
        for change in answer["files"]:
            lines.append(f"{change['file']}: {change['role']}; {change['why']}")
            for key, lead in (("runs", "runs"), ("may_run", "may run"), ("bundles", "assembles the bundle of")):
                lines += [f"  {lead} {item}" for item in change[key]]
            if not change["bundles"]:
                lines.append("  nothing runs")
    else:
        outgoing: dict[str, list[str]] = {}
        for edge in answer["edges"]:
            times = f" ({edge['count']:,})" if edge["count"] > 1 else ""
            outgoing.setdefault(edge["source"], []).append(f"  -> {edge['sink']}{times}")
        for node in answer["nodes"]:
            tail = node["kernel"] if answer["full"] else _partitions(node["partitions"])
            lines += [f"{node['id']}  {node['kind']}  {tail}", *outgoing.get(node["id"], ())]
    return "".join(f"{_printable(line)}\n" for line in lines)


def render_dot(answer: Mapping[str, Any]) -> str:
    """A graph answer in the DOT language (https://graphviz.org/doc/info/lang.html); every name stands quoted and escaped."""
    lines = [f"digraph {_quoted(answer['name'])} {{", "  node [shape=box];"]
    for node in answer["nodes"]:
        count = "" if answer["full"] else f" x {node['partitions']}"
        label = f"{node['id']}: {node['kind']}{count}"
        lines.append(f"  {_quoted(node['id'])} [label={_quoted(label)}];")
    for edge in answer["edges"]:
        label = f" [label={_quoted(str(edge['count']))}]" if edge["count"] > 1 else ""
        lines.append(f"  {_quoted(edge['source'])} -> {_quoted(edge['sink'])}{label};")
    return "\n".join([*lines, "}"]) + "\n"


def _partitions(count: int) -> str:
    return f"{count:,} partition{'s' if count > 1 else ''}"


def _quoted(text: str) -> str:
    """A quoted DOT string. A backslash is doubled because labels give ``\\n`` and ``\\N`` a meaning."""
    escaped = _printable(text).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)
