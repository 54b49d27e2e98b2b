"""How many actions run at once by default: what the affinity mask and the quotas of control groups leave."""

from pathlib import Path

import pytest

from dsr1build.execute import resources
from dsr1build.execute.resources import usable_cpus


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``machine({file: text}, membership)``: the CPUs of a process on 64 CPUs with these files of control groups."""
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: set(range(64)))

    def cpus(files: dict[str, str], membership: str) -> int:
        for name, text in files.items():
            path = tmp_path / "cgroup" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        (tmp_path / "membership").write_text(membership)
        return usable_cpus(tmp_path / "cgroup", tmp_path / "membership")

    return cpus


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({}, "", 64),
        ({"cpu.max": "max 100000\n"}, "0::/\n", 64),
        ({"cpu.max": "250000 100000\n"}, "0::/\n", 3),
        ({"cpu.max": "1000 100000\n"}, "0::/\n", 1),
        ({"a/b/cpu.max": "400000 100000\n"}, "0::/a/b\n", 4),
        ({"a/cpu.max": "200000 100000\n", "a/b/cpu.max": "400000 100000\n"}, "0::/a/b\n", 2),
        ({"a/cpu.max": "800000 100000\n", "a/b/cpu.max": "max 100000\n"}, "0::/a/b\n", 8),
        ({"other/cpu.max": "100000 100000\n"}, "0::/a/b\n", 64),
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n2:memory:/m\n", 2),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, "4:cpu,cpuacct:/\n", 64),
        ({"cpu/x/cpu.cfs_quota_us": "500000\n", "cpu/x/cpu.cfs_period_us": "50000\n"}, "4:cpu:/x\n", 10),
        ({"cpu.max": "many 100000\n", "a/cpu.max": "", "a/b/cpu.max": "1 0\n"}, "0::/a/b\nnonsense\n", 64),
        ({"../outside/cpu.max": "100000 100000\n"}, "0::/../outside\n", 64),
    ],
)
def test_quotas_of_all_groups_above_count(machine, files: dict[str, str], membership: str, expected: int) -> None:
    assert machine(files, membership) == expected


def test_the_smaller_of_mask_and_quota_counts(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda pid: {3, 5})
    assert machine({"cpu.max": "400000 100000\n"}, "0::/\n") == 2
