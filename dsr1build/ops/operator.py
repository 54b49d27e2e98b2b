"""What an operator of the ``dsr1`` domain consists of: types, meaning, lowering, tolerance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from dsr1build.graph.model import Attribute, TensorType
from dsr1build.ops.emitter import Emitter, Value

Attributes: TypeAlias = Mapping[str, Attribute]
Types: TypeAlias = Sequence[TensorType | None]
Operands: TypeAlias = Sequence[Value | None]


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. Optional inputs end in ``?`` and are None where absent.

    * ``infer(types, attributes)``: result types; raises ValueError where operands do not fit.
    * ``reference(types, attributes)``: the body of its ONNX function in ONNX's text syntax
      (https://onnx.ai/onnx/repo-docs/Syntax.html), opset 21, plain standard operators over the formal names of
      ``inputs`` and ``outputs``. This is the meaning.
    * ``lower(emitter, operands, attributes)``: writes the same computation as portable MLIR, returns the results.
      A scalar input (``past``) is not an operand there: it is the index ``%past``.
    * ``tolerance``: largest difference of the lowering to the reference in float64, relative to the range of the result.
    * ``row_independent``: row t of each result depends on row t of the inputs alone, so rows can be padded.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: tuple[str, ...]
    infer: Callable[[Types, Attributes], tuple[TensorType, ...]]
    reference: Callable[[Types, Attributes], str]
    lower: Callable[[Emitter, Operands, Attributes], tuple[Value, ...]]
    tolerance: float
    row_independent: bool


def integer(attributes: Attributes, name: str) -> int:
    """An integer attribute. Raises ValueError where it is missing or of another type."""
    value = attributes.get(name)
    if not isinstance(value, int):
        raise ValueError(f"attribute {name!r} must be an integer, not {value!r}")
    return value


def real(attributes: Attributes, name: str) -> float:
    """A number attribute as a float. Raises ValueError where it is missing or of another type."""
    value = attributes.get(name)
    if not isinstance(value, int | float):
        raise ValueError(f"attribute {name!r} must be a number, not {value!r}")
    return float(value)


def text(attributes: Attributes, name: str) -> str:
    """A string attribute. Raises ValueError where it is missing or of another type."""
    value = attributes.get(name)
    if not isinstance(value, str):
        raise ValueError(f"attribute {name!r} must be a string, not {value!r}")
    return value
