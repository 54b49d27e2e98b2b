"""The canonical encoding of named fields, and the SHA-256 over it that names an action.

Grammar (all integers little-endian)::

    value  := 'N'                                  null
            | 'T' | 'F'                            booleans
            | 'I' length:u64 ascii-decimal         integer of any size
            | 'D' ieee754-binary64                 float; NaN is refused, -0.0 and 0.0 differ
            | 'S' length:u64 utf-8                 text
            | 'B' length:u64 bytes                 bytes
            | 'R' sha256:32 bytes                  reference to a blob by its digest
            | 'L' count:u64 value*                 list
            | 'M' count:u64 (text value)*          mapping, keys in increasing order of their UTF-8 bytes

Every value carries its type and its length, so no two different values have the same encoding.
"""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class BlobRef:
    """The content of a file, by its SHA-256 (64 lower-case hexadecimal digits)."""

    sha256: str


FieldValue: TypeAlias = "bool | int | float | str | bytes | BlobRef | Sequence[FieldValue] | Mapping[str, FieldValue] | None"
Fields: TypeAlias = Mapping[str, FieldValue]


def encode(value: FieldValue) -> bytes:
    """Encode ``value`` by the grammar above. Raises TypeError for any other type and ValueError for NaN."""
    out: list[bytes] = []
    _encode(value, out)
    return b"".join(out)


def _encode(value: FieldValue, out: list[bytes]) -> None:
    if value is None:
        out.append(b"N")
    elif isinstance(value, bool):
        out.append(b"T" if value else b"F")
    elif isinstance(value, int):
        digits = str(value).encode("ascii")
        out.append(b"I" + struct.pack("<Q", len(digits)) + digits)
    elif isinstance(value, float):
        if math.isnan(value):
            raise ValueError("NaN has no canonical encoding")
        out.append(b"D" + struct.pack("<d", value))
    elif isinstance(value, str):
        text = value.encode("utf-8")
        out.append(b"S" + struct.pack("<Q", len(text)) + text)
    elif isinstance(value, bytes):
        out.append(b"B" + struct.pack("<Q", len(value)) + value)
    elif isinstance(value, BlobRef):
        out.append(b"R" + bytes.fromhex(value.sha256))
    elif isinstance(value, Mapping):
        items = sorted((key.encode("utf-8"), item) for key, item in value.items())
        out.append(b"M" + struct.pack("<Q", len(items)))
        for key, item in items:
            out.append(struct.pack("<Q", len(key)) + key)
            _encode(item, out)
    elif isinstance(value, Sequence):
        out.append(b"L" + struct.pack("<Q", len(value)))
        for item in value:
            _encode(item, out)
    else:
        raise TypeError(f"{type(value).__name__} has no canonical encoding")


def key_of(fields: Fields) -> str:
    """The key of an action: SHA-256 of its encoded fields, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(encode(fields)).hexdigest()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
