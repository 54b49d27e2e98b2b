"""Every lowering, compiled alone, against its formula in float64.

Weights lie at odd addresses, scratch is poisoned, cache rows behind the valid ones are NaN (tests/kernel_runner.py).
"""

from pathlib import Path

import numpy as np
import pytest
from operator_cases import CASES, CONTEXT, Case, kernel_of, relative_error

from kernel_runner import compile_text


@pytest.mark.parametrize("tokens", [1, None], ids=["tokens=1", "tokens=1.."])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_a_compiled_lowering_gives_the_formula(case: Case, tokens: int | None, tmp_path: Path) -> None:
    source = kernel_of(case, tokens)
    kernel = compile_text(source.text, source.signature, tmp_path)
    pasts = (0, 1, 37) if "past" in case.inputs else (0,)
    for rows in (1,) if tokens == 1 else (1, 3, 5):
        for past in pasts:
            arrays = case.arrays(rows, past)
            expected = case.expected(arrays)
            dims = {"tokens": rows, "past": past, "context": CONTEXT}
            given = {n: a for n, a in arrays.items() if n != "past"}
            if "cache" not in given:
                given["y"] = np.full(expected.shape, np.nan, np.float32)
            results = [kernel.call(given, dims, splits) for splits in (1, 3)]
            got, again = (next(iter(r.values())) for r in results)
            assert got.tobytes() == again.tobytes(), "the split of the work changes the bits"
            assert relative_error(got, expected) <= case.operator.tolerance, f"{rows} rows after {past}"
