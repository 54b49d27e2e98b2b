"""Checkpoints that transformers wrote: they load, hold the hazards that they should, and their graphs mean the same."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from model_sources import random_model

from checkpoints import (
    PROMPT_TOKENS,
    SMALL_MODELS,
    checkpoint,
    prompt_ids,
    reference_generate,
    reference_logits,
)
from dsr1build.frontends.load import load_model
from dsr1build.graph.model import Graph, Mode, Model, RopeTable, StoredTensor
from dsr1build.ops.registry import OPERATORS

pytestmark = pytest.mark.slow


def loaded(directory: Path, context: int | None = None) -> Model:
    return load_model(checkpoint=directory, config=None, seed=None, context=context)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_graphs_of_checkpoint_and_configuration_are_equal(name: str) -> None:
    stored, random = loaded(checkpoint(name)), random_model(name)
    assert stored.skipped == stored.notes == ()
    assert stored.counts.tensors == random.counts.tensors
    assert stored.counts.parameters == random.counts.parameters
    for mode, graph in stored.graphs.items():
        other = random.graphs[mode]
        assert (graph.nodes, graph.functions, graph.states) == (other.nodes, other.functions, other.states)
        shapes = {weight: type_.shape for weight, type_ in graph.weights.items()}
        assert list(shapes.items()) == [(weight, type_.shape) for weight, type_ in other.weights.items()]


def test_shards_and_dtypes() -> None:
    model = loaded(checkpoint("r1-mini", "bfloat16", 3))
    files = {source.file for source in model.sources.values() if isinstance(source, StoredTensor)}
    assert len(files) >= 3
    weights = model.graphs["decode"].weights
    assert {type_.dtype for name, type_ in weights.items() if "e_score" in name or name.startswith("rope")} == {"f32"}
    others = {type_.dtype for name, type_ in weights.items() if "e_score" not in name and not name.startswith("rope")}
    assert others == {"bf16"}
    half = loaded(checkpoint("llama-mini", "float16"))
    assert half.graphs["decode"].weights["lm_head.weight"].dtype == "f16"


def test_the_prediction_layer_is_skipped() -> None:
    plain, with_mtp = loaded(checkpoint("r1-mini")), loaded(checkpoint("r1-mini", mtp=True))
    assert with_mtp.skipped == (("multi-token prediction layers", 68),)
    assert with_mtp.counts == plain.counts
    assert with_mtp.graphs == plain.graphs


def test_stored_bytes_are_where_the_model_says() -> None:
    from safetensors.numpy import load_file

    directory = checkpoint("r1-mini", "float32", 3)
    model = loaded(directory)
    name = "model.layers.3.mlp.experts.15.down_proj.weight"
    source = model.sources[name]
    assert isinstance(source, StoredTensor)
    content = (directory / source.file).read_bytes()[source.offset : source.offset + source.length]
    assert content == load_file(directory / source.file)[name].tobytes()


@pytest.mark.parametrize("name", [n for n in SMALL_MODELS if n not in ("r1-mini-softmax", "qwen2-mini", "llama-mini")])
def test_masking_by_zero_would_choose_other_experts(name: str) -> None:
    """The fixture's hazard: scores less the bias are negative for experts that must be chosen."""
    import torch

    from checkpoints import reference_model, routers

    differences = 0
    model = reference_model(checkpoint(name))

    def compare(router: Any, _: Any, output: Any) -> None:
        nonlocal differences
        logits, _, indices = output
        scores = logits.sigmoid() + router.e_score_correction_bias
        assert (router.e_score_correction_bias < 0).any()
        grouped = scores.view(-1, router.num_group, router.num_experts // router.num_group)
        groups = grouped.topk(2, dim=-1)[0].sum(-1).topk(router.topk_group, dim=-1)[1]
        keep = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter_(1, groups, True).unsqueeze(-1)
        wrong = (grouped * keep).flatten(1).topk(router.top_k, dim=-1)[1]
        differences += int((wrong.sort(-1)[0] != indices.sort(-1)[0]).any(-1).sum())

    handles = [router.register_forward_hook(compare) for router in routers(model)]
    reference_logits(checkpoint(name), prompt_ids(name))
    for handle in handles:
        handle.remove()
    assert differences > 10


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_the_reference_is_worth_comparing_with(name: str) -> None:
    logits = reference_logits(checkpoint(name), prompt_ids(name))
    assert logits.shape[0] == PROMPT_TOKENS
    assert np.isfinite(logits).all()
    assert 1.0 < logits.std() < 10.0
    tokens, rows = reference_generate(checkpoint(name), prompt_ids(name, 12), 16)
    again = reference_logits(checkpoint(name), [*prompt_ids(name, 12), *tokens[:-1]])[11:]
    assert np.abs(again - rows).max() < 1e-4 * np.ptp(rows)


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_onnxruntime_computes_what_transformers_computes(name: str) -> None:
    """By the meaning of the operators alone: prefill to beyond YaRN's original length, then decode."""
    directory = checkpoint(name)
    ids = prompt_ids(name, 72)
    expected = reference_logits(directory, ids)
    model = loaded(directory, context=80)
    weights = weights_of(model, directory)
    states = {n: np.zeros([80, *t.shape[1:]], np.float32) for n, t in model.graphs["prefill"].states.items()}
    sessions = {mode: onnx_session(graph) for mode, graph in model.graphs.items()}
    steps: list[tuple[Mode, int, int]] = [("prefill", 0, 40), ("prefill", 40, 30), ("decode", 70, 1), ("decode", 71, 1)]
    rows = []
    for mode, past, tokens in steps:
        feeds = {"ids": np.array(ids[past : past + tokens], np.int64), "past": np.array(past, np.int64), **states, **weights}
        logits, *updated = sessions[mode].run(None, feeds)
        states = dict(zip(states, updated, strict=True))
        rows.append(logits)
    assert np.abs(np.concatenate(rows) - expected).max() < 2e-5 * np.ptp(expected)


def weights_of(model: Model, directory: Path) -> Mapping[str, Any]:
    from safetensors.numpy import load_file

    weights = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    for name, source in model.sources.items():
        if isinstance(source, RopeTable):
            angles = np.outer(np.arange(model.max_context), source.inverse_frequencies)
            weights[name] = (source.scale * getattr(np, source.function)(angles)).astype(np.float32)
    assert set(weights) == set(model.sources)
    return weights


def onnx_session(graph: Graph) -> Any:
    import onnxruntime
    from onnx import inliner

    from dsr1build.graph.onnx_form import to_onnx
    from dsr1build.ops.reference import function_proto

    inlined = inliner.inline_local_functions(to_onnx(graph, OPERATORS, function_proto))
    return onnxruntime.InferenceSession(inlined.SerializeToString(), providers=["CPUExecutionProvider"])


def test_the_written_configuration_is_in_the_new_spelling() -> None:
    config = json.loads((checkpoint("r1-mini") / "config.json").read_text())
    assert "rope_parameters" in config
    assert "dtype" in config
    assert not {"rope_scaling", "rope_theta", "torch_dtype"} & set(config)
