"""Kernels of several operators: destinations, copies, states, specializations, and refusals."""

import re
from dataclasses import replace

import numpy as np
import pytest
from mlir import ir

from dsr1build.graph.model import DType, Node, TensorType
from dsr1build.graph.signature import Argument, Role, Signature, Specialization, ordered_dims
from dsr1build.lower.kernel_source import KernelSource, lower_kernel
from kernel_runner import compile_text

RANGE = Specialization("range")
NORM = (("epsilon", 1e-6),)
ROPE = (("head_dim", 16), ("heads", 2), ("interleaved", 0), ("offset", 0))
HEADS = (("heads", 2), ("kv_heads", 2), ("scale", 0.25))


def argument(name: str, role: Role, *shape: int | str, dtype: DType = "f32") -> Argument:
    return Argument(name, role, TensorType(dtype, shape))


def signature(*arguments: Argument) -> Signature:
    used = {d for a in arguments for d in a.type.shape if isinstance(d, str)}
    return Signature(arguments, ordered_dims(used | ({"past"} if "context" in used else set())))


FFN = (
    Node("RMSNorm", ("a0", "a1"), ("v0",), NORM),
    Node("SwiGLU", ("v0", "a2", "a3"), ("v1",)),
    Node("Linear", ("v1", "a4", "", "a0"), ("v2",)),
)
FFN_SIGNATURE = signature(
    argument("a0", "input", "tokens", 28),
    argument("a1", "weight", 28, dtype="bf16"),
    argument("a2", "weight", 40, 28, dtype="bf16"),
    argument("a3", "weight", 40, 28, dtype="bf16"),
    argument("a4", "weight", 28, 40, dtype="bf16"),
    argument("a5", "output", "tokens", 28),
)

ATTENTION = (
    Node("Linear", ("a0", "a1"), ("v0",)),
    Node("RotaryEmbedding", ("v0", "a4", "a5", "past"), ("v1",), ROPE),
    Node("Linear", ("a0", "a2"), ("v2",)),
    Node("RotaryEmbedding", ("v2", "a4", "a5", "past"), ("v3",), ROPE),
    Node("CacheInsert", ("a6", "v3", "past"), ("v4",)),
    Node("Linear", ("a0", "a3"), ("v5",)),
    Node("CacheInsert", ("a7", "v5", "past"), ("v6",)),
    Node("GroupedAttention", ("v1", "v4", "v6", "past"), ("v7",), HEADS),
)
ATTENTION_SIGNATURE = signature(
    argument("a0", "input", "tokens", 28),
    *(argument(f"a{i}", "weight", 32, 28) for i in (1, 2, 3)),
    *(argument(f"a{i}", "weight", "context", 8) for i in (4, 5)),
    *(argument(f"a{i}", "state", "context", 32) for i in (6, 7)),
    argument("a8", "output", "tokens", 32),
)
ATTENTION_RESULTS = ("v4", "v6", "v7")


def parses(source: KernelSource) -> bool:
    with ir.Context():
        return bool(ir.Module.parse(source.text).operation.verify())


@pytest.mark.parametrize("specialization", [RANGE, Specialization("exact", 1), Specialization("padded", 8)], ids=str)
def test_a_kernel_parses_with_its_own_signature(specialization: Specialization) -> None:
    source = lower_kernel(FFN, FFN_SIGNATURE, ("v2",), specialization)
    assert parses(source)
    assert source.signature.dims == (("tokens",) if specialization is RANGE else ())
    rows = "tokens" if specialization is RANGE else specialization.tokens
    assert source.signature.arguments[5].type == TensorType("f32", (rows, 28))


def test_the_last_operator_writes_the_output_argument() -> None:
    text = lower_kernel(FFN, FFN_SIGNATURE, ("v2",), RANGE).text
    assert 'outs(%a5 : tensor<?x28xf32>) attrs = {tag = "p2/dot/out"}' in text
    assert "/copy" not in text


def test_equal_kernels_are_equal_texts() -> None:
    texts = {lower_kernel(ATTENTION, ATTENTION_SIGNATURE, ATTENTION_RESULTS, RANGE).text for _ in range(3)}
    assert len(texts) == 1


def test_states_are_returned_before_outputs() -> None:
    text = lower_kernel(ATTENTION, ATTENTION_SIGNATURE, ATTENTION_RESULTS, RANGE).text
    assert text.startswith("func.func @kernel(%a0: tensor<?x28xf32>, ")
    assert "%a6: tensor<?x32xf32> {bufferization.writable = true}, %a7: tensor<?x32xf32> {bufferization.writable = true}" in text
    assert "%tokens: index, %past: index, %context: index) -> (tensor<?x32xf32>, tensor<?x32xf32>, tensor<?x32xf32>)" in text


def test_a_value_that_two_outputs_hold_is_copied_once() -> None:
    twice = Signature((*FFN_SIGNATURE.arguments, argument("a6", "output", "tokens", 28)), FFN_SIGNATURE.dims)
    source = lower_kernel(FFN, twice, ("v2", "v2"), RANGE)
    assert parses(source)
    assert re.findall(r'tag = "p\d+/map2/copy"', source.text) == ['tag = "p3/map2/copy"']


