"""GNU make's jobserver: under ``make -j`` a build takes no more places than make has to give.

make passes ``--jobserver-auth=R,W`` (a pipe; before 4.2 ``--jobserver-fds``) or ``--jobserver-auth=fifo:PATH`` (4.4) in
MAKEFLAGS. Each byte that can be read there is the right to run one job more than the first, which needs none; it has to be
written back, the same byte, when the job has ended.
Source: the GNU make manual, "Sharing Job Slots with GNU make", "POSIX Jobserver Interaction".
"""

import contextlib
import os
import stat
from collections.abc import Mapping

UNAVAILABLE = (
    "make's jobserver cannot be reached, so its -j is not known here; begin the recipe's line with `+`, or pass -j to dsr1build"
)


class Jobserver:
    """Tokens of a make that runs above this process. Close it to give all of them back."""

    def __init__(self, read: int, write: int) -> None:
        self._read = read
        self._write = write
        self._tokens: list[bytes] = []

    def acquire(self, running: int) -> bool:
        """May one more job run beside ``running`` others? Takes a token where one is needed, and does not wait."""
        if running <= len(self._tokens):
            return True
        try:
            token = os.read(self._read, 1)
        except (BlockingIOError, InterruptedError):
            return False
        if token:
            self._tokens.append(token)
        return bool(token)

    def release(self, running: int) -> None:
        """Give back what ``running`` jobs do not need."""
        while len(self._tokens) > max(0, running - 1):
            token = self._tokens.pop()
            # A make that is gone needs nothing back.
            with contextlib.suppress(OSError):
                os.write(self._write, token)

    def close(self) -> None:
        self.release(0)
        for descriptor in {self._read, self._write}:
            os.close(descriptor)


def open_jobserver(environment: Mapping[str, str]) -> tuple[Jobserver | None, str]:
    """The jobserver that MAKEFLAGS names, if any, and a warning where it names one that cannot be used."""
    # What stands after ` -- ` are variable definitions, which may hold anything.
    words = environment.get("MAKEFLAGS", "").partition(" -- ")[0].split()
    named = [word.partition("=")[2] for word in words if word.startswith(("--jobserver-auth=", "--jobserver-fds="))]
    if not named:
        return None, ""
    # With several, the last is that of the make which runs this.
    where = named[-1]
    try:
        if where.startswith("fifo:"):
            both = os.open(where.removeprefix("fifo:"), os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            if not stat.S_ISFIFO(os.fstat(both).st_mode):
                os.close(both)
                return None, UNAVAILABLE
            return Jobserver(both, both), ""
        read, _, write = where.partition(",")
        return _pipe(int(read), int(write)), ""
    except (OSError, ValueError):
        return None, UNAVAILABLE


def _pipe(read: int, write: int) -> Jobserver:
    """Raises OSError and ValueError where these are no descriptors of a pipe."""
    for descriptor in (read, write):
        # make leaves the descriptors closed for recipes without `+`, and other files may have taken their numbers.
        if descriptor < 0 or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            raise ValueError(descriptor)
    # Opening the pipe anew gives it a file description of its own: setting the inherited one to not wait would be seen by
    # make and by all its children.
    mine = os.open(f"/proc/self/fd/{read}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    return Jobserver(mine, os.dup(write))
