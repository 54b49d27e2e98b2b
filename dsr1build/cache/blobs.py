"""A content-addressed tree of files: ``root/aa/aabb...``, named by the SHA-256 of what they hold.

A file is written under a random name on the same file system, synced, then renamed, so a reader sees it whole or not at
all. Nothing that is read is trusted before its length and digest have been compared; a file that does not agree is moved
to ``broken/`` and counts as absent.
"""

import contextlib
import errno
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from dsr1build.digest import BlobRef

# Results are a thousand times smaller. A damaged disk may show files of any length, with holes; a longer one is neither read
# nor copied.
LARGEST_BLOB = 1 << 30
_CHUNK = 1 << 20
# What a network file system answers for a moment, when a file is replaced on its server or held by another host.
_PASSING = (errno.EBUSY, errno.ESTALE, errno.EAGAIN)
# Seconds to wait before each further attempt.
_PAUSES = (0.01, 0.05, 0.2)

_T = TypeVar("_T")


class NotAFile(Exception):
    """What bears the name of a file is a directory, a named pipe, a socket or a device, or longer than any such file."""


class BlobLost(Exception):
    """A blob is not there, or what is there is something else. ``reason`` is `lost`, `damaged` or `unreadable`."""

    def __init__(self, ref: BlobRef, reason: str = "lost") -> None:
        super().__init__(f"blob {ref.sha256} is missing or damaged")
        self.ref = ref
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Staged:
    """A synced temporary file that holds the blob ``ref`` of ``size`` bytes and has not got its name yet."""

    path: Path
    ref: BlobRef
    size: int


@dataclass(frozen=True, slots=True)
class BlobTree:
    """The tree below ``root``. ``temporary`` and ``broken`` lie on the same file system; the names of temporary files
    begin with ``owner``, by which those of a writer that is gone are known."""

    root: Path
    temporary: Path
    broken: Path
    owner: str = ""

    def path(self, ref: BlobRef) -> Path:
        return self.root / ref.sha256[:2] / ref.sha256

    def read(self, ref: BlobRef, most: int = LARGEST_BLOB) -> bytes:
        """The verified content; a file of more than ``most`` bytes counts as damaged and is not read. Raises BlobLost, and
        OSError where the process has no file handle left."""
        try:
            data = patiently(lambda: _read(self.path(ref), most))
        except NotAFile:
            self.set_aside(ref)
            raise BlobLost(ref, "damaged") from None
        except OSError as error:
            raise _lost(ref, error) from None
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            self.set_aside(ref)
            raise BlobLost(ref, "damaged")
        return data

    def verify(self, ref: BlobRef, size: int) -> None:
        """Read the whole file. Raises BlobLost unless it is there with this length and digest, and OSError as ``read``."""
        try:
            found = patiently_hashed(self.path(ref), ref, size)
        except NotAFile:
            found = ""
        if found != ref.sha256:
            self.set_aside(ref)
            raise BlobLost(ref, "damaged")

    def copy_to(self, ref: BlobRef, target: Path) -> None:
        """Copy the verified content to ``target``. Raises BlobLost, and OSError where ``target`` cannot be written."""
        try:
            source = patiently(lambda: open_file(self.path(ref), LARGEST_BLOB))
        except NotAFile:
            self.set_aside(ref)
            raise BlobLost(ref, "damaged") from None
        except OSError as error:
            raise _lost(ref, error) from None
        digest = hashlib.sha256()
        with source, target.open("wb") as out:
            while True:
                try:
                    chunk = source.read(_CHUNK)
                except OSError:
                    raise BlobLost(ref, "unreadable") from None
                if not chunk:
                    break
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != ref.sha256:
            target.unlink()
            self.set_aside(ref)
            raise BlobLost(ref, "damaged")

    def write(self, data: bytes) -> BlobRef:
        """Store ``data``. Raises OSError."""
        staged = self.stage(iter((data,)))
        self.commit(staged)
        return staged.ref

    def stage_file(self, source: Path) -> Staged:
        """Copy the file ``source`` to a temporary file of the tree. Raises OSError."""
        with source.open("rb") as file:
            return self.stage(iter(lambda: file.read(_CHUNK), b""))

    def stage(self, chunks: Iterator[bytes]) -> Staged:
        """Write ``chunks`` to a temporary file and sync it. Raises OSError, and leaves no file then."""
        scratch = self.temporary / f"{self.owner}{secrets.token_hex(16)}"
        digest = hashlib.sha256()
        size = 0
        try:
            with with_directory(scratch, lambda: scratch.open("xb")) as out:
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
        except BaseException:
            discard(scratch)
            raise
        return Staged(scratch, BlobRef(digest.hexdigest()), size)

    def commit(self, staged: Staged) -> None:
        """Give a staged file its name. Raises OSError, and leaves no temporary file then."""
        target = self.path(staged.ref)
        try:
            # An older file of this name is replaced even if it looks right: that also heals a damaged one.
            with_directory(target, lambda: patiently(lambda: staged.path.replace(target)))
        except BaseException:
            discard(staged.path)
            raise

    def set_aside(self, ref: BlobRef) -> None:
        """Move a damaged file to ``broken``. On a store that cannot be written it stays, and is a miss each time."""
        with contextlib.suppress(OSError):
            self.broken.mkdir(parents=True, exist_ok=True)
            aside = self.broken / f"{ref.sha256}.{secrets.token_hex(4)}"
            self.path(ref).replace(aside)
            # Its age from here on is how long it has been lying there.
            os.utime(aside)

    def remove(self, ref: BlobRef) -> None:
        """Delete the file, if it is there and can be deleted."""
        with contextlib.suppress(OSError):
            self.path(ref).unlink()

    def entries(self) -> Iterator[BlobRef]:
        """Every blob by its file name, unverified, in increasing order; what cannot be listed is left out."""
        for outer in _names(self.root, 2):
            for name in _names(self.root / outer, 64):
                yield BlobRef(name)


