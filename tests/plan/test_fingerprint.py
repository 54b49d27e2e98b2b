"""Fingerprints see every change of what a build has read, and read no more than they must."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dsr1build.plan.fingerprint import Fingerprint, first_change, take_fingerprint


def settled(path: Path) -> Fingerprint:
    """As if the path had been looked at long after its last change; the stamp is that of now."""
    return take_fingerprint(str(path))._replace(settled=True)


def change_of(path: Path, entry: Fingerprint) -> tuple[str | None, dict[str, Fingerprint]]:
    refreshed: dict[str, Fingerprint] = {}
    return first_change({str(path): entry}, refreshed), refreshed


def edit_and_restore_mtime(path: Path) -> None:
    before = path.stat()
    path.write_bytes(b"other")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replace_by_rename(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    before = path.stat()
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.replace(path)


def become_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def become_a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def retarget(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(b"other")
    path.unlink()
    path.symlink_to(other)


def become_a_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path)


@pytest.mark.parametrize(
    "change", [edit_and_restore_mtime, replace_by_rename, become_a_directory, become_a_pipe, retarget, become_a_loop, Path.unlink]
)
def test_every_kind_of_change_is_seen(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    entry = settled(path)
    assert change_of(path, entry) == (None, {})
    time.sleep(0.02)
    change(path)
    assert change_of(path, entry)[0] == str(path)


def test_an_edit_within_the_same_tick_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    entry = take_fingerprint(str(path))
    assert not entry.settled
    path.write_bytes(b"other")
    same_tick = entry._replace(stamp=take_fingerprint(str(path)).stamp)
    assert change_of(path, same_tick)[0] == str(path)


def test_a_time_stamp_of_the_future_is_not_trusted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    ahead = time.time_ns() + 3_600_000_000_000
    os.utime(path, ns=(ahead, ahead))
    assert not take_fingerprint(str(path)).settled


def test_a_touched_file_of_equal_content_is_unchanged_and_its_entry_is_renewed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"first")
    entry = settled(path)
    os.utime(path, ns=(0, 0))
    changed, refreshed = change_of(path, entry)
    assert changed is None
    assert refreshed[str(path)].stamp == take_fingerprint(str(path)).stamp != entry.stamp


def test_a_file_that_appears_where_none_was_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "generation_config.json"
    entry = take_fingerprint(str(path))
    assert change_of(path, entry) == (None, {})
    path.write_bytes(b"")
    assert change_of(path, entry)[0] == str(path)


def test_a_directory_changes_with_the_names_in_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    entry = take_fingerprint(str(tmp_path))
    (tmp_path / "a").write_bytes(b"more")
    assert change_of(tmp_path, entry)[0] is None
    (tmp_path / "b").write_bytes(b"")
    assert change_of(tmp_path, entry)[0] == str(tmp_path)


def write_shard(path: Path, header: bytes, size: int) -> None:
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(size)


def bytes_read() -> int:
    return int(Path("/proc/self/io").read_text("ascii").split("rchar: ")[1].split()[0])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="this system does not count the bytes that a process reads")
def test_of_a_touched_shard_of_4_gb_the_header_alone_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_shard(path, b'{"a": 1}', 4_000_000_000)
    entry = take_fingerprint(str(path), "header")
    os.utime(path, ns=(0, 0))
    before = bytes_read()
    assert change_of(path, entry)[0] is None
    assert bytes_read() - before < 4096
    write_shard(path, b'{"a": 2}', 4_000_000_000)
    assert change_of(path, entry)[0] == str(path)
    write_shard(path, b'{"a": 1}', 3_999_999_999)
    assert change_of(path, entry)[0] == str(path)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 16, b"\x10" + b"\0" * 7 + b"short"])
def test_a_shard_without_a_sound_header_has_no_fingerprint(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="safetensors header"):
        take_fingerprint(str(path), "header")


def test_nothing_heavy_is_imported() -> None:
    heavy = "pydantic yaml numpy onnx networkx joblib diskcache mlir dataclasses json"
    code = f"import sys, dsr1build.plan.fingerprint; print([m for m in {heavy.split()!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
