"""The record of an action: which files it left. Local stores and remotes keep the same bytes.

A record is canonical JSON (sorted keys, no blanks, ASCII) of at most ``LARGEST_RECORD`` bytes::

    {"key": <sha256>, "kind": "compile", "label": <text>, "outputs": {<relative path>: {"sha256": .., "size": ..}, ..},
     "peak": 300000000, "seconds": 1.5,
     "signature": {"key": "ed25519:<64 hexadecimal digits>", "value": <128 hexadecimal digits>}, "version": 1}

``kind`` and ``label`` (the action in words, for people), ``seconds`` and ``peak`` (what it cost to make the files: time on
the clock, and the most memory in bytes) and ``signature`` may be absent. The signature covers all else
(``dsr1build.cache.signing``). For one record there is one spelling, so bytes that parse are bytes that were rendered.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NoReturn

from dsr1build.digest import BlobRef

LARGEST_RECORD = 1 << 20
LONGEST_LABEL = 200
# Sizes are kept as unsigned 64-bit numbers in the index.
_LARGEST_SIZE = (1 << 64) - 1
_LONGEST_SECONDS = 1e12
_SHA256 = re.compile(r"[0-9a-f]{64}")
PUBLIC_KEY = re.compile(r"ed25519:[0-9a-f]{64}")
_SIGNATURE = re.compile(r"[0-9a-f]{128}")


@dataclass(frozen=True, slots=True)
class Signature:
    """``key`` is the public key as profiles write it, ``value`` the 64 bytes of the signature in hexadecimal digits."""

    key: str
    value: str


@dataclass(frozen=True, slots=True)
class Record:
    """``outputs``: for each relative path the file's digest and its length in bytes. ``peak`` is 0 where it is not known."""

    key: str
    outputs: Mapping[str, tuple[BlobRef, int]]
    seconds: float | None = None
    signature: Signature | None = None
    kind: str = ""
    label: str = ""
    peak: int = 0


def render_record(record: Record) -> bytes:
    """The one spelling of ``record``. Raises ValueError where a part is not of its form, or the whole is too large."""
    _check(record)
    fields: dict[str, Any] = {
        "key": record.key,
        "outputs": {name: {"sha256": ref.sha256, "size": size} for name, (ref, size) in record.outputs.items()},
        "version": 1,
    }
    for name, text in (("kind", record.kind), ("label", record.label)):
        if text:
            fields[name] = text
    if record.seconds is not None:
        fields["seconds"] = float(record.seconds)
    if record.peak:
        fields["peak"] = record.peak
    if record.signature is not None:
        fields["signature"] = {"key": record.signature.key, "value": record.signature.value}
    data = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")
    if len(data) > LARGEST_RECORD:
        raise ValueError(f"the record has {len(data)} bytes, more than {LARGEST_RECORD}")
    return data


def parse_record(data: bytes, key: str | None = None) -> Record:
    """The record whose spelling is ``data``; of ``key``, where one is given. The signature is not checked.

    Raises ValueError for anything that ``render_record`` would not write.
    """
    if len(data) > LARGEST_RECORD:
        raise ValueError(f"the record has {len(data)} bytes, more than {LARGEST_RECORD}")
    try:
        fields: Any = json.loads(data, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("the record is nested too deeply") from None
    if not isinstance(fields, dict):
        raise ValueError("the record is not an object")
    if key is not None and fields.get("key") != key:
        raise ValueError("the record belongs to another key")
    files = fields.get("outputs")
    if not isinstance(files, dict):
        raise ValueError("the record names no outputs")
    outputs: dict[str, tuple[BlobRef, int]] = {}
    for name, entry in files.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            raise ValueError(f"the record's entry for {name!r} is not a file")
        outputs[name] = (BlobRef(entry["sha256"]), entry.get("size", -1))
    signature = fields.get("signature")
    if signature is not None:
        if not isinstance(signature, dict):
            raise ValueError("the signature is not an object")
        signature = Signature(signature.get("key", ""), signature.get("value", ""))
    words = (fields.get("kind", ""), fields.get("label", ""))
    record = Record(fields.get("key", ""), outputs, fields.get("seconds"), signature, *words, fields.get("peak", 0))
    # A part that this version does not know, or a second spelling of one that it knows, shows here.
    if render_record(record) != data:
        raise ValueError("the record is not in canonical form")
    return record


def check_output_path(name: str) -> None:
    """Raises ValueError unless ``name`` is a plain relative path of characters that can be shown: control characters would
    reach terminals and logs."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name or name == "." or not name.isprintable():
        raise ValueError(f"{name!r} is not a relative path inside the outputs")


def _check(record: Record) -> None:
    if not _is(_SHA256, record.key):
        raise ValueError(f"{record.key!r} is not a key")
    for name, (ref, size) in record.outputs.items():
        check_output_path(name)
        if not _is(_SHA256, ref.sha256) or type(size) is not int or not 0 <= size <= _LARGEST_SIZE:
            raise ValueError(f"the entry for {name!r} is not a file")
    for text in (record.kind, record.label):
        if not isinstance(text, str) or len(text) > LONGEST_LABEL or not text.isprintable():
            raise ValueError("the action's name is not a line of text")
    seconds = record.seconds
    if seconds is not None and (type(seconds) not in (int, float) or not 0 <= seconds <= _LONGEST_SECONDS):
        raise ValueError(f"{seconds!r} is not a number of seconds")
    if type(record.peak) is not int or not 0 <= record.peak <= _LARGEST_SIZE:
        raise ValueError(f"{record.peak!r} is not a number of bytes")
    signature = record.signature
    if signature is not None and not (_is(PUBLIC_KEY, signature.key) and _is(_SIGNATURE, signature.value)):
        raise ValueError("the signature is not of the form of one")


def _is(form: re.Pattern[str], text: object) -> bool:
    return isinstance(text, str) and form.fullmatch(text) is not None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")
