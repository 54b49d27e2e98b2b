"""The insert of new rows into a KV cache, in place."""

from dsr1build.graph.model import TensorType
from dsr1build.ops.copy import copy
from dsr1build.ops.emitter import Emitter, Value
from dsr1build.ops.operator import Attributes, Operands, Operator, Types, activation, aligned, required, scalar_past


def _infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    cache, rows, past = aligned(types, 3)
    _, width = activation(cache, "cache")
    if activation(rows, "rows")[1] != width:
        raise ValueError(f"rows is {rows}, expected the width of cache, {cache}")
    scalar_past(past)
    return (required(cache, "cache"),)


def _reference(types: Types, attributes: Attributes) -> str:
    return """
        zero = Constant <value_ints = [0]> ()
        one = Constant <value_ints = [1]> ()
        from = Reshape (past, one)
        count = Shape <start = 0, end = 1> (rows)
        to = Add (from, count)
        capacity = Shape <start = 0, end = 1> (cache)
        before = Slice (cache, zero, from, zero)
        after = Slice (cache, to, capacity, zero)
        y = Concat <axis = 0> (before, rows, after)
    """


def _lower(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """The cache keeps its buffer: the result is the cache itself with a window of rows overwritten."""
    cache, rows = (required(v, n) for v, n in zip(operands, ("cache", "rows"), strict=True))
    return (copy(emitter, rows, cache, first_row="past"),)


CACHE_INSERT = Operator(
    name="CacheInsert",
    inputs=("cache", "rows", "past"),
    outputs=("y",),
    attributes=(),
    infer=_infer,
    reference=_reference,
    lower=_lower,
    tolerance=0.0,
    row_independent=False,
)

OPERATORS = (CACHE_INSERT,)
