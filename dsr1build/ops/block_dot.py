"""The product of activations with FP8 weights in rows, dequantised where they are read.

A weight [N, K] of e4m3fn bytes has one f32 scale for each block of 128 x 128 elements; blocks at the edges are cut off::

    w'[n, k] = w[n, k] * scale[n / 128, k / 128]

Each weight is multiplied by its scale before it meets an activation, so what is multiplied is bit for bit the weight that
dequantising to f32 gives. Columns are split into whole blocks, lanes of the last block and its rest::

    s[n, b]    = scale[n / 128, b] * 256                              role scale
    p[t, n, j] = sum_b sum_k x[t, b, k, j] * w'[n, b, k, j]           role dot, whole blocks of 16 x 8 columns
    p[t, n, j] += sum_k x[t, k, j] * w'[n, k, j]                      role dotrest, the last K mod 128 columns in lanes of 8
    y0[t, n]   = sum_r x[t, r] * w'[n, r]                             role tail, the last K mod 8 columns
    y[t, n]    = y0 + sum_j p[t, n, j]                                role sum

A part is absent where it has no columns.
"""

from dsr1build.graph.model import Dim, TensorType
from dsr1build.ops.dot import LANES
from dsr1build.ops.emitter import E4M3_REBIAS, Body, Emitter, Value
from dsr1build.ops.operator import SCALE_BLOCK


def block_dot(emitter: Emitter, x: Value, w: Value, scale: Value, into: Value | None = None, suffix: str = "") -> Value:
    """``x`` f32 [T, K] times the transpose of ``w`` e4m3fn [N, K] with ``scale`` f32 [ceil(N/128), ceil(K/128)], f32 [T, N].

    Generics of the current phase, of schedule ``dot``. ``into`` and ``suffix`` are those of ``dot.dot``.
    """
    rows, (outputs, width) = x.type.shape[0], w.type.shape
    assert isinstance(outputs, int) and isinstance(width, int)
    blocks, groups = width // SCALE_BLOCK, width % SCALE_BLOCK // LANES
    rest = blocks * SCALE_BLOCK
    tail = rest + groups * LANES

    def columns(value: Value, start: int, *split: int) -> Value:
        """Columns from ``start`` on, as many as the product of ``split``, viewed in its shape."""
        count = 1
        for factor in split:
            count *= factor
        part = value
        if count < width:
            part = emitter.slice(value, [0, start], [value.type.shape[0], count])
        if len(split) == 1:
            return part
        return emitter.expand(part, [[0], list(range(1, 1 + len(split)))], [value.type.shape[0], *split])

    def multiply(b: Body, a: str, c: str, s: str, acc: str) -> str:
        return b.mac(acc, a, b.widen(c, w.type.dtype, s))

    def add(b: Body, lane: str, acc: str) -> str:
        return b.add(acc, lane)

    def row_scales(role: str, across: int | None) -> Value:
        """Rebiased scales of all rows: [N, ``across``] of the first blocks of columns, or [N] of the last block."""
        shape: tuple[Dim, ...] = (outputs,) if across is None else (outputs, across)

        def pick(b: Body, _: str) -> str:
            down = b.div_int(b.index(0), b.integer(SCALE_BLOCK, "index"))
            column = b.integer(blocks, "index") if across is None else b.index(1)
            return b.mul(b.extract(scale, [down, column]), b.constant(E4M3_REBIAS))

        loops = "n" if across is None else "n, b"
        out = (emitter.empty(TensorType("f32", shape)), loops)
        return emitter.generic(f"scale{role}{suffix}", loops, [], out, "p" * len(shape), pick)

    y = emitter.fill(into if into is not None else emitter.empty(TensorType("f32", (rows, outputs))), 0.0)
    if tail < width:
        ins = [
            (columns(x, tail, width - tail), "t, r"),
            (columns(w, tail, width - tail), "n, r"),
            (row_scales("tail", None), "n"),
        ]
        y = emitter.generic(f"tail{suffix}", "t, n, r", ins, (y, "t, n"), "ppr", multiply)
    if tail == 0:
        return y
    partial = emitter.filled(TensorType("f32", (rows, outputs, LANES)))
    if blocks:
        per_block = SCALE_BLOCK // LANES
        ins = [
            (columns(x, 0, blocks, per_block, LANES), "t, b, k, j"),
            (columns(w, 0, blocks, per_block, LANES), "n, b, k, j"),
            (row_scales("", blocks), "n, b"),
        ]
        partial = emitter.generic(f"dot{suffix}", "t, n, b, k, j", ins, (partial, "t, n, j"), "pprrp", multiply)
    if groups:
        ins = [
            (columns(x, rest, groups, LANES), "t, k, j"),
            (columns(w, rest, groups, LANES), "n, k, j"),
            (row_scales("rest", None), "n"),
        ]
        partial = emitter.generic(f"dotrest{suffix}", "t, n, k, j", ins, (partial, "t, n, j"), "pprp", multiply)
    return emitter.generic(f"sum{suffix}", "t, n, j", [(partial, "t, n, j")], (y, "t, n"), "ppr", add)
