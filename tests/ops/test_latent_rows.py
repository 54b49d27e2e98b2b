"""Rows of the latent cache: the reference against float64, the kernel against the reference."""

import numpy as np
import pytest
from operator_runs import NUMPY_DTYPE, kernel, reference, run_both

from dsr1build.graph.model import TensorType
from dsr1build.ops.latent_rows import LATENT_ROWS
from kernel_runner import compile_text

CONTEXT = 48
EPSILON = 1e-6


def types_of(latent, half, dtype="f32"):
    return (
        TensorType("f32", ("tokens", latent + 2 * half)),
        TensorType(dtype, (latent,)),
        TensorType("f32", ("context", half)),
        TensorType("f32", ("context", half)),
        TensorType("i64", ()),
    )


def attributes_of(latent, interleaved):
    return {"latent": latent, "epsilon": EPSILON, "interleaved": interleaved}


def arrays_of(latent, half, tokens, past, dtype="f32"):
    rng = np.random.default_rng(1)
    angles = np.arange(CONTEXT)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return {
        "x": rng.standard_normal((tokens, latent + 2 * half), dtype=np.float32),
        "gamma": rng.standard_normal(latent).astype(NUMPY_DTYPE[dtype]),
        "cos": np.cos(angles).astype(np.float32),
        "sin": np.sin(angles).astype(np.float32),
        "past": np.int64(past),
    }


def rows_in_float64(latent, half, arrays, interleaved):
    """The rotation as a product of complex numbers, pair by pair."""
    x, past = arrays["x"].astype(np.float64), int(arrays["past"])
    out = x.copy()
    out[:, :latent] *= arrays["gamma"].astype(np.float64) / np.sqrt((x[:, :latent] ** 2).mean(1, keepdims=True) + EPSILON)
    for t in range(len(x)):
        for j in range(half):
            a, b = (latent + 2 * j, latent + 2 * j + 1) if interleaved else (latent + j, latent + half + j)
            z = complex(x[t, a], x[t, b]) * complex(arrays["cos"][past + t, j], arrays["sin"][past + t, j])
            out[t, a], out[t, b] = z.real, z.imag
    return out


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize(("latent", "half"), [(32, 4), (12, 3), (13, 1)])
@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (5, 37)])
def test_reference_is_a_norm_and_a_rotation(latent, half, tokens, past, dtype, interleaved):
    arrays = arrays_of(latent, half, tokens, past, dtype)
    (got,) = reference(LATENT_ROWS, types_of(latent, half, dtype), attributes_of(latent, interleaved), arrays)
    expected = rows_in_float64(latent, half, arrays, interleaved)
    assert np.abs(got - expected).max() / np.ptp(expected) < LATENT_ROWS.tolerance


def test_operands_that_do_not_fit_are_named():
    x, gamma, cos, sin, past = types_of(32, 4)
    cases = [
        (
            (TensorType("f32", ("tokens", 41)), gamma, cos, sin, past),
            "x has 41 columns, expected latent = 32 and an even number of columns to rotate",
        ),
        ((x, TensorType("f32", (31,)), cos, sin, past), "gamma is f32[31], expected a weight of shape [32]"),
        ((x, gamma, cos, TensorType("f32", ("context", 5)), past), "sin is f32[context, 5], expected 4 columns"),
        ((x, gamma, cos, sin, TensorType("i64", (1,))), "past is i64[1], expected i64[]"),
    ]
    for types, message in cases:
        with pytest.raises(ValueError) as error:
            LATENT_ROWS.infer(types, attributes_of(32, 1))
        assert str(error.value) == message


@pytest.mark.parametrize("tokens", [1, None], ids=["tokens=1", "tokens=1.."])
@pytest.mark.parametrize(("latent", "half", "dtype", "interleaved"), [(32, 4, "bf16", 1), (12, 3, "f32", 1), (13, 3, "f32", 0)])
def test_kernel_gives_what_the_reference_gives(latent, half, dtype, interleaved, tokens, tmp_path):
    types, attributes = types_of(latent, half, dtype), attributes_of(latent, interleaved)
    compiled = compile_text(*kernel(LATENT_ROWS, types, attributes, tokens), tmp_path)
    for count in [1] if tokens else [1, 3, 5]:
        for past in (0, 1, 37):
            arrays = arrays_of(latent, half, count, past, dtype)
            dims = {"tokens": count, "past": past, "context": CONTEXT}
            (got,), (expected,) = run_both(LATENT_ROWS, types, attributes, compiled, arrays, dims)
            assert np.abs(got - expected).max() / np.ptp(expected) < LATENT_ROWS.tolerance
            exact = rows_in_float64(latent, half, arrays, interleaved)
            assert np.abs(got - exact).max() / np.ptp(exact) < LATENT_ROWS.tolerance
