"""Temporary directories that outlive no build for long: what a killed process left is removed by the next one.

The process that uses a directory holds a lock of the kernel on a file inside, which is free as soon as the process is gone,
so neither ages nor process ids play a role. Only directories of the same user are touched.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_LOCK = "lock"
# A directory without a lock file belongs to a process that was killed before it could make one, or that is about to.
_ABANDONED_SECONDS = 24 * 3600


def make_scratch(prefix: str, parent: Path | None = None) -> tuple[Path, int]:
    """A new directory in ``parent``, by default the temporary directory, whose name begins with ``prefix``, and the
    descriptor that holds its lock.

    Directories of that prefix that nobody holds any more are removed first. The caller removes the directory and then
    closes the descriptor. Raises OSError.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    for old in _candidates(parent, prefix):
        _remove_if_abandoned(old)
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=parent)).resolve()
        lock = os.open(scratch / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        # Where a file system has no locks, nobody can take the directory for abandoned either.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        if os.fstat(lock).st_nlink:
            return scratch, lock
        # Another process's sweep was faster than this lock and has removed the directory.
        os.close(lock)


@contextlib.contextmanager
def scratch_directory(prefix: str, parent: Path | None = None) -> Iterator[Path]:
    """A directory as ``make_scratch`` makes it, empty but for its lock file, and gone afterwards. Raises OSError."""
    scratch, lock = make_scratch(prefix, parent)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _candidates(parent: Path, prefix: str) -> list[Path]:
    try:
        with os.scandir(parent) as found:
            return [Path(item.path) for item in found if item.name.startswith(prefix) and item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _remove_if_abandoned(directory: Path) -> None:
    with contextlib.suppress(OSError):
        state = directory.lstat()
        if state.st_uid != os.getuid():
            return
        try:
            # Opened for writing as well, so that not even a named pipe in the place of the lock makes this wait.
            descriptor = os.open(directory / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            if stat.S_ISDIR(state.st_mode) and time.time() - state.st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(directory, ignore_errors=True)
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(descriptor)
