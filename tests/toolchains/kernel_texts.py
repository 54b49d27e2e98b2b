"""Kernel texts for the tests of this room, written with the emitter as operators write them."""

from dsr1build.graph.model import Dim, DType, TensorType
from dsr1build.graph.signature import Argument, Role, Signature, ordered_dims
from dsr1build.ops.emitter import Emitter, Value

LANES = 8


def argument(name: str, role: Role, dtype: DType, *shape: Dim) -> Argument:
    return Argument(name, role, TensorType(dtype, shape))


def begin(tokens: Dim, *arguments: Argument, past: bool = False) -> tuple[Emitter, dict[str, Value]]:
    dims = {d for a in arguments for d in a.type.shape if isinstance(d, str)} | ({"past"} if past else set())
    signature = Signature(arguments, ordered_dims(dims))
    emitter = Emitter(signature, None if isinstance(tokens, str) else tokens)
    return emitter, {a.name: Value(f"%{a.name}", a.type) for a in arguments}


def product(e: Emitter, x: Value, w: Value, suffix: str = "", into: Value | None = None) -> Value:
    """The generics of one ``dot`` product: dot, tail where K is not a multiple of the lanes, sum."""
    (tokens, width), rows = x.type.shape, w.type.shape[0]
    dtype = w.type.dtype
    main = int(width) // LANES * LANES
    result = e.fill(into, 0.0) if into else e.filled(TensorType("f32", (tokens, rows)))
    groups = [[0], [1, 2]]
    partial = None
    if main:
        xm, wm = x, w
        if main < int(width):
            xm, wm = e.slice(x, [0, 0], [tokens, main]), e.slice(w, [0, 0], [rows, main])
        x3, w3 = e.expand(xm, groups, [tokens, main // LANES, LANES]), e.expand(wm, groups, [rows, main // LANES, LANES])
        zero = e.filled(TensorType("f32", (tokens, rows, LANES)))
        partial = e.generic(
            "dot" + suffix, "t, n, k, j", [(x3, "t, k, j"), (w3, "n, k, j")], (zero, "t, n, j"), "pprp",
            lambda b, a, c, o: b.mac(o, a, b.widen(c, dtype)),
        )  # fmt: skip
    if main < int(width):
        left = int(width) - main
        xt, wt = e.slice(x, [0, main], [tokens, left]), e.slice(w, [0, main], [rows, left])
        result = e.generic(
            "tail" + suffix, "t, n, r", [(xt, "t, r"), (wt, "n, r")], (result, "t, n"), "ppr",
            lambda b, a, c, o: b.mac(o, a, b.widen(c, dtype)),
        )  # fmt: skip
    if partial:
        result = e.generic(
            "sum" + suffix, "t, n, j", [(partial, "t, n, j")], (result, "t, n"), "ppr", lambda b, a, o: b.add(o, a)
        )
    return result


def linear(tokens: Dim, n: int, k: int, dtype: DType, bias: bool = False) -> tuple[str, Signature]:
    """y = x w^T (+ bias + residual)"""
    extra = (argument("bias", "weight", "f32", n), argument("residual", "input", "f32", tokens, n)) if bias else ()
    e, v = begin(
        tokens,
        argument("x", "input", "f32", tokens, k),
        *extra,
        argument("w", "weight", dtype, n, k),
        argument("y", "output", "f32", tokens, n),
    )
    e.phase("dot")
    if not bias:
        return e.finish([product(e, v["x"], v["w"], into=v["y"])]), e.signature
    y = product(e, v["x"], v["w"])
    result = e.generic(
        "out", "t, n", [(y, "t, n"), (v["bias"], "n"), (v["residual"], "t, n")], (v["y"], "t, n"), "pp",
        lambda b, y, c, r, _: b.add(b.add(y, c), r),
    )  # fmt: skip
    return e.finish([result]), e.signature


def swiglu(tokens: Dim, n: int, k: int, dtype: DType) -> tuple[str, Signature]:
    """y = silu(x g^T) * (x u^T)"""
    e, v = begin(
        tokens,
        argument("x", "input", "f32", tokens, k),
        argument("g", "weight", dtype, n, k),
        argument("u", "weight", dtype, n, k),
        argument("y", "output", "f32", tokens, n),
    )
    e.phase("dot")
    gate, up = product(e, v["x"], v["g"]), product(e, v["x"], v["u"], "2")
    result = e.generic(
        "out", "t, n", [(gate, "t, n"), (up, "t, n")], (v["y"], "t, n"), "pp",
        lambda b, g, u, _: b.mul(b.div(g, b.add(b.constant(1.0), b.exp(b.neg(g)))), u),
    )  # fmt: skip
    return e.finish([result]), e.signature


def softmax(tokens: Dim, n: int) -> tuple[str, Signature]:
    """y = softmax(x) along the last axis: a chain of maximum, exp, sum, quotient in one map1 phase."""
    e, v = begin(tokens, argument("x", "input", "f32", tokens, n), argument("y", "output", "f32", tokens, n))
    e.phase("map1")
    row = TensorType("f32", (tokens,))
    x = v["x"]
    top = e.generic("max", "t, n", [(x, "t, n")], (e.filled(row, float("-inf")), "t"), "pr", lambda b, a, o: b.maximum(o, a))
    ex = e.generic(
        "exp", "t, n", [(x, "t, n"), (top, "t")], (e.empty(x.type), "t, n"), "pp", lambda b, a, m, _: b.exp(b.sub(a, m))
    )
    total = e.generic("sum", "t, n", [(ex, "t, n")], (e.filled(row), "t"), "pr", lambda b, a, o: b.add(o, a))
    y = e.generic("quotient", "t, n", [(ex, "t, n"), (total, "t")], (v["y"], "t, n"), "pp", lambda b, a, s, _: b.div(a, s))
    return e.finish([y]), e.signature


def insert(tokens: Dim, width: int) -> tuple[str, Signature]:
    """cache[past : past + tokens] = 2 * rows, and y = the sum of each valid row of the cache."""
    e, v = begin(
        tokens,
        argument("rows", "input", "f32", tokens, width),
        argument("cache", "state", "f32", "context", width),
        argument("y", "output", "f32", "context"),
        past=True,
    )
    e.phase("map1")
    rows = v["rows"]
    old = e.slice(v["cache"], ["past", 0], [tokens, width])
    new = e.generic("double", "t, n", [(rows, "t, n")], (old, "t, n"), "pp", lambda b, a, _: b.add(a, a))
    cache = e.insert(new, v["cache"], ["past", 0], [tokens, width])
    e.phase("map1")
    length = e.length()
    valid = e.slice(cache, [0, 0], [length, width])
    part = e.slice(v["y"], [0], [length])
    sums = e.generic("sum", "c, n", [(valid, "c, n")], (e.fill(part, 0.0), "c"), "pr", lambda b, a, o: b.add(o, a))
    y = e.insert(sums, v["y"], [0], [length])
    return e.finish([cache, y]), e.signature
