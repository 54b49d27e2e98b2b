"""What an operator of the ``dsr1`` domain consists of: types, meaning, lowering, tolerance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from dsr1build.graph.model import Attribute, Dim, TensorType
from dsr1build.ops.emitter import Emitter, Value

Attributes: TypeAlias = Mapping[str, Attribute]
Types: TypeAlias = Sequence[TensorType | None]
Operands: TypeAlias = Sequence[Value | None]

T = TypeVar("T")

# Weights of 1-byte floats come with one f32 scale for each block of 128 x 128 elements.
SCALE_BLOCK = 128
PLAIN_WEIGHTS = ("f32", "bf16", "f16")


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator. Optional inputs end in ``?`` and are None where absent; an input ending in ``*`` repeats.

    * ``infer(types, attributes)``: result types; raises ValueError where operands do not fit.
    * ``reference(types, attributes)``: the body of its ONNX function in ONNX's text syntax
      (https://onnx.ai/onnx/repo-docs/Syntax.html), opset 21, plain standard operators over the formal names of
      ``inputs`` and ``outputs``. This is the meaning.
    * ``lower(emitter, operands, attributes)``: writes the same computation as portable MLIR, returns the results.
      The scalar input ``past`` is not among the operands: it is the index ``%past``, and the inputs behind it move up.
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


def aligned(values: Sequence[T | None], count: int) -> list[T | None]:
    """``values`` with absent trailing optional ones added as None. Raises ValueError where there are too many."""
    if len(values) > count:
        raise ValueError(f"{len(values)} inputs where at most {count} are taken")
    return [*values, *[None] * (count - len(values))]


def required(value: T | None, name: str) -> T:
    """An operand or type that must be there. Raises ValueError naming it where it is not."""
    if value is None:
        raise ValueError(f"input {name} is missing")
    return value


def activation(type_: TensorType | None, name: str) -> tuple[Dim, int]:
    """Rows and width of an f32 matrix [rows, width] with a constant width. Raises ValueError for anything else."""
    type_ = required(type_, name)
    if type_.dtype != "f32" or len(type_.shape) != 2 or not isinstance(type_.shape[1], int):
        raise ValueError(f"{name} is {type_}, expected f32[rows, width]")
    return type_.shape[0], type_.shape[1]


def weight_matrix(type_: TensorType | None, name: str, width: int, scale: TensorType | None = None) -> int:
    """The rows N of a weight [N, width] in a stored type; f8e4m3fn has a scale f32 [ceil(N/128), ceil(width/128)].

    Raises ValueError where the weight or its scale does not fit.
    """
    type_ = required(type_, name)
    if type_.dtype not in (*PLAIN_WEIGHTS, "f8e4m3fn") or len(type_.shape) != 2 or type_.shape[1] != width:
        raise ValueError(f"{name} is {type_}, expected a weight of shape [N, {width}]")
    rows = type_.shape[0]
    if not isinstance(rows, int):
        raise ValueError(f"{name} is {type_}, expected a constant number of rows")
    blocks = TensorType("f32", (-(-rows // SCALE_BLOCK), -(-width // SCALE_BLOCK)))
    if type_.dtype == "f8e4m3fn" and scale != blocks:
        raise ValueError(f"the scale of {name} is {scale}, expected {blocks} for {type_}")
    if type_.dtype != "f8e4m3fn" and scale is not None:
        raise ValueError(f"{name} is {type_} and takes no scale, got {scale}")
    return rows


def weight_vector(type_: TensorType | None, name: str, length: int) -> None:
    """Check a weight [length] in a plain stored type. Raises ValueError where it does not fit."""
    type_ = required(type_, name)
    if type_.dtype not in PLAIN_WEIGHTS or type_.shape != (length,):
        raise ValueError(f"{name} is {type_}, expected a weight of shape [{length}]")


def same(type_: TensorType | None, name: str, expected: TensorType) -> None:
    """Check an operand's type. Raises ValueError where it differs."""
    if required(type_, name) != expected:
        raise ValueError(f"{name} is {type_}, expected {expected}")


def scalar_past(type_: TensorType | None) -> None:
    """Check the scalar input ``past`` (i64). Raises ValueError for anything else."""
    same(type_, "past", TensorType("i64", ()))