def test_an_output_that_is_an_input_is_copied(tmp_path) -> None:
    through = Signature((*FFN_SIGNATURE.arguments, argument("a6", "output", "tokens", 28)), FFN_SIGNATURE.dims)
    source = lower_kernel(FFN, through, ("v2", "a0"), RANGE)
    arrays = _random(source.signature, {"tokens": 3})
    result = compile_text(source.text, source.signature, tmp_path).call(arrays, {"tokens": 3}, splits=2)
    assert np.array_equal(result["a6"], arrays["a0"])
    assert np.allclose(result["a5"], _ffn(arrays), rtol=0, atol=1e-5)


def test_an_output_that_others_read_is_written_once(tmp_path) -> None:
    both = Signature((*FFN_SIGNATURE.arguments, argument("a6", "output", "tokens", 28)), FFN_SIGNATURE.dims)
    source = lower_kernel(FFN, both, ("v2", "v0"), RANGE)
    assert "/copy" not in source.text
    arrays = _random(source.signature, {"tokens": 2})
    result = compile_text(source.text, source.signature, tmp_path).call(arrays, {"tokens": 2})
    assert np.allclose(result["a5"], _ffn(arrays), rtol=0, atol=1e-5)
    assert np.allclose(result["a6"], _norm(arrays["a0"], arrays["a1"]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 4])
def test_attention_with_its_cache(tokens: int, tmp_path) -> None:
    source = lower_kernel(ATTENTION, ATTENTION_SIGNATURE, ATTENTION_RESULTS, RANGE)
    past, context = 5, 16
    dims = {"tokens": tokens, "past": past, "context": context}
    arrays = _random(source.signature, dims)
    result = compile_text(source.text, source.signature, tmp_path).call(arrays, dims, splits=2)
    wide = {n: a.astype(np.float64) for n, a in arrays.items()}
    q, k = (_rotate(wide["a0"] @ wide[w].T, wide, past) for w in ("a1", "a2"))
    keys, values = wide["a6"].copy(), wide["a7"].copy()
    keys[past : past + tokens], values[past : past + tokens] = k, wide["a0"] @ wide["a3"].T
    assert np.allclose(result["a6"], keys, rtol=0, atol=1e-5)
    assert np.allclose(result["a7"], values, rtol=0, atol=1e-5)
    for t in range(tokens):
        for h in (0, 1):
            columns = slice(16 * h, 16 * h + 16)
            scores = np.exp(keys[: past + t + 1, columns] @ q[t, columns] * 0.25)
            expected = scores / scores.sum() @ values[: past + t + 1, columns]
            assert np.allclose(result["a8"][t, columns], expected, rtol=0, atol=1e-5)


def _random(of: Signature, dims: dict[str, int]) -> dict[str, np.ndarray]:
    import ml_dtypes

    generator = np.random.default_rng(11)
    arrays = {}
    for a in of.arguments:
        shape = [dims[d] if isinstance(d, str) else d for d in a.type.shape]
        values = generator.standard_normal(shape) * 0.3
        arrays[a.name] = values.astype(ml_dtypes.bfloat16 if a.type.dtype == "bf16" else np.float32)
    return arrays


def _norm(x: np.ndarray, gamma: np.ndarray) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * gamma.astype(np.float64)


def _ffn(arrays: dict[str, np.ndarray]) -> np.ndarray:
    gate, up, down = (arrays[n].astype(np.float64) for n in ("a2", "a3", "a4"))
    x = _norm(arrays["a0"], arrays["a1"])
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T + arrays["a0"]


def _rotate(x: np.ndarray, wide: dict[str, np.ndarray], past: int) -> np.ndarray:
    cos, sin = (wide[n][past : past + len(x), None, :] for n in ("a4", "a5"))
    first, second = x.reshape(-1, 2, 2, 8)[:, :, 0], x.reshape(-1, 2, 2, 8)[:, :, 1]
    turned = np.stack([first * cos - second * sin, second * cos + first * sin], axis=2)
    return turned.reshape(x.shape)


REFUSALS = [
    ((replace(FFN[0], op="LayerNorm"),), ("v0",), "no operator 'LayerNorm' in domain 'dsr1'"),
    ((replace(FFN[0], domain="module"),), ("v0",), "no operator 'RMSNorm' in domain 'module'"),
    ((replace(FFN[0], inputs=("a9", "a1")),), ("v0",), "RMSNorm reads 'a9', which is not defined before it"),
    (FFN[:1], ("v7",), "result reads 'v7', which is not defined before it"),
    (FFN[:2], ("v1",), "result v1 is f32[tokens, 40], its argument a5 is f32[tokens, 28]"),
    (FFN, ("v2", "v2"), "2 results for 1 state and output arguments"),
    ((replace(FFN[0], outputs=("v0", "v9")),), ("v0",), "RMSNorm names 2 of 1 results"),
    (
        (replace(FFN[0], name="layers.3.norm", attributes=()),),
        ("v0",),
        "layers.3.norm: attribute 'epsilon' must be a number, not None",
    ),
    ((replace(FFN[2], inputs=("a0", "a4")),), ("v2",), "Linear: w is bf16[28, 40], expected a weight of shape [N, 28]"),
    (
        (Node("CacheInsert", ("a0", "a0", "past"), ("v2",)),),
        ("v2",),
        "an operator reads 'past', which is not a dimension of the signature",
    ),
]


@pytest.mark.parametrize(("nodes", "results", "message"), REFUSALS, ids=[r[2][:40] for r in REFUSALS])
def test_a_malformed_kernel_is_refused_by_name(nodes, results, message) -> None:
    with pytest.raises(ValueError) as error:
        lower_kernel(nodes, FFN_SIGNATURE, results, RANGE)
    assert str(error.value) == message
