"""What control groups leave of the machine's memory, and what the kernel says of processes that it killed for it."""

import pytest

from dsr1build.execute.resources import killed_for_memory, usable_memory

GB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    def write(files, membership="0::/a/b\n"):
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "membership").write_text(membership)
        (tmp_path / "meminfo").write_text("MemTotal:       67108864 kB\nMemFree: 1 kB\n")
        return tmp_path / "cgroup", tmp_path / "membership", tmp_path / "meminfo"

    return write


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "0::/\n", 64 * GB),
        ({"memory.max": "max\n"}, "0::/\n", 64 * GB),
        ({"memory.max": f"{8 * GB}\n"}, "0::/\n", 8 * GB),
        ({"a/memory.max": f"{4 * GB}\n", "a/b/memory.max": f"{9 * GB}\n"}, "0::/a/b\n", 4 * GB),
        ({"a/b/memory.high": f"{2 * GB}\n"}, "0::/a/b\n", 2 * GB),
        ({"memory/docker/memory.limit_in_bytes": f"{3 * GB}\n"}, "5:memory:/docker\n4:cpu:/x\n", 3 * GB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "5:memory:/\n", 64 * GB),
        ({"memory.max": "nonsense\n"}, "0::/\n", 64 * GB),
    ],
)
def test_the_least_limit_of_all_groups_counts(machine, files, membership, expected):
    assert usable_memory(*machine(files, membership)) == expected


def test_the_machine_itself_has_memory():
    assert 1 << 28 < usable_memory() < 1 << 50


def test_the_processes_that_the_kernel_killed_are_counted_in_the_own_group(machine):
    files = {"memory.events": "oom 9\noom_kill 9\n", "a/b/memory.events": "low 0\noom 3\noom_kill 2\n"}
    assert killed_for_memory(*machine(files)[:2]) == 2
    assert killed_for_memory(*machine({"a/b/memory.events": "broken\n", "memory.events": "oom_kill 9\n"})[:2]) == 9


def test_no_control_group_no_kills(machine):
    assert killed_for_memory(*machine({})[:2]) == 0
