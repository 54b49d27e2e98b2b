"""Put a directory in its place in one step, or leave what stands there untouched."""

import ctypes
import fcntl
import filecmp
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_RENAME_EXCHANGE = 2  # of renameat2(2)
_AT_FDCWD = -100


@contextmanager
def work_directory(destination: Path) -> Iterator[Path]:
    """An empty directory beside ``destination``, removed at the end. One process at a time has one.

    What a killed process left behind is removed first; nobody else can be using it.
    """
    parent = os.open(destination.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(parent, fcntl.LOCK_EX)
        prefix = f".{destination.name}.part-"
        for left in destination.parent.glob(f"{prefix}*"):
            shutil.rmtree(left)
        work = Path(tempfile.mkdtemp(prefix=prefix, dir=destination.parent))
        try:
            # mkdtemp makes private directories; a bundle is as public as any other output.
            mask = os.umask(0)
            os.umask(mask)
            work.chmod(0o777 & ~mask)
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
    finally:
        os.close(parent)


def put_directory(work: Path, destination: Path) -> None:
    """Move ``work`` to ``destination``. What stood there is swapped out in the same step and removed after it."""
    if not destination.exists():
        work.rename(destination)
        return
    libc = ctypes.CDLL(None, use_errno=True)
    done = libc.renameat2(_AT_FDCWD, os.fsencode(work), _AT_FDCWD, os.fsencode(destination), _RENAME_EXCHANGE)
    if done == 0:
        shutil.rmtree(work)
        return
    # A file system without exchange: there is a moment without a bundle, but never a half one.
    old = work.with_name(work.name + "-old")
    destination.rename(old)
    try:
        work.rename(destination)
    except OSError:
        old.rename(destination)
        raise
    shutil.rmtree(old)


def same_tree(left: Path, right: Path) -> bool:
    """Whether both directories hold the same files with the same content; links count by where they lead."""
    if not right.is_dir():
        return False
    names = _files(left)
    return names == _files(right) and all(_same_file(left / name, right / name) for name in names)


def _files(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_symlink() or not path.is_dir())


def _same_file(left: Path, right: Path) -> bool:
    if left.is_symlink() or right.is_symlink():
        return left.is_symlink() and right.is_symlink() and left.readlink() == right.readlink()
    return left.samefile(right) or filecmp.cmp(left, right, shallow=False)
