"""The record of the pass group that a compile is in."""

import itertools
import json
from pathlib import Path

import kernel_texts
import pytest

from dsr1build.toolchains import pass_groups
from dsr1build.toolchains.pass_groups import PassGroup, begin_groups, enter_group, read_groups
from kernel_runner import compile_text


@pytest.fixture
def began(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(pass_groups, "_began", None)
    monkeypatch.chdir(tmp_path)
    begin_groups()
    return tmp_path


def test_a_compile_notes_every_group_and_its_end(began: Path) -> None:
    text, signature = kernel_texts.linear("tokens", 28, 64, "bf16")
    compile_text(text, signature, began / "kernel")
    groups = read_groups(began)
    names = ["parse", "schedule", "bufferize", "outline", "lower", "translate", "optimize", "codegen"]
    assert [group.name for group in groups] == names
    assert groups[0].ir_bytes == len(text) and groups[6].ir_bytes > 0 and groups[7].ir_bytes > 0
    assert all(group.seconds is not None and group.seconds > 0 for group in groups)
    assert all(after.start >= before.start for before, after in itertools.pairwise(groups))


def test_nothing_is_noted_outside_an_action(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pass_groups, "_began", None)
    monkeypatch.chdir(tmp_path)
    enter_group("parse", 3)
    assert list(tmp_path.iterdir()) == [] and read_groups(tmp_path) == ()


def test_a_group_that_was_not_left_has_no_end(began: Path) -> None:
    enter_group("parse", 7)
    enter_group("bufferize")
    first, last = read_groups(began)
    assert (first.name, first.ir_bytes, last.name, last.seconds) == ("parse", 7, "bufferize", None)


@pytest.mark.parametrize("tail", [b"", b'{"name": "cut', b"[]\n", b'{"name": 1}\n', b"\xff\n", b"[" * 70_000])
def test_what_a_killed_or_hostile_worker_left_is_read_as_far_as_it_goes(tmp_path: Path, tail: bytes) -> None:
    line = json.dumps({"name": "parse", "at": 0.5, "ir_bytes": 7}).encode() + b"\n"
    (tmp_path / pass_groups.FILE).write_bytes(line + tail)
    assert read_groups(tmp_path) == (PassGroup("parse", 0.5, None, 7),)
