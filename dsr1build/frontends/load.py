"""A model source becomes a ``graph.Model``: a checkpoint directory, or a configuration with reproducible random weights."""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from dsr1build.errors import InvalidInput
from dsr1build.frontends.checkpoint.blueprint import Blueprint, Expected, Role
from dsr1build.frontends.checkpoint.config_fields import Fields, read_fields
from dsr1build.frontends.checkpoint.deepseek_v3 import read_deepseek_v3
from dsr1build.frontends.checkpoint.llama import read_llama
from dsr1build.frontends.checkpoint.qwen2 import read_qwen2
from dsr1build.frontends.checkpoint.safetensors_index import FileTensor, read_checkpoint_tensors
from dsr1build.graph.model import (
    ITEM_BYTES,
    Counts,
    DType,
    Graph,
    Mode,
    Model,
    RandomTensor,
    RopeTable,
    StoredTensor,
    TensorType,
    WeightSource,
)

ARCHITECTURES: Mapping[str, Callable[[Fields], Blueprint]] = {
    "deepseek_v3": read_deepseek_v3,
    "llama": read_llama,
    "qwen2": read_qwen2,
}

# The dtypes that a checkpoint may store a tensor in, by safetensors name.
_FLOATS: Mapping[str, DType] = {"F32": "f32", "BF16": "bf16", "F16": "f16"}
_STORED: Mapping[Role, Mapping[str, DType]] = {
    "gain": _FLOATS,
    "matrix": _FLOATS,
    "bias": _FLOATS,
    "selection_bias": {"F32": "f32"},
    "fp8_matrix": {"F8_E4M3": "f8e4m3fn"},
    "fp8_scale": {"F32": "f32"},
}
_SHOWN_PROBLEMS = 5


def load_model(*, checkpoint: Path | None, config: Path | None, seed: int | None, context: int | None) -> Model:
    """Load the model of a checkpoint directory, or of a config.json with random weights from ``seed`` (default 0).

    Exactly one of ``checkpoint`` and ``config`` is given. ``context`` is the longest context in tokens; None stands for
    the model's own limit, ``max_position_embeddings``. Only headers of weight files are read.

    Raises InvalidInput for everything that is wrong with the source: an unknown architecture, an unknown or unsupported
    field, a context beyond the model's limit, tensors that are missing, misshapen or unknown.
    """
    if (checkpoint is None) == (config is None):
        raise ValueError("exactly one of checkpoint and config is needed")
    if checkpoint is not None:
        return _load_checkpoint(checkpoint, context)
    assert config is not None
    fields = read_fields(config)
    blueprint = _read_blueprint(fields)
    distinct = {e: TensorType(_default_dtype(e.role, blueprint.dtype), e.shape) for e in set(blueprint.tensors.values())}
    types = {name: distinct[e] for name, e in blueprint.tensors.items()}
    by_role = {role: _random_source(role, blueprint.deviation, seed or 0) for role in _STORED}
    sources: dict[str, WeightSource] = {name: by_role[e.role] for name, e in blueprint.tensors.items()}
    return _assemble(fields, blueprint, context, types, sources, blueprint.bos_token_ids, blueprint.eos_token_ids)


def _load_checkpoint(directory: Path, context: int | None) -> Model:
    if not directory.is_dir():
        message = "expected a directory with config.json and *.safetensors files"
        message += ", found a file" if directory.exists() else ", found nothing"
        raise InvalidInput(message, where=str(directory), hint="Name the checkpoint's directory.")
    if not (directory / "config.json").exists():
        hint = "Name the directory that holds config.json beside the weights."
        raise InvalidInput("the checkpoint has no config.json", where=str(directory), hint=hint)
    fields = read_fields(directory / "config.json")
    blueprint = _read_blueprint(fields)
    found, notes = read_checkpoint_tensors(directory)
    types, sources, skipped = _match(directory, blueprint, found)
    bos, eos = _generation_ids(directory, blueprint)
    return _assemble(
        fields, blueprint, context, types, sources, bos, eos, directory=str(directory.resolve()), skipped=skipped, notes=notes
    )


