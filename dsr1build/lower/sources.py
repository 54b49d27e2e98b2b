"""The digest of our own source files, by which an edit of a lowering reaches the keys of the actions that it may change."""

from functools import cache
from pathlib import Path

from dsr1build.digest import key_of, sha256_hex


@cache
def sources_digest(rooms: tuple[str, ...]) -> str:
    """SHA-256 over the path and content of every Python file of these rooms (folders of ``dsr1build``), comments
    included.

    Read once in a process: the code that runs is the code that was loaded, and a build takes one look.
    Raises FileNotFoundError for a room that does not exist.
    """
    package = Path(__file__).resolve().parent.parent
    files: dict[str, str] = {}
    for room in rooms:
        if not (package / room).is_dir():
            raise FileNotFoundError(f"dsr1build has no room {room!r}")
        for path in (package / room).rglob("*.py"):
            files[path.relative_to(package).as_posix()] = sha256_hex(path.read_bytes())
    return key_of(files)
