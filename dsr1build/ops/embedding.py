"""Token embedding: a gather of table rows."""

from dsr1build.graph.model import TensorType
from dsr1build.ops.copy import in_blocks
from dsr1build.ops.emitter import Body, Emitter, Value
from dsr1build.ops.operator import PLAIN_WEIGHTS, Attributes, Operands, Operator, Types, aligned, required


def _infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    ids, table = (required(t, n) for t, n in zip(aligned(types, 2), ("ids", "table"), strict=True))
    if ids.dtype != "i64" or len(ids.shape) != 1:
        raise ValueError(f"ids is {ids}, expected i64[rows]")
    if table.dtype not in PLAIN_WEIGHTS or len(table.shape) != 2 or not all(isinstance(d, int) for d in table.shape):
        raise ValueError(f"table is {table}, expected a weight of shape [vocabulary, hidden]")
    return (TensorType("f32", (ids.shape[0], table.shape[1])),)


def _reference(types: Types, attributes: Attributes) -> str:
    return """
        rows = Gather <axis = 0> (table, ids)
        y = Cast <to = 1> (rows)
    """


def _lower(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    ids, table = (required(v, n) for v, n in zip(operands, ("ids", "table"), strict=True))
    result = TensorType("f32", (ids.type.shape[0], table.type.shape[1]))
    y = in_blocks(emitter, emitter.destination(0, result), 1)
    blocks = in_blocks(emitter, table, 1)

    def take(b: Body, token: str, _: str) -> str:
        element = b.extract(blocks, [b.to_index(token), b.index(1), b.index(2)])
        return b.widen(element, table.type.dtype)

    emitter.phase("map2")
    y = emitter.generic("gather", "t, w, j", [(ids, "t")], (y, "t, w, j"), "ppp", take)
    return (emitter.collapse(y, [[0], [1, 2]], result.shape),)


EMBEDDING = Operator(
    name="Embedding",
    inputs=("ids", "table"),
    outputs=("y",),
    attributes=(),
    infer=_infer,
    reference=_reference,
    lower=_lower,
    tolerance=0.0,
    row_independent=True,
)

OPERATORS = (EMBEDDING,)
