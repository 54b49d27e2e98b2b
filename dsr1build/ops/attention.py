"""Causal attention over a KV cache with grouped heads."""

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
    integer,
    real,
    required,
    scalar_past,
)


def masked_softmax(emitter: Emitter, scores: Value, loops: str, scale: float) -> tuple[Value, Value]:
    """The numerators and denominators of a causal softmax, as generics of the current phase.

    ``scores`` [.., L] is indexed by ``loops``, which hold ``t``, the token, and end in cache rows; it is overwritten.
    Returns exp(scale * score - largest), exactly 0 in cache rows l > past + t, and its sums over the cache rows, [..].
    Every token sees at least its own row, so the largest is finite.
    """
    names = loops.split(", ")
    outer, token_loop, row_loop = ", ".join(names[:-1]), names.index("t"), len(names) - 1
    parallel = "p" * row_loop
    sums_type = TensorType("f32", scores.type.shape[:-1])

    def visible(b: Body) -> str:
        return b.compare_int("ule", b.index(row_loop), b.add_int("%past", b.index(token_loop), "index"))

    def mask(b: Body, score: str) -> str:
        return b.select(visible(b), b.mul(score, b.constant(scale)), b.constant(float("-inf")))

    def exponential(b: Body, largest: str, score: str) -> str:
        return b.select(visible(b), b.exp(b.sub(score, largest)), b.constant(0.0))

    masked = emitter.generic("mask", loops, [], (scores, loops), f"{parallel}p", mask)
    largest = emitter.filled(sums_type, float("-inf"))
    largest = emitter.generic(
        "largest", loops, [(masked, loops)], (largest, outer), f"{parallel}r", lambda b, a, acc: b.maximum(acc, a)
    )
    terms = emitter.generic("terms", loops, [(largest, outer)], (masked, loops), f"{parallel}p", exponential)
    sums = emitter.generic(
        "total", loops, [(terms, loops)], (emitter.filled(sums_type), outer), f"{parallel}r", lambda b, a, acc: b.add(acc, a)
    )
    return terms, sums


def _shape(types: Types, attributes: Attributes) -> tuple[int, int, int]:
    """Key-value heads, query heads for each of them, and columns of a head. Raises ValueError where they do not fit."""
    q, k, v, past = aligned(types, 4)
    width, cached, valued = (activation(t, n)[1] for t, n in ((q, "q"), (k, "k"), (v, "v")))
    scalar_past(past)
    heads, kv_heads = integer(attributes, "heads"), integer(attributes, "kv_heads")
    real(attributes, "scale")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"{heads} heads do not divide into {kv_heads} key-value heads")
    if width % heads or cached != width // heads * kv_heads:
        raise ValueError(f"k is {k}, expected {kv_heads} heads as wide as the {heads} heads of q, {q}")
    if valued != cached:
        raise ValueError(f"v is {v}, expected the type of k, {k}")
    return kv_heads, heads // kv_heads, width // heads


def _infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    _shape(types, attributes)
    return (required(types[0], "q"),)


def causal_softmax_reference(scores: str, result: str, scale: float) -> str:
    """Reference statements: ``result`` is the softmax over the last axis of ``scores`` [.., T, L] times ``scale``.

    Column l is masked for row t where l > past + t. Reads the formal name ``past``; L is past + T.
    """
    return f"""
        {result}_scale = Constant <value_float = {scale!r}> ()
        {result}_minus = Constant <value = float {{-inf}}> ()
        {result}_first = Constant <value_int = 0> ()
        {result}_step = Constant <value_int = 1> ()
        {result}_none = Constant <value_ints = [-1]> ()
        {result}_rows1 = Shape <start = -2, end = -1> ({scores})
        {result}_columns1 = Shape <start = -1> ({scores})
        {result}_rows0 = Squeeze ({result}_rows1)
        {result}_columns0 = Squeeze ({result}_columns1)
        {result}_t = Range ({result}_first, {result}_rows0, {result}_step)
        {result}_l = Range ({result}_first, {result}_columns0, {result}_step)
        {result}_last = Add ({result}_t, past)
        {result}_last2 = Unsqueeze ({result}_last, {result}_none)
        {result}_visible = LessOrEqual ({result}_l, {result}_last2)
        {result}_scaled = Mul ({scores}, {result}_scale)
        {result}_masked = Where ({result}_visible, {result}_scaled, {result}_minus)
        {result} = Softmax <axis = -1> ({result}_masked)
    """


