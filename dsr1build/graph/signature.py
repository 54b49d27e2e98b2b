"""The typed interface of a kernel: what it takes, in which order, and which sizes are known only at run time."""

from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

from dsr1build.graph.model import RUNTIME_DIMS, Dim, DType, TensorType

Role: TypeAlias = Literal["input", "weight", "state", "output"]
Guard: TypeAlias = Literal["exact", "padded", "range"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One tensor argument of a kernel; its position in ``Signature.arguments`` is its position in ``bufs``.

    ``layout`` is ``rows`` ([out][in], as a checkpoint stores it) for every weight today.
    """

    name: str
    role: Role
    type: TensorType
    layout: str = "rows"


@dataclass(frozen=True, slots=True)
class Signature:
    """Tensor arguments in order (inputs, weights, states, then outputs) and the run-time dimensions in order."""

    arguments: tuple[Argument, ...]
    dims: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "arguments": [
                {"name": a.name, "role": a.role, "dtype": a.type.dtype, "shape": list(a.type.shape), "layout": a.layout}
                for a in self.arguments
            ],
            "dims": list(self.dims),
        }

    @staticmethod
    def from_json(data: dict[str, Any]) -> "Signature":
        def shape(entries: list[Dim]) -> tuple[Dim, ...]:
            return tuple(entries)

        return Signature(
            tuple(
                Argument(a["name"], a["role"], TensorType(dtype_of(a["dtype"]), shape(a["shape"])), a["layout"])
                for a in data["arguments"]
            ),
            tuple(data["dims"]),
        )


def dtype_of(text: str) -> DType:
    """Check a dtype name that comes from a file. Raises ValueError for an unknown one."""
    known: tuple[DType, ...] = ("f32", "bf16", "f16", "f8e4m3fn", "i64", "i32", "i8")
    for dtype in known:
        if text == dtype:
            return dtype
    raise ValueError(f"unknown dtype {text!r}")


@dataclass(frozen=True, slots=True)
class Specialization:
    """A binding of a kernel's ``tokens``.

    * ``exact``:  ``tokens`` is a constant, the variant is chosen only on equality;
    * ``padded``: ``tokens`` is a constant, the runtime pads the rows with zeros; only for row-independent kernels;
    * ``range``:  ``tokens`` stays a run-time dimension (``tokens`` is then 0 and without meaning).
    """

    guard: Guard
    tokens: int = 0

    def __str__(self) -> str:
        return "tokens=1.." if self.guard == "range" else f"tokens{'<=' if self.guard == 'padded' else '='}{self.tokens}"


def specialize(signature: Signature, specialization: Specialization) -> Signature:
    """Replace the bound dimension in every shape and drop it from the run-time dimensions."""
    if specialization.guard == "range":
        return signature
    bound: dict[Dim, Dim] = {"tokens": specialization.tokens}
    arguments = tuple(
        replace(a, type=TensorType(a.type.dtype, tuple(bound.get(d, d) for d in a.type.shape))) for a in signature.arguments
    )
    return Signature(arguments, tuple(d for d in signature.dims if d not in bound))


def ordered_dims(used: set[str]) -> tuple[str, ...]:
    """Run-time dimensions in the one order that every kernel uses."""
    return tuple(d for d in RUNTIME_DIMS if d in used)
