"""A content-addressed tree of files: ``root/aa/bb/aabb...``, named by the SHA-256 of what they hold.

A file is written under a random name on the same file system, synced, then renamed, so a reader sees it whole or not at
all. Nothing that is read is trusted before its length and digest have been compared; a file that does not agree is moved
to ``broken/`` and counts as absent.
"""

import contextlib
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dsr1build.digest import BlobRef

_CHUNK = 1 << 20
# A temporary file of a writer that was killed is removed when it is older than this; no write takes a day.
_ABANDONED_SECONDS = 24 * 3600


class BlobLost(Exception):
    """A blob is not there, or what is there is something else."""

    def __init__(self, ref: BlobRef) -> None:
        super().__init__(f"blob {ref.sha256} is missing or damaged")
        self.ref = ref


@dataclass(frozen=True, slots=True)
class BlobTree:
    """The tree below ``root``. ``temporary`` and ``broken`` lie on the same file system."""

    root: Path
    temporary: Path
    broken: Path

    def path(self, ref: BlobRef) -> Path:
        return self.root / ref.sha256[:2] / ref.sha256[2:4] / ref.sha256

    def read(self, ref: BlobRef) -> bytes:
        """The verified content. Raises BlobLost."""
        try:
            data = self.path(ref).read_bytes()
        except OSError:
            raise BlobLost(ref) from None
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            self.set_aside(ref)
            raise BlobLost(ref)
        return data

    def holds(self, ref: BlobRef, size: int) -> bool:
        """Whether the blob is there with this length and digest; the whole file is read."""
        digest = hashlib.sha256()
        try:
            with self.path(ref).open("rb") as file:
                right = os.fstat(file.fileno()).st_size == size
                while right and (chunk := file.read(_CHUNK)):
                    digest.update(chunk)
        except OSError:
            return False
        if right and digest.hexdigest() == ref.sha256:
            return True
        self.set_aside(ref)
        return False

    def copy_to(self, ref: BlobRef, target: Path) -> None:
        """Copy the verified content to ``target``. Raises BlobLost, and OSError where ``target`` cannot be written."""
        try:
            source = self.path(ref).open("rb")
        except OSError:
            raise BlobLost(ref) from None
        digest = hashlib.sha256()
        with source, target.open("wb") as out:
            while True:
                try:
                    chunk = source.read(_CHUNK)
                except OSError:
                    raise BlobLost(ref) from None
                if not chunk:
                    break
                digest.update(chunk)
                out.write(chunk)
        if digest.hexdigest() != ref.sha256:
            target.unlink()
            self.set_aside(ref)
            raise BlobLost(ref)

    def write(self, data: bytes) -> BlobRef:
        """Store ``data``. Raises OSError."""
        return self._store(iter((data,)))[0]

    def write_file(self, source: Path) -> tuple[BlobRef, int]:
        """Store a copy of the file ``source``; returns its reference and its length in bytes. Raises OSError."""
        with source.open("rb") as file:
            return self._store(iter(lambda: file.read(_CHUNK), b""))

    def _store(self, chunks: Iterator[bytes]) -> tuple[BlobRef, int]:
        self.temporary.mkdir(parents=True, exist_ok=True)
        scratch = self.temporary / secrets.token_hex(16)
        digest = hashlib.sha256()
        size = 0
        try:
            with scratch.open("xb") as out:
                for chunk in chunks:
                    digest.update(chunk)
                    size += len(chunk)
                    out.write(chunk)
                out.flush()
                os.fsync(out.fileno())
            ref = BlobRef(digest.hexdigest())
            target = self.path(ref)
            target.parent.mkdir(parents=True, exist_ok=True)
            # An older file of this name is replaced even if it looks right: that also heals a damaged one.
            scratch.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                scratch.unlink()
            raise
        return ref, size

    def set_aside(self, ref: BlobRef) -> None:
        """Move a damaged file to ``broken``. On a store that cannot be written it stays, and is a miss each time."""
        with contextlib.suppress(OSError):
            self.broken.mkdir(parents=True, exist_ok=True)
            self.path(ref).replace(self.broken / f"{ref.sha256}.{secrets.token_hex(4)}")

    def entries(self) -> Iterator[BlobRef]:
        """Every blob by its file name, unverified, in increasing order. Ends early where a directory cannot be read."""
        with contextlib.suppress(OSError):
            for outer in sorted(self.root.iterdir()):
                for inner in sorted(outer.iterdir()):
                    for file in sorted(inner.iterdir()):
                        if len(file.name) == 64:
                            yield BlobRef(file.name)

    def sweep(self) -> None:
        """Remove temporary files that a killed writer left more than a day ago."""
        with contextlib.suppress(OSError):
            for file in self.temporary.iterdir():
                with contextlib.suppress(OSError):
                    if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                        file.unlink()
