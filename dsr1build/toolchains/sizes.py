"""Sizes as functions of the run-time dimensions: read from index arithmetic, shown as text, written back as arithmetic.

A kernel's item counts and memory sizes are needed three times: in ``<symbol>__plan`` (the authority), in the code that
cuts the scratch area into buffers, and as text in ``kernel.json``. All three come from one expression.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Literal, TypeAlias

from mlir import ir
from mlir.dialects import arith

Operation: TypeAlias = Literal["+", "-", "*", "ceildiv", "floordiv", "mod", "min", "max"]


@dataclass(frozen=True, slots=True)
class Binary:
    operation: Operation
    left: "Size"
    right: "Size"


Size: TypeAlias = int | str | Binary


class NotOfDims(Exception):
    """A size that depends on more than the run-time dimensions; the message names the operation."""


def combine(operation: Operation, left: Size, right: Size) -> Size:
    """One operation, folded where the result is known. All sizes are >= 0, divisors are > 0."""
    if isinstance(left, int) and isinstance(right, int):
        return _calculate(operation, left, right)
    if left == right and operation in ("min", "max"):
        return left
    match operation:
        case "+" if left == 0:
            return right
        case "+" | "-" if right == 0:
            return left
        case "*" if left == 0 or right == 0:
            return 0
        case "*" if left == 1:
            return right
        case "*" | "ceildiv" | "floordiv" if right == 1:
            return left
        case "max" if left == 0:
            return right
        case "max" if right == 0:
            return left
    return Binary(operation, left, right)


def _calculate(operation: Operation, a: int, b: int) -> int:
    match operation:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "ceildiv":
            return -(-a // b)
        case "floordiv":
            return a // b
        case "mod":
            return a % b
        case "min":
            return min(a, b)
        case "max":
            return max(a, b)


def evaluate(size: Size, dims: Mapping[str, int]) -> int:
    if isinstance(size, int):
        return size
    if isinstance(size, str):
        return dims[size]
    return _calculate(size.operation, evaluate(size.left, dims), evaluate(size.right, dims))


def show(size: Size) -> str:
    """The formula as text: ``(tokens * 32)``, ``max(a, b)``, ``ceildiv(tokens, 4)``."""
    if not isinstance(size, Binary):
        return str(size)
    left, right = show(size.left), show(size.right)
    return f"({left} {size.operation} {right})" if size.operation in ("+", "-", "*") else f"{size.operation}({left}, {right})"


def emit(size: Size, dims: Mapping[str, ir.Value]) -> ir.Value:
    """The size as an index value at the current insertion point."""
    if isinstance(size, int):
        return index(size)
    if isinstance(size, str):
        return dims[size]
    left, right = emit(size.left, dims), emit(size.right, dims)
    build = {
        "+": arith.addi,
        "-": arith.subi,
        "*": arith.muli,
        "ceildiv": arith.ceildivui,
        "floordiv": arith.divui,
        "mod": arith.remui,
        "min": arith.minui,
        "max": arith.maxui,
    }[size.operation]
    value: ir.Value = build(left, right)
    return value


def index(value: int) -> ir.Value:
    constant: ir.Value = arith.ConstantOp(ir.IndexType.get(), value).result
    return constant


def exact(value: ir.Value, names: Mapping[ir.Value, str]) -> Size:
    """The size that an index value stands for; ``names`` are the dimensions. Raises NotOfDims."""
    return _read(value, names, bound=False)


def upper_bound(value: ir.Value, names: Mapping[ir.Value, str]) -> Size:
    """A size that the value never exceeds and that is monotone in the dimensions.

    A partial tile is ``min(n - i, 4)`` with a loop counter ``i``: it is at most 4, and ``n - i`` is at most ``n``.
    Raises NotOfDims where no bound follows.
    """
    return _read(value, names, bound=True)


_ARITH: Mapping[str, Operation] = {
    "arith.addi": "+",
    "arith.subi": "-",
    "arith.muli": "*",
    "arith.ceildivsi": "ceildiv",
    "arith.ceildivui": "ceildiv",
    "arith.divsi": "floordiv",
    "arith.divui": "floordiv",
    "arith.floordivsi": "floordiv",
    "arith.remsi": "mod",
    "arith.remui": "mod",
    "arith.minsi": "min",
    "arith.minui": "min",
    "arith.maxsi": "max",
    "arith.maxui": "max",
}


def _read(value: ir.Value, names: Mapping[ir.Value, str], bound: bool) -> Size:
    if value in names:
        return names[value]
    if isinstance(value.owner, ir.Block):
        raise NotOfDims("a loop counter")
    op = value.owner.operation
    if op.name == "arith.constant":
        return int(op.attributes["value"].value)
    if op.name in _ARITH:
        left, right = op.operands
        return _apply(_ARITH[op.name], lambda: _read(left, names, bound), lambda: _read(right, names, bound), bound)
    if op.name not in ("affine.apply", "affine.min", "affine.max"):
        raise NotOfDims(op.name)
    map_ = op.attributes["map"].value
    operands = list(op.operands)

    def of_expression(e: ir.AffineExpr) -> Size:
        return _read_affine(e, operands, map_.n_dims, names, bound)

    operation: Operation = "max" if op.name == "affine.max" else "min"
    reads = [partial(of_expression, e) for e in map_.results]
    return reduce(lambda left, right: partial(_apply, operation, left, right, bound), reads)()


def _apply(operation: Operation, left: Callable[[], Size], right: Callable[[], Size], bound: bool) -> Size:
    """Combine two sizes that are read on demand: where a bound is asked for, one side alone can give it."""
    if bound and operation == "-":
        return left()
    if bound and operation == "mod":
        return combine("-", right(), 1)
    if bound and operation == "min":
        known = []
        for side in (left, right):
            with contextlib.suppress(NotOfDims):
                known.append(side())
        if not known:
            raise NotOfDims("a loop counter")
        return known[0] if len(known) == 1 else combine("min", *known)
    if bound and operation in ("ceildiv", "floordiv") and isinstance(divisor := right(), Binary):
        # A quotient is bounded by a divisor that is known exactly, not by one that may be smaller.
        raise NotOfDims(f"a quotient by {show(divisor)}")
    return combine(operation, left(), right())


def _read_affine(e: ir.AffineExpr, operands: Sequence[ir.Value], dims: int, names: Mapping[ir.Value, str], bound: bool) -> Size:
    def side(expression: ir.AffineExpr) -> Callable[[], Size]:
        return lambda: _read_affine(expression, operands, dims, names, bound)

    if isinstance(e, ir.AffineConstantExpr):
        return int(e.value)
    if isinstance(e, ir.AffineDimExpr):
        return _read(operands[e.position], names, bound)
    if isinstance(e, ir.AffineSymbolExpr):
        return _read(operands[dims + e.position], names, bound)
    if isinstance(e, ir.AffineAddExpr):
        for positive, other in ((e.lhs, e.rhs), (e.rhs, e.lhs)):
            if isinstance(other, ir.AffineMulExpr) and isinstance(other.rhs, ir.AffineConstantExpr) and other.rhs.value < 0:
                product = partial(_product, side(other.lhs), -other.rhs.value)
                return _apply("-", side(positive), product, bound)
        return _apply("+", side(e.lhs), side(e.rhs), bound)
    match e:
        case ir.AffineMulExpr():
            return _apply("*", side(e.lhs), side(e.rhs), bound)
        case ir.AffineModExpr():
            return _apply("mod", side(e.lhs), side(e.rhs), bound)
        case ir.AffineFloorDivExpr():
            return _apply("floordiv", side(e.lhs), side(e.rhs), bound)
        case ir.AffineCeilDivExpr():
            return _apply("ceildiv", side(e.lhs), side(e.rhs), bound)
    raise NotOfDims(str(e))


def _product(left: Callable[[], Size], right: int) -> Size:
    return combine("*", left(), right)
