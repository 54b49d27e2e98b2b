"""What every adapter does with blobs and requests, whatever it speaks: verified files and bounded parallelism."""

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Executor, wait
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from dsr1build.cache.remote import RemoteUnavailable
from dsr1build.digest import BlobRef

CHUNK = 1 << 20

# No record comes near this. Whatever is longer is not a record, and is not read to its end to find out.
LONGEST_RECORD = 4 << 20

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def receive_blob(chunks: Iterable[bytes], blob: BlobRef, size: int, directory: Path) -> bool:
    """Write ``chunks`` to ``directory/<sha256>`` if they are ``size`` bytes of the right digest; the file appears whole or
    not at all. Reading stops at the first byte too many. Raises RemoteUnavailable when the file cannot be written: there is
    nothing that a remote could help with then."""
    temporary = directory / f".{blob.sha256}.{uuid4().hex}"
    hasher, length = hashlib.sha256(), 0
    try:
        # Unbuffered, so that a full disk shows at the write and not while another error is under way.
        with _writing(directory), temporary.open("xb", buffering=0) as file:
            for chunk in chunks:
                length += len(chunk)
                if length > size:
                    return False
                hasher.update(chunk)
                _write_all(file.write, chunk)
        if length != size or hasher.hexdigest() != blob.sha256:
            return False
        with _writing(directory):
            temporary.replace(directory / blob.sha256)
        return True
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_all(write: Callable[[memoryview], int | None], data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[write(view) or 0 :]


@contextlib.contextmanager
def _writing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RemoteUnavailable(f"cannot write to {directory}: {error.strerror or error}") from error


def blob_chunks(path: Path, blob: BlobRef, size: int) -> Iterator[bytes]:
    """The bytes of ``path`` for an upload that declares ``size`` of them. The last chunk is handed out only when all bytes
    have the digest, so that a receiver never gets the whole of a file that changed. Raises RemoteUnavailable for such a file
    and for one that cannot be read."""
    hasher, length, held = hashlib.sha256(), 0, b""
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(CHUNK):
                length += len(chunk)
                if length > size:
                    break
                hasher.update(chunk)
                if held:
                    yield held
                held = chunk
    except OSError as error:
        raise RemoteUnavailable(f"cannot read {path}: {error.strerror or error}") from error
    if length != size or hasher.hexdigest() != blob.sha256:
        raise RemoteUnavailable(f"{path} is no longer the blob {blob.sha256}; it is not uploaded")
    if held:
        yield held


def file_size(path: Path) -> int:
    """Raises RemoteUnavailable for a file that is gone or cannot be looked at."""
    try:
        return path.stat().st_size
    except OSError as error:
        raise RemoteUnavailable(f"cannot read {path}: {error.strerror or error}") from error


def in_parallel(executor: Executor, function: Callable[[_Item], _Result], items: Sequence[_Item]) -> list[_Result]:
    """``function`` of each item, in order. The first error ends it: what has not begun is not begun, so a dead server costs
    the time-out of one round however many items there are. Raises that error, and RemoteUnavailable if the remote has been
    closed meanwhile."""
    try:
        futures = [executor.submit(function, item) for item in items]
    except RuntimeError as error:
        raise RemoteUnavailable("the remote has been closed") from error
    done, pending = wait(futures, return_when=FIRST_EXCEPTION)
    for future in pending:
        future.cancel()
    try:
        for future in done:
            future.result()
        return [future.result() for future in futures]
    except CancelledError as error:
        raise RemoteUnavailable("the remote has been closed") from error
