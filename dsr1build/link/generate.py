"""Weights that no file holds: RoPE tables, and reproducible random weights for builds from a configuration alone.

They are written as safetensors files, one tensor after the other, so that no more than a piece of one tensor is in memory.
"""

import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from dsr1build.digest import encode, sha256_hex
from dsr1build.errors import InvalidInput
from dsr1build.graph.model import ITEM_BYTES, DType, RandomTensor, RopeTable, TensorType
from dsr1build.link.binding import weight_shape

if TYPE_CHECKING:
    # A build that finds its generated weights in place never needs NumPy, which takes a tenth of a second to import.
    import numpy as np

# The names of element types in a safetensors header.
SAFETENSORS_DTYPES: Mapping[DType, str] = {
    "f32": "F32",
    "bf16": "BF16",
    "f16": "F16",
    "f8e4m3fn": "F8_E4M3",
    "i64": "I64",
    "i32": "I32",
    "i8": "I8",
}
PIECE_ELEMENTS = 1 << 20
# Raised when the same source would give other bytes than before.
GENERATOR_VERSION = 1

Generated = Mapping[str, tuple[TensorType, RopeTable | RandomTensor]]


def generated_identity(tensors: Generated, context: int) -> str:
    """SHA-256 over all that the content of a generated file depends on (beside the pinned version of NumPy)."""
    entries: list[list[str | int | float | list[float]]] = []
    for name in sorted(tensors):
        type_, source = tensors[name]
        if isinstance(source, RopeTable):
            entries.append([name, str(type_), source.function, list(source.inverse_frequencies), source.scale, context])
        else:
            entries.append([name, str(type_), source.seed, source.mean, source.deviation])
    return sha256_hex(encode({"version": GENERATOR_VERSION, "numpy": version("numpy"), "tensors": entries}))


def write_generated(path: Path, tensors: Generated, context: int) -> str:
    """Write the tensors, sorted by name, as one safetensors file; gives its SHA-256.

    Raises InvalidInput for an element type that cannot be generated.
    """
    pieces: dict[str, tuple[TensorType, Callable[[], Iterator[bytes]]]] = {}
    for name in sorted(tensors):
        type_, source = tensors[name]
        pieces[name] = (type_, _producer(name, type_, source, context))
    digest = hashlib.sha256()
    with path.open("wb") as file:
        header = safetensors_header({name: type_ for name, (type_, _) in pieces.items()}, context)
        digest.update(header)
        file.write(header)
        for _, produce in pieces.values():
            for piece in produce():
                digest.update(piece)
                file.write(piece)
    return digest.hexdigest()


def safetensors_header(types: Mapping[str, TensorType], context: int) -> bytes:
    """Length and JSON header of a safetensors file that holds these tensors back to back, in the given order."""
    entries: dict[str, dict[str, str | list[int]]] = {}
    at = 0
    for name, type_ in types.items():
        shape = weight_shape(type_, context)
        end = at + prod(shape) * ITEM_BYTES[type_.dtype]
        entries[name] = {"dtype": SAFETENSORS_DTYPES[type_.dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    # Blanks at the end of the header are part of the format; they put the first tensor at a multiple of 64.
    text += b" " * (-(8 + len(text)) % 64)
    return struct.pack("<Q", len(text)) + text


def rope_table(source: RopeTable, context: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    """f32 [context, len(inverse_frequencies)]: scale x cos or sin of position x inverse frequency, rounded once."""
    import numpy as np

    angles = np.arange(context, dtype=np.float64)[:, None] * np.asarray(source.inverse_frequencies, dtype=np.float64)
    values = source.scale * (np.cos(angles) if source.function == "cos" else np.sin(angles))
    return values.astype(np.float32)


def random_pieces(name: str, type_: TensorType, source: RandomTensor, context: int) -> Iterator[bytes]:
    """The bytes of mean + deviation x N(0, 1), rounded to the type, piece by piece.

    The numbers come from Philox with the first 128 bits of SHA-256(seed, name) as its key: no tensor depends on another.
    """
    import numpy as np

    key = int.from_bytes(hashlib.sha256(encode([source.seed, name])).digest()[:16], "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    left = prod(weight_shape(type_, context))
    while left:
        count = min(left, PIECE_ELEMENTS)
        normal = generator.standard_normal(count, dtype=np.float32)
        values = np.float32(source.mean) + np.float32(source.deviation) * normal
        yield _rounded(values, type_.dtype)
        left -= count


def _producer(name: str, type_: TensorType, source: RopeTable | RandomTensor, context: int) -> Callable[[], Iterator[bytes]]:
    if isinstance(source, RopeTable):
        if type_.dtype != "f32":
            raise InvalidInput(f"a RoPE table of type {type_.dtype} cannot be generated", where=name, hint="RoPE tables are f32.")
        table = source
        return lambda: iter([rope_table(table, context).tobytes()])
    if type_.dtype not in ("f32", "bf16", "f16"):
        raise InvalidInput(
            f"random weights of type {type_.dtype} cannot be generated",
            where=name,
            hint="Set torch_dtype of the configuration to float32, bfloat16 or float16.",
        )
    random = source
    return lambda: random_pieces(name, type_, random, context)


def _rounded(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]", dtype: DType) -> bytes:
    import numpy as np

    if dtype == "f32":
        return values.tobytes()
    if dtype == "f16":
        return values.astype(np.float16).tobytes()
    # NumPy has no bf16: round the upper half of the bits to nearest, ties to even. The values are finite.
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()
