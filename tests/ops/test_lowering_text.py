"""The text of each lowering: phases and roles, the shape of products, and that it parses."""

import re

import pytest
from mlir import ir
from operator_cases import CASES, PLANNED_CASES, Case, kernel_of

from dsr1build.errors import InvalidInput


def case(name: str) -> Case:
    return next(c for c in (*CASES, *PLANNED_CASES) if c.name == name)


def tags(text: str) -> list[str]:
    return re.findall(r'tag = "([^"]+)"', text)


@pytest.mark.parametrize("tokens", [1, None], ids=["tokens=1", "tokens=1.."])
@pytest.mark.parametrize("each", CASES, ids=lambda c: c.name)
def test_it_parses_and_verifies(each: Case, tokens: int | None) -> None:
    with ir.Context():
        assert ir.Module.parse(kernel_of(each, tokens).text).operation.verify()


ROLES = {
    "linear-64x256-bf16": ["p0/dot/dot", "p0/dot/sum"],
    "linear-7x28-bf16": ["p0/dot/tail", "p0/dot/dot", "p0/dot/sum"],
    "linear-28x7-f16": ["p0/dot/tail"],
    "linear-28x28-f16-br": ["p0/dot/tail", "p0/dot/dot", "p0/dot/sum", "p0/dot/out"],
    "swiglu-257x64-f16": ["p0/dot/dot", "p0/dot/sum", "p0/dot/dot2", "p0/dot/sum2", "p0/dot/out"],
    "swiglu-28x7-f32": ["p0/dot/tail", "p0/dot/tail2", "p0/dot/out"],
    "norm-256-bf16": ["p0/map1/squares", "p0/map1/sum", "p0/map1/inverse", "p0/map1/norm"],
    "rotary-3x28-0+28-halves": ["p0/map2/rotate"],
    "rotary-2x24-16+8-interleaved": ["p0/map2/rotate", "p1/map2/copy"],
    "rotary-1x28-9+10-interleaved": ["p0/map2/rotate", "p1/map2/copy", "p2/map2/copy"],
    "embedding-257x28-bf16": ["p0/map2/gather"],
    "insert-28": ["p0/map2/copy"],
    "attention-6/2x16": [f"p0/map3/{r}" for r in ("scores", "sum", "mask", "largest", "terms", "total", "values", "context")],
    "slots-28": ["p0/map2/routed", "p0/map2/out"],
}


@pytest.mark.parametrize("name", ROLES)
def test_the_generics_are_tagged_with_phase_schedule_and_role(name: str) -> None:
    assert tags(kernel_of(case(name), None).text) == ROLES[name]


def test_a_product_without_tail_is_exactly_this() -> None:
    assert kernel_of(case("linear-64x256-bf16"), 1).text == (
        "func.func @kernel(%x: tensor<1x256xf32>, %w: tensor<64x256xbf16>, "
        "%y: tensor<1x64xf32> {bufferization.writable = true}) -> (tensor<1x64xf32>) {\n"
        "  %c0 = arith.constant 0.000000000e+00 : f32\n"
        "  %v1 = tensor.expand_shape %x [[0], [1, 2]] output_shape [1, 32, 8] : tensor<1x256xf32> into tensor<1x32x8xf32>\n"
        "  %v2 = tensor.expand_shape %w [[0], [1, 2]] output_shape [64, 32, 8] : tensor<64x256xbf16> into tensor<64x32x8xbf16>\n"
        "  %v3 = linalg.fill ins(%c0 : f32) outs(%y : tensor<1x64xf32>) -> tensor<1x64xf32>\n"
        "  %v4 = tensor.empty() : tensor<1x64x8xf32>\n"
        "  %v5 = linalg.fill ins(%c0 : f32) outs(%v4 : tensor<1x64x8xf32>) -> tensor<1x64x8xf32>\n"
        "  %v12 = linalg.generic {indexing_maps = [affine_map<(t, n, k, j) -> (t, k, j)>, "
        "affine_map<(t, n, k, j) -> (n, k, j)>, affine_map<(t, n, k, j) -> (t, n, j)>], "
        'iterator_types = ["parallel", "parallel", "reduction", "parallel"]}\n'
        "    ins(%v1, %v2 : tensor<1x32x8xf32>, tensor<64x32x8xbf16>)\n"
        '    outs(%v5 : tensor<1x64x8xf32>) attrs = {tag = "p0/dot/dot"} {\n'
        "    ^bb0(%e6: f32, %e7: bf16, %e8: f32):\n"
        "      %s9 = arith.extf %e7 : bf16 to f32\n"
        "      %s10 = arith.mulf %e6, %s9 : f32\n"
        "      %s11 = arith.addf %e8, %s10 : f32\n"
        "      linalg.yield %s11 : f32\n"
        "    } -> tensor<1x64x8xf32>\n"
        "  %v16 = linalg.generic {indexing_maps = [affine_map<(t, n, j) -> (t, n, j)>, "
        'affine_map<(t, n, j) -> (t, n)>], iterator_types = ["parallel", "parallel", "reduction"]}\n'
        "    ins(%v12 : tensor<1x64x8xf32>)\n"
        '    outs(%v3 : tensor<1x64xf32>) attrs = {tag = "p0/dot/sum"} {\n'
        "    ^bb0(%e13: f32, %e14: f32):\n"
        "      %s15 = arith.addf %e14, %e13 : f32\n"
        "      linalg.yield %s15 : f32\n"
        "    } -> tensor<1x64xf32>\n"
        "  return %v16 : tensor<1x64xf32>\n"
        "}\n"
    )


