"""The ONNX form passes the checker, and onnxruntime runs it to the numbers that transformers gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import decoder

from dsr1build.graph.model import Graph, Mode, Model, RopeTable
from dsr1build.ops.registry import OPERATORS


def onnx_form(graph: Graph) -> Any:
    from dsr1build.graph.onnx_form import to_onnx
    from dsr1build.ops.reference import function_proto

    return to_onnx(graph, OPERATORS, function_proto)


def test_passes_the_checker_and_keeps_functions() -> None:
    import onnx

    model = onnx_form(decoder(layers=3))
    onnx.checker.check_model(model, full_check=True)
    calls = [node.op_type for node in model.graph.node if node.domain == "module"]
    assert calls.count("ffn") == 3 * 5
    assert [f.name for f in model.functions if f.domain == "module"] == ["attention", "gate", "ffn"]
    shapes = {v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim] for v in model.graph.input}
    assert shapes["ids"] == ["tokens"]
    assert shapes["layers.0.attn.keys"] == ["context", 4]
    assert [v.name for v in model.graph.output][:2] == ["logits", "layers.0.attn.keys.next"]


def test_one_function_for_each_combination_of_types() -> None:
    model = onnx_form(decoder())
    linears = [f for f in model.functions if f.name == "Linear"]
    assert len(linears) > 1
    assert len({(f.domain, f.name, f.overload) for f in model.functions}) == len(model.functions)


def test_weights_can_be_given_as_initializers() -> None:
    from onnx import numpy_helper

    from dsr1build.graph.onnx_form import to_onnx
    from dsr1build.ops.reference import function_proto

    gain = numpy_helper.from_array(np.ones(8, np.float32), "norm.weight")
    model = to_onnx(decoder(), OPERATORS, function_proto, [gain])
    assert "norm.weight" not in {v.name for v in model.graph.input}
    assert [t.name for t in model.graph.initializer] == ["norm.weight"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2-mini", "r1-mini"])
def test_onnxruntime_computes_what_transformers_computes(name: str) -> None:
    from checkpoints import checkpoint, prompt_ids, reference_logits
    from dsr1build.frontends.load import load_model

    directory = checkpoint(name)
    ids = prompt_ids(name, 20)
    expected = reference_logits(directory, ids)
    model = load_model(checkpoint=directory, config=None, seed=None, context=32)
    weights = _weights(model, directory)
    states = {n: np.zeros([32, *t.shape[1:]], np.float32) for n, t in model.graphs["prefill"].states.items()}
    sessions = {mode: _session(graph) for mode, graph in model.graphs.items()}
    steps: list[tuple[Mode, int, int]] = [("prefill", 0, 17), ("decode", 17, 1), ("decode", 18, 1), ("decode", 19, 1)]
    got = []
    for mode, past, tokens in steps:
        feeds = {"ids": np.array(ids[past : past + tokens], np.int64), "past": np.array(past, np.int64), **states, **weights}
        logits, *updated = sessions[mode].run(None, feeds)
        states = dict(zip(states, updated, strict=True))
        got.append(logits)
    actual = np.concatenate(got)
    assert np.abs(actual - expected).max() <= 1e-4 * np.ptp(expected)


def _weights(model: Model, directory: Path) -> dict[str, np.ndarray[Any, Any]]:
    from safetensors.numpy import load_file

    stored = {name: tensor for path in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(path).items()}
    context = model.max_context
    tables = {
        name: (source.scale * getattr(np, source.function)(np.outer(np.arange(context), source.inverse_frequencies))).astype("f4")
        for name, source in model.sources.items()
        if isinstance(source, RopeTable)
    }
    return {name: tables[name] if name in tables else stored[name] for name in model.graphs["prefill"].weights}


def _session(graph: Graph) -> Any:
    import onnxruntime
    from onnx import inliner

    text = inliner.inline_local_functions(onnx_form(graph)).SerializeToString()
    return onnxruntime.InferenceSession(text, providers=["CPUExecutionProvider"])