def _read_blueprint(fields: Fields) -> Blueprint:
    model_type = fields.raw("model_type")
    supported = ", ".join(ARCHITECTURES)
    if model_type is None:
        hint = f"Supported: {supported}."
        raise InvalidInput("field 'model_type' is missing", where=str(fields.file), hint=hint)
    return ARCHITECTURES[fields.choice("model_type", "", tuple(ARCHITECTURES))](fields)


def _default_dtype(role: Role, dtype: DType) -> DType:
    if role in ("selection_bias", "fp8_scale"):
        return "f32"
    return "f8e4m3fn" if role == "fp8_matrix" else dtype


def _random_source(role: Role, deviation: float, seed: int) -> RandomTensor:
    """Norm gains lie near 1; selection biases are wide enough to matter beside sigmoid scores, half of them negative."""
    if role in ("gain", "fp8_scale"):
        return RandomTensor(seed, 1.0, 0.02)
    return RandomTensor(seed, 0.0, 0.1 if role == "selection_bias" else deviation)


def _match(
    directory: Path, blueprint: Blueprint, found: Mapping[str, FileTensor]
) -> tuple[dict[str, TensorType], dict[str, WeightSource], tuple[tuple[str, int], ...]]:
    """Pair every expected tensor with a stored one and account for the rest."""
    problems: list[str] = []
    missing: list[str] = []
    types: dict[str, TensorType] = {}
    sources: dict[str, WeightSource] = {}
    for name, expected in blueprint.tensors.items():
        tensor = found.get(name)
        if tensor is None:
            missing.append(name)
            continue
        dtype = _STORED[expected.role].get(tensor.dtype)
        if tensor.shape != expected.shape:
            problems.append(f"{name} has the shape {list(tensor.shape)}, expected {list(expected.shape)}")
        elif dtype is None:
            allowed = " or ".join(_STORED[expected.role])
            problems.append(f"{name} has the dtype {tensor.dtype}, expected {allowed}")
        else:
            types[name] = TensorType(dtype, expected.shape)
            sources[name] = StoredTensor(tensor.file, tensor.offset, tensor.length)
    skipped, unknown = _sort_rest(blueprint, (name for name in found if name not in blueprint.tensors))
    if missing or unknown or problems:
        _refuse(directory, blueprint.tensors, missing, unknown, problems)
    return types, sources, skipped


def _sort_rest(blueprint: Blueprint, names: Iterable[str]) -> tuple[tuple[tuple[str, int], ...], list[str]]:
    """Groups of tensors that are known and not needed, as (what, number), and the tensors that nothing explains."""
    extra = tuple(f"model.layers.{layer}." for layer in blueprint.extra_layers)
    counts = {"multi-token prediction layers": 0, "RoPE frequency buffers": 0, "stored copy of the tied head": 0}
    unknown: list[str] = []
    for name in names:
        if extra and name.startswith(extra):
            counts["multi-token prediction layers"] += 1
        elif name.endswith("rotary_emb.inv_freq"):
            counts["RoPE frequency buffers"] += 1
        elif name == "lm_head.weight" and blueprint.tied:
            counts["stored copy of the tied head"] += 1
        else:
            unknown.append(name)
    return tuple((what, count) for what, count in counts.items() if count), unknown


