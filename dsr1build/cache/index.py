"""The index of a store: which manifest belongs to a key, how large its files are, what it cost to make.

It is a table of small byte strings in diskcache (SQLite). The trees of blobs and manifests hold the truth, so a lost or
damaged index is moved aside and written again from the manifests, and all that a wrong row can cause is a miss.

diskcache by itself unpickles what it reads, keys too, and follows file names out of its rows (CVE-2025-69872).
``BytesDisk`` does neither: it knows byte strings that lie inside the row, and refuses everything else.

A row: the 32 bytes of the key, then ``sha256 of the manifest:32 bytes  bytes:u64  seconds:f64``, little-endian.
"""

import contextlib
import fcntl
import os
import secrets
import sqlite3
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diskcache  # type: ignore[import-untyped]

from dsr1build.digest import BlobRef

_ROW = struct.Struct("<32sQd")
# Set once the index is known to hold every manifest of the tree; not a key, for keys are 32 bytes long.
_COMPLETE = b"complete"


class BytesDisk(diskcache.Disk):  # type: ignore[misc]
    """diskcache's storage for byte strings inside the row: nothing is pickled, and no file is written, read or removed."""

    def put(self, key: object) -> tuple[Any, bool]:
        return sqlite3.Binary(_bytes_only(key)), True

    def get(self, key: object, raw: object) -> bytes:
        if not raw:
            raise ValueError("the index holds a pickled key")
        return _bytes_only(key)

    def store(self, value: object, read: bool, key: object = None) -> tuple[int, int, None, Any]:
        if read:
            raise ValueError("the index takes no files")
        return 0, diskcache.core.MODE_RAW, None, sqlite3.Binary(_bytes_only(value))

    def fetch(self, mode: object, filename: object, value: object, read: bool) -> bytes:
        if mode != diskcache.core.MODE_RAW or filename is not None or read:
            raise ValueError("the index holds a row that is not a byte string")
        return _bytes_only(value)

    def remove(self, file_path: object) -> None:
        """Rows own no files; a row that names one may name anything."""


def _bytes_only(value: object) -> bytes:
    if not isinstance(value, (bytes, memoryview)):
        raise ValueError(f"the index takes bytes, not {type(value).__name__}")
    return bytes(value)


class IndexUnusable(Exception):
    """The index cannot be opened or written."""


@dataclass(frozen=True, slots=True)
class Record:
    manifest: BlobRef
    bytes: int
    seconds: float


class Index:
    """An open index. ``entries`` walks the manifests of the tree as (key, record); it is called where the table is new."""

    def __init__(self, directory: Path, entries: Iterable[tuple[str, Record]]) -> None:
        """Open or create the index. Raises IndexUnusable."""
        if os.path.expandvars(directory) != str(directory):
            raise IndexUnusable(f"{directory} contains a $ that diskcache would expand")
        try:
            with _lock(directory.with_suffix(".lock")):
                try:
                    self._table = _open(directory)
                except sqlite3.DatabaseError as error:
                    if isinstance(error, sqlite3.OperationalError) and "malformed" not in str(error):
                        raise
                    directory.replace(directory.with_name(f"{directory.name}.broken.{secrets.token_hex(4)}"))
                    self._table = _open(directory)
                if self._table.get(_COMPLETE) is None:
                    for key, record in entries:
                        self.put(key, record)
                    self._table.set(_COMPLETE, b"")
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError) as error:
            raise IndexUnusable(str(error)) from error

    def get(self, key: str) -> Record | None:
        """The record of ``key``; a row that cannot be read or understood counts as absent."""
        try:
            row = self._table.get(bytes.fromhex(key))
            if row is None:
                return None
            manifest, size, seconds = _ROW.unpack(row)
        except (OSError, sqlite3.Error, diskcache.Timeout, ValueError, struct.error):
            return None
        return Record(BlobRef(manifest.hex()), size, seconds)

    def put(self, key: str, record: Record) -> None:
        """Set the record of ``key``. Raises IndexUnusable."""
        row = _ROW.pack(bytes.fromhex(record.manifest.sha256), record.bytes, record.seconds)
        try:
            self._table.set(bytes.fromhex(key), row)
        except (OSError, sqlite3.Error, diskcache.Timeout) as error:
            raise IndexUnusable(str(error)) from error

    def close(self) -> None:
        with contextlib.suppress(OSError, sqlite3.Error):
            self._table.close()


def _open(directory: Path) -> Any:
    table = diskcache.Cache(
        str(directory),
        timeout=10,
        disk=BytesDisk,
        eviction_policy="none",
        cull_limit=0,
        statistics=0,
        tag_index=0,
        # One page is enough for a row; the map of 64 MiB that diskcache asks for counts against an address space limit.
        sqlite_mmap_size=0,
    )
    # A damaged page beyond the first shows only when it is read; the table is small.
    try:
        (verdict,) = table._sql("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error:
        table.close()
        raise
    if verdict != "ok":
        table.close()
        raise sqlite3.DatabaseError(verdict)
    return table


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock of the kernel, so that a killed holder leaves none; two builders never repair one index at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