def test_the_last_columns_are_a_product_of_their_own() -> None:
    text = kernel_of(case("linear-7x28-bf16"), None).text
    assert "tensor.extract_slice %x[0, 24] [%tokens, 4] [1, 1] : tensor<?x28xf32> to tensor<?x4xf32>" in text
    assert "tensor.extract_slice %w[0, 24] [7, 4] [1, 1] : tensor<7x28xbf16> to tensor<7x4xbf16>" in text
    assert "affine_map<(t, n, r) -> (t, r)>, affine_map<(t, n, r) -> (n, r)>, affine_map<(t, n, r) -> (t, n)>" in text


def test_silu_is_written_out() -> None:
    body = kernel_of(case("swiglu-257x64-f16"), 1).text.split("p0/dot/out")[1]
    operations = re.findall(r"= ((?:arith|math)\.\w+)", body)
    assert operations == ["arith.negf", "math.exp", "arith.addf", "arith.divf", "arith.mulf"]


def test_attention_reads_the_valid_rows_of_the_cache_alone() -> None:
    text = kernel_of(case("attention-4/2x28"), None).text
    (length,) = re.findall(r"(%\w+) = arith.addi %past, %tokens : index", text)
    assert f"tensor.extract_slice %k[0, 0] [{length}, 56] [1, 1] : tensor<?x56xf32> to tensor<?x56xf32>" in text
    assert f"tensor.extract_slice %v[0, 0] [{length}, 56] [1, 1] : tensor<?x56xf32> to tensor<?x56xf32>" in text
    assert text.count("arith.cmpi ule") == 2


def test_the_cache_is_overwritten_from_past_on() -> None:
    text = kernel_of(case("insert-28"), None).text
    assert "[%past, 0, 0, 0] [%tokens, 1, 1, 28] [1, 1, 1, 1]" in text
    assert text.count("tensor.insert_slice") == 1


def test_every_reshape_is_of_an_argument_or_of_an_earlier_phase() -> None:
    """A view of a value of the same phase would stop the fusion of that phase."""
    for each in CASES:
        phase_of: dict[str, str] = {}
        lines = kernel_of(each, None).text.splitlines()
        made = [(i, re.match(r"  (%\w+) = (\S+)(.*)", line)) for i, line in enumerate(lines)]
        values = [(i, m) for i, m in made if m and not lines[i].startswith("      ")]
        results = {m.group(1): i for i, m in values if m.group(2) == "linalg.generic"}
        for name, i in results.items():
            tag = re.search(r'tag = "(p\d+)/', "".join(lines[i : i + 3]))
            assert tag, lines[i]
            phase_of[name] = tag.group(1)
        for i, m in values:
            if m.group(2) not in ("tensor.expand_shape", "tensor.collapse_shape", "tensor.extract_slice"):
                continue
            source = m.group(3).split()[0].split("[")[0]
            later = {phase_of[n] for n, k in results.items() if k > i}
            if source in phase_of:
                assert phase_of[source] not in later, f"{each.name}: {lines[i]}"


def test_the_dense_sum_of_experts_is_not_lowered() -> None:
    with pytest.raises(InvalidInput) as error:
        kernel_of(case("experts-28"), 1)
    assert error.value.render() == (
        "CombineExperts: error: a dense sum over all experts has no kernel\n"
        "help: set `dispatch: sparse` in the recipe, so that only the chosen experts run."
    )
