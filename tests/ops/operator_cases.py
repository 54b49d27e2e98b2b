"""Operators with operand types, attributes, inputs, and their formulas in float64."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from dsr1build.graph.model import Attribute, DType, Node, TensorType
from dsr1build.graph.signature import Argument, Role, Signature, Specialization, ordered_dims
from dsr1build.lower.kernel_source import KernelSource, lower_kernel
from dsr1build.ops.operator import Operator
from dsr1build.ops.reference import formal_inputs
from dsr1build.ops.registry import OPERATORS

Arrays = Mapping[str, NDArray]
NUMPY_DTYPE = {
    "f32": np.float32,
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "f8e4m3fn": ml_dtypes.float8_e4m3fn,
    "i64": np.int64,
}
PAST = TensorType("i64", ())
CONTEXT = 48


def tensor(dtype: DType, *shape: int | str) -> TensorType:
    return TensorType(dtype, shape)


def rows(width: int) -> TensorType:
    return TensorType("f32", ("tokens", width))


def cached(width: int) -> TensorType:
    return TensorType("f32", ("context", width))


@dataclass(frozen=True)
class Case:
    """``formula`` takes every input in float64 by its formal name (``past`` as an int) and returns the result."""

    name: str
    op: str
    types: tuple[TensorType | None, ...]
    formula: Callable[..., NDArray]
    attributes: Mapping[str, Attribute] = field(default_factory=dict)

    @property
    def operator(self) -> Operator:
        return OPERATORS[self.op]

    @property
    def inputs(self) -> dict[str, TensorType]:
        """The inputs that are there, by formal name."""
        names = formal_inputs(self.operator, len(self.types))
        return {n: t for n, t in zip(names, self.types, strict=False) if t is not None}

    def arrays(self, tokens: int, past: int) -> dict[str, NDArray]:
        """Random inputs, the same in every run. Cache rows behind the valid ones are NaN: nothing may read them."""
        generator = np.random.default_rng([tokens, past, *self.name.encode()])
        sizes = {"tokens": tokens, "context": CONTEXT}
        made: dict[str, NDArray] = {}
        for name, type_ in self.inputs.items():
            shape = [sizes.get(d, d) if isinstance(d, str) else d for d in type_.shape]
            if name == "past":
                made[name] = np.array(past, np.int64)
            elif name == "ids":
                made[name] = generator.integers(0, self.inputs["table"].shape[0], shape)
            elif name.startswith("scale"):
                made[name] = generator.uniform(0.01, 0.03, shape).astype(np.float32)
            else:
                made[name] = generator.standard_normal(shape).astype(NUMPY_DTYPE[type_.dtype])
            if name in ("k", "v"):
                made[name][past + tokens :] = np.nan
        return made

    def expected(self, arrays: Arrays) -> NDArray:
        wide = {n: a if a.dtype == np.int64 else a.astype(np.float64) for n, a in arrays.items()}
        if "past" in wide:
            wide["past"] = int(wide["past"])
        return self.formula(**wide, **{n: v for n, v in self.attributes.items() if self.op in _WITH_ATTRIBUTES})


_WITH_ATTRIBUTES = ("RMSNorm", "RotaryEmbedding", "GroupedAttention")


def linear(x, w, bias=0.0, residual=0.0, scale=None):
    return x @ dequantised(w, scale).T + bias + residual


def dequantised(w, scale):
    if scale is None:
        return w
    n, k = w.shape
    return w * np.repeat(np.repeat(scale, 128, axis=0), 128, axis=1)[:n, :k]


def swiglu(x, w_gate, w_up, scale_gate=None, scale_up=None):
    gate = x @ dequantised(w_gate, scale_gate).T
    return gate / (1 + np.exp(-gate)) * (x @ dequantised(w_up, scale_up).T)


def rms_norm(x, gamma, epsilon):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gamma


def rotary(x, cos, sin, past, heads, head_dim, offset, interleaved):
    y = x.reshape(len(x), heads, head_dim).copy()
    half = cos.shape[1]
    for t in range(len(x)):
        for j in range(half):
            a, b = (2 * j, 2 * j + 1) if interleaved else (j, j + half)
            a, b = a + offset, b + offset
            c, s = cos[past + t, j], sin[past + t, j]
            first, second = y[t, :, a].copy(), y[t, :, b].copy()
            y[t, :, a], y[t, :, b] = first * c - second * s, second * c + first * s
    return y.reshape(x.shape)


def embedding(ids, table):
    return table[ids]


def cache_insert(cache, rows, past):
    y = cache.copy()
    y[past : past + len(rows)] = rows
    return y


def grouped_attention(q, k, v, past, heads, kv_heads, scale):
    tokens, width = len(q), q.shape[1] // heads
    y = np.empty((tokens, heads, width))
    for t in range(tokens):
        for h in range(heads):
            columns = slice(h // (heads // kv_heads) * width, (h // (heads // kv_heads) + 1) * width)
            scores = k[: past + t + 1, columns] @ q[t, h * width : (h + 1) * width] * scale
            shares = np.exp(scores - scores.max())
            y[t, h] = shares / shares.sum() @ v[: past + t + 1, columns]
    return y.reshape(tokens, heads * width)


def combine_experts(residual, weights, shared=0.0, **experts):
    return residual + shared + sum(weights[:, i : i + 1] * experts[f"expert{i}"] for i in range(weights.shape[1]))


def combine_slots(residual, slots, slot_weights, shared=0.0):
    return residual + shared + (slots * slot_weights[:, :, None]).sum(1)


def _linear(n: int, k: int, dtype: DType, extra: str = "") -> Case:
    bias = tensor(dtype, n) if "b" in extra else None
    residual = rows(n) if "r" in extra else None
    name = f"linear-{n}x{k}-{dtype}{'-' if extra else ''}{extra}"
    return Case(name, "Linear", (rows(k), tensor(dtype, n, k), bias, residual), linear)


def _rotary(heads: int, head_dim: int, half: int, offset: int, interleaved: int) -> Case:
    attributes = {"heads": heads, "head_dim": head_dim, "offset": offset, "interleaved": interleaved}
    name = f"rotary-{heads}x{head_dim}-{offset}+{2 * half}-{'interleaved' if interleaved else 'halves'}"
    types = (rows(heads * head_dim), cached(half), cached(half), PAST)
    return Case(name, "RotaryEmbedding", types, rotary, attributes)


def _attention(heads: int, kv_heads: int, width: int) -> Case:
    types = (rows(heads * width), cached(kv_heads * width), cached(kv_heads * width), PAST)
    attributes = {"heads": heads, "kv_heads": kv_heads, "scale": float(np.float32(width**-0.5))}
    return Case(f"attention-{heads}/{kv_heads}x{width}", "GroupedAttention", types, grouped_attention, attributes)


CASES: tuple[Case, ...] = (
    *(_linear(n, k, d) for n, k, d in ((7, 28, "bf16"), (28, 7, "f16"), (257, 28, "f32"), (28, 257, "bf16"), (64, 256, "bf16"))),
    *(_linear(28, 28, "f16", e) for e in ("b", "r", "br")),
    _linear(7, 257, "f32", "br"),
    *(
        Case(f"swiglu-{n}x{k}-{d}", "SwiGLU", (rows(k), tensor(d, n, k), tensor(d, n, k)), swiglu)
        for n, k, d in ((7, 28, "bf16"), (28, 7, "f32"), (257, 64, "f16"))
    ),
    *(
        Case(f"norm-{n}-{d}", "RMSNorm", (rows(n), tensor(d, n)), rms_norm, {"epsilon": 1e-6})
        for n, d in ((7, "f32"), (28, "bf16"), (257, "f16"), (256, "bf16"))
    ),
    _rotary(3, 28, 14, 0, 0),
    _rotary(3, 28, 14, 0, 1),
    _rotary(2, 24, 4, 16, 1),
    _rotary(2, 24, 4, 16, 0),
    _rotary(1, 28, 5, 9, 1),
    *(
        Case(f"embedding-257x{n}-{d}", "Embedding", (tensor("i64", "tokens"), tensor(d, 257, n)), embedding)
        for n, d in ((28, "bf16"), (64, "f16"), (7, "f32"))
    ),
    Case("insert-28", "CacheInsert", (cached(28), rows(28), PAST), cache_insert),
    Case("insert-512", "CacheInsert", (cached(512), rows(512), PAST), cache_insert),
    _attention(4, 2, 28),
    _attention(6, 2, 16),
    _attention(2, 2, 7),
    Case("slots-28", "CombineSlots", (rows(28), rows(28), tensor("f32", "tokens", 3, 28), rows(3)), combine_slots),
    Case("slots-512", "CombineSlots", (rows(512), None, tensor("f32", "tokens", 8, 512), rows(8)), combine_slots),
    Case("linear-fp8", "Linear", (rows(200), tensor("f8e4m3fn", 300, 200), None, None, tensor("f32", 3, 2)), linear),
    Case(
        "linear-fp8-odd",
        "Linear",
        (rows(271), tensor("f8e4m3fn", 6, 271), tensor("bf16", 6), rows(6), tensor("f32", 1, 3)),
        linear,
    ),
    Case(
        "swiglu-fp8",
        "SwiGLU",
        (rows(264), *[tensor("f8e4m3fn", 132, 264)] * 2, *[tensor("f32", 2, 3)] * 2),
        swiglu,
    ),
)

# Operators that can be planned and have a meaning, but no kernel.
PLANNED_CASES: tuple[Case, ...] = (
    Case("experts-28", "CombineExperts", (rows(28), rows(28), rows(3), rows(28), rows(28), rows(28)), combine_experts),
    Case("experts-28-alone", "CombineExperts", (rows(28), None, rows(2), rows(28), rows(28)), combine_experts),
)


def relative_error(got: NDArray, expected: NDArray) -> float:
    """The largest difference, relative to the range of the expected values; NaN in equal places counts as equal."""
    assert got.shape == expected.shape
    assert np.array_equal(np.isnan(got), np.isnan(expected))
    span = np.nanmax(np.abs(expected), initial=1e-30)
    return float(np.nanmax(np.abs(got.astype(np.float64) - expected), initial=0.0) / span)


def kernel_of(case: Case, tokens: int | None) -> KernelSource:
    """The operator as the only one of a kernel, for ``tokens`` rows or (None) any number of rows.

    Arguments carry the formal names, the result is ``y``, or the state ``cache``.
    """
    weights = ("w", "w_gate", "w_up", "bias", "gamma", "cos", "sin", "table", "scale", "scale_gate", "scale_up")
    roles: dict[str, Role] = {n: "weight" if n in weights else "state" if n == "cache" else "input" for n in case.inputs}
    arguments = [Argument(n, roles[n], t) for n, t in case.inputs.items() if n != "past"]
    (result,) = case.operator.infer(case.types, case.attributes)
    if "cache" not in case.inputs:
        arguments.append(Argument("y", "output", result))
    arguments.sort(key=lambda a: ("input", "weight", "state", "output").index(a.role))
    used = {d for a in arguments for d in a.type.shape if isinstance(d, str)}
    signature = Signature(tuple(arguments), ordered_dims(used | ({"past"} if "past" in case.inputs else set())))
    names = formal_inputs(case.operator, len(case.types))
    inputs = tuple(n if n in case.inputs else "" for n in names)
    node = Node(case.op, inputs, ("result",), tuple(sorted(case.attributes.items())))
    specialization = Specialization("range") if tokens is None else Specialization("exact", tokens)
    return lower_kernel((node,), signature, ("result",), specialization)
