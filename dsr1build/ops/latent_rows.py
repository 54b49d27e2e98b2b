"""``LatentRows``: the row of the latent KV cache that one token adds.

A row is [RMSNorm of the latent | rotated key shared by all heads], as in DeepSeek-V2's multi-head latent attention
(https://arxiv.org/abs/2405.04434, section 2.1).
"""

from dsr1build.graph.model import TensorType
from dsr1build.ops.emitter import Body, Emitter, Value
from dsr1build.ops.norm import sum_of_squares
from dsr1build.ops.operator import (
    Attributes,
    Operands,
    Operator,
    Types,
    activation,
    aligned,
    integer,
    real,
    required,
    same,
    scalar_past,
    weight_vector,
)


def _half(width: int, latent: int) -> int:
    """Pairs that are rotated: half of the columns behind the latent ones. Raises ValueError where there are none."""
    if latent < 1 or width <= latent or (width - latent) % 2:
        raise ValueError(f"x has {width} columns, expected latent = {latent} and an even number of columns to rotate")
    return (width - latent) // 2


def _infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    x, gamma, cos, sin, past = aligned(types, 5)
    rows, width = activation(x, "x")
    latent = integer(attributes, "latent")
    half = _half(width, latent)
    weight_vector(gamma, "gamma", latent)
    for table, name in ((cos, "cos"), (sin, "sin")):
        if activation(table, name)[1] != half:
            raise ValueError(f"{name} is {table}, expected {half} columns")
    same(sin, "sin", required(cos, "cos"))
    scalar_past(past)
    if real(attributes, "epsilon") <= 0:
        raise ValueError("attribute epsilon must be positive")
    return (TensorType("f32", (rows, width)),)


def _reference(types: Types, attributes: Attributes) -> str:
    x = required(types[0], "x")
    latent, width = integer(attributes, "latent"), activation(x, "x")[1]
    half = _half(width, latent)
    # Pairs stand as [half, 2] where they are interleaved, as [2, half] where the second halves follow the first ones.
    pairs, axis = (f"-1, {half}, 2", 2) if integer(attributes, "interleaved") else (f"-1, 2, {half}", 1)
    return f"""
        epsilon = Constant <value_float = {real(attributes, "epsilon")!r}> ()
        last = Constant <value_ints = [-1]> ()
        first = Constant <value_ints = [0]> ()
        parts = Constant <value_ints = [{latent}, {2 * half}]> ()
        content, rotary = Split <axis = 1> (x, parts)
        scale = Cast <to = 1> (gamma)
        squares = Mul (content, content)
        mean = ReduceMean <keepdims = 1> (squares, last)
        biased = Add (mean, epsilon)
        root = Sqrt (biased)
        inverse = Reciprocal (root)
        normal = Mul (content, inverse)
        scaled = Mul (normal, scale)
        count = Shape <start = 0, end = 1> (x)
        begin = Reshape (past, last)
        end = Add (begin, count)
        c = Slice (cos, begin, end, first)
        s = Slice (sin, begin, end, first)
        pairs_shape = Constant <value_ints = [{pairs}]> ()
        pairs = Reshape (rotary, pairs_shape)
        zero = Constant <value_int = 0> ()
        one = Constant <value_int = 1> ()
        a = Gather <axis = {axis}> (pairs, zero)
        b = Gather <axis = {axis}> (pairs, one)
        ac = Mul (a, c)
        bs = Mul (b, s)
        bc = Mul (b, c)
        as = Mul (a, s)
        turned_a = Sub (ac, bs)
        turned_b = Add (bc, as)
        axis = Constant <value_ints = [{axis}]> ()
        column_a = Unsqueeze (turned_a, axis)
        column_b = Unsqueeze (turned_b, axis)
        turned_pairs = Concat <axis = {axis}> (column_a, column_b)
        flat_shape = Constant <value_ints = [-1, {2 * half}]> ()
        turned = Reshape (turned_pairs, flat_shape)
        rows = Concat <axis = 1> (scaled, turned)
    """


def _lower(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """One phase over tokens. The row is one generic, so that the two parts need no waves of their own."""
    x, gamma, cos, sin = (required(v, n) for v, n in zip(operands, ("x", "gamma", "cos", "sin"), strict=True))
    tokens, width = x.type.shape
    latent, epsilon = integer(attributes, "latent"), real(attributes, "epsilon")
    assert isinstance(width, int)
    half = _half(width, latent)
    interleaved = bool(integer(attributes, "interleaved"))

    emitter.phase("map1")
    squares = sum_of_squares(emitter, emitter.slice(x, [0, 0], [tokens, latent]))

    def row(b: Body, element: str, squared: str, _: str) -> str:
        def whole(value: int) -> str:
            return b.integer(value, "index")

        t, c = b.index(0), b.index(1)
        mean = b.div(squared, b.constant(float(latent)))
        inverse = b.div(b.constant(1.0), b.sqrt(b.add(mean, b.constant(epsilon))))
        rotates = b.compare_int("uge", c, whole(latent))
        # Both parts are computed everywhere, with indices that stay in range where the part does not apply.
        g = b.extract(gamma, [b.select(rotates, whole(0), c, "index")])
        normal = b.mul(b.mul(element, inverse), b.widen(g, gamma.type.dtype))
        r = b.select(rotates, b.add_int(c, whole(-latent), "index"), whole(0), "index")
        if interleaved:
            pair, side = b.div_int(r, whole(2)), b.rem_int(r, whole(2))
            partner = b.add_int(b.mul_int(pair, whole(2)), b.rem_int(b.add_int(r, whole(1), "index"), whole(2)), "index")
        else:
            pair, side = b.rem_int(r, whole(half)), b.div_int(r, whole(half))
            partner = b.rem_int(b.add_int(r, whole(half), "index"), whole(2 * half))
        other = b.extract(x, [t, b.add_int(partner, whole(latent), "index")])
        position = b.add_int(emitter.size_value("past"), t, "index")
        cosine, sine = b.extract(cos, [position, pair]), b.extract(sin, [position, pair])
        first = b.sub(b.mul(element, cosine), b.mul(other, sine))
        second = b.add(b.mul(element, cosine), b.mul(other, sine))
        turned = b.select(b.compare_int("eq", side, whole(0)), first, second)
        return b.select(rotates, turned, normal)

    destination = emitter.destination(0, x.type)
    return (emitter.generic("rows", "t, c", [(x, "t, c"), (squares, "t")], (destination, "t, c"), "pp", row),)


LATENT_ROWS = Operator(
    name="LatentRows",
    inputs=("x", "gamma", "cos", "sin", "past"),
    outputs=("rows",),
    attributes=("latent", "epsilon", "interleaved"),
    infer=_infer,
    reference=_reference,
    lower=_lower,
    tolerance=2e-6,
    # A padded row would read the tables behind the last position of the context.
    row_independent=False,
)

OPERATORS = (LATENT_ROWS,)
