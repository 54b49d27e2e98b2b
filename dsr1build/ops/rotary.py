"""Rotary position embedding from tables of cosines and sines."""

from dsr1build.graph.model import Dim, TensorType
from dsr1build.ops.copy import copy_columns
from dsr1build.ops.emitter import Body, Emitter, Value
from dsr1build.ops.operator import (
    Attributes,
    Operands,
    Operator,
    Types,
    activation,
    aligned,
    integer,
    required,
    same,
    scalar_past,
)


def table_half(cos: TensorType | None, sin: TensorType | None) -> int:
    """The number of frequencies of a pair of tables [C, half]. Raises ValueError where they do not fit."""
    _, half = activation(cos, "cos")
    same(sin, "sin", required(cos, "cos"))
    return half


def table_rows(emitter: Emitter, table: Value, rows: Dim) -> Value:
    """The rows of a table [C, half] that belong to this call: [T, half], from position ``past`` on."""
    return emitter.slice(table, ["past", 0], [rows, table.type.shape[1]])


def rotate(
    emitter: Emitter, pairs: tuple[Value, Value], cos: Value, sin: Value, into: Value, half_axis: int, outer: str
) -> Value:
    """Rotate pairs (a, b) of columns: (a cos - b sin, b cos + a sin), one generic, the last of the current phase.

    ``pairs`` are [.., half]; ``cos`` and ``sin`` are [T, half]; ``into`` is [.., half, 2] with ``half_axis`` 0
    (interleaved) or [.., 2, half] with ``half_axis`` 1; ``outer`` names the outer loops, ``t`` first.
    """

    def body(b: Body, first: str, second: str, c: str, s: str, _: str) -> str:
        loops = outer.count(",") + 1
        is_first = b.compare_int("eq", b.index(loops + 1 - half_axis), b.integer(0, "index"))
        own = b.mul(b.select(is_first, first, second), c)
        other = b.mul(b.select(is_first, b.neg(second), first), s)
        return b.add(own, other)

    target = f"{outer}, j, z" if half_axis == 0 else f"{outer}, z, j"
    operands = [(p, f"{outer}, j") for p in pairs] + [(cos, "t, j"), (sin, "t, j")]
    return emitter.generic("rotate", target, operands, (into, target), "p" * (target.count(",") + 1), body)


