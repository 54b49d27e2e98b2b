"""A cache as one file: a tar archive with the records of a store and the blobs that they name.

``records/<key>`` holds the record of an action, and each blob stands before the first record that names it, as
``blobs/<sha256>``; records come in the order of their keys. Every header is that of a plain file of mode 0644 without
owner and time, so equal stores give equal bytes, and an importer accepts no other header: no link, no path but these.
A file that ends in ``.gz`` or ``.xz`` is compressed.
"""

import contextlib
import gzip
import lzma
import re
import secrets
import tarfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from dsr1build.cache.blobs import BlobLost, discard
from dsr1build.cache.record import LARGEST_RECORD, parse_record
from dsr1build.cache.scratch import scratch_directory
from dsr1build.cache.signing import Trust, refusal
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef
from dsr1build.errors import EnvironmentUnfit, InvalidInput

_BLOCK = 512
_NAME = re.compile(r"(blobs|records)/([0-9a-f]{64})")
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class Moved:
    """``results`` that went over, their ``bytes``, and those that did not: damaged, or not signed by a trusted key."""

    results: int
    bytes: int
    refused: int


def export_archive(store: LocalStore, file: Path) -> Moved:
    """Write every result of the store that is whole to ``file``, which is replaced at the end. Raises EnvironmentUnfit."""
    results = size = refused = 0
    written: set[str] = set()
    part = file.with_name(f"{file.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("wb") as raw, _compressed(raw, file.name) as out:
            for key in sorted(store.entries()):
                record = store.record(key, counted=False)
                data = store.record_bytes(key)
                if record is None or data is None:
                    refused += 1
                    continue
                for ref in (BlobRef(key), *(ref for ref, _ in record.outputs.values())):
                    if ref.sha256 not in written:
                        with contextlib.suppress(BlobLost):
                            size += _write(out, f"blobs/{ref.sha256}", store.read_blob(ref))
                            written.add(ref.sha256)
                _write(out, f"records/{key}", data)
                results += 1
            out.write(bytes(2 * _BLOCK))
        part.replace(file)
    except OSError as error:
        raise EnvironmentUnfit(
            f"the archive cannot be written: {error.strerror}", where=str(file), hint="Name a file on a disk with more room."
        ) from None
    finally:
        discard(part)
    return Moved(results, size, refused)


def import_archive(store: LocalStore, file: Path, trust: Trust, warn: Callable[[str], None]) -> Moved:
    """Take the results of an archive into ``store``. Nothing counts before its digest has been compared.

    Raises InvalidInput for a file that ``export_archive`` would not write, and EnvironmentUnfit where it cannot be read or
    the store cannot be written; results before that place are kept.
    """
    results = size = refused = 0
    limit = store.limits.max_bytes
    try:
        with scratch_directory("import-", _beside(store)) as directory, _opened(file) as source:
            staged: dict[BlobRef, Path] = {}
            for number, (folder, digest, length) in enumerate(_members(source, file), 1):
                size += length
                # Files without a byte take room as well.
                if number > store.limits.max_files:
                    raise _refused(file, f"it holds more files than the cache may, {store.limits.max_files}")
                if size > limit:
                    raise _refused(file, f"it holds more than the cache may, {limit} bytes")
                if folder == "blobs":
                    staged[BlobRef(digest)] = directory / digest
                    _copy(source, directory / digest, length, file)
                    continue
                if length > LARGEST_RECORD:
                    raise _refused(file, f"the record {digest} has {length} bytes")
                data = _exactly(source, length + -length % _BLOCK, file)[:length]
                try:
                    record = parse_record(data, digest)
                    if (why := refusal(record, trust)) is not None:
                        raise ValueError(why)
                    store.adopt(data, staged)
                except ValueError as error:
                    # Its files stay: one that follows may name them, too.
                    refused += 1
                    if refused == 1:
                        warn(f"the result {digest} of {file} is not taken: {error}")
                    continue
                results += 1
                for ref in {BlobRef(digest), *(ref for ref, _ in record.outputs.values())} & set(staged):
                    staged.pop(ref).unlink()
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise _refused(file, f"it is cut off or damaged ({error})") from None
    except OSError as error:
        raise EnvironmentUnfit(
            f"the archive cannot be imported: {error.strerror or error}",
            where=str(error.filename or file),
            hint="Check that the archive can be read and that the cache's disk has room.",
        ) from None
    return Moved(results, size, refused)


def _beside(store: LocalStore) -> Path:
    store.directory.mkdir(parents=True, exist_ok=True)
    return store.directory


def _header(name: str, length: int) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = length
    return member.tobuf(tarfile.GNU_FORMAT)


def _write(out: IO[bytes], name: str, data: bytes) -> int:
    out.write(_header(name, len(data)))
    out.write(data)
    out.write(bytes(-len(data) % _BLOCK))
    return len(data)


def _members(source: IO[bytes], file: Path) -> Iterator[tuple[str, str, int]]:
    """Folder, digest and length of each member; whoever takes one reads its content before the next."""
    while True:
        header = _exactly(source, _BLOCK, file)
        if not any(header):
            if any(_exactly(source, _BLOCK, file)) or source.read(1):
                raise _refused(file, "something follows its end")
            return
        name = _NAME.fullmatch(header[:100].rstrip(b"\0").decode("ascii", "replace"))
        try:
            length = tarfile.nti(header[124:136])  # type: ignore[attr-defined]
            right = name is not None and length >= 0 and _header(name[0], length) == header
        except (tarfile.HeaderError, ValueError):
            right = False
        if name is None or not right:
            raise _refused(file, "it holds something else than plain files with the names of results")
        yield name[1], name[2], length


def _copy(source: IO[bytes], target: Path, length: int, file: Path) -> None:
    with target.open("wb") as out:
        left = length
        while left:
            chunk = _exactly(source, min(left, _CHUNK), file)
            out.write(chunk)
            left -= len(chunk)
    _exactly(source, -length % _BLOCK, file)


def _exactly(source: IO[bytes], length: int, file: Path) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = source.read(length - len(data))
        if not chunk:
            raise _refused(file, "it is cut off")
        data += chunk
    return bytes(data)


def _refused(file: Path, why: str) -> InvalidInput:
    return InvalidInput(
        f"this is not an archive of a cache: {why}", where=str(file), hint="Make one with `dsr1build cache export FILE`."
    )


@contextlib.contextmanager
def _compressed(raw: IO[bytes], name: str) -> Iterator[IO[bytes]]:
    if name.endswith(".gz"):
        # Neither name nor time are written, so equal contents are equal files.
        with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
            yield packed  # type: ignore[misc]
    elif name.endswith(".xz"):
        with lzma.LZMAFile(raw, "wb", preset=1) as xz:
            yield xz
    else:
        yield raw


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[IO[bytes]]:
    """The archive, unpacked by what its first bytes say and not by its name."""
    with file.open("rb") as raw:
        magic = raw.read(6)
        raw.seek(0)
        if magic[:2] == b"\x1f\x8b":
            with gzip.GzipFile(fileobj=raw, mode="rb") as packed:
                yield packed  # type: ignore[misc]
        elif magic == b"\xfd7zXZ\0":
            with lzma.LZMAFile(raw, "rb") as xz:
                yield xz
        else:
            yield raw
