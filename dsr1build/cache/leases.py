"""What running builds hold, so that eviction takes nothing away under them.

Each process has one file, ``leases/<random name>``, under an exclusive lock of the kernel (flock) for as long as it lives;
it appends the SHA-256 (one a line) of every file that it relies on. Whoever wants to delete reads the files that are still
locked. A process that is killed loses its lock, and the next reader removes its file: no process id and no clock plays a
role, and nothing has to be cleaned up by hand.

``evict.lock`` orders the two sides: holders append under a shared lock, an evictor reads and deletes under an exclusive one.
So whatever a process holds *before* it looks whether a file is there stays there.
"""

import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from dsr1build.cache.blobs import NotAFile, open_file

# An evictor that takes longer is stopped or far away. Builds then go on without a lease: what is evicted under them is
# made again.
_PATIENCE_SECONDS = 10.0
_WORD_AFTER_SECONDS = 1.0
# A temporary file is named after its writer's lease and a random number; that of a writer without a lease by the number
# alone, and then only its age tells that it is abandoned: no write takes a day.
_RANDOM_DIGITS = 32
_ABANDONED_SECONDS = 24 * 3600


class Leases:
    """The leases below ``root``, and this process's own, which is made when something is held. ``warn`` takes one line."""

    def __init__(self, root: Path, warn: Callable[[str], None]) -> None:
        self.owner = secrets.token_hex(8)
        self._directory = root / "leases"
        self._lock_path = root / "evict.lock"
        self._warn = warn
        self._own: int | None = None
        self._lock: int | None = None
        self._held: set[str] = set()

    def begin(self) -> str:
        """Make this process's lease file. Gives its name, or "" where that is not possible."""
        try:
            if self._own is None:
                self._own = self._make()
        except OSError:
            return ""
        return self.owner

    def hold(self, digests: Iterable[str]) -> None:
        """Hold files until ``close``. Where that is not possible (read-only, disk full) they may be evicted."""
        new = [digest for digest in digests if digest not in self._held]
        if not new:
            return
        if not self.begin() or self._own is None:
            return
        try:
            if self._lock is None:
                self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            if not self._wait(self._lock):
                return
            try:
                os.write(self._own, "".join(f"{digest}\n" for digest in new).encode("ascii"))
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        except OSError:
            return
        self._held.update(new)

    def _make(self) -> int:
        self._directory.mkdir(parents=True, exist_ok=True)
        while True:
            path = self._directory / self.owner
            own = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(own, fcntl.LOCK_EX)
            if os.fstat(own).st_nlink:
                return own
            # A reader took the file for one of a dead process before it was locked, and removed it.
            os.close(own)

    def _wait(self, lock: int) -> bool:
        """Take the shared lock; false where an evictor keeps it too long."""
        started = time.monotonic()
        told = False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                waited = time.monotonic() - started
            if waited > _PATIENCE_SECONDS:
                return False
            if waited > _WORD_AFTER_SECONDS and not told:
                told = True
                self._warn(f"waiting for {self._holder()}, which evicts entries of the cache at {self._directory.parent.parent}")
            time.sleep(0.005)

    def _holder(self) -> str:
        try:
            with open_file(self._lock_path) as file:
                pid, host = file.read().decode("utf-8").split()
        except (NotAFile, OSError, ValueError):
            return "another process"
        return f"process {pid} on {host}"

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[set[str]]:
        """Nobody else deletes, and nobody begins to hold anything, inside; gives what is held. Raises OSError."""
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
            yield self._held_by_all()
        finally:
            # Closing frees the lock; so does the kernel when the process is killed.
            os.close(lock)

    def _held_by_all(self) -> set[str]:
        held = set(self._held)
        for path in self._others():
            with contextlib.suppress(NotAFile, OSError), open_file(path) as file:
                # What a killed process wrote in its last moment may be half a line; such a line names nothing.
                held.update(file.read().decode("ascii", errors="replace").split())
        return held

    def _others(self) -> list[Path]:
        """The files of living processes; those of dead ones are removed."""
        return [
            self._directory / name
            for name in _names(self._directory)
            if name != self.owner and _is_locked(self._directory / name)
        ]

    def sweep(self, temporary: Path) -> None:
        """Remove the lease files of dead processes, and the files in ``temporary`` that such a process was writing."""
        # The files are listed before the leases: a file that is there by then has a lease that is there.
        names = _names(temporary)
        living = {path.name for path in self._others()} | {self.owner}
        for name in names:
            with contextlib.suppress(OSError):
                if name[:-_RANDOM_DIGITS]:
                    abandoned = name[:-_RANDOM_DIGITS] not in living
                else:
                    abandoned = time.time() - (temporary / name).stat().st_mtime > _ABANDONED_SECONDS
                if abandoned:
                    (temporary / name).unlink()

    def close(self) -> None:
        """Hold nothing any more."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                (self._directory / self.owner).unlink()
            os.close(self._own)
            self._own = None
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        self._held.clear()


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as found:
            return sorted(item.name for item in found)
    except OSError:
        return []


def _is_locked(path: Path) -> bool:
    """Whether a living process holds the file; if none does, it is removed."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return False
    except OSError:
        # One of another user's, perhaps; to keep its files costs room and nothing else.
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)
