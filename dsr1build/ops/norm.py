"""RMSNorm."""

from dsr1build.graph.model import TensorType
from dsr1build.ops.dot import LANES, split_lanes
from dsr1build.ops.emitter import Body, Emitter, Value
from dsr1build.ops.operator import (
    Attributes,
    Operands,
    Operator,
    Types,
    activation,
    aligned,
    real,
    required,
    weight_vector,
)


def sum_of_squares(emitter: Emitter, x: Value) -> Value:
    """The sum of squares of each row of ``x`` [T, N], f32 [T], in the current phase; lanes first, as in ``ops.dot``."""
    rows = x.type.shape[0]
    lanes, tail = split_lanes(emitter, x)
    total = emitter.filled(TensorType("f32", (rows,)))
    if tail is not None:
        total = emitter.generic("tail", "t, r", [(tail, "t, r")], (total, "t"), "pr", lambda b, a, acc: b.mac(acc, a, a))
    if lanes is not None:
        partial = emitter.filled(TensorType("f32", (rows, LANES)))
        partial = emitter.generic(
            "squares", "t, k, j", [(lanes, "t, k, j")], (partial, "t, j"), "prp", lambda b, a, acc: b.mac(acc, a, a)
        )
        total = emitter.generic("sum", "t, j", [(partial, "t, j")], (total, "t"), "pr", lambda b, p, acc: b.add(acc, p))
    return total


def normalize(emitter: Emitter, x: Value, gamma: Value, epsilon: float, into: Value) -> Value:
    """RMSNorm of the rows of ``x`` [T, N] into ``into`` [T, N], the last generics of the current phase."""
    width = x.type.shape[1]
    assert isinstance(width, int)

    def inverse_root(b: Body, squares: str, _: str) -> str:
        mean = b.div(squares, b.constant(float(width)))
        return b.div(b.constant(1.0), b.sqrt(b.add(mean, b.constant(epsilon))))

    def scaled(b: Body, a: str, inverse: str, g: str, _: str) -> str:
        return b.mul(b.mul(a, inverse), b.widen(g, gamma.type.dtype))

    squares = sum_of_squares(emitter, x)
    inverse = emitter.generic("inverse", "t", [(squares, "t")], (emitter.empty(squares.type), "t"), "p", inverse_root)
    return emitter.generic("norm", "t, n", [(x, "t, n"), (inverse, "t"), (gamma, "n")], (into, "t, n"), "pp", scaled)


def _infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    x, gamma = aligned(types, 2)
    rows, width = activation(x, "x")
    weight_vector(gamma, "gamma", width)
    if real(attributes, "epsilon") <= 0:
        raise ValueError("attribute epsilon must be positive")
    return (TensorType("f32", (rows, width)),)


def _reference(types: Types, attributes: Attributes) -> str:
    return f"""
        epsilon = Constant <value_float = {real(attributes, "epsilon")!r}> ()
        last = Constant <value_ints = [-1]> ()
        scale = Cast <to = 1> (gamma)
        squares = Mul (x, x)
        mean = ReduceMean <keepdims = 1> (squares, last)
        biased = Add (mean, epsilon)
        root = Sqrt (biased)
        inverse = Reciprocal (root)
        normal = Mul (x, inverse)
        y = Mul (normal, scale)
    """


def _lower(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    x, gamma = (required(v, n) for v, n in zip(operands, ("x", "gamma"), strict=True))
    emitter.phase("map1")
    return (normalize(emitter, x, gamma, real(attributes, "epsilon"), emitter.destination(0, x.type)),)


RMS_NORM = Operator(
    name="RMSNorm",
    inputs=("x", "gamma"),
    outputs=("y",),
    attributes=("epsilon",),
    infer=_infer,
    reference=_reference,
    lower=_lower,
    tolerance=2e-6,
    row_independent=True,
)

OPERATORS = (RMS_NORM,)
