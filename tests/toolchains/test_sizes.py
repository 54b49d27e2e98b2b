"""Sizes as formulas: folding, text, values."""

import pytest
from mlir import ir

from dsr1build.toolchains import sizes


def test_known_parts_fold() -> None:
    assert sizes.combine("ceildiv", 7, 4) == 2
    assert sizes.combine("*", 1, "tokens") == "tokens"
    assert sizes.combine("+", 0, "tokens") == "tokens"
    assert sizes.combine("*", 0, "tokens") == 0
    assert sizes.combine("max", "tokens", "tokens") == "tokens"
    assert sizes.combine("ceildiv", "tokens", 1) == "tokens"


def test_a_formula_reads_as_it_computes() -> None:
    size = sizes.combine("*", sizes.combine("ceildiv", sizes.combine("+", "past", "tokens"), 4), 64)
    assert sizes.show(size) == "(ceildiv((past + tokens), 4) * 64)"
    assert sizes.evaluate(size, {"past": 6, "tokens": 3}) == 192


@pytest.mark.parametrize(
    ("map_", "exact", "bound"),
    [
        ("()[s0] -> (s0 ceildiv 4)", "ceildiv(tokens, 4)", "ceildiv(tokens, 4)"),
        ("()[s0] -> (s0 * 6 + 2)", "((tokens * 6) + 2)", "((tokens * 6) + 2)"),
        ("()[s0] -> (s0 - (s0 floordiv 4) * 4)", "mod(tokens, 4)", "3"),
        ("()[s0] -> (s0 - (s0 floordiv 4) * 2)", "(tokens - (floordiv(tokens, 4) * 2))", "tokens"),
        ("(d0)[s0] -> (-d0 + s0)", None, "tokens"),
        ("(d0)[s0] -> (-d0 + s0, 4)", None, "min(tokens, 4)"),
        ("(d0)[s0] -> (d0 + s0)", None, None),
        ("(d0)[s0] -> (d0, 4)", None, "4"),
        ("(d0)[s0] -> ((s0 * 8) floordiv s0)", "floordiv((tokens * 8), tokens)", "floordiv((tokens * 8), tokens)"),
    ],
)
def test_index_arithmetic_is_read_exactly_or_as_a_monotone_bound(map_: str, exact: str | None, bound: str | None) -> None:
    operation = "affine.min" if "," in map_.split("->")[1] else "affine.apply"
    operands = "%i" * ("d0" in map_.split("->")[0]) + (")[%tokens]" if "s0" in map_ else ")")
    text = f"""func.func @f(%tokens: index, %n: index) {{
      %c0 = arith.constant 0 : index
      %c1 = arith.constant 1 : index
      scf.for %i = %c0 to %n step %c1 {{
        %v = {operation} affine_map<{map_}>({operands}
        "test.use"(%v) : (index) -> ()
      }}
      return
    }}"""
    context = ir.Context()
    context.allow_unregistered_dialects = True
    with context:
        module = ir.Module.parse(text)
        function = module.body.operations[0]
        loop = next(op for op in function.entry_block.operations if op.operation.name == "scf.for")
        value = next(iter(loop.operation.regions[0].blocks[0].operations)).operation.results[0]
        names = {function.entry_block.arguments[0]: "tokens"}
        for read, expected in ((sizes.exact, exact), (sizes.upper_bound, bound)):
            if expected is None:
                with pytest.raises(sizes.NotOfDims):
                    read(value, names)
            else:
                assert sizes.show(read(value, names)) == expected
