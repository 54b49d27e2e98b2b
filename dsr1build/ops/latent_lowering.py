"""The lowering of latent attention in its two forms (``ops.latent_attention`` says what they compute)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dsr1build.graph.model import Dim, TensorType
from dsr1build.ops.attention import masked_softmax
from dsr1build.ops.emitter import E4M3_REBIAS, Body, Emitter, Value
from dsr1build.ops.operator import (
    SCALE_BLOCK,
    Attributes,
    Operands,
    Types,
    activation,
    aligned,
    integer,
    real,
    required,
    scalar_past,
    weight_matrix,
)

# Heads of one work item of the absorbed form: a cache row that was loaded serves all of them.
HEAD_BLOCK = 4
# Partial sums of one dot product over a cache row.
DOT_LANES = 16
# Terms that one step of the expansion adds to each output: fewer loads and stores of the output for each product.
EXPANSION_STEP = 4


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The attributes of a latent attention, and the width of the latent that its operands have."""

    heads: int
    nope: int
    rope: int
    value: int
    latent: int
    scale: float


def latent_shape(types: Types, attributes: Attributes) -> LatentShape:
    """Check all operands of a latent attention. Raises ValueError naming the one that does not fit."""
    q, cache, w_kvb, past, scale_kvb = aligned(types, 5)
    shape = LatentShape(
        integer(attributes, "heads"),
        integer(attributes, "nope"),
        integer(attributes, "rope"),
        integer(attributes, "value"),
        activation(cache, "cache")[1] - integer(attributes, "rope"),
        real(attributes, "scale"),
    )
    if min(shape.heads, shape.nope, shape.rope, shape.value, shape.latent) < 1:
        raise ValueError(f"heads, nope, rope, value and the latent columns must be positive, got {shape}")
    if activation(q, "q")[1] != shape.heads * (shape.nope + shape.rope):
        raise ValueError(f"q is {q}, expected {shape.heads} heads of {shape.nope} + {shape.rope} columns")
    if weight_matrix(w_kvb, "w_kvb", shape.latent, scale_kvb) != shape.heads * (shape.nope + shape.value):
        raise ValueError(f"w_kvb is {w_kvb}, expected {shape.heads} heads of {shape.nope} + {shape.value} rows")
    scalar_past(past)
    return shape


def _f32(*shape: Dim) -> TensorType:
    return TensorType("f32", shape)


def _accumulate(
    e: Emitter, role: str, loops: str, ins: Sequence[tuple[Value, str]], out: tuple[Value, str], iterators: str
) -> Value:
    """``out += ins[0] * ins[1]``, the operands widened to f32; ``ins[2]``, if any, are the scales of ``ins[1]``."""
    types = [v.type.dtype for v, _ in ins]

    def multiply(b: Body, x: str, w: str, *rest: str) -> str:
        *scale, acc = rest
        return b.mac(acc, b.widen(x, types[0]), b.widen(w, types[1], *scale))

    return e.generic(role, loops, ins, out, iterators, multiply)


def _scale_of(b: Body, scale: Value, rows: int, head: str, row: str, column: str) -> str:
    """The rebiased block scale of element [``row``, ``column``] of a head's ``rows`` rows of the weight."""
    down = b.add_int(b.mul_int(head, b.integer(rows, "index")), row, "index")
    block = b.integer(SCALE_BLOCK, "index")
    return b.mul(b.extract(scale, [b.div_int(down, block), b.div_int(column, block)]), b.constant(E4M3_REBIAS))


