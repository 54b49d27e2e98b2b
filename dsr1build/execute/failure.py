"""Why an action failed, and whether that says something about the action or only about the moment."""

import re
import signal
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dsr1build.execute.executor import Ended, Limits
from dsr1build.toolchains.pass_groups import PassGroup

_TAIL_LINES = 20
_TAIL_CHARACTERS = 4000
# How Python, the C++ library, LLVM and the C library say that memory ran out.
_NO_MEMORY = re.compile(r"MemoryError|bad_alloc|[Oo]ut of memory|Cannot allocate memory")
_NO_ROOM = re.compile(r"No space left on device|Disk quota exceeded|\[Errno (28|122)\]")
# Signals by which a process ends itself; the others come from outside.
_OWN_SIGNALS = frozenset(
    {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP, signal.SIGSYS}
)

FailureKind: TypeAlias = Literal["exit", "signal", "output", "time", "memory", "disk", "outside", "lost"]


@dataclass(frozen=True, slots=True)
class Failure:
    """``reason`` is for people; ``output`` holds the last lines that the action wrote; ``pass_group`` is where it ended,
    "" where that is not known."""

    kind: FailureKind
    reason: str
    output: str
    pass_group: str = ""

    @property
    def may_be_deterministic(self) -> bool:
        """Whether the action itself may be the cause; what time, memory, the disk or others did says nothing of it."""
        return self.kind in ("exit", "signal", "output")


def judge(ended: Ended, limits: Limits, groups: tuple[PassGroup, ...], killed_for_memory: bool = False) -> Failure | None:
    """Why the action failed; None where it ended well. ``killed_for_memory``: the kernel has killed a process for that."""
    output = last_lines(ended.tail)
    group = groups[-1].name if groups and groups[-1].seconds is None else ""
    if ended.timed_out:
        return Failure("time", f"killed after {limits.seconds:g} seconds, the limit for one action", output, group)
    if ended.lost:
        return Failure("lost", ended.lost, output, group)
    if ended.signal is None and ended.exit == 0:
        return None
    if (ended.signal == signal.SIGKILL and killed_for_memory) or _NO_MEMORY.search(ended.tail[-_TAIL_CHARACTERS:]):
        return Failure("memory", f"out of memory at the limit of {size(limits.memory)}, {size(ended.peak)} used", output, group)
    if ended.signal == signal.SIGXCPU:
        return Failure("time", f"killed after {limits.seconds:g} seconds of CPU time, the limit for one action", output, group)
    if ended.signal is not None:
        known = ended.signal in signal.valid_signals() and ended.signal < signal.SIGRTMIN
        reason = f"killed by {signal.Signals(ended.signal).name if known else f'signal {ended.signal}'}"
        return Failure("signal" if ended.signal in _OWN_SIGNALS else "outside", reason, output, group)
    kind: FailureKind = "disk" if _NO_ROOM.search(ended.tail[-_TAIL_CHARACTERS:]) else "exit"
    return Failure(kind, f"exit code {ended.exit}", output, group)


def last_lines(text: str) -> str:
    return "\n".join(text.rstrip().splitlines()[-_TAIL_LINES:])[-_TAIL_CHARACTERS:]


def size(count: int) -> str:
    """A number of bytes for people, in binary units: ``1.5 GiB``."""
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{round(count / unit, 2):g} {name}"
    return f"{count} B"
