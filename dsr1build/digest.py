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

# Fields of actions are a few levels deep; those of a stranger's cache might be deeper than the interpreter's stack.
DEEPEST = 100


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


def decode(data: bytes) -> FieldValue:
    """The value whose encoding is ``data``: lists come back as tuples, mappings as dicts in key order.

    Raises ValueError for anything that ``encode`` would not have written: a truncated or trailing byte, keys out of order
    or twice, an integer with a leading zero, NaN; and for more than ``DEEPEST`` lists and mappings in one another. So
    ``encode(decode(data)) == data`` holds for all that is accepted.
    """
    value, end = _decode(data, 0, DEEPEST)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes follow the value")
    return value


def _take(data: bytes, at: int, count: int) -> bytes:
    if count > len(data) - at:
        raise ValueError(f"the data ends at byte {len(data)}, {count} bytes are missing from byte {at}")
    return data[at : at + count]


def _sized(data: bytes, at: int) -> tuple[bytes, int]:
    size: int = struct.unpack("<Q", _take(data, at, 8))[0]
    return _take(data, at + 8, size), at + 8 + size


def _decode(data: bytes, at: int, depth: int) -> tuple[FieldValue, int]:
    if depth < 0:
        raise ValueError(f"the value at byte {at} is nested too deeply")
    tag = _take(data, at, 1)
    at += 1
    match tag:
        case b"N":
            return None, at
        case b"T" | b"F":
            return tag == b"T", at
        case b"I":
            digits, at = _sized(data, at)
            number = int(digits.decode("ascii"))
            if str(number).encode("ascii") != digits:
                raise ValueError(f"{digits!r} is not the one spelling of an integer")
            return number, at
        case b"D":
            real: float = struct.unpack("<d", _take(data, at, 8))[0]
            if math.isnan(real):
                raise ValueError("NaN has no canonical encoding")
            return real, at + 8
        case b"S":
            text, at = _sized(data, at)
            return text.decode("utf-8"), at
        case b"B":
            return _sized(data, at)
        case b"R":
            return BlobRef(_take(data, at, 32).hex()), at + 32
        case b"L":
            count: int = struct.unpack("<Q", _take(data, at, 8))[0]
            at += 8
            items: list[FieldValue] = []
            for _ in range(count):
                item, at = _decode(data, at, depth - 1)
                items.append(item)
            return tuple(items), at
        case b"M":
            count = struct.unpack("<Q", _take(data, at, 8))[0]
            at += 8
            mapping: dict[str, FieldValue] = {}
            previous: bytes | None = None
            for _ in range(count):
                key, at = _sized(data, at)
                if previous is not None and key <= previous:
                    raise ValueError(f"the key {key!r} does not follow {previous!r} in order")
                previous = key
                mapping[key.decode("utf-8")], at = _decode(data, at, depth - 1)
            return mapping, at
    raise ValueError(f"unknown tag {tag!r} at byte {at - 1}")


def blob_refs(value: FieldValue) -> list[BlobRef]:
    """Every blob that ``value`` refers to, each once, in the order of the encoding."""
    found: dict[BlobRef, None] = {}

    def walk(item: FieldValue) -> None:
        if isinstance(item, BlobRef):
            found[item] = None
        elif isinstance(item, Mapping):
            for key in sorted(item, key=lambda name: name.encode("utf-8")):
                walk(item[key])
        elif isinstance(item, Sequence) and not isinstance(item, (str, bytes)):
            for entry in item:
                walk(entry)

    walk(value)
    return list(found)


def key_of(fields: Fields) -> str:
    """The key of an action: SHA-256 of its encoded fields, 64 lower-case hexadecimal digits."""
    return hashlib.sha256(encode(fields)).hexdigest()


def sha256_hex(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
