"""Rewrites of scalar and vector arithmetic that upstream passes do not do: exp without libm, fused multiply-add, alignment."""

from collections.abc import Sequence

from mlir import ir
from mlir.dialects import arith, math, vector

# Cephes expf: x = n ln 2 + r with ln 2 in two parts, e^r by a polynomial of degree 5 in Horner form.
LOG2_E = 1.4426950408889634
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
# Below the first e^x has no normal f32 and becomes 0; above the second it has no finite one.
EXP_LOWEST, EXP_HIGHEST = -87.33654, 88.72283


def all_operations(root: ir.Operation, names: Sequence[str] = ()) -> list[ir.Operation]:
    """Every operation in ``root``, or those with one of ``names``, in post-order."""
    found: list[ir.Operation] = []

    def visit(op: ir.Operation) -> ir.WalkResult:
        if not names or op.name in names:
            found.append(op)
        return ir.WalkResult.ADVANCE

    root.operation.walk(visit)
    return found


def expand_exp(module: ir.Module, fma: bool) -> None:
    """Replace math.exp on f32 scalars and vectors by arithmetic; relative error below 3e-7.

    NaN gives NaN, -inf gives 0 and +inf gives +inf. ``fma`` says whether the target has fused multiply-add.
    """
    for op in all_operations(module.operation, ["math.exp"]):
        with ir.InsertionPoint(op), op.location:
            op.results[0].replace_all_uses_with(_exp(op.operands[0], fma))
        op.erase()


def _exp(x: ir.Value, fma: bool) -> ir.Value:
    type_ = x.type
    i32 = ir.IntegerType.get_signless(32)
    int_type = ir.VectorType.get(type_.shape, i32) if isinstance(type_, ir.VectorType) else i32

    def real(value: float) -> ir.Value:
        attribute = ir.FloatAttr.get_f32(value)
        splat = ir.DenseElementsAttr.get_splat(type_, attribute) if isinstance(type_, ir.VectorType) else attribute
        return arith.ConstantOp(type_, splat).result

    def integer(value: int) -> ir.Value:
        attribute = ir.IntegerAttr.get(i32, value)
        splat = ir.DenseElementsAttr.get_splat(int_type, attribute) if isinstance(int_type, ir.VectorType) else attribute
        return arith.ConstantOp(int_type, splat).result

    def multiply_add(a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return math.fma(a, b, c) if fma else arith.addf(arith.mulf(a, b), c)

    def power_of_two(k: ir.Value) -> ir.Value:
        return arith.bitcast(type_, arith.shli(arith.addi(k, integer(127)), integer(23)))

    clamped = arith.minimumf(arith.maximumf(x, real(EXP_LOWEST)), real(EXP_HIGHEST))
    # A NaN must not reach fptosi, whose result would be undefined.
    finite = arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), real(0.0), clamped)
    n = math.roundeven(arith.mulf(finite, real(LOG2_E)))
    r = multiply_add(n, real(-LN2_LOW), multiply_add(n, real(-LN2_HIGH), finite))
    p = real(EXP_COEFFICIENTS[0])
    for coefficient in EXP_COEFFICIENTS[1:]:
        p = multiply_add(p, r, real(coefficient))
    y = multiply_add(p, arith.mulf(r, r), arith.addf(r, real(1.0)))
    # 2^n in two factors: n reaches 128, and 2^128 is no f32.
    power = arith.fptosi(int_type, n)
    half = arith.shrsi(power, integer(1))
    result = arith.mulf(arith.mulf(y, power_of_two(half)), power_of_two(arith.subi(power, half)))
    result = arith.select(arith.cmpf(arith.CmpFPredicate.OLT, x, real(EXP_LOWEST)), real(0.0), result)
    result = arith.select(arith.cmpf(arith.CmpFPredicate.OGT, x, real(EXP_HIGHEST)), real(float("inf")), result)
    return arith.select(arith.cmpf(arith.CmpFPredicate.UNO, x, x), x, result)


def use_fma(module: ir.Module) -> None:
    """``c + a * b`` becomes ``fma(a, b, c)`` where the product has no other use.

    A contract flag would leave the choice to each site: where LLVM vectorises a loop over work items, body and remainder
    choose differently, and the result depends on [lo, hi). Written down, the choice is the same everywhere. So it must not
    depend on the block either: the vectoriser puts a shape_cast between product and sum of some blocks and not of others.
    """
    for add in all_operations(module.operation, ["arith.addf", "arith.subf"]):
        for k in (1, 0) if add.name == "arith.addf" else (1,):
            chain = _product_behind(add.operands[k], add)
            if not chain:
                continue
            product = chain[-1]
            with ir.InsertionPoint(add), add.location:
                factors = [_cast(v, add.results[0].type) for v in product.operands]
                if add.name == "arith.subf":
                    factors[0] = arith.negf(factors[0])
                add.results[0].replace_all_uses_with(math.fma(*factors, add.operands[1 - k]))
            for op in (add, *chain):
                op.erase()
            break


def _product_behind(value: ir.Value, add: ir.Operation) -> list[ir.Operation]:
    """The operations from ``value`` back to a multiplication, through shape casts, each used once and in the block of
    ``add``; empty where there is none."""
    chain: list[ir.Operation] = []
    while not isinstance(value.owner, ir.Block):
        op = value.owner.operation
        if op.name not in ("arith.mulf", "vector.shape_cast") or op.block != add.operation.block or len(list(value.uses)) != 1:
            return []
        chain.append(op)
        if op.name == "arith.mulf":
            return chain
        value = op.operands[0]
    return []


def _cast(value: ir.Value, type_: ir.Type) -> ir.Value:
    return value if value.type == type_ else vector.shape_cast(type_, value)


def loads_at_any_address(module: ir.Module) -> None:
    """Alignment 1 on every load of data: weights lie at any byte address (x86 uses the same instructions)."""
    one = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 1)
    for op in all_operations(module.operation, ["llvm.load"]):
        if str(op.results[0].type) != "!llvm.ptr":
            op.attributes["alignment"] = one
