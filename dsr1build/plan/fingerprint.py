"""Fingerprints of files: what tells, mostly without reading, that what a build has read is unchanged.

An entry holds a stamp (device, inode, size, mtime and ctime) and a digest of the content. An equal stamp stands for equal
content only where the entry is settled: the file was last changed well before it was read, so that a later change had to
give it another stamp. All other entries are read again, and a file that was touched but has the same content is unchanged.

Entries must be taken before the build reads the files, or of files that were last changed before it began. Any other would
vouch for content that the build has not seen. This module imports nothing heavy, since a build that has nothing to do should
cost no more than its answer.
"""

import hashlib
import os
import stat
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["file", "directory", "absent"]
How: TypeAlias = Literal["whole", "header", "stamp"]

# File systems may give two changes within this time the same time stamp.
SETTLED_NS = 2_000_000_000
# The header of a safetensors file is at most this long, by its format.
_HEADER_BYTES = 100_000_000
_ABSENT = (0, 0, 0, 0, 0)


class Fingerprint(NamedTuple):
    """``stamp`` is (device, inode, bytes, mtime in ns, ctime in ns) of what the path leads to; ``content`` is a SHA-256 in
    hexadecimal digits, empty for an absent file, or the stamp where that alone counts. ``how`` says what of a file counts: all
    of it, size and header, or nothing but the stamp, for files that are costly to read."""

    kind: Kind
    how: How
    stamp: tuple[int, int, int, int, int]
    content: str
    settled: bool


def take_fingerprint(path: str, how: How = "whole") -> Fingerprint:
    """The fingerprint of a file, of a directory (the names in it) or of a path where there is nothing.

    With ``header`` the size and the header of a safetensors file count, with ``stamp`` the stamp alone, and nothing else is
    read. Raises OSError where the path cannot be looked at or read, and ValueError for what is neither a file nor a directory,
    or lacks a sound header.
    """
    started = time.time_ns()
    try:
        before = Path(path).stat()
    except (FileNotFoundError, NotADirectoryError):
        return Fingerprint("absent", how, _ABSENT, "", True)
    kind: Kind
    if stat.S_ISDIR(before.st_mode):
        kind = "directory"
        content = _digest_names(path)
    elif stat.S_ISREG(before.st_mode):
        kind = "file"
        content = _DIGEST[how](path)
    else:
        # Reading a pipe or a device could wait without end.
        raise ValueError(f"{path} is neither a file nor a directory")
    stamp = _stamp(before)
    # A time of change in the future comes from a clock that was set back; such a stamp says nothing of later changes.
    settled = max(before.st_mtime_ns, before.st_ctime_ns) < started - SETTLED_NS and _stamp(Path(path).stat()) == stamp
    return Fingerprint(kind, how, stamp, content, settled)


def first_change(table: Mapping[str, Fingerprint], refreshed: dict[str, Fingerprint]) -> str | None:
    """The first path of ``table`` that is not what it was, or None where nothing changed.

    Puts into ``refreshed`` the new entries of paths that had to be read again and have the same content. A path that cannot
    be looked at counts as changed.
    """
    for path, entry in table.items():
        if entry.settled and _current_stamp(path) == entry.stamp:
            continue
        try:
            found = take_fingerprint(path, entry.how)
        except (OSError, ValueError):
            return path
        if (found.kind, found.content) != (entry.kind, entry.content):
            return path
        refreshed[path] = found
    return None


def _current_stamp(path: str) -> tuple[int, int, int, int, int] | None:
    try:
        return _stamp(Path(path).stat())
    except (FileNotFoundError, NotADirectoryError):
        return _ABSENT
    except (OSError, ValueError):
        return None


def _stamp(found: os.stat_result) -> tuple[int, int, int, int, int]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _digest_names(path: str) -> str:
    return hashlib.sha256(b"\0".join(sorted(os.fsencode(entry.name) for entry in Path(path).iterdir()))).hexdigest()


def _digest_whole(path: str) -> str:
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_header(path: str) -> str:
    # Unbuffered, so that no byte of a tensor is read.
    with Path(path).open("rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= min(_HEADER_BYTES, size - 8):
            raise ValueError(f"{path} has no safetensors header")
        header = file.read(length)
    if len(header) != length:
        raise ValueError(f"{path} ends within its header")
    return hashlib.sha256(b"%d %b" % (size, header)).hexdigest()


def _digest_stamp(path: str) -> str:
    return repr(_stamp(Path(path).stat()))


_DIGEST: Mapping[How, Callable[[str], str]] = {"whole": _digest_whole, "header": _digest_header, "stamp": _digest_stamp}
