"""Bundles that somebody changed: the next build makes them whole, and reads every byte where it is asked to."""

import json
import os
from pathlib import Path

import pytest
import toy_model

from dsr1build.link.bundle import assemble_bundle
from dsr1build.link.verify import changed_files


def made(bundle: Path) -> dict[str, bytes]:
    return {str(p.relative_to(bundle)): p.read_bytes() for p in sorted(bundle.rglob("*")) if p.is_file()}


def build(root: Path, library: Path, changed: tuple[str, ...] = ()) -> Path:
    stored = toy_model.write_checkpoint(root / "checkpoint", toy_model.weights())
    model = toy_model.partitioned_model(root / "checkpoint", stored).model
    bundle = root / "dist" / "toy" / "plain"
    return assemble_bundle(bundle, "toy", toy_model.TARGET, toy_model.toy_program(), model, 48, library, changed)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    state = path.stat()
    path.write_bytes(data)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def make_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "flip": flip,
    "truncate": truncate,
    "remove": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "directory": make_directory,
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.fixture
def toy(toy_library: Path, tmp_path: Path) -> tuple[Path, dict[str, bytes]]:
    bundle = build(tmp_path, toy_library)
    return bundle, made(bundle)


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_missing_or_shows_a_change_is_made_anew_by_any_build(toy, toy_library: Path, tmp_path: Path, damage: str) -> None:
    bundle, before = toy
    assert changed_files(bundle) == ()
    for name in before:
        # The checkpoint's own files are inputs; a change of the same length in generated weights is found on request.
        if name.startswith("checkpoint/") or (name.startswith("weights/") and damage == "flip"):
            continue
        if name == "manifest.json" and damage in ("remove", "directory"):
            continue  # Without it the directory is not a bundle, and a build does not replace it.
        if name == "manifest.json" and damage == "pipe":
            continue
        DAMAGES[damage](bundle / name)
        build(tmp_path, toy_library)
        assert made(bundle) == before, name


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_file_that_the_build_made_is_verified(toy, toy_library: Path, tmp_path: Path, damage: str) -> None:
    bundle, before = toy
    manifest = json.loads(before["manifest.json"])
    for name in (manifest["library"]["file"], "weights.bind", "weights/tables.safetensors"):
        DAMAGES[damage](bundle / name)
        assert changed_files(bundle) == (name,)
        build(tmp_path, toy_library, changed_files(bundle))
        assert made(bundle) == before
        assert changed_files(bundle) == ()


def test_generated_weights_that_somebody_changed_are_generated_again(toy, toy_library: Path, tmp_path: Path) -> None:
    bundle, before = toy
    tables = bundle / "weights" / "tables.safetensors"
    flip(tables)
    build(tmp_path, toy_library)
    assert made(bundle) != before
    build(tmp_path, toy_library, changed_files(bundle))
    assert made(bundle) == before


def test_a_manifest_that_says_nothing_or_something_else(toy, toy_library: Path, tmp_path: Path) -> None:
    bundle, before = toy
    path = bundle / "manifest.json"
    for sha256 in (None, "0" * 64):
        manifest = json.loads(before["manifest.json"])
        manifest["weights"]["files"][-1]["sha256"] = sha256
        path.write_text(json.dumps(manifest))
        assert changed_files(bundle) == ("weights/tables.safetensors",)
        build(tmp_path, toy_library, changed_files(bundle))
        assert made(bundle) == before
    path.write_text("{}")
    assert changed_files(bundle) == ("manifest.json",)
    build(tmp_path, toy_library)
    assert made(bundle) == before


def test_a_checkpoint_is_compared_by_length_and_header(toy, tmp_path: Path) -> None:
    bundle, _ = toy
    file = bundle / "checkpoint" / "a.safetensors"
    file.unlink()
    file.write_bytes((tmp_path / "checkpoint" / "a.safetensors").read_bytes())
    assert changed_files(bundle) == ()
    data = bytearray(file.read_bytes())
    data[20] ^= 1
    file.write_bytes(data)
    assert changed_files(bundle) == ("checkpoint/a.safetensors",)
    file.write_bytes(data[:-1])
    assert changed_files(bundle) == ("checkpoint/a.safetensors",)


def test_no_bundle_is_not_a_changed_one(tmp_path: Path) -> None:
    assert changed_files(tmp_path / "nothing") == ()
