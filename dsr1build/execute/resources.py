"""What this process may use of the machine: CPUs, memory, file handles."""

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from dsr1build.execute.events import Emit, Warned

_CONTROL_GROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
# File handles that the builder or its fork server needs besides one for each action that runs.
_OWN_HANDLES = 24
# What is left to everything else where nobody says how much a build may use.
DEFAULT_MEMORY_SHARE = 0.8


def usable_cpus(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """CPUs that this process may use: its affinity mask, and the least quota of its control group and of those above it,
    rounded up, at least 1. ``groups`` is where version 2 is mounted, or version 1 with its ``cpu`` below; ``membership``
    names the process's own group."""
    cpus = len(os.sched_getaffinity(0))
    for directory in _control_groups(groups, membership, "cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
            with contextlib.suppress(OSError, ValueError):
                quota, period = " ".join((directory / name).read_text("ascii") for name in names).split()
                # Without a limit version 2 says `max` and version 1 says -1.
                if quota != "max" and int(quota) > 0 and int(period) > 0:
                    cpus = min(cpus, -(-int(quota) // int(period)))
    return max(1, cpus)


def usable_memory(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP, meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that this process and its children may use: what the machine has, and the least limit of its control
    group and of those above it."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with contextlib.suppress(OSError, ValueError, StopIteration):
        total = next(line for line in meminfo.read_text("ascii").splitlines() if line.startswith("MemTotal:"))
        memory = int(total.split()[1]) * 1024
    for directory in _control_groups(groups, membership, "memory"):
        for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                # Without a limit version 2 says `max`, which is no number, and version 1 says more than any machine has.
                memory = min(memory, int((directory / name).read_text("ascii")))
    return memory


def killed_for_memory(groups: Path = _CONTROL_GROUPS, membership: Path = _MEMBERSHIP) -> int:
    """How many processes of this control group the kernel has killed because memory ran out; 0 where it does not say."""
    for directory in reversed(list(_control_groups(groups, membership, "memory"))):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError, ValueError):
                counts = dict(line.split() for line in (directory / name).read_text("ascii").splitlines())
                if "oom_kill" in counts:
                    return int(counts["oom_kill"])
    return 0


def affordable_jobs(jobs: int, emit: Emit) -> int:
    """As many of ``jobs`` as the limit on file handles allows, at least 1; a lower limit than may be is raised first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < jobs + _OWN_HANDLES and soft != hard:
        soft = jobs + _OWN_HANDLES if hard == resource.RLIM_INFINITY else min(hard, jobs + _OWN_HANDLES)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= jobs + _OWN_HANDLES:
        return jobs
    fewer = max(1, soft - _OWN_HANDLES)
    if fewer < jobs:
        emit(Warned(f"there are only {soft} file handles (`ulimit -n`); {fewer} actions run at once instead of {jobs}"))
    return fewer


def _control_groups(groups: Path, membership: Path, controller: str) -> Iterator[Path]:
    """The directories of the process's control group and of all above it. In a container the mount may begin at the
    process's own group, so the mount itself is one of them."""
    yield groups
    yield groups / controller
    with contextlib.suppress(OSError, UnicodeDecodeError):
        for line in membership.read_text("utf-8").splitlines():
            controllers, _, path = line.partition(":")[2].partition(":")
            root = groups / controller if controller in controllers.split(",") else groups
            if controllers and root == groups:
                continue
            parts = [part for part in path.split("/") if part]
            if ".." not in parts:
                for depth in range(len(parts)):
                    yield root.joinpath(*parts[: depth + 1])
