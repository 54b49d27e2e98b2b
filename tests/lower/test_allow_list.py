"""The portable subset is held line by line."""

import pytest
from test_kernel_source import ATTENTION, ATTENTION_RESULTS, ATTENTION_SIGNATURE, RANGE

from dsr1build.lower.allow_list import check_portable
from dsr1build.lower.kernel_source import lower_kernel

TEXT = lower_kernel(ATTENTION, ATTENTION_SIGNATURE, ATTENTION_RESULTS, RANGE).text


def test_a_lowered_kernel_is_portable() -> None:
    check_portable(TEXT)
    assert TEXT.count("linalg.generic") > 10


@pytest.mark.parametrize(
    "line",
    [
        "  %x = linalg.add ins(%a, %b : tensor<4xf32>, tensor<4xf32>) outs(%c : tensor<4xf32>) -> tensor<4xf32>",
        "  %x = math.tanh %a : f32",
        "  %x = tensor.pad %a low[0] high[1] {",
        "  %x = memref.alloc() : memref<4xf32>",
        "  scf.for %i = %a to %b step %c {",
        "  func.call @expf(%a) : (f32) -> f32",
        '  %x = "arith.addf"(%a, %b) : (f32, f32) -> f32',
        "  %x:2 = linalg.generic {}",
    ],
)
def test_anything_else_is_refused_with_its_line(line: str) -> None:
    lines = TEXT.splitlines()
    lines.insert(3, line)
    with pytest.raises(ValueError) as error:
        check_portable("\n".join(lines))
    assert str(error.value) == f"line 4 is outside of the portable subset: {line.strip()}"