def lower_expanded(e: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """One phase, one work item a head: its keys and values are expanded into the worker's local memory.

    Inner loops run over contiguous outputs (n, l, v), never over a sum, so that they vectorise as they stand.
    """
    q, cache, w_kvb, scale, s = _operands(operands, attributes)
    tokens, heads, length = q.type.shape[0], s.heads, e.length()
    query_heads = e.expand(q, ((0,), (1, 2)), (tokens, heads, s.nope + s.rope))
    q_nope = e.slice(query_heads, [0, 0, 0], [tokens, heads, s.nope])
    q_rope = e.slice(query_heads, [0, 0, s.nope], [tokens, heads, s.rope])
    k_rope = e.slice(cache, [0, s.latent], [length, s.rope])
    step = math.gcd(s.latent, EXPANSION_STEP)
    columns = s.latent // step
    w_heads = e.expand(w_kvb, ((0, 1), (2,)), (heads, s.nope + s.value, s.latent))
    destination = e.destination(0, _f32(tokens, heads * s.value))
    out = e.expand(destination, ((0,), (1, 2)), (tokens, heads, s.value))
    latents = [e.slice(cache, [0, m], [length, columns], [1, step]) for m in range(step)]

    e.phase("map1")

    def expansion(role: str, start: int, width: int) -> Value:
        """[heads, length, width]: the latent rows times the transpose of rows start.. of each head's weight."""

        def widen(b: Body, w: str, m: int) -> str:
            if scale is None:
                return b.widen(w, w_kvb.type.dtype)
            row = b.add_int(b.index(1), b.integer(start, "index"), "index")
            column = b.add_int(b.mul_int(b.index(2), b.integer(step, "index")), b.integer(m, "index"), "index")
            return b.widen(w, w_kvb.type.dtype, _scale_of(b, scale, s.nope + s.value, b.index(0), row, column))

        turned = [
            e.generic(
                f"{role}_turned{m}",
                "h, n, c",
                [(e.slice(w_heads, [0, start, m], [heads, width, columns], [1, 1, step]), "h, n, c")],
                (e.empty(_f32(heads, columns, width)), "h, c, n"),
                "ppp",
                lambda b, w, _, m=m: widen(b, w, m),
            )
            for m in range(step)
        ]

        def multiply(b: Body, *elements: str) -> str:
            acc = elements[-1]
            for m in range(step):
                acc = b.mac(acc, elements[m], elements[step + m])
            return acc

        ins = [*((x, "l, c") for x in latents), *((w, "h, c, n") for w in turned)]
        return e.generic(role, "h, l, c, n", ins, (e.filled(_f32(heads, length, width)), "h, l, n"), "pprp", multiply)

    k = expansion("k", 0, s.nope)
    k_turned = e.generic(
        "k_turned", "h, n, l", [(k, "h, l, n")], (e.empty(_f32(heads, s.nope, length)), "h, n, l"), "ppp", lambda b, x, _: x
    )
    k_rope_turned = e.generic(
        "k_rope_turned", "r, l", [(k_rope, "l, r")], (e.empty(_f32(s.rope, length)), "r, l"), "pp", lambda b, x, _: x
    )
    scores = e.filled(_f32(heads, tokens, length))
    scores = _accumulate(
        e, "nope_scores", "h, t, n, l", [(q_nope, "t, h, n"), (k_turned, "h, n, l")], (scores, "h, t, l"), "pprp"
    )
    scores = _accumulate(
        e, "rope_scores", "h, t, r, l", [(q_rope, "t, h, r"), (k_rope_turned, "r, l")], (scores, "h, t, l"), "pprp"
    )
    terms, total = masked_softmax(e, scores, "h, t, l", s.scale)
    v = expansion("v", s.nope, s.value)
    mixed = e.filled(_f32(heads, tokens, s.value))
    mixed = _accumulate(e, "mixed", "h, t, l, v", [(terms, "h, t, l"), (v, "h, l, v")], (mixed, "h, t, v"), "pprp")
    y = e.generic(
        "out", "h, t, v", [(mixed, "h, t, v"), (total, "h, t")], (out, "t, h, v"), "ppp", lambda b, x, z, _: b.div(x, z)
    )
    return (e.collapse(y, ((0,), (1, 2)), destination.type.shape),)


def lower_absorbed(e: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """One phase, one work item for each token and block of heads.

    Dot products along a row of the cache or of W_UV add up in lanes [k, j], the lanes are added at the end. Where the weight
    has block scales, the columns come in parts [b, k, j] of which each has one scale in every row.
    """
    q, cache, w_kvb, scale, s = _operands(operands, attributes)
    tokens, length = q.type.shape[0], e.length()
    block = math.gcd(s.heads, HEAD_BLOCK)
    blocks = s.heads // block
    lanes = math.gcd(math.gcd(s.latent, s.rope), DOT_LANES)
    part = s.latent if scale is None else math.gcd(s.latent, SCALE_BLOCK)
    r = s.rope // lanes
    # The loops over the columns of the latent, and their sizes without and with the lanes.
    c, outer = ("k", (s.latent // lanes,)) if scale is None else ("b, k", (s.latent // part, part // lanes))
    columns = (*outer, lanes)
    summed, kept = "r" * len(outer), "p" * len(outer)
    query_heads = e.expand(q, ((0,), (1, 2, 3)), (tokens, blocks, block, s.nope + s.rope))
    q_nope = e.slice(query_heads, [0, 0, 0, 0], [tokens, blocks, block, s.nope])
    q_rope = e.expand(
        e.slice(query_heads, [0, 0, 0, s.nope], [tokens, blocks, block, s.rope]),
        ((0,), (1,), (2,), (3, 4)),
        (tokens, blocks, block, r, lanes),
    )
    latent = e.expand(e.slice(cache, [0, 0], [length, s.latent]), _last_split(1, columns), (length, *columns))
    k_rope = e.expand(e.slice(cache, [0, s.latent], [length, s.rope]), ((0,), (1, 2)), (length, r, lanes))
    w_heads = e.expand(w_kvb, _last_split(3, columns), (blocks, block, s.nope + s.value, *columns))
    first = [0] * len(columns)
    w_uk = e.slice(w_heads, [0, 0, 0, *first], [blocks, block, s.nope, *columns])
    w_uv = e.slice(w_heads, [0, 0, s.nope, *first], [blocks, block, s.value, *columns])
    destination = e.destination(0, _f32(tokens, s.heads * s.value))
    split = ((0,), (1, 2, 3))
    out = e.expand(destination, split, (tokens, blocks, block, s.value))

    e.phase("map2")
    by_head = (tokens, blocks, block)

    def scales(role: str, start: int, width: int, loop: str) -> list[tuple[Value, str]]:
        """The operand that scales the weight's rows start.. of each head, one value for each row and part; none without."""
        if scale is None:
            return []

        def pick(b: Body, _: str) -> str:
            head = b.add_int(b.mul_int(b.index(0), b.integer(block, "index")), b.index(1), "index")
            row = b.add_int(b.index(2), b.integer(start, "index"), "index")
            return _scale_of(b, scale, s.nope + s.value, head, row, b.mul_int(b.index(3), b.integer(part, "index")))

        out = (e.empty(_f32(blocks, block, width, s.latent // part)), "g, i, n, b")
        return [(e.generic(role, "g, i, n, b", [], out, "pppp", pick), f"g, i, {loop}, b")]

    q_latent = _accumulate(
        e,
        "q_latent",
        f"t, g, i, n, {c}, j",
        [(q_nope, "t, g, i, n"), (w_uk, f"g, i, n, {c}, j"), *scales("scale_uk", 0, s.nope, "n")],
        (e.filled(_f32(*by_head, *columns)), f"t, g, i, {c}, j"),
        f"pppr{kept}p",
    )
    partial = (e.filled(_f32(tokens, blocks, length, block, lanes)), "t, g, l, i, j")
    operands_latent = [(q_latent, f"t, g, i, {c}, j"), (latent, f"l, {c}, j")]
    nope = _accumulate(e, "nope_scores", f"t, g, l, i, {c}, j", operands_latent, partial, f"pppp{summed}p")
    operands_rope = [(q_rope, "t, g, i, r, j"), (k_rope, "l, r, j")]
    both = _accumulate(e, "rope_scores", "t, g, l, i, r, j", operands_rope, (nope, partial[1]), "pppprp")
    scores = e.generic(
        "scores",
        "t, g, i, l, j",
        [(both, "t, g, l, i, j")],
        (e.filled(_f32(*by_head, length)), "t, g, i, l"),
        "ppppr",
        lambda b, p, acc: b.add(acc, p),
    )
    terms, total = masked_softmax(e, scores, "t, g, i, l", s.scale)
    mixed = _accumulate(
        e,
        "mixed",
        f"t, g, l, i, {c}, j",
        [(terms, "t, g, i, l"), (latent, f"l, {c}, j")],
        (e.filled(_f32(*by_head, *columns)), f"t, g, i, {c}, j"),
        f"pprp{kept}p",
    )
    values = _accumulate(
        e,
        "values",
        f"t, g, i, v, {c}, j",
        [(mixed, f"t, g, i, {c}, j"), (w_uv, f"g, i, v, {c}, j"), *scales("scale_uv", s.nope, s.value, "v")],
        (e.filled(_f32(*by_head, s.value, lanes)), "t, g, i, v, j"),
        f"pppp{summed}p",
    )
    added = e.generic(
        "added",
        "t, g, i, v, j",
        [(values, "t, g, i, v, j")],
        (e.filled(_f32(*by_head, s.value)), "t, g, i, v"),
        "ppppr",
        lambda b, p, acc: b.add(acc, p),
    )
    y = e.generic(
        "out",
        "t, g, i, v",
        [(added, "t, g, i, v"), (total, "t, g, i")],
        (out, "t, g, i, v"),
        "pppp",
        lambda b, x, z, _: b.div(x, z),
    )
    return (e.collapse(y, split, destination.type.shape),)


def _last_split(position: int, columns: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Groups of a reshape that splits dimension 0 into ``position`` dimensions and the last one into ``columns``."""
    return tuple(range(position)), tuple(range(position, position + len(columns)))


def _operands(operands: Operands, attributes: Attributes) -> tuple[Value, Value, Value, Value | None, LatentShape]:
    q, cache, w_kvb, scale_kvb = aligned(operands, 4)
    q, cache, w_kvb = required(q, "q"), required(cache, "cache"), required(w_kvb, "w_kvb")
    past = TensorType("i64", ())
    types = [q.type, cache.type, w_kvb.type, past, None if scale_kvb is None else scale_kvb.type]
    return q, cache, w_kvb, scale_kvb, latent_shape(types, attributes)
