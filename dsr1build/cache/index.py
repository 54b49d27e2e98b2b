"""The index of a store: which manifest belongs to a key, how large its files are, what it cost to make, when it was used.

It is a table of small byte strings in diskcache (SQLite). The trees of blobs and manifests hold the truth, so a lost or
damaged index is moved aside and written again from the manifests, and all that a wrong row can cause is a miss.

diskcache by itself unpickles what it reads, keys too, and follows file names out of its rows (CVE-2025-69872).
``BytesDisk`` does neither: it knows byte strings that lie inside the row, and refuses everything else.

A row: the 32 bytes of the key, then, little-endian::

    sha256 of the manifest:32 bytes  bytes:u64  files:u32  seconds:f64  last use:f64 (seconds since 1970)  peak:u64
    kind 0 label:utf-8

Rows with shorter keys are about the whole: ``complete 3`` is there once every manifest of the tree is in the table, ``totals``
has ``bytes:u64 files:u64`` of the store, and ``counters`` belongs to ``dsr1build.cache.statistics``.
"""

import contextlib
import fcntl
import math
import os
import secrets
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import diskcache  # type: ignore[import-untyped]

from dsr1build.digest import BlobRef

_ROW = struct.Struct("<32sQIddQ")
_TOTALS = struct.Struct("<QQ")
_COMPLETE_ROW = b"complete 3"
_TOTALS_ROW = b"totals"
_COUNTERS_ROW = b"counters"
_KEY_BYTES = 32
_FAILURES = (OSError, sqlite3.Error, diskcache.Timeout, ValueError)


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
class Entry:
    """What the index knows of a key. ``bytes`` and ``files`` count the outputs, the fields and the manifest; ``seconds`` is
    what the action cost, ``peak`` the most memory that it used (bytes, 0 where that is not known), ``used`` its last use in
    seconds since 1970, to the hour."""

    manifest: BlobRef
    bytes: int
    files: int
    seconds: float
    used: float
    kind: str = ""
    label: str = ""
    peak: int = 0


