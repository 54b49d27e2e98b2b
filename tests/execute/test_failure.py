import pytest

from dsr1build.execute.executor import Ended, Limits
from dsr1build.execute.failure import judge, last_lines, size
from dsr1build.toolchains.pass_groups import PassGroup

LIMITS = Limits(memory=1536 << 20, seconds=90)


def ended(exit=None, signal=None, tail="", **more):
    return Ended("a", exit, signal, 1.0, 300 << 20, tail, **more)


@pytest.mark.parametrize(
    ("how", "kind", "reason"),
    [
        (ended(exit=1), "exit", "exit code 1"),
        (ended(exit=3, tail="OSError: [Errno 27] File too large"), "exit", "exit code 3"),
        (ended(signal=6), "signal", "killed by SIGABRT"),
        (ended(signal=11), "signal", "killed by SIGSEGV"),
        (ended(signal=9), "outside", "killed by SIGKILL"),
        (ended(signal=15), "outside", "killed by SIGTERM"),
        (ended(signal=24), "time", "killed after 90 seconds of CPU time, the limit for one action"),
        (ended(signal=40), "outside", "killed by signal 40"),
        (ended(signal=9, timed_out=True), "time", "killed after 90 seconds, the limit for one action"),
        (ended(lost="its fork server was lost"), "lost", "its fork server was lost"),
        (ended(exit=1, tail="x\nMemoryError"), "memory", "out of memory at the limit of 1.5 GiB, 300 MiB used"),
        (ended(signal=6, tail="what():  std::bad_alloc"), "memory", "out of memory at the limit of 1.5 GiB, 300 MiB used"),
        (ended(signal=6, tail="LLVM ERROR: out of memory"), "memory", "out of memory at the limit of 1.5 GiB, 300 MiB used"),
        (ended(exit=1, tail="mmap: Cannot allocate memory"), "memory", "out of memory at the limit of 1.5 GiB, 300 MiB used"),
        (ended(exit=1, tail="OSError: [Errno 28] No space left on device"), "disk", "exit code 1"),
    ],
)
def test_each_end_has_its_reason(how, kind, reason):
    failure = judge(how, LIMITS, ())
    assert failure is not None
    assert (failure.kind, failure.reason) == (kind, reason)
    assert failure.may_be_deterministic == (kind in ("exit", "signal"))


def test_a_good_end_is_no_failure():
    assert judge(ended(exit=0, tail="MemoryError was caught"), LIMITS, ()) is None


def test_a_kill_beside_a_kill_of_the_kernel_for_memory_is_one_for_memory():
    failure = judge(ended(signal=9), LIMITS, (), killed_for_memory=True)
    assert failure is not None and failure.kind == "memory"


def test_the_pass_group_that_has_not_ended_is_named():
    groups = (PassGroup("parse", 0.0, 0.1, 10), PassGroup("bufferize", 0.1, None, 20))
    failure = judge(ended(signal=11), LIMITS, groups)
    assert failure is not None and failure.pass_group == "bufferize"
    done = judge(ended(exit=1), LIMITS, (PassGroup("parse", 0.0, 0.1, 10),))
    assert done is not None and done.pass_group == ""


def test_the_last_lines_are_bounded():
    text = "\n".join(f"line {number}" for number in range(100)) + "\n\n"
    assert last_lines(text).splitlines() == [f"line {number}" for number in range(80, 100)]
    assert len(last_lines("x" * 100_000)) == 4000


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (4 << 30, "4 GiB")])
def test_sizes_for_people(count, text):
    assert size(count) == text
