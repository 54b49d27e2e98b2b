"""The ONNX function of every operator against its formula in float64."""

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx.reference import ReferenceEvaluator
from operator_cases import CASES, PLANNED_CASES, Case, relative_error

from dsr1build.graph.model import TensorType
from dsr1build.ops.reference import function_proto, model_proto
from dsr1build.ops.registry import OPERATORS

ALL = (*CASES, *PLANNED_CASES)
SIZES = ((1, 0), (3, 1), (5, 37))


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
@pytest.mark.parametrize(("tokens", "past"), SIZES)
def test_in_double_precision_it_is_the_formula(case: Case, tokens: int, past: int) -> None:
    arrays = case.arrays(tokens, past)
    model = model_proto(case.operator, case.types, case.attributes, precision="f64")
    feeds = {n: a.astype(np.float64) if a.dtype == np.float32 else a for n, a in arrays.items()}
    (got,) = ReferenceEvaluator(model).run(None, feeds)
    assert got.dtype == np.float64
    assert relative_error(got, case.expected(arrays)) < 1e-13


@pytest.mark.parametrize("case", ALL, ids=lambda c: c.name)
def test_onnxruntime_runs_it_within_its_tolerance(case: Case) -> None:
    arrays = case.arrays(3, 5)
    model = model_proto(case.operator, case.types, case.attributes)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {n: _ort_value(a, case.inputs[n]) for n, a in arrays.items()}
    got = session.run_with_ort_values(None, feeds)[0].numpy()
    assert got.dtype == np.float32
    assert relative_error(got, case.expected(arrays)) <= case.operator.tolerance


def _ort_value(array: np.ndarray, type_: TensorType) -> onnxruntime.OrtValue:
    """onnxruntime takes types that NumPy lacks as raw bits with an element type."""
    bits = {"bf16": (np.uint16, onnx.TensorProto.BFLOAT16), "f8e4m3fn": (np.uint8, onnx.TensorProto.FLOAT8E4M3FN)}
    if type_.dtype in bits:
        raw, element = bits[type_.dtype]
        return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(raw), element)
    return onnxruntime.OrtValue.ortvalue_from_numpy(array)


def test_slots_in_expert_order_give_the_bits_of_the_dense_sum() -> None:
    generator = np.random.default_rng(7)
    tokens, experts, top_k, hidden = 6, 9, 3, 28
    residual, shared = (generator.standard_normal((tokens, hidden)).astype(np.float32) for _ in range(2))
    outputs = generator.standard_normal((experts, tokens, hidden)).astype(np.float32)
    chosen = np.sort(np.argsort(generator.random((tokens, experts)))[:, :top_k])
    weights = np.zeros((tokens, experts), np.float32)
    slots = np.empty((tokens, top_k, hidden), np.float32)
    for t in range(tokens):
        weights[t, chosen[t]] = generator.random(top_k)
        slots[t] = outputs[chosen[t], t]
    slot_weights = np.take_along_axis(weights, chosen, axis=1)

    def run(op: str, types: list[TensorType], feeds: dict[str, np.ndarray]) -> np.ndarray:
        model = model_proto(OPERATORS[op], types, {})
        return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)[0]

    row = TensorType("f32", (tokens, hidden))
    dense = run(
        "CombineExperts",
        [row, row, TensorType("f32", (tokens, experts)), *[row] * experts],
        {"residual": residual, "shared": shared, "weights": weights, **{f"expert{i}": outputs[i] for i in range(experts)}},
    )
    sparse = run(
        "CombineSlots",
        [row, row, TensorType("f32", slots.shape), TensorType("f32", slot_weights.shape)],
        {"residual": residual, "shared": shared, "slots": slots, "slot_weights": slot_weights},
    )
    assert dense.tobytes() == sparse.tobytes()


def test_a_function_has_the_formal_names_and_its_overload() -> None:
    case = next(c for c in CASES if c.name == "attention-4/2x28")
    function = function_proto(case.operator, case.types, case.attributes, overload="2")
    assert (function.domain, function.name, function.overload) == ("dsr1", "GroupedAttention", "2")
    assert list(function.input) == ["q", "k", "v", "past"]
    assert list(function.output) == ["y"]
    assert {node.domain for node in function.node} == {""}
