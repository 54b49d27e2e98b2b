"""A change of a tool or of a source that workers run is seen, however small and however its times are set."""

import os

import pytest

from dsr1build.cache import unchanged


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of two sources and one tool in the places where the real ones are."""
    for name in ("cache/unchanged.py", "lower/action.py", "runtime/c/weights.c", "cli/main.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("one")
    (tmp_path / "opt").write_text("tool")
    monkeypatch.setattr(unchanged, "__file__", str(tmp_path / "cache/unchanged.py"))
    monkeypatch.setattr(unchanged, "tool_files", lambda: [tmp_path / "opt"])
    return tmp_path


@pytest.mark.parametrize("name", ["lower/action.py", "runtime/c/weights.c", "opt"])
@pytest.mark.parametrize("change", ["rewritten", "replaced", "removed"])
def test_a_change_is_seen(package, name, change):
    same = unchanged.watch_program()
    assert same()
    path = package / name
    before = path.stat()
    text = path.read_text()[::-1]
    if change == "rewritten":
        path.write_text(text)
        # The time of change cannot be set back, the time of modification can.
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif change == "replaced":
        (package / "new").write_text(text)
        (package / "new").replace(path)
    else:
        path.unlink()
    assert not same()


def test_a_new_source_is_seen_and_what_workers_do_not_run_is_not_watched(package):
    same = unchanged.watch_program()
    (package / "cli/main.py").write_text("two")
    assert same()
    (package / "lower/more.py").write_text("two")
    assert not same()


def test_the_real_files_are_found():
    assert unchanged.watch_program()()
    assert len(unchanged.tool_files()) > 50
