"""A toy model with everything that the runtime has to carry: state, experts, padded and exact variants, two layers.

Its kernels are hand-written C (toy_kernels.c), so the runtime and the link are tested without the kernel compiler.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dsr1build.digest import BlobRef, sha256_hex
from dsr1build.graph.model import Counts, Graph, Mode, Model, RopeTable, StoredTensor, TensorType
from dsr1build.graph.signature import Argument, Role, Signature, Specialization, ordered_dims, specialize
from dsr1build.link.bundle import assemble_bundle
from dsr1build.link.manifest import TargetInfo
from dsr1build.link.program import Phase, Program, Variant, build_program
from dsr1build.link.shared_object import EXPORTS, runtime_sources, runtime_target, table_sources
from dsr1build.partition.model import ExpertDispatch, Kernel, Partition, PartitionedModel
from dsr1build.toolchains.c_code import compile_c, link_shared
from dsr1build.toolchains.target import TargetSpec, c_fields, link_fields

VOCABULARY, HIDDEN, EXPERTS, TOP_K, LAYERS, CHUNK, CONTEXT = 19, 20, 6, 2, 2, 7, 48
SOURCE = Path(__file__).with_name("toy_kernels.c")
NAN_TOKEN = 18  # its embedding is NaN, so the router of the first layer fails on it


def _f32(*shape: int | str) -> TensorType:
    return TensorType("f32", shape)


def _signature(arguments: Sequence[tuple[Role, TensorType]], *dims: str) -> Signature:
    named = tuple(Argument(f"a{i}", role, type_) for i, (role, type_) in enumerate(arguments))
    return Signature(named, ordered_dims(set(dims)))


_ROWS = _f32("tokens", HIDDEN)
_WEIGHTS, _MASK = _f32("tokens", EXPERTS), TensorType("i32", ("tokens", EXPERTS))
_TABLE = _f32(VOCABULARY, HIDDEN)
SIGNATURES = {
    "embedding": _signature([("input", TensorType("i64", ("tokens",))), ("weight", _TABLE), ("output", _ROWS)], "tokens"),
    "attention": _signature(
        [("input", _ROWS), ("weight", _f32("context", HIDDEN)), ("state", _f32("context", HIDDEN)), ("output", _ROWS)],
        "tokens",
        "past",
    ),
    "gating": _signature(
        [("input", _ROWS), ("weight", _f32(EXPERTS, HIDDEN)), ("output", _WEIGHTS), ("output", _MASK)], "tokens"
    ),
    "expert": _signature([("input", _ROWS), ("weight", _f32(HIDDEN, HIDDEN)), ("output", _ROWS)], "tokens"),
    "combine": _signature(
        [("input", _ROWS), ("input", _f32("tokens", TOP_K, HIDDEN)), ("input", _f32("tokens", TOP_K)), ("output", _ROWS)],
        "tokens",
    ),
    "head": _signature([("input", _ROWS), ("weight", _TABLE), ("output", _f32("tokens", VOCABULARY))], "tokens"),
}
_VARIANTS = {
    "embedding": {"toy_embedding_range": Specialization("range"), "toy_embedding_1": Specialization("exact", 1)},
    "attention": {"toy_attention": Specialization("range")},
    "gating": {"toy_gating": Specialization("range")},
    "expert": {
        "toy_expert_range": Specialization("range"),
        "toy_expert_4": Specialization("padded", 4),
        "toy_expert_1": Specialization("exact", 1),
    },
    "combine": {"toy_combine": Specialization("range")},
    "head": {"toy_head_range": Specialization("range"), "toy_head_3": Specialization("padded", 3)},
}
_WAVES = {"embedding": [0], "attention": [0, 0, 1], "gating": [0, 1], "expert": [0, 1], "combine": [0], "head": [0]}
TARGET = TargetInfo(name="plain", triple="x86_64-unknown-linux-gnu", cpu="x86-64", features=(), cpuinfo_flags=("sse2",))
KINDS = {name: name for name in SIGNATURES}


def variants() -> dict[str, list[Variant]]:
    """The compiled variants of each kernel, as kernel.json would describe them."""
    return {
        name: [
            Variant(
                bound, symbol, specialize(SIGNATURES[name], bound), tuple(Phase(w, True, "?") for w in _WAVES[name]), "?", "?"
            )
            for symbol, bound in _VARIANTS[name].items()
        ]
        for name in SIGNATURES
    }


def weight_types() -> dict[str, TensorType]:
    types = {"embed": _TABLE, "head": _TABLE, "bias": _f32("context", HIDDEN)}
    for layer in range(LAYERS):
        types[f"layers.{layer}.gate"] = _f32(EXPERTS, HIDDEN)
        types |= {f"layers.{layer}.experts.{e}": _f32(HIDDEN, HIDDEN) for e in range(EXPERTS)}
    return types


def weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Values of the weights that a checkpoint would hold; the table ``bias`` is generated."""
    rng = np.random.default_rng(seed)
    values = {}
    for name, type_ in weight_types().items():
        if name != "bias":
            values[name] = (rng.standard_normal(type_.shape) / np.sqrt(HIDDEN)).astype(np.float32)
    values["embed"][NAN_TOKEN] = np.nan
    values["head"][NAN_TOKEN] = 0.0  # so that it is not generated
    return values