def with_directory(path: Path, attempt: Callable[[], _T]) -> _T:
    """The result of ``attempt``, which makes ``path``; the directory is made where it is missing, which is seldom: asking for
    it first would cost every file a call. Raises OSError."""
    try:
        return attempt()
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
        return attempt()


def patiently(attempt: Callable[[], _T]) -> _T:
    """The result of ``attempt``, made again a few times where a file is busy or its handle stale. Raises OSError."""
    for pause in _PAUSES:
        try:
            return attempt()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(pause)
    return attempt()


def open_file(path: Path, most: int | None = None) -> BinaryIO:
    """Open a regular file, of at most ``most`` bytes, for reading, without waiting for anything else that may stand there.
    Raises OSError and NotAFile."""
    try:
        # Without O_NONBLOCK the call waits for a writer of a named pipe, for ever if there is none.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV):
            raise NotAFile(str(path)) from None
        raise
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode) or (most is not None and status.st_size > most):
        os.close(descriptor)
        raise NotAFile(str(path))
    return os.fdopen(descriptor, "rb")


def _read(path: Path, most: int) -> bytes:
    with open_file(path, most) as file:
        return file.read()


def patiently_hashed(path: Path, ref: BlobRef, size: int) -> str:
    """The SHA-256 of a file; "" where its length is not ``size``. Raises BlobLost, NotAFile, and OSError as
    ``BlobTree.read``."""

    def attempt() -> str:
        digest = hashlib.sha256()
        with open_file(path) as file:
            if os.fstat(file.fileno()).st_size != size:
                return ""
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
        return digest.hexdigest()

    try:
        return patiently(attempt)
    except OSError as error:
        raise _lost(ref, error) from None


def discard(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _lost(ref: BlobRef, error: OSError) -> Exception:
    """What a failed read means: a want of file handles says nothing about the blob."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return error
    return BlobLost(ref, "lost" if error.errno in (errno.ENOENT, errno.ENOTDIR) else "unreadable")


def _names(directory: Path, length: int) -> list[str]:
    try:
        with os.scandir(directory) as found:
            return sorted(item.name for item in found if len(item.name) == length)
    except OSError:
        return []