class Index:
    """An open index. ``walk`` gives the entry of each manifest of the tree, by key; it is called where the table is new."""

    def __init__(self, directory: Path, walk: Callable[[], Iterable[tuple[str, Entry]]]) -> None:
        """Open or create the index. Raises IndexUnusable."""
        if os.path.expandvars(directory) != str(directory):
            raise IndexUnusable(f"{directory} contains a $ that diskcache would expand")
        try:
            with _lock(directory.with_suffix(".lock")):
                try:
                    self._table = _open(directory)
                except _FAILURES as error:
                    if not _is_damage(directory, error):
                        raise
                    directory.replace(directory.with_name(f"{directory.name}.broken.{secrets.token_hex(4)}"))
                    self._table = _open(directory)
                try:
                    if self._table.get(_COMPLETE_ROW) is None:
                        self._fill(walk())
                except BaseException:
                    self._table.close()
                    raise
        except _FAILURES as error:
            raise IndexUnusable(str(error)) from error

    def rebuild(self, walk: Callable[[], Iterable[tuple[str, Entry]]]) -> None:
        """Replace all entries by those of the tree; counters stay. Raises IndexUnusable."""
        try:
            self._fill(walk())
        except _FAILURES as error:
            raise IndexUnusable(str(error)) from error

    def _fill(self, entries: Iterable[tuple[str, Entry]]) -> None:
        rows = [(bytes.fromhex(key), entry) for key, entry in entries]
        with self._table.transact():
            self._table._sql("DELETE FROM Cache WHERE raw = 0 OR length(key) = ?", (_KEY_BYTES,))
            for key, entry in rows:
                self._table.set(key, _pack(entry))
            kept = dict(rows).values()
            self._set_totals(sum(e.bytes for e in kept), sum(e.files for e in kept))
            self._table.set(_COMPLETE_ROW, b"")

    def get(self, key: str) -> Entry | None:
        """The entry of ``key``; a row that cannot be read or understood counts as absent."""
        try:
            row = self._table.get(bytes.fromhex(key))
            return None if row is None else _unpack(row)
        except _FAILURES:
            return None

    def put(self, key: str, entry: Entry) -> tuple[int, int]:
        """Set the entry of ``key``; gives the totals that result. Raises IndexUnusable."""
        name = bytes.fromhex(key)
        try:
            with self._table.transact():
                old = self.get(key)
                self._table.set(name, _pack(entry))
                size, files = self._totals()
                if old is not None:
                    size, files = size - old.bytes, files - old.files
                totals = max(0, size) + entry.bytes, max(0, files) + entry.files
                self._set_totals(*totals)
        except _FAILURES as error:
            raise IndexUnusable(str(error)) from error

        return totals

    def remove(self, entries: Mapping[str, BlobRef]) -> None:
        """Remove each key whose row names this manifest. Raises IndexUnusable."""
        try:
            with self._table.transact():
                size, files = self._totals()
                for key, manifest in entries.items():
                    old = self.get(key)
                    if old is not None and old.manifest == manifest:
                        self._table.delete(bytes.fromhex(key))
                        size, files = max(0, size - old.bytes), max(0, files - old.files)
                self._set_totals(size, files)
        except _FAILURES as error:
            raise IndexUnusable(str(error)) from error

    def touch(self, keys: Iterable[str], now: float) -> None:
        """Set the last use of entries. What cannot be written is an older time of last use, and nothing else."""
        with contextlib.suppress(*_FAILURES), self._table.transact():
            for key in keys:
                entry = self.get(key)
                if entry is not None:
                    self._table.set(bytes.fromhex(key), _pack(replace(entry, used=now)))

    def entries(self) -> dict[str, Entry]:
        """All entries that can be understood, by key."""
        found: dict[str, Entry] = {}
        try:
            rows = self._table._sql("SELECT key, value FROM Cache WHERE raw = 1 AND mode = ?", (diskcache.core.MODE_RAW,))
            for key, value in rows:
                if isinstance(key, bytes) and len(key) == _KEY_BYTES:
                    with contextlib.suppress(ValueError):
                        found[key.hex()] = _unpack(_bytes_only(value))
        except _FAILURES:
            return found
        return found

    def totals(self) -> tuple[int, int]:
        """Bytes and files of the store: as ``set_totals`` left them, with what came and went since. A file that several
        new entries share is counted for each, so this is an upper bound between two evictions."""
        try:
            return self._totals()
        except _FAILURES:
            return 0, 0

    def set_totals(self, size: int, files: int) -> None:
        """Set what was counted in the tree. Raises IndexUnusable."""
        try:
            self._set_totals(size, files)
        except _FAILURES as error:
            raise IndexUnusable(str(error)) from error

    def _totals(self) -> tuple[int, int]:
        row = self._table.get(_TOTALS_ROW)
        if row is None or len(row) != _TOTALS.size:
            return 0, 0
        size, files = _TOTALS.unpack(row)
        return size, files

    def _set_totals(self, size: int, files: int) -> None:
        self._table.set(_TOTALS_ROW, _TOTALS.pack(size, files))

    def counters(self) -> bytes:
        """What ``count`` left; empty where there is nothing to be read."""
        try:
            return self._table.get(_COUNTERS_ROW) or b""
        except _FAILURES:
            return b""

    def count(self, add: Callable[[bytes], bytes]) -> None:
        """Replace the counters by what ``add`` makes of them, in one transaction. Counts that cannot be written are lost."""
        with contextlib.suppress(*_FAILURES), self._table.transact():
            self._table.set(_COUNTERS_ROW, add(self.counters()))

    def close(self) -> None:
        with contextlib.suppress(OSError, sqlite3.Error):
            self._table.close()


def _pack(entry: Entry) -> bytes:
    head = _ROW.pack(bytes.fromhex(entry.manifest.sha256), entry.bytes, entry.files, entry.seconds, entry.used, entry.peak)
    return head + f"{entry.kind}\0{entry.label}".encode()


def _unpack(row: bytes) -> Entry:
    """Raises ValueError for a row of another form."""
    if len(row) < _ROW.size:
        raise ValueError("the row is too short")
    manifest, size, files, seconds, used, peak = _ROW.unpack(row[: _ROW.size])
    kind, separator, label = row[_ROW.size :].decode("utf-8").partition("\0")
    if not separator or not math.isfinite(seconds) or not math.isfinite(used):
        raise ValueError("the row is not of this form")
    return Entry(BlobRef(manifest.hex()), size, files, seconds, used, kind, label, peak)


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
    # A damaged page beyond the first shows only when it is read; the table is small. So do columns and rows of another form.
    try:
        (verdict,) = table._sql("PRAGMA quick_check(1)").fetchone()
        table.get(_COMPLETE_ROW)
    except (sqlite3.Error, ValueError):
        table.close()
        raise
    if verdict != "ok":
        table.close()
        raise sqlite3.DatabaseError(verdict)
    return table


def _is_damage(directory: Path, error: Exception) -> bool:
    """Whether what stands in the place of the index is none, rather than out of reach for the moment."""
    if isinstance(error, sqlite3.OperationalError):
        if any(words in str(error) for words in ("malformed", "no such column", "no such table", "has no column")):
            return True
    elif isinstance(error, (sqlite3.DatabaseError, ValueError)):
        return True
    parts = [directory / f"cache.db{suffix}" for suffix in ("", "-wal", "-shm")]
    return (os.path.lexists(directory) and not directory.is_dir()) or any(
        os.path.lexists(part) and not part.is_file() for part in parts
    )


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold a lock of the kernel, so that a killed holder leaves none; two builders never repair one index at once."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
