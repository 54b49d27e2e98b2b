"""Whether what keys were computed from is still what it was: the tools, and those sources of this project that workers run.

Everything else that an action depends on is named by its content. Digests of tools and sources are taken when a build is
planned, and the files are used later; a result that was made in between may be of other files than its key says. So before
results are handed to others, the files are looked at again: a change of content shows in size, times or inode.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

from dsr1build.toolchains.tools import tool_files

# What the processes of actions import or compile; the rest of the project was imported when the build began.
_SOURCES = (
    "errors.py",
    "digest.py",
    "execute/worker.py",
    "graph/*.py",
    "ops/*.py",
    "lower/*.py",
    "toolchains/*.py",
    "runtime/c/*",
)


def watch_program() -> Callable[[], bool]:
    """Look at the files now, before any key is computed; the function that is returned tells whether they are unchanged.

    Raises EnvironmentUnfit where a tool is missing.
    """
    before = _stamp()

    def unchanged() -> bool:
        return _stamp() == before

    return unchanged


def _stamp() -> bytes:
    package = Path(__file__).resolve().parents[1]
    sources = [path for pattern in _SOURCES for path in package.glob(pattern)]
    digest = hashlib.sha256()
    for path in sorted({*sources, *tool_files()}):
        try:
            status = path.stat()
            facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        except OSError:
            facts = (-1, 0, 0, 0)
        digest.update(f"{path} {facts}\n".encode("utf-8", "surrogateescape"))
    return digest.digest()
