"""Runs one operator with several results or a cache: its reference by onnxruntime, its lowering as a kernel of its own."""

from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx.parser
import onnxruntime

from dsr1build.graph.model import Attribute, TensorType
from dsr1build.graph.signature import Argument, Signature, Specialization, ordered_dims, specialize
from dsr1build.ops.emitter import Emitter, Value
from dsr1build.ops.operator import Operator
from kernel_runner import LoadedKernel

ONNX_DTYPE = {
    "f32": "float",
    "bf16": "bfloat16",
    "f16": "float16",
    "f8e4m3fn": "float8e4m3fn",
    "i64": "int64",
    "i32": "int32",
}
NUMPY_DTYPE = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "i64": np.int64,
    "i32": np.int32,
}
# Types that numpy does not know: passed to onnxruntime as the integers with the same bits.
AS_BITS = {"bf16": (np.uint16, onnx.TensorProto.BFLOAT16), "f8e4m3fn": (np.uint8, onnx.TensorProto.FLOAT8E4M3FN)}

Arrays = Mapping[str, np.ndarray]


def inputs_of(operator: Operator, types: Sequence[TensorType | None]) -> list[tuple[str, TensorType]]:
    """The inputs that are there, by their formal names."""
    return [(name.rstrip("?"), t) for name, t in zip(operator.inputs, types, strict=False) if t is not None]


def reference(
    operator: Operator, types: Sequence[TensorType | None], attributes: Mapping[str, Attribute], arrays: Arrays
) -> tuple[np.ndarray, ...]:
    """The operator's meaning, as onnxruntime computes it in float32."""

    def declared(name: str, type_: TensorType) -> str:
        return f"{ONNX_DTYPE[type_.dtype]}[{', '.join(map(str, type_.shape))}] {name}".replace("[]", "")

    inputs = inputs_of(operator, types)
    results = zip(operator.outputs, operator.infer(types, attributes), strict=True)
    text = (
        '<ir_version: 10, opset_import: ["" : 21]>\n'
        f"main ({', '.join(declared(*i) for i in inputs)}) => ({', '.join(declared(*r) for r in results)})\n"
        f"{{\n{operator.reference(types, attributes)}\n}}"
    )
    model = onnx.parser.parse_model(text)
    onnx.checker.check_model(model, full_check=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {}
    for name, type_ in inputs:
        array = np.ascontiguousarray(arrays[name], dtype=NUMPY_DTYPE[type_.dtype])
        if type_.dtype in AS_BITS:
            bits, element = AS_BITS[type_.dtype]
            feeds[name] = onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(bits), element)
        else:
            feeds[name] = onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return tuple(v.numpy() for v in session.run_with_ort_values(list(operator.outputs), feeds))


def kernel(
    operator: Operator,
    types: Sequence[TensorType | None],
    attributes: Mapping[str, Attribute],
    tokens: int | None,
) -> tuple[str, Signature]:
    """The lowering as the only op of a kernel, for ``tokens`` fixed or (None) dynamic; ``past`` is a run-time dimension."""
    activations = ("x", "q", "logits", "cache")
    inputs = [(n, t) for n, t in inputs_of(operator, types) if n != "past"]
    arguments = [Argument(n, "input", t) for n, t in inputs if n in activations]
    arguments += [Argument(n, "weight", t) for n, t in inputs if n not in activations]
    results = operator.infer(types, attributes)
    outputs = [Argument(n, "output", t) for n, t in zip(operator.outputs, results, strict=True)]
    dims = {d for a in arguments for d in a.type.shape if isinstance(d, str)}
    if len(inputs) < len(inputs_of(operator, types)):
        dims.add("past")
    signature = Signature((*arguments, *outputs), ordered_dims(dims))
    signature = specialize(signature, Specialization("range") if tokens is None else Specialization("exact", tokens))
    emitter = Emitter(signature, tokens)
    values = {a.name: Value(f"%{a.name}", a.type) for a in signature.arguments}
    names = [n.rstrip("?") for n in operator.inputs if n != "past"]
    emitter.set_destinations([values[n] for n in operator.outputs])
    produced = operator.lower(emitter, [values.get(n) for n in names], attributes)
    return emitter.finish(produced), signature


def run_both(
    operator: Operator,
    types: Sequence[TensorType | None],
    attributes: Mapping[str, Attribute],
    compiled: LoadedKernel,
    arrays: Arrays,
    dims: Mapping[str, int],
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
    """(what the kernel gives, what the reference gives); fails where the split of the work changes the kernel's bits."""
    expected = reference(operator, types, attributes, arrays)
    given = {n: np.ascontiguousarray(arrays[n], NUMPY_DTYPE[t.dtype]) for n, t in inputs_of(operator, types) if n != "past"}
    given |= {n: np.full_like(e, -77) for n, e in zip(operator.outputs, expected, strict=True)}
    once, thrice = (compiled.call(given, dims, splits) for splits in (1, 3))
    for name in operator.outputs:
        assert once[name].tobytes() == thrice[name].tobytes(), f"the split of the work changes {name}"
    return tuple(once[n] for n in operator.outputs), expected
