"""Products with weights: Linear and SwiGLU."""

from dsr1build.graph.model import TensorType
from dsr1build.ops.block_dot import block_dot
from dsr1build.ops.dot import dot
from dsr1build.ops.emitter import Body, Emitter, Value
from dsr1build.ops.operator import (
    SCALE_BLOCK,
    Attributes,
    Operands,
    Operator,
    Types,
    activation,
    aligned,
    required,
    same,
    weight_matrix,
    weight_vector,
)


def widened_weight(result: str, weight: str, type_: TensorType, scale: str) -> str:
    """Reference statements that define ``result``: the weight [N, K] as float, its block scales applied.

    With scales, element [n, k] is ``weight[n, k] * scale[n / 128, k / 128]``.
    """
    if type_.dtype != "f8e4m3fn":
        return f"{result} = Cast <to = 1> ({weight})"
    rows, columns = type_.shape
    assert isinstance(rows, int) and isinstance(columns, int)
    down, across = -(-rows // SCALE_BLOCK), -(-columns // SCALE_BLOCK)
    return f"""
        {result}_stored = Cast <to = 1> ({weight})
        {result}_scale = Cast <to = 1> ({scale})
        {result}_points = Constant <value_ints = [{down}, 1, {across}, 1]> ()
        {result}_blocks = Constant <value_ints = [{down}, {SCALE_BLOCK}, {across}, {SCALE_BLOCK}]> ()
        {result}_padded = Constant <value_ints = [{down * SCALE_BLOCK}, {across * SCALE_BLOCK}]> ()
        {result}_start = Constant <value_ints = [0, 0]> ()
        {result}_end = Constant <value_ints = [{rows}, {columns}]> ()
        {result}_s4 = Reshape ({result}_scale, {result}_points)
        {result}_e4 = Expand ({result}_s4, {result}_blocks)
        {result}_e2 = Reshape ({result}_e4, {result}_padded)
        {result}_factor = Slice ({result}_e2, {result}_start, {result}_end)
        {result} = Mul ({result}_stored, {result}_factor)
    """


def _product(emitter: Emitter, x: Value, w: Value, scale: Value | None, into: Value | None = None, suffix: str = "") -> Value:
    """``x`` times the transpose of ``w``, by ``dot`` or, where the weight has block scales, by ``block_dot``."""
    return dot(emitter, x, w, into, suffix) if scale is None else block_dot(emitter, x, w, scale, into, suffix)


def _infer_linear(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    x, w, bias, residual, scale = aligned(types, 5)
    rows, width = activation(x, "x")
    outputs = weight_matrix(w, "w", width, scale)
    result = TensorType("f32", (rows, outputs))
    if bias is not None:
        weight_vector(bias, "bias", outputs)
    if residual is not None:
        same(residual, "residual", result)
    return (result,)


def _reference_linear(types: Types, attributes: Attributes) -> str:
    _, w, bias, residual, _ = aligned(types, 5)
    lines = [
        widened_weight("wide", "w", required(w, "w"), "scale"),
        "turned = Transpose <perm = [1, 0]> (wide)",
        "product = MatMul (x, turned)",
    ]
    total = "product"
    if bias is not None:
        lines += ["offset = Cast <to = 1> (bias)", f"biased = Add ({total}, offset)"]
        total = "biased"
    lines.append(f"y = Add ({total}, residual)" if residual is not None else f"y = Identity ({total})")
    return "\n".join(lines)


def _lower_linear(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    x, w, bias, residual, scale = aligned(operands, 5)
    x, w = required(x, "x"), required(w, "w")
    result = TensorType("f32", (x.type.shape[0], w.type.shape[0]))
    emitter.phase("dot")
    if bias is None and residual is None:
        return (_product(emitter, x, w, scale, emitter.destination(0, result)),)
    terms = [(v, m) for v, m in ((bias, "n"), (residual, "t, n")) if v is not None]

    def add_terms(b: Body, product: str, *rest: str) -> str:
        for (value, _), element in zip(terms, rest, strict=False):
            product = b.add(product, b.widen(element, value.type.dtype))
        return product

    product = _product(emitter, x, w, scale)
    destination = emitter.destination(0, result)
    return (emitter.generic("out", "t, n", [(product, "t, n"), *terms], (destination, "t, n"), "pp", add_terms),)


def _infer_swiglu(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    x, w_gate, w_up, scale_gate, scale_up = aligned(types, 5)
    rows, width = activation(x, "x")
    outputs = weight_matrix(w_gate, "w_gate", width, scale_gate)
    if weight_matrix(w_up, "w_up", width, scale_up) != outputs:
        raise ValueError(f"w_up is {w_up}, expected the shape of w_gate, {w_gate}")
    return (TensorType("f32", (rows, outputs)),)


def _reference_swiglu(types: Types, attributes: Attributes) -> str:
    _, w_gate, w_up, _, _ = aligned(types, 5)
    return "\n".join(
        [
            widened_weight("wide_gate", "w_gate", required(w_gate, "w_gate"), "scale_gate"),
            widened_weight("wide_up", "w_up", required(w_up, "w_up"), "scale_up"),
            "turned_gate = Transpose <perm = [1, 0]> (wide_gate)",
            "turned_up = Transpose <perm = [1, 0]> (wide_up)",
            "gate = MatMul (x, turned_gate)",
            "up = MatMul (x, turned_up)",
            "opening = Sigmoid (gate)",
            "silu = Mul (gate, opening)",
            "y = Mul (silu, up)",
        ]
    )


def _lower_swiglu(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    x, w_gate, w_up, scale_gate, scale_up = aligned(operands, 5)
    x, w_gate, w_up = required(x, "x"), required(w_gate, "w_gate"), required(w_up, "w_up")

    def gated(b: Body, g: str, u: str, _: str) -> str:
        return b.mul(b.div(g, b.add(b.constant(1.0), b.exp(b.neg(g)))), u)

    emitter.phase("dot")
    gate = _product(emitter, x, w_gate, scale_gate)
    up = _product(emitter, x, w_up, scale_up, suffix="2")
    destination = emitter.destination(0, gate.type)
    return (emitter.generic("out", "t, n", [(gate, "t, n"), (up, "t, n")], (destination, "t, n"), "pp", gated),)


LINEAR = Operator(
    name="Linear",
    inputs=("x", "w", "bias?", "residual?", "scale?"),
    outputs=("y",),
    attributes=(),
    infer=_infer_linear,
    reference=_reference_linear,
    lower=_lower_linear,
    tolerance=2e-6,
    row_independent=True,
)

SWIGLU = Operator(
    name="SwiGLU",
    inputs=("x", "w_gate", "w_up", "scale_gate?", "scale_up?"),
    outputs=("y",),
    attributes=(),
    infer=_infer_swiglu,
    reference=_reference_swiglu,
    lower=_lower_swiglu,
    tolerance=4e-6,
    row_independent=True,
)

OPERATORS = (LINEAR, SWIGLU)
