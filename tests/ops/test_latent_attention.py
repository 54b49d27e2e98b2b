"""Both forms of latent attention: the references against float64, the kernels against the references and each other."""

import ml_dtypes
import numpy as np
import pytest
from operator_runs import NUMPY_DTYPE, kernel, reference, run_both

from dsr1build.graph.model import TensorType
from dsr1build.ops.latent_attention import LATENT_ATTENTION_ABSORBED, LATENT_ATTENTION_EXPANDED
from kernel_runner import compile_text

FORMS = [LATENT_ATTENTION_EXPANDED, LATENT_ATTENTION_ABSORBED]
CONTEXT = 48
# heads, nope, rope, value, latent: the scaled-down R1 with nope != value, and widths that no vector divides.
SMALL = {"heads": 4, "nope": 16, "rope": 8, "value": 24, "latent": 32}
ODD = {"heads": 3, "nope": 6, "rope": 2, "value": 5, "latent": 12}


def types_of(size, dtype="f32"):
    width = size["latent"] + size["rope"]
    return (
        TensorType("f32", ("tokens", size["heads"] * (size["nope"] + size["rope"]))),
        TensorType("f32", ("context", width)),
        TensorType(dtype, (size["heads"] * (size["nope"] + size["value"]), size["latent"])),
        TensorType("i64", ()),
    )


def attributes_of(size):
    return {k: size[k] for k in ("heads", "nope", "rope", "value")} | {"scale": 0.31}


def arrays_of(size, tokens, past, dtype="f32", seed=0):
    rng = np.random.default_rng(seed)
    q, cache, w, _ = types_of(size)
    rows = rng.standard_normal((CONTEXT, cache.shape[1]), dtype=np.float32)
    # Rows behind the valid ones are NaN: nothing may read them.
    rows[past + tokens :] = np.nan
    return {
        "q": rng.standard_normal((tokens, q.shape[1]), dtype=np.float32),
        "cache": rows,
        "w_kvb": (rng.standard_normal(w.shape) / 4).astype(NUMPY_DTYPE[dtype]),
        "past": np.int64(past),
    }


def attention_in_float64(size, arrays, scale=0.31):
    """Written head by head and row by row from the definition of the unabsorbed form."""
    q, cache, w = (arrays[n].astype(np.float64) for n in ("q", "cache", "w_kvb"))
    past, nope, latent = int(arrays["past"]), size["nope"], size["latent"]
    out = np.zeros((len(q), size["heads"] * size["value"]))
    for h in range(size["heads"]):
        of_head = w[h * (nope + size["value"]) : (h + 1) * (nope + size["value"])]
        for t in range(len(q)):
            query = q[t, h * (nope + size["rope"]) : (h + 1) * (nope + size["rope"])]
            rows = cache[: past + t + 1]
            keys, values = rows[:, :latent] @ of_head[:nope].T, rows[:, :latent] @ of_head[nope:].T
            scores = scale * (keys @ query[:nope] + rows[:, latent:] @ query[nope:])
            p = np.exp(scores - scores.max())
            out[t, h * size["value"] : (h + 1) * size["value"]] = p @ values / p.sum()
    return out


def relative_error(got, expected):
    return np.abs(got - expected).max() / np.ptp(expected)


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
@pytest.mark.parametrize(("tokens", "past"), [(1, 0), (1, 37), (5, 0), (3, 37)])
@pytest.mark.parametrize("size", [SMALL, ODD], ids=["small", "odd"])
def test_reference_is_attention_over_the_expanded_latents(form, size, tokens, past, dtype):
    arrays = arrays_of(size, tokens, past, dtype)
    (got,) = reference(form, types_of(size, dtype), attributes_of(size), arrays)
    assert relative_error(got, attention_in_float64(size, arrays)) < form.tolerance


def test_reference_applies_block_scales():
    size = {"heads": 2, "nope": 80, "rope": 4, "value": 72, "latent": 130}
    types = (*types_of(size, "f8e4m3fn"), TensorType("f32", (3, 2)))
    arrays = arrays_of(size, 2, 3)
    stored = arrays["w_kvb"].astype(ml_dtypes.float8_e4m3fn)
    scale = np.linspace(0.5, 2.0, 6, dtype=np.float32).reshape(3, 2)
    factor = np.kron(scale, np.ones((128, 128)))[: stored.shape[0], : stored.shape[1]]
    for form in FORMS:
        (got,) = reference(form, types, attributes_of(size), arrays | {"w_kvb": stored, "scale_kvb": scale})
        expected = attention_in_float64(size, arrays | {"w_kvb": stored.astype(np.float64) * factor})
        assert relative_error(got, expected) < form.tolerance