def _infer(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    x, cos, sin, past = aligned(types, 4)
    rows, width = activation(x, "x")
    half = table_half(cos, sin)
    scalar_past(past)
    heads, head_dim, offset = (integer(attributes, n) for n in ("heads", "head_dim", "offset"))
    integer(attributes, "interleaved")
    if width != heads * head_dim:
        raise ValueError(f"x is {x}, expected {heads} heads x {head_dim} columns")
    if offset < 0 or offset + 2 * half > head_dim:
        raise ValueError(f"columns {offset}..{offset + 2 * half} of a head of {head_dim} cannot be rotated")
    return (TensorType("f32", (rows, width)),)


def rotation_reference(x: str, result: str, interleaved: bool, half: int) -> str:
    """Reference statements: ``result`` is ``x`` [T, heads, 2*half] rotated at the positions from ``past`` on.

    Reads the formal names ``cos``, ``sin`` and ``past``.
    """
    split = (half, 2) if interleaved else (2, half)
    axis = 3 if interleaved else 2
    return f"""
        {result}_zero = Constant <value_ints = [0]> ()
        {result}_one = Constant <value_ints = [1]> ()
        {result}_rows = Shape <start = 0, end = 1> ({x})
        {result}_from = Reshape (past, {result}_one)
        {result}_to = Add ({result}_from, {result}_rows)
        {result}_cos2 = Slice (cos, {result}_from, {result}_to, {result}_zero)
        {result}_sin2 = Slice (sin, {result}_from, {result}_to, {result}_zero)
        {result}_head = Constant <value_ints = [1]> ()
        {result}_cos3 = Unsqueeze ({result}_cos2, {result}_head)
        {result}_sin3 = Unsqueeze ({result}_sin2, {result}_head)
        {result}_paired = Constant <value_ints = [0, 0, {split[0]}, {split[1]}]> ()
        {result}_flat = Constant <value_ints = [0, 0, {2 * half}]> ()
        {result}_axis = Constant <value_ints = [{axis}]> ()
        {result}_x4 = Reshape ({x}, {result}_paired)
        {result}_a4, {result}_b4 = Split <axis = {axis}, num_outputs = 2> ({result}_x4)
        {result}_a = Squeeze ({result}_a4, {result}_axis)
        {result}_b = Squeeze ({result}_b4, {result}_axis)
        {result}_ac = Mul ({result}_a, {result}_cos3)
        {result}_bs = Mul ({result}_b, {result}_sin3)
        {result}_bc = Mul ({result}_b, {result}_cos3)
        {result}_as = Mul ({result}_a, {result}_sin3)
        {result}_first = Sub ({result}_ac, {result}_bs)
        {result}_second = Add ({result}_bc, {result}_as)
        {result}_first4 = Unsqueeze ({result}_first, {result}_axis)
        {result}_second4 = Unsqueeze ({result}_second, {result}_axis)
        {result}_y4 = Concat <axis = {axis}> ({result}_first4, {result}_second4)
        {result} = Reshape ({result}_y4, {result}_flat)
    """


def _reference(types: Types, attributes: Attributes) -> str:
    _, cos, sin, _ = aligned(types, 4)
    half = table_half(cos, sin)
    heads, head_dim, offset = (integer(attributes, n) for n in ("heads", "head_dim", "offset"))
    rest = head_dim - offset - 2 * half
    return f"""
        headed = Constant <value_ints = [0, {heads}, {head_dim}]> ()
        merged = Constant <value_ints = [0, {heads * head_dim}]> ()
        parts = Constant <value_ints = [{offset}, {2 * half}, {rest}]> ()
        x3 = Reshape (x, headed)
        before, middle, after = Split <axis = 2> (x3, parts)
        {rotation_reference("middle", "rotated", bool(integer(attributes, "interleaved")), half)}
        y3 = Concat <axis = 2> (before, rotated, after)
        y = Reshape (y3, merged)
    """


def _lower(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    x, cos, sin = (required(v, n) for v, n in zip(operands, ("x", "cos", "sin"), strict=True))
    heads, head_dim, offset = (integer(attributes, n) for n in ("heads", "head_dim", "offset"))
    half_axis = 0 if integer(attributes, "interleaved") else 1
    rows, half = x.type.shape[0], cos.type.shape[1]
    assert isinstance(half, int)
    groups = [[0], [1, 2]]
    x3 = emitter.expand(x, groups, [rows, heads, head_dim])
    y3 = emitter.expand(emitter.destination(0, x.type), groups, [rows, heads, head_dim])
    window: tuple[list[Dim], list[Dim]] = [0, 0, offset], [rows, heads, 2 * half]
    split: list[Dim] = [rows, heads, half, 2] if half_axis == 0 else [rows, heads, 2, half]
    paired = [[0], [1], [2, 3]]
    x4 = emitter.expand(emitter.slice(x3, *window), paired, split)
    axis = 3 - half_axis
    one = [d if i != axis else 1 for i, d in enumerate(split)]
    first, second = (emitter.slice(x4, [z if i == axis else 0 for i in range(4)], one, drop=[axis]) for z in (0, 1))
    target = emitter.expand(emitter.slice(y3, *window), paired, split)
    emitter.phase("map2")
    tables = (table_rows(emitter, cos, rows), table_rows(emitter, sin, rows))
    rotated = rotate(emitter, (first, second), *tables, target, half_axis, "t, h")
    y3 = emitter.insert(emitter.collapse(rotated, paired, window[1]), y3, *window)
    y3 = copy_columns(emitter, x3, y3, 0, offset)
    y3 = copy_columns(emitter, x3, y3, offset + 2 * half, head_dim)
    return (emitter.collapse(y3, groups, x.type.shape),)


ROTARY_EMBEDDING = Operator(
    name="RotaryEmbedding",
    inputs=("x", "cos", "sin", "past"),
    outputs=("y",),
    attributes=("heads", "head_dim", "offset", "interleaved"),
    infer=_infer,
    reference=_reference,
    lower=_lower,
    tolerance=1e-6,
    row_independent=False,
)

OPERATORS = (ROTARY_EMBEDDING,)
