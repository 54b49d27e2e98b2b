"""Bundles on disk: whole or not at all, untouched when nothing changed, weights linked and not copied."""

import json
import os
import struct
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import toy_model

from dsr1build.cli.main import main
from dsr1build.errors import BuildFailed, EnvironmentUnfit, InvalidInput
from dsr1build.graph.model import StoredTensor
from dsr1build.link import weights
from dsr1build.link.binding import Placement, WeightFile, write_binding
from dsr1build.link.bundle import assemble_bundle
from dsr1build.link.inspection import INSPECT_SCHEMA
from dsr1build.link.manifest import MANIFEST_SCHEMA
from dsr1build.link.replace import put_directory, same_tree, work_directory
from dsr1build.link.tables import program_digest


def stamps(directory: Path) -> dict[str, tuple[int, int]]:
    return {
        str(p.relative_to(directory)): (p.stat().st_ino, p.stat().st_mtime_ns)
        for p in [directory, *directory.rglob("*")]
        if "checkpoint" not in p.parts[len(directory.parts) :]
    }


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def contents(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_what_a_bundle_consists_of(toy_library: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    for name in ("tokenizer.json", "chat_template.jinja", "README.md"):
        (tmp_path / "checkpoint" / name).write_text(name)
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    assert bundle == tmp_path / "dist" / "toy" / "plain"
    library = next(bundle.glob("model-*.so")).name
    assert sorted(contents(bundle)) == [
        "checkpoint/a.safetensors",
        "checkpoint/b.safetensors",
        "include/dsr1.h",
        "manifest.json",
        library,
        "tokenizer/chat_template.jinja",
        "tokenizer/tokenizer.json",
        "weights.bind",
        "weights/tables.safetensors",
    ]
    manifest = json.loads((bundle / "manifest.json").read_text())
    jsonschema.validate(manifest, MANIFEST_SCHEMA)
    assert manifest["library"]["file"] == library == f"model-{manifest['library']['sha256'][:16]}.so"
    assert manifest["tokenizer"] == ["tokenizer.json", "chat_template.jinja"]
    assert manifest["program"] == program_digest(toy_model.toy_program()).hex()
    assert manifest["modes"]["decode"]["by_kind"] == {
        "attention": 2, "combine": 2, "embedding": 1, "dispatch": 2, "gating": 2, "head": 1
    }  # fmt: skip
    assert names(bundle.parent) == ["plain"]


def test_the_checkpoints_files_are_linked_and_not_copied(toy_library: Path, tmp_path: Path) -> None:
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    for name in ("a.safetensors", "b.safetensors"):
        assert (bundle / "checkpoint" / name).samefile(tmp_path / "checkpoint" / name)
        assert not (bundle / "checkpoint" / name).is_symlink()


@pytest.mark.parametrize(("largest", "symbolic"), [(1 << 30, False), (10, True)])
def test_where_hard_links_are_impossible(
    toy_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, largest: int, symbolic: bool
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(weights, "LARGEST_COPY", largest)
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    file = bundle / "checkpoint" / "a.safetensors"
    assert file.is_symlink() == symbolic
    assert file.read_bytes() == (tmp_path / "checkpoint" / "a.safetensors").read_bytes()


def test_a_second_assembly_touches_nothing(toy_library: Path, tmp_path: Path) -> None:
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    before = stamps(bundle)
    # The checkpoint is written anew with equal content: other inodes, equal bytes.
    toy_model.build_toy_bundle(tmp_path, toy_library)
    assert stamps(bundle) == before


def test_two_places_give_equal_bytes(toy_library: Path, tmp_path: Path) -> None:
    one = toy_model.build_toy_bundle(tmp_path / "one", toy_library)
    two = toy_model.build_toy_bundle(tmp_path / "zwei ümlaut", toy_library)
    assert contents(one) == contents(two)
    assert not any(str(tmp_path).encode() in data for data in contents(one).values())


def test_a_change_replaces_the_bundle_as_a_whole(toy_library: Path, tmp_path: Path) -> None:
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    (bundle / "stray").write_text("x")
    toy_model.build_toy_bundle(tmp_path, toy_library, context=96)
    assert not (bundle / "stray").exists()
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert (manifest["context"], manifest["state_bytes"]) == (96, 2 * 96 * toy_model.HIDDEN * 4)
    assert names(bundle.parent) == ["plain"]


@pytest.mark.parametrize("exists", [True, False])
def test_a_symbolic_link_to_where_the_bundle_lies_is_followed(toy_library: Path, tmp_path: Path, exists: bool) -> None:
    there, link = tmp_path / "large disk" / "bundle", tmp_path / "dist" / "toy" / "plain"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../large disk/bundle")
    if exists:
        there.mkdir(parents=True)
    for context in (48, 96):
        assert toy_model.build_toy_bundle(tmp_path, toy_library, context=context) == there
        assert json.loads((link / "manifest.json").read_text())["context"] == context
        assert link.is_symlink() and names(link.parent) == ["plain"] and names(there.parent) == ["bundle"]


def test_generated_weights_are_not_generated_again(toy_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    tables = (bundle / "weights" / "tables.safetensors").stat().st_ino
    (bundle / "stray").write_text("x")  # so that the bundle is replaced
    monkeypatch.setattr(weights, "write_generated", None)
    toy_model.build_toy_bundle(tmp_path, toy_library)
    assert (bundle / "weights" / "tables.safetensors").stat().st_ino == tables
    assert not (bundle / "stray").exists()


def test_generated_weights_where_hard_links_are_impossible(
    toy_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    before = contents(bundle)
    (bundle / "stray").write_text("x")  # so that the bundle is replaced

    def refuse(source: Path, target: Path) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", refuse)
    toy_model.build_toy_bundle(tmp_path, toy_library)
    assert contents(bundle) == before


def test_an_error_leaves_the_old_bundle_and_nothing_else(toy_library: Path, tmp_path: Path) -> None:
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    before = stamps(bundle)
    model = toy_model.partitioned_model(tmp_path / "checkpoint", {}).model
    with pytest.raises(BuildFailed, match=r"^embed: error: the weight has no source$"):
        assemble_bundle(bundle, "toy", toy_model.TARGET, toy_model.toy_program(), model, 48, toy_library)
    assert stamps(bundle) == before
    assert names(bundle.parent) == ["plain"]


def test_a_missing_checkpoint_file_is_an_error_with_its_name(toy_library: Path, tmp_path: Path) -> None:
    stored = {name: StoredTensor("gone.safetensors", 8, 4) for name in toy_model.weights()}
    model = toy_model.partitioned_model(tmp_path, stored).model
    with pytest.raises(
        EnvironmentUnfit, match=r"gone\.safetensors: error: the bundle cannot be written: No such file or directory"
    ):
        assemble_bundle(tmp_path / "b", "toy", toy_model.TARGET, toy_model.toy_program(), model, 48, toy_library)
    assert names(tmp_path) == []


def test_a_directory_with_other_files_is_not_replaced(toy_library: Path, tmp_path: Path) -> None:
    place = tmp_path / "dist" / "toy" / "plain"
    place.mkdir(parents=True)
    (place / "thesis.txt").write_text("years of work")
    with pytest.raises(InvalidInput) as caught:
        toy_model.build_toy_bundle(tmp_path, toy_library)
    assert str(caught.value) == (
        f"{place}: error: the directory for the bundle holds other files\nhelp: Move them, or change `output`."
    )
    assert names(place) == ["thesis.txt"]


def test_what_a_killed_build_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".b.part-abc"
    (left / "x").mkdir(parents=True)
    with work_directory(tmp_path / "b") as work:
        assert not left.exists()
        (work / "f").write_text("new")
        put_directory(work, tmp_path / "b")
    assert names(tmp_path) == ["b"]
    assert oct((tmp_path / "b").stat().st_mode & 0o777) == oct(0o777 & ~current_umask())


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_trees_are_compared_by_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "f").write_text("same")
    assert same_tree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "sub" / "f").write_text("sane")
    assert not same_tree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "sub" / "f").write_text("same")
    (tmp_path / "b" / "g").symlink_to("sub/f")
    assert not same_tree(tmp_path / "a", tmp_path / "b")
    assert not same_tree(tmp_path / "a", tmp_path / "none")


def test_the_binding_says_where_each_weight_lies() -> None:
    program = toy_model.toy_program()
    placements = {}
    for number, (name, _) in enumerate(program.weights):
        shape = toy_model.weight_types()[name].shape
        length = 4 * int(np.prod([48 if d == "context" else d for d in shape]))
        placements[name] = Placement(number % 2, 3 + number, length)
    data = write_binding(program, 48, "model-x.so", [WeightFile("p/ä", 9999), WeightFile("q", 9999)], placements)
    magic, version, files, tensors, string_bytes = struct.unpack_from("<8sIIII", data)
    assert (magic, version, files, tensors) == (b"DSR1BIND", 1, 2, len(program.weights))
    assert struct.unpack_from("<q", data, 24) == (48,)
    assert data[32:64] == program_digest(program)
    strings = data[-string_bytes:]

    def text(offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode()

    assert text(struct.unpack_from("<I", data, 64)[0]) == "model-x.so"
    assert [text(struct.unpack_from("<I", data, 72 + 16 * i)[0]) for i in range(2)] == ["p/ä", "q"]
    third = struct.unpack_from("<IIIIQQ4q", data, 72 + 32 + 64 * 2)
    name = program.weights[2][0]
    assert (text(third[0]), third[1:]) == (name, (0, 0, 2, 5, placements[name].length, 48, toy_model.HIDDEN, 0, 0))
    assert len(data) == 72 + 32 + 64 * tensors + string_bytes


def test_a_weight_of_the_wrong_length_is_refused() -> None:
    program = toy_model.toy_program()
    with pytest.raises(BuildFailed) as caught:
        write_binding(program, 48, "m.so", [WeightFile("f", 9999)], {"embed": Placement(0, 0, 12)})
    assert str(caught.value) == "embed: error: f32[19, 20] takes 1520 bytes, f has 12"


def test_inspect_shows_a_bundle(toy_library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    assert main(["inspect", str(bundle)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("toy: toy for plain (x86_64-unknown-linux-gnu, x86-64)\n")
    assert "  decode      10 steps: 2 attention, 2 combine, 2 dispatch, 1 embedding, 2 gating, 1 head\n" in text
    assert "expert  expert     12 in prefill, 12 in decode; variants: exact 1, padded 4, range\n" in text
    assert text.endswith("  CPU needs   sse2\n              this machine has them all\n")
    assert main(["inspect", str(bundle), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    jsonschema.validate(data, INSPECT_SCHEMA)
    assert (data["missing_features"], data["wrong_files"]) == ([], [])
    (bundle / "weights" / "tables.safetensors").unlink()
    assert main(["inspect", str(bundle)]) == 0
    assert capsys.readouterr().out.endswith(
        "  wrong file  weights/tables.safetensors is missing or has another length; build the bundle again\n"
    )


def test_inspect_refuses_what_is_no_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"{tmp_path}: error: not a bundle: it has no manifest.json\nhelp: Give a directory that `dsr1build build` printed.\n"
    )
    (tmp_path / "manifest.json").write_text('{"format": "dsr1build-bundle", "version": 7}')
    assert main(["inspect", str(tmp_path)]) == 2
    assert "the manifest cannot be read: version: Input should be 1\n" in capsys.readouterr().err