# Heads whose rows cross blocks of 128 rows: a latent that no block divides, and two whole blocks.
BLOCKS = [
    {"heads": 2, "nope": 80, "rope": 4, "value": 72, "latent": 130},
    {"heads": 4, "nope": 48, "rope": 16, "value": 40, "latent": 256},
]


@pytest.mark.parametrize("tokens", [1, None], ids=["tokens=1", "tokens=1.."])
@pytest.mark.parametrize("size", [*BLOCKS, ODD], ids=["cut", "whole", "odd"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_kernel_applies_block_scales(form, size, tokens, tmp_path):
    rows, latent = size["heads"] * (size["nope"] + size["value"]), size["latent"]
    types = (*types_of(size, "f8e4m3fn"), TensorType("f32", (-(-rows // 128), -(-latent // 128))))
    scale = np.random.default_rng(1).uniform(0.5, 2.0, types[4].shape).astype(np.float32)
    compiled = compile_text(*kernel(form, types, attributes_of(size), tokens), tmp_path)
    for count in [1] if tokens else [1, 3]:
        arrays = arrays_of(size, count, 37, "f8e4m3fn") | {"scale_kvb": scale}
        dims = {"tokens": count, "past": 37, "context": CONTEXT}
        (got,), (expected,) = run_both(form, types, attributes_of(size), compiled, arrays, dims)
        assert relative_error(got, expected) < form.tolerance


@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_operands_that_do_not_fit_are_named(form):
    q, cache, w, past = types_of(SMALL)
    cases = [
        ((TensorType("f32", ("tokens", 95)), cache, w, past), "q is f32[tokens, 95], expected 4 heads of 16 + 8 columns"),
        ((q, cache, TensorType("f32", (159, 32)), past), "w_kvb is f32[159, 32], expected 4 heads of 16 + 24 rows"),
        ((q, cache, TensorType("f32", (160, 31)), past), "w_kvb is f32[160, 31], expected a weight of shape [N, 32]"),
        ((q, cache, w, TensorType("i32", ())), "past is i32[], expected i64[]"),
        ((q, None, w, past), "input cache is missing"),
    ]
    for types, message in cases:
        with pytest.raises(ValueError) as error:
            form.infer(types, attributes_of(SMALL))
        assert str(error.value) == message


@pytest.mark.parametrize("tokens", [1, None], ids=["tokens=1", "tokens=1.."])
@pytest.mark.parametrize(("size", "dtype"), [(SMALL, "bf16"), (ODD, "f32"), (ODD, "f16")], ids=["small", "odd", "odd-f16"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: f.name)
def test_kernel_gives_what_the_reference_gives(form, size, dtype, tokens, tmp_path):
    types, attributes = types_of(size, dtype), attributes_of(size)
    compiled = compile_text(*kernel(form, types, attributes, tokens), tmp_path)
    for count in [1] if tokens else [1, 3, 5]:
        for past in (0, 1, 37):
            arrays = arrays_of(size, count, past, dtype)
            dims = {"tokens": count, "past": past, "context": CONTEXT}
            (got,), (expected,) = run_both(form, types, attributes, compiled, arrays, dims)
            assert relative_error(got, expected) < form.tolerance
            assert relative_error(got, attention_in_float64(size, arrays)) < form.tolerance
    if tokens is None:
        # A row's bits do not depend on the tokens that follow it.
        first = arrays | {"q": arrays["q"][:2]}
        (part,), _ = run_both(form, types, attributes, compiled, first, {"tokens": 2, "past": 37, "context": CONTEXT})
        assert part.tobytes() == got[:2].tobytes()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_heads(tmp_path):
    for form in FORMS:
        sizes = []
        for heads in (4, 16):
            size = ODD | {"heads": heads}
            compiled = compile_text(*kernel(form, types_of(size), attributes_of(size), None), tmp_path / f"{form.name}-{heads}")
            _, scratch, local = compiled.plan({"tokens": 3, "past": 900, "context": 1000})
            sizes.append((scratch, local))
        assert sizes[0] == sizes[1]
