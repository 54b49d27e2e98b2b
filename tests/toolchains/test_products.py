"""The dot schedule: numbers against float64, bits over rows and splits, and vector code."""

import itertools
import re
import subprocess
from pathlib import Path

import kernel_texts
import ml_dtypes
import numpy as np
import pytest

from dsr1build.graph.model import Dim, DType
from dsr1build.toolchains import tools
from kernel_runner import LoadedKernel, compile_text

NUMPY = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}
EXTENTS = (1, 7, 28, 64, 257)
TOKENS = (1, 3, 4, 5, 64)


def arrays(kernel: LoadedKernel, tokens: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random arguments. Row t of every activation is the same for every number of tokens."""
    random = np.random.default_rng(seed)
    result = {}
    for a in kernel.signature.arguments:
        rows = 64 if a.name in ("x", "residual", "y") else None
        shape = [rows if i == 0 and rows else int(d) for i, d in enumerate(a.type.shape)]
        values = random.standard_normal(shape).astype(NUMPY[a.type.dtype])
        result[a.name] = values[:tokens] if rows else values
    result["y"] = np.full_like(result["y"], np.nan)
    return result


def linear_reference(given: dict[str, np.ndarray]) -> np.ndarray:
    v = {name: array.astype(np.float64) for name, array in given.items()}
    return v["x"] @ v["w"].T + v.get("bias", 0.0) + v.get("residual", 0.0)


def swiglu_reference(given: dict[str, np.ndarray]) -> np.ndarray:
    x, g, u = (given[name].astype(np.float64) for name in "xgu")
    gate = x @ g.T
    return gate / (1 + np.exp(-gate)) * (x @ u.T)


def check(got: np.ndarray, expected: np.ndarray, k: int) -> None:
    assert np.abs(got - expected).max() <= 4e-7 * (1 + np.sqrt(k) * np.abs(expected).max())


# Every N with one K, every K with one N, and the types in turn.
SAMPLE = [
    (n, k, dtype)
    for (n, k), dtype in zip(
        [*((n, 64) for n in EXTENTS), *((28, k) for k in EXTENTS if k != 64), (257, 257)], itertools.cycle(NUMPY), strict=False
    )
]


@pytest.mark.parametrize(("n", "k", "dtype"), SAMPLE)
def test_a_run_time_number_of_rows_gives_the_product(n: int, k: int, dtype: DType, tmp_path: Path) -> None:
    kernel = compile_text(*kernel_texts.linear("tokens", n, k, dtype), tmp_path)
    for tokens in TOKENS:
        given = arrays(kernel, tokens)
        check(kernel.call(given, {"tokens": tokens}, splits=3)["y"], linear_reference(given), k)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "k"), list(itertools.product(EXTENTS, EXTENTS)))
def test_every_extent_and_type_gives_the_product(n: int, k: int, tmp_path: Path) -> None:
    for dtype, tokens in itertools.product(NUMPY, (1, 5, "tokens")):
        kernel = compile_text(*kernel_texts.linear(tokens, n, k, dtype, bias=True), tmp_path / f"{dtype}{tokens}")
        given = arrays(kernel, 5 if tokens == "tokens" else tokens)
        check(kernel.call(given, {"tokens": 5}, splits=2)["y"], linear_reference(given), k)


@pytest.mark.parametrize(("n", "k"), [(28, 64), (28, 257), (7, 7)])
def test_a_row_has_the_same_bits_for_every_number_of_rows_and_every_split(n: int, k: int, tmp_path: Path) -> None:
    for name, text in (("linear", kernel_texts.linear), ("swiglu", kernel_texts.swiglu)):
        rows = compile_text(*text("tokens", n, k, "bf16"), tmp_path / name)
        whole = rows.call(arrays(rows, 64), {"tokens": 64})["y"]
        for tokens, splits in [(1, 1), (3, 2), (4, 1), (5, 3), (64, 3), (64, 64)]:
            got = rows.call(arrays(rows, tokens), {"tokens": tokens}, splits)["y"]
            assert got.tobytes() == whole[:tokens].tobytes()
        for tokens in (1, 5):
            bound = compile_text(*text(tokens, n, k, "bf16"), tmp_path / f"{name}{tokens}")
            assert bound.call(arrays(bound, tokens), {}, 3)["y"].tobytes() == whole[:tokens].tobytes()


@pytest.mark.parametrize(("tokens", "k"), [(1, 64), ("tokens", 257), (5, 28), (1, 7)])
def test_bias_and_residual_are_added_in_the_same_phase(tokens: Dim, k: int, tmp_path: Path) -> None:
    kernel = compile_text(*kernel_texts.linear(tokens, 28, k, "f16", bias=True), tmp_path)
    given = arrays(kernel, 5 if tokens == "tokens" else int(tokens))
    check(kernel.call(given, {"tokens": 5}, 3)["y"], linear_reference(given), k)
    assert [p["items"] for p in kernel.description["phases"]] == ["7"]


@pytest.mark.parametrize(("tokens", "n", "k"), [(1, 64, 64), ("tokens", 28, 257), (5, 7, 28)])
def test_gate_and_up_are_one_phase(tokens: Dim, n: int, k: int, tmp_path: Path) -> None:
    kernel = compile_text(*kernel_texts.swiglu(tokens, n, k, "bf16"), tmp_path)
    given = arrays(kernel, 5 if tokens == "tokens" else int(tokens))
    check(kernel.call(given, {"tokens": 5}, 2)["y"], swiglu_reference(given), k)
    assert len(kernel.description["phases"]) == 1


@pytest.mark.parametrize("options", [{"rows": 1}, {"rows": 2, "tokens": 8}, {"rows": 8, "tokens": 1}, {"tokens": 4}])
def test_block_sizes_change_the_code_and_not_the_bits(options: dict[str, int], tmp_path: Path) -> None:
    text, signature = kernel_texts.linear("tokens", 64, 28, "bf16")
    usual = compile_text(text, signature, tmp_path / "usual")
    other = compile_text(text, signature, tmp_path / "other", {"dot": options})
    given = arrays(usual, 5)
    assert other.symbol != usual.symbol
    assert other.call(given, {"tokens": 5})["y"].tobytes() == usual.call(given, {"tokens": 5})["y"].tobytes()


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("tokens", [1, 5, "tokens"])
def test_products_are_vector_code(tokens: Dim, dtype: DType, tmp_path: Path) -> None:
    """Fused multiply-add on 8 lanes, and not one scalar multiplication."""
    for name, text in (("linear", kernel_texts.linear), ("swiglu", kernel_texts.swiglu)):
        kernel = compile_text(*text(tokens, 64, 128, dtype), tmp_path / name)
        objdump = tools.tool("llvm", "bin/llvm-objdump")
        assembly = subprocess.run([objdump, "-d", kernel.object_file], capture_output=True, text=True, check=True).stdout
        assert len(re.findall(r"vfmadd\d+ps.*%ymm", assembly)) >= 4
        assert not re.findall(r"vfn?madd\d+ss|vmulss", assembly)


def test_the_widening_of_a_stored_weight_is_exact(tmp_path: Path) -> None:
    """Every finite f16 and bf16 value, subnormal ones too, comes through a product with 1."""
    for dtype in ("f16", "bf16"):
        bits = np.arange(1 << 16, dtype=np.uint16).view(NUMPY[dtype])
        bits = bits[np.isfinite(bits.astype(np.float32))]
        w = np.zeros((len(bits), 8), NUMPY[dtype])
        w[:, 3] = bits
        kernel = compile_text(*kernel_texts.linear(1, len(bits), 8, dtype), tmp_path / dtype)
        y = np.full((1, len(bits)), np.nan, np.float32)
        got = kernel.call({"x": np.ones((1, 8), np.float32), "w": w, "y": y}, {})["y"][0]
        assert (got == bits.astype(np.float32)).all()
