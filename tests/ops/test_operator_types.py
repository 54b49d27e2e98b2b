"""Result types, and what is said where operands do not fit."""

import pytest
from operator_cases import CASES, PAST, PLANNED_CASES, Case, cached, rows, tensor

from dsr1build.graph.model import TensorType
from dsr1build.ops.registry import OPERATORS


@pytest.mark.parametrize("case", (*CASES, *PLANNED_CASES), ids=lambda c: c.name)
def test_the_result_has_the_type_of_the_formula(case: Case) -> None:
    (result,) = case.operator.infer(case.types, case.attributes)
    expected = case.expected(case.arrays(5, 3))
    sizes = {"tokens": 5, "context": 48}
    assert tuple(sizes.get(d, d) if isinstance(d, str) else d for d in result.shape) == expected.shape
    assert result.dtype == "f32"


def test_attributes_and_inputs_are_those_of_the_cases() -> None:
    for case in (*CASES, *PLANNED_CASES):
        assert tuple(case.attributes) == case.operator.attributes, case.name
        repeats = any(name.endswith("*") for name in case.operator.inputs)
        assert repeats or len(case.types) <= len(case.operator.inputs), case.name


ROPE = {"heads": 2, "head_dim": 12, "offset": 4, "interleaved": 1}
ATTENTION = {"heads": 4, "kv_heads": 2, "scale": 0.5}

MISFITS: list[tuple[str, list[TensorType | None], dict[str, int | float], str]] = [
    ("Linear", [None, tensor("f32", 4, 8)], {}, "input x is missing"),
    ("Linear", [rows(8), tensor("f32", 4, 9)], {}, "w is f32[4, 9], expected a weight of shape [N, 8]"),
    ("Linear", [rows(8), tensor("i64", 4, 8)], {}, "w is i64[4, 8], expected a weight of shape [N, 8]"),
    ("Linear", [rows(8), tensor("f32", 4, 8), tensor("f32", 8)], {}, "bias is f32[8], expected a weight of shape [4]"),
    (
        "Linear",
        [rows(8), tensor("f32", 4, 8), None, rows(8)],
        {},
        "residual is f32[tokens, 8], expected f32[tokens, 4]",
    ),
    (
        "Linear",
        [rows(200), tensor("f8e4m3fn", 4, 200)],
        {},
        "the scale of w is None, expected f32[1, 2] for f8e4m3fn[4, 200]",
    ),
    (
        "Linear",
        [rows(8), tensor("f32", 4, 8), None, None, tensor("f32", 1, 1)],
        {},
        "w is f32[4, 8] and takes no scale, got f32[1, 1]",
    ),
    (
        "SwiGLU",
        [rows(8), tensor("f32", 4, 8), tensor("f32", 5, 8)],
        {},
        "w_up is f32[5, 8], expected the shape of w_gate, f32[4, 8]",
    ),
    ("RMSNorm", [rows(8), tensor("f32", 8)], {}, "attribute 'epsilon' must be a number, not None"),
    ("RMSNorm", [rows(8), tensor("f32", 8)], {"epsilon": 0}, "attribute epsilon must be positive"),
    (
        "RMSNorm",
        [tensor("bf16", "tokens", 8), tensor("f32", 8)],
        {"epsilon": 1e-6},
        "x is bf16[tokens, 8], expected f32[rows, width]",
    ),
    ("RotaryEmbedding", [rows(25), cached(4), cached(4), PAST], ROPE, "x is f32[tokens, 25], expected 2 heads x 12 columns"),
    ("RotaryEmbedding", [rows(24), cached(5), cached(5), PAST], ROPE, "columns 4..14 of a head of 12 cannot be rotated"),
    ("RotaryEmbedding", [rows(24), cached(4), cached(5), PAST], ROPE, "sin is f32[context, 5], expected f32[context, 4]"),
    ("CacheInsert", [cached(8), rows(9), PAST], {}, "rows is f32[tokens, 9], expected the width of cache, f32[context, 8]"),
    ("CacheInsert", [cached(8), rows(8), tensor("i32")], {}, "past is i32[], expected i64[]"),
    (
        "GroupedAttention",
        [rows(32), cached(8), cached(8), PAST],
        ATTENTION,
        "k is f32[context, 8], expected 2 heads as wide as the 4 heads of q, f32[tokens, 32]",
    ),
    ("Embedding", [tensor("i32", "tokens"), tensor("f32", 5, 8)], {}, "ids is i32[tokens], expected i64[rows]"),
    (
        "CombineSlots",
        [rows(8), None, tensor("f32", "tokens", 2, 9), rows(2)],
        {},
        "slots is f32[tokens, 2, 9], expected f32[tokens, top_k, 8]",
    ),
    (
        "CombineExperts",
        [rows(8), None, rows(3), rows(8), rows(8)],
        {},
        "weights is f32[tokens, 3], expected f32[tokens, 2]",
    ),
]


@pytest.mark.parametrize(("op", "types", "attributes", "message"), MISFITS, ids=[m[3][:40] for m in MISFITS])
def test_a_misfit_is_named(op, types, attributes, message) -> None:
    with pytest.raises(ValueError) as error:
        OPERATORS[op].infer(types, attributes)
    assert str(error.value) == message