def _refuse(
    directory: Path, expected: Mapping[str, Expected], missing: list[str], unknown: list[str], problems: list[str]
) -> None:
    """One error for all that is wrong with the tensors, naming the first few."""
    lines = problems[:_SHOWN_PROBLEMS]
    for name in missing[: _SHOWN_PROBLEMS - len(lines)]:
        close = difflib.get_close_matches(name, unknown[:1000], n=1, cutoff=0.8)
        lines.append(f"{name} {list(expected[name].shape)} is missing" + (f" (is {close[0]!r} meant to be it?)" if close else ""))
    for name in unknown[: _SHOWN_PROBLEMS - len(lines)]:
        lines.append(f"{name} is not a tensor of this model")
    total = len(problems) + len(missing) + len(unknown)
    if total > len(lines):
        lines.append(f"and {total - len(lines)} more")
    count = "1 problem" if total == 1 else f"{total} problems"
    message = "\n    ".join((f"the weights do not fit config.json ({count}):", *lines))
    hint = "Use config.json and weights of one revision of one model."
    if missing == ["lm_head.weight"] and total == 1:
        hint = "If the head shares the embedding's tensor, set `tie_word_embeddings` to true in config.json."
    raise InvalidInput(message, where=str(directory), hint=hint)


def _generation_ids(directory: Path, blueprint: Blueprint) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Token ids of begin and end of text; generation_config.json comes before config.json, as in transformers."""
    path = directory / "generation_config.json"
    if not path.exists():
        return blueprint.bos_token_ids, blueprint.eos_token_ids
    fields = read_fields(path)
    bos, eos = fields.token_ids("bos_token_id"), fields.token_ids("eos_token_id")
    return bos or blueprint.bos_token_ids, eos or blueprint.eos_token_ids


def _assemble(
    fields: Fields,
    blueprint: Blueprint,
    context: int | None,
    types: Mapping[str, TensorType],
    sources: Mapping[str, WeightSource],
    bos: tuple[int, ...],
    eos: tuple[int, ...],
    *,
    directory: str = "",
    skipped: tuple[tuple[str, int], ...] = (),
    notes: tuple[str, ...] = (),
) -> Model:
    if context is None:
        context = blueprint.max_positions
    if context < 1:
        raise InvalidInput(f"context must be at least 1 token, not {context}", hint="Correct `context`.")
    if context > blueprint.max_positions:
        message = f"context {context} is longer than the model's max_position_embeddings {blueprint.max_positions}"
        position = fields.position("max_position_embeddings")
        raise InvalidInput(message, position=position, hint=f"Set `context` to {blueprint.max_positions} or less.")
    parameters = size = tensors = 0
    for name, type_ in types.items():
        if blueprint.tensors[name].role == "fp8_scale":
            continue
        elements = math.prod(blueprint.tensors[name].shape)
        parameters += elements
        size += elements * ITEM_BYTES[type_.dtype]
        tensors += 1
    rope = blueprint.rope
    table = TensorType("f32", ("context", len(rope.inverse_frequencies)))
    weights = {**types, "rope.cos": table, "rope.sin": table}
    graphs: dict[Mode, Graph] = {
        mode: Graph(
            mode=mode,
            inputs={"ids": TensorType("i64", ("tokens",)), "past": TensorType("i64", ())},
            states={name: TensorType("f32", ("context", width)) for name, width in blueprint.states.items()},
            weights=weights,
            outputs={"logits": TensorType("f32", ("tokens", blueprint.vocabulary))},
            nodes=blueprint.nodes,
            functions=functions,
            state_updates={name: f"{name}.next" for name in blueprint.states},
        )
        for mode, functions in blueprint.functions.items()
    }
    tables = {
        "rope.cos": RopeTable("cos", rope.inverse_frequencies, rope.table_scale),
        "rope.sin": RopeTable("sin", rope.inverse_frequencies, rope.table_scale),
    }
    return Model(
        architecture=blueprint.architecture,
        graphs=graphs,
        sources={**sources, **tables},
        counts=Counts(parameters, tensors, size),
        vocabulary=blueprint.vocabulary,
        hidden=blueprint.hidden,
        max_context=context,
        bos_token_ids=bos,
        eos_token_ids=eos,
        directory=directory,
        skipped=skipped,
        notes=notes,
    )
