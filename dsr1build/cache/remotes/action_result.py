"""The ActionResult that stands for an action on servers that know actions: its outputs, and the record as one more file."""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from dsr1build.cache.remotes.proto import message
from dsr1build.digest import BlobRef, sha256_hex

RECORD_NAME = "dsr1-record.json"


@dataclass(frozen=True, slots=True)
class RecordFile:
    """What an ActionResult says of the record. ``contents`` is empty where it is not inlined; nothing but the digest's
    form is checked."""

    blob: BlobRef
    size: int
    contents: bytes


def encode_action_result(record: bytes, outputs: Mapping[str, tuple[BlobRef, int]]) -> bytes:
    """The serialized ActionResult, with the record inlined. Files are in order of their paths."""
    digest, output_file = message("Digest"), message("OutputFile")
    files = {**outputs, RECORD_NAME: (BlobRef(sha256_hex(record)), len(record))}
    result = message("ActionResult")(
        output_files=[
            output_file(
                path=path,
                digest=digest(hash=blob.sha256, size_bytes=size),
                contents=record if path == RECORD_NAME else b"",
            )
            for path, (blob, size) in sorted(files.items(), key=lambda item: item[0])
        ]
    )
    data: bytes = result.SerializeToString(deterministic=True)
    return data


def decode_action_result(data: bytes) -> RecordFile | None:
    """The record's file, or None for bytes that are no ActionResult and for results of other programs."""
    try:
        result = message("ActionResult").FromString(data)
    except DecodeError:
        return None
    for file in result.output_files:
        # The digest becomes a part of an address.
        if file.path == RECORD_NAME and file.digest.size_bytes > 0 and re.fullmatch("[0-9a-f]{64}", file.digest.hash):
            return RecordFile(BlobRef(file.digest.hash), file.digest.size_bytes, file.contents)
    return None
