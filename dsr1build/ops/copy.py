"""Copies of whole tensors and windows, as phases: a copy left to the compiler would be a serial memcpy, or refused."""

from dsr1build.graph.model import Dim
from dsr1build.ops.dot import LANES
from dsr1build.ops.emitter import Emitter, Value

# Columns of one item of an elementwise phase: a few cache lines, so that items are worth distributing.
BLOCK = 256


def block_width(width: int) -> int:
    """The largest divisor of ``width`` that is at most BLOCK and a multiple of the lanes; the whole width if none is."""
    return next((b for b in range(BLOCK, 0, -LANES) if width % b == 0), width)


def in_blocks(emitter: Emitter, value: Value, dimension: int) -> Value:
    """A view with a constant ``dimension`` split into [width / block, block]. Arguments and earlier results only."""
    shape = list(value.type.shape)
    width = shape[dimension]
    assert isinstance(width, int)
    block = block_width(width)
    groups = [[i] for i in range(dimension)] + [[dimension, dimension + 1]]
    groups += [[i + 1] for i in range(dimension + 1, len(shape))]
    return emitter.expand(value, groups, [*shape[:dimension], width // block, block, *shape[dimension + 1 :]])


def copy(emitter: Emitter, source: Value, into: Value, first_row: Dim = 0) -> Value:
    """``source`` [T, N] written over the rows of ``into`` [R, N] from ``first_row`` on, one phase; returns the new ``into``.

    The destination is seen with one more dimension of size 1: MLIR erases a generic whose operands are all indexed
    alike and that only yields its input, and with it the copy.
    """
    rows, width = source.type.shape
    assert isinstance(width, int)
    block = block_width(width)
    groups = [[0], [1, 2, 3]]
    sizes: list[Dim] = [rows, width // block, 1, block]
    offsets: list[Dim] = [first_row, 0, 0, 0]
    emitter.phase("map2")
    blocks = in_blocks(emitter, source, 1)
    whole = emitter.expand(into, groups, [into.type.shape[0], *sizes[1:]])
    target = whole if whole.type.shape == tuple(sizes) else emitter.slice(whole, offsets, sizes)
    done = emitter.generic("copy", "t, w, o, j", [(blocks, "t, w, j")], (target, "t, w, o, j"), "pppp", lambda b, a, _: a)
    if target is not whole:
        done = emitter.insert(done, whole, offsets, sizes)
    return emitter.collapse(done, groups, into.type.shape)


def copy_columns(emitter: Emitter, source: Value, into: Value, start: int, end: int) -> Value:
    """Columns start..end of ``source`` [T, heads, D] written into ``into`` of the same shape, one phase; none if empty."""
    rows, heads, _ = into.type.shape
    width = end - start
    if width == 0:
        return into
    offsets: list[Dim] = [0, 0, start]
    sizes: list[Dim] = [rows, heads, width]
    emitter.phase("map2")
    taken = emitter.slice(source, offsets, sizes)
    target = emitter.expand(emitter.slice(into, offsets, sizes), [[0], [1], [2, 3]], [rows, heads, 1, width])
    done = emitter.generic("copy", "t, h, o, j", [(taken, "t, h, j")], (target, "t, h, o, j"), "pppp", lambda b, a, _: a)
    return emitter.insert(emitter.collapse(done, [[0], [1], [2, 3]], sizes), into, offsets, sizes)