def _reference(types: Types, attributes: Attributes) -> str:
    kv_heads, group, width = _shape(types, attributes)
    return f"""
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        rows = Shape <start = 0, end = 1> (q)
        past1 = Reshape (past, one)
        length = Add (past1, rows)
        grouped = Constant <value_ints = [0, {kv_heads}, {group}, {width}]> ()
        headed = Constant <value_ints = [0, {kv_heads}, 1, {width}]> ()
        merged = Constant <value_ints = [0, {kv_heads * group * width}]> ()
        q4 = Reshape (q, grouped)
        k2 = Slice (k, zero, length, zero)
        v2 = Slice (v, zero, length, zero)
        k4 = Reshape (k2, headed)
        v4 = Reshape (v2, headed)
        queries = Transpose <perm = [1, 2, 0, 3]> (q4)
        keys = Transpose <perm = [1, 2, 3, 0]> (k4)
        rows_of_values = Transpose <perm = [1, 2, 0, 3]> (v4)
        scores = MatMul (queries, keys)
        {causal_softmax_reference("scores", "shares", real(attributes, "scale"))}
        context = MatMul (shares, rows_of_values)
        y4 = Transpose <perm = [2, 0, 1, 3]> (context)
        y = Reshape (y4, merged)
    """


def _lower(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """One phase over (token, key-value head, head of its group); the columns of q and k lie in lanes, as in ``ops.dot``."""
    q, k, v = (required(x, n) for x, n in zip(operands, ("q", "k", "v"), strict=True))
    rows, columns = q.type.shape
    heads, kv_heads = integer(attributes, "heads"), integer(attributes, "kv_heads")
    assert isinstance(columns, int)
    group, width = heads // kv_heads, columns // heads
    length = emitter.length()
    split_heads = [[0], [1, 2]]

    def cached(cache: Value) -> Value:
        valid = emitter.slice(cache, [0, 0], [length, kv_heads * width])
        return emitter.expand(valid, split_heads, [length, kv_heads, width])

    q_lanes, q_tail = split_lanes(emitter, emitter.expand(q, [[0], [1, 2, 3]], [rows, kv_heads, group, width]))
    k_lanes, k_tail = split_lanes(emitter, cached(k))
    values = cached(v)
    y4 = emitter.expand(emitter.destination(0, q.type), [[0], [1, 2, 3]], [rows, kv_heads, group, width])

    emitter.phase("map3")
    outer = "t, h, g"
    scores = emitter.filled(TensorType("f32", (rows, kv_heads, group, length)))
    if q_tail is not None and k_tail is not None:
        operands_tail = [(q_tail, "t, h, g, r"), (k_tail, "l, h, r")]
        scores = emitter.generic(
            "tail", "t, h, g, l, r", operands_tail, (scores, "t, h, g, l"), "ppppr", lambda b, a, c, acc: b.mac(acc, a, c)
        )
    if q_lanes is not None and k_lanes is not None:
        partial = emitter.filled(TensorType("f32", (rows, kv_heads, group, length, LANES)))
        operands_lanes = [(q_lanes, "t, h, g, k, j"), (k_lanes, "l, h, k, j")]
        partial = emitter.generic(
            "scores",
            "t, h, g, l, k, j",
            operands_lanes,
            (partial, "t, h, g, l, j"),
            "pppprp",
            lambda b, a, c, acc: b.mac(acc, a, c),
        )
        scores = emitter.generic(
            "sum", "t, h, g, l, j", [(partial, "t, h, g, l, j")], (scores, "t, h, g, l"), "ppppr", lambda b, p, acc: b.add(acc, p)
        )
    terms, sums = masked_softmax(emitter, scores, f"{outer}, l", real(attributes, "scale"))
    weighted = emitter.filled(TensorType("f32", (rows, kv_heads, group, width)))
    weighted = emitter.generic(
        "values",
        "t, h, g, l, d",
        [(terms, "t, h, g, l"), (values, "l, h, d")],
        (weighted, "t, h, g, d"),
        "ppprp",
        lambda b, p, a, acc: b.mac(acc, p, a),
    )
    y4 = emitter.generic(
        "context",
        "t, h, g, d",
        [(weighted, "t, h, g, d"), (sums, outer)],
        (y4, "t, h, g, d"),
        "pppp",
        lambda b, a, total, _: b.div(a, total),
    )
    return (emitter.collapse(y4, [[0], [1, 2, 3]], q.type.shape),)


GROUPED_ATTENTION = Operator(
    name="GroupedAttention",
    inputs=("q", "k", "v", "past"),
    outputs=("y",),
    attributes=("heads", "kv_heads", "scale"),
    infer=_infer,
    reference=_reference,
    lower=_lower,
    tolerance=3e-6,
    row_independent=False,
)

OPERATORS = (GROUPED_ATTENTION,)