def _partitions(mode: Mode) -> tuple[list[Partition], list[ExpertDispatch]]:
    out = [Partition("embed", "embedding", mode, "embedding", ("ids", "embed", "x0"), ("embed",))]
    dispatches = []
    for layer in range(LAYERS):
        name = f"layers.{layer}"

        def add(part: str, kernel: str, *arguments: str, name: str = name) -> None:
            out.append(Partition(f"{name}.{part}", KINDS[kernel], mode, kernel, arguments, (f"{name}.{part}",)))  # type: ignore[arg-type]

        add("attention", "attention", f"x{layer}", "bias", f"cache{layer}", f"h{layer}")
        add("gate", "gating", f"h{layer}", f"{name}.gate", f"w{layer}", f"m{layer}")
        for e in range(EXPERTS):
            add(f"experts.{e}", "expert", f"h{layer}", f"{name}.experts.{e}", f"y{layer}.{e}")
        add("combine", "combine", f"h{layer}", f"slots{layer}", f"sw{layer}", f"x{layer + 1}")
        experts = tuple(f"{name}.experts.{e}" for e in range(EXPERTS))
        dispatches.append(
            ExpertDispatch(
                f"{name}.experts",
                f"h{layer}",
                f"w{layer}",
                f"m{layer}",
                experts,
                f"{name}.combine",
                f"slots{layer}",
                f"sw{layer}",
                TOP_K,
            )
        )
    out.append(Partition("head", "head", mode, "head", (f"x{LAYERS}", "head", "logits"), ("head",)))
    return out, dispatches


def partitioned_model(directory: Path | None = None, stored: dict[str, StoredTensor] | None = None) -> PartitionedModel:
    """The toy as the partition room would hand it on. ``stored`` says where its weights lie."""
    modes: tuple[Mode, ...] = ("prefill", "decode")
    states = {f"cache{layer}": _f32("context", HIDDEN) for layer in range(LAYERS)}
    graphs = {
        mode: Graph(
            mode,
            {"ids": TensorType("i64", ("tokens",)), "past": TensorType("i64", ())},
            states,
            weight_types(),
            {"logits": _f32("tokens", VOCABULARY)},
            (),
            {},
            {},
        )
        for mode in modes
    }
    bias = RopeTable("cos", tuple(1.0 / (2 + i) for i in range(HIDDEN)), 0.5)
    count = sum(int(np.prod([d for d in t.shape if isinstance(d, int)])) for n, t in weight_types().items() if n != "bias")
    model = Model(
        "toy",
        graphs,
        {**(stored or {}), "bias": bias},
        Counts(count, len(weight_types()) - 1, 4 * count),
        VOCABULARY,
        HIDDEN,
        CONTEXT,
        eos_token_ids=(3,),
        directory=str(directory) if directory else "",
    )
    kernels = {
        name: Kernel(name, KINDS[name], (), signature, (), name != "attention", name, b"")  # type: ignore[arg-type]
        for name, signature in SIGNATURES.items()
    }
    cut = {mode: _partitions(mode) for mode in modes}
    return PartitionedModel(
        model, {m: tuple(p) for m, (p, _) in cut.items()}, kernels, {m: tuple(d) for m, (_, d) in cut.items()}
    )


