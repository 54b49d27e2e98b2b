"""weights.bind: which bytes of which file each weight of a program is.

The format is documented, and read, in dsr1build/runtime/c/weights.c. All numbers are little-endian; strings are
NUL-terminated UTF-8 at the end of the file and are referred to by their offset there.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from dsr1build.errors import BuildFailed
from dsr1build.graph.model import ITEM_BYTES, TensorType
from dsr1build.link.program import MOST_RANK, Program
from dsr1build.link.tables import DTYPE_NUMBERS, program_digest

MAGIC = b"DSR1BIND"
VERSION = 1
_HEADER = struct.Struct("<8sIIIIq32sII")
_FILE = struct.Struct("<IIQ")
_TENSOR = struct.Struct("<IIIIQQ4q")


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights: its path relative to the bundle directory, and its length in bytes."""

    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a weight lies: number of its file, address of its first byte in the file, length in bytes."""

    file: int
    offset: int
    length: int


def weight_shape(type_: TensorType, context: int) -> tuple[int, ...]:
    """The shape of a weight or state with the context length put in. Raises ValueError for another run-time dimension."""
    shape = tuple(context if d == "context" else d for d in type_.shape)
    numbers = tuple(d for d in shape if isinstance(d, int))
    if len(numbers) != len(shape):
        raise ValueError(f"{type_} depends on more than the context")
    return numbers


def write_binding(
    program: Program, context: int, library: str, files: Sequence[WeightFile], placements: Mapping[str, Placement]
) -> bytes:
    """The content of weights.bind. Raises BuildFailed where a weight has no place or the wrong number of bytes."""
    strings = bytearray()
    offsets: dict[str, int] = {}

    def text(value: str) -> int:
        if value not in offsets:
            offsets[value] = len(strings)
            strings.extend(value.encode("utf-8") + b"\0")
        return offsets[value]

    library_name = text(library)
    file_table = b"".join(_FILE.pack(text(file.path), 0, file.size) for file in files)
    tensors = []
    for name, type_ in program.weights:
        placement = placements.get(name)
        if placement is None:
            raise BuildFailed("the weight has no place in a file", where=name)
        shape = weight_shape(type_, context)
        expected = prod(shape) * ITEM_BYTES[type_.dtype]
        if placement.length != expected or placement.offset + expected > files[placement.file].size:
            raise BuildFailed(f"{type_} takes {expected} bytes, {files[placement.file].path} has {placement.length}", where=name)
        padded = shape + (0,) * (MOST_RANK - len(shape))
        number = DTYPE_NUMBERS[type_.dtype]
        tensors.append(_TENSOR.pack(text(name), placement.file, number, len(shape), placement.offset, placement.length, *padded))
    header = _HEADER.pack(
        MAGIC, VERSION, len(files), len(tensors), len(strings), context, program_digest(program), library_name, 0
    )
    return header + file_table + b"".join(tensors) + bytes(strings)
