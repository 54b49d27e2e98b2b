"""The product of activations with weights in rows, as the schedule ``dot`` expects it.

``K`` is viewed as [K/8, 8] so that the partial sums of one output lie in 8 lanes and the order of additions is fixed in
the text: a compiler that keeps it gives the same bits for any number of rows, threads and any split of the work::

    p[t, n, j] = sum_k x[t, k, j] * w[n, k, j]      role dot
    y0[t, n]   = sum_r x[t, r] * w[n, r]            role tail, the last K mod 8 columns; absent where there are none
    y[t, n]    = y0 + sum_j p[t, n, j]              role sum; absent where K < 8
"""

from dsr1build.graph.model import Dim, TensorType
from dsr1build.ops.emitter import Body, Emitter, Value

LANES = 8


def split_lanes(emitter: Emitter, value: Value) -> tuple[Value | None, Value | None]:
    """[.., K] as ([.., K/8, 8], [.., K mod 8]); a part is None where it is empty.

    Only for arguments and results of earlier phases: these are views.
    """
    *outer, width = value.type.shape
    assert isinstance(width, int)
    whole = width // LANES * LANES
    main, tail = None, None
    zeros: list[Dim] = [0] * len(outer)
    if whole:
        columns = value if whole == width else emitter.slice(value, [*zeros, 0], [*outer, whole])
        groups = [*([i] for i in range(len(outer))), [len(outer), len(outer) + 1]]
        main = emitter.expand(columns, groups, [*outer, whole // LANES, LANES])
    if whole < width:
        tail = emitter.slice(value, [*zeros, whole], [*outer, width - whole])
    return main, tail


def dot(emitter: Emitter, x: Value, w: Value, into: Value | None = None, suffix: str = "") -> Value:
    """``x [T, K]`` times the transpose of ``w [N, K]``, f32 [T, N], as generics of the current phase.

    ``w`` is widened to f32 element by element. ``into`` is the tensor to compute into, where this is the end of the
    phase. ``suffix`` tells the roles of a second product of the phase apart (``dot2``).
    """

    def multiply(b: Body, a: str, c: str, acc: str) -> str:
        return b.mac(acc, a, b.widen(c, w.type.dtype))

    def add(b: Body, lane: str, acc: str) -> str:
        return b.add(acc, lane)

    rows, outputs = x.type.shape[0], w.type.shape[0]
    x_lanes, x_tail = split_lanes(emitter, x)
    w_lanes, w_tail = split_lanes(emitter, w)
    y = emitter.fill(into if into is not None else emitter.empty(TensorType("f32", (rows, outputs))), 0.0)
    if x_tail is not None and w_tail is not None:
        y = emitter.generic(f"tail{suffix}", "t, n, r", [(x_tail, "t, r"), (w_tail, "n, r")], (y, "t, n"), "ppr", multiply)
    if x_lanes is not None and w_lanes is not None:
        partial = emitter.filled(TensorType("f32", (rows, outputs, LANES)))
        partial = emitter.generic(
            f"dot{suffix}", "t, n, k, j", [(x_lanes, "t, k, j"), (w_lanes, "n, k, j")], (partial, "t, n, j"), "pprp", multiply
        )
        y = emitter.generic(
            f"sum{suffix}", "t, n, j", [(partial, "t, n, j")], (y, "t, n"), "ppr", lambda b, p, acc: b.add(acc, p)
        )
    return y