def toy_program(chunk: int = CHUNK) -> Program:
    return build_program(partitioned_model(), variants(), chunk, ("sse2",))


def reference(values: dict[str, np.ndarray], ids: Sequence[int]) -> np.ndarray:
    """Logits [len(ids), vocabulary] in float64."""
    w = {name: value.astype(np.float64) for name, value in values.items()}
    positions = np.arange(len(ids))[:, None]
    bias = 0.5 * np.cos(positions / (2.0 + np.arange(HIDDEN)))
    x = w["embed"][list(ids)]
    for layer in range(LAYERS):
        h = x + bias + np.cumsum(x, axis=0) / (positions + 1)
        scores = h @ w[f"layers.{layer}.gate"].T
        x = h.copy()
        for t in range(len(ids)):
            for e in sorted(np.argsort(-scores[t], kind="stable")[:TOP_K]):
                x[t] += scores[t, e] * (2 * w[f"layers.{layer}.experts.{e}"] @ h[t])
    return x @ w["head"].T


def write_checkpoint(directory: Path, values: dict[str, np.ndarray]) -> dict[str, StoredTensor]:
    """Write the weights into two safetensors files whose tensors lie at odd addresses."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {}
    names = list(values)
    for file, part in (("a.safetensors", names[: len(names) // 2]), ("b.safetensors", names[len(names) // 2 :])):
        entries, at, data = {}, 1, b"\0"
        for name in part:
            content = values[name].tobytes()
            shape = list(values[name].shape)
            entries[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + len(content)]}
            data, at = data + content, at + len(content)
        header = json.dumps(entries).encode()
        header += b" " * (-len(header) % 8)
        (directory / file).unlink(missing_ok=True)
        (directory / file).write_bytes(len(header).to_bytes(8, "little") + header + data)
        for name in part:
            begin, end = entries[name]["data_offsets"]
            stored[name] = StoredTensor(file, 8 + len(header) + begin, end - begin)
    return stored


def link_library(directory: Path, program: Program, zig_cache: Path) -> Path:
    """Compile runtime, tables and toy kernels and link them, with the workers that a build uses."""
    directory.mkdir(parents=True, exist_ok=True)
    objects: list[BlobRef] = []
    for sources in (runtime_sources(), table_sources(program), {SOURCE.name: SOURCE.read_bytes()}):
        blobs = {name: BlobRef(sha256_hex(data)) for name, data in sources.items()}
        for name, data in sources.items():
            (directory / blobs[name].sha256).write_bytes(data)
        compile_c(c_fields(blobs, runtime_target(TargetSpec())), directory, directory, zig_cache)
        for name in sorted(sources):
            if name.endswith(".c"):
                data = (directory / name).with_suffix(".o").read_bytes()
                (directory / sha256_hex(data)).write_bytes(data)
                objects.append(BlobRef(sha256_hex(data)))
    link_shared(link_fields(objects, EXPORTS, "model.so"), directory, directory)
    return directory / "model.so"


def build_toy_bundle(root: Path, library: Path, chunk: int = CHUNK, context: int = CONTEXT) -> Path:
    """A checkpoint and its bundle below ``root``."""
    stored = write_checkpoint(root / "checkpoint", weights())
    model = partitioned_model(root / "checkpoint", stored).model
    return assemble_bundle(root / "dist" / "toy" / "plain", "toy", TARGET, toy_program(chunk), model, context, library)
