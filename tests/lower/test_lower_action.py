"""The fields of a lower action, there and back, and what its worker leaves."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from test_kernel_source import ATTENTION, ATTENTION_RESULTS, ATTENTION_SIGNATURE, FFN, FFN_SIGNATURE, RANGE

import dsr1build
from dsr1build.digest import decode, encode, key_of
from dsr1build.graph.model import Node
from dsr1build.graph.signature import Signature, Specialization
from dsr1build.lower import sources
from dsr1build.lower.action import OUTPUTS, SOURCE_ROOMS, kernel_of_fields, lower_fields, lower_worker
from dsr1build.lower.kernel_source import lower_kernel


@pytest.mark.parametrize("specialization", [RANGE, Specialization("exact", 1)], ids=str)
def test_a_kernel_survives_encoding(specialization: Specialization) -> None:
    nodes = (
        *ATTENTION,
        Node("Route", ("a0",), ("v8", "v9"), (("numbers", (1, 2)), ("parts", (0.5, 1.0)), ("scoring", "sigmoid"))),
    )
    fields = lower_fields(nodes, ATTENTION_SIGNATURE, ATTENTION_RESULTS, specialization)
    back = decode(encode(fields))
    assert kernel_of_fields(back) == (nodes, ATTENTION_SIGNATURE, ATTENTION_RESULTS, specialization)


def test_whatever_differs_in_the_kernel_differs_in_the_key() -> None:
    def key(nodes=FFN, signature=FFN_SIGNATURE, results=("v2",), specialization=RANGE) -> str:
        return key_of(lower_fields(nodes, signature, results, specialization))

    other_order = Signature(FFN_SIGNATURE.arguments[::-1], FFN_SIGNATURE.dims)
    keys = [
        key(),
        key(nodes=(replace(FFN[0], attributes=(("epsilon", 1e-5),)), *FFN[1:])),
        key(nodes=(FFN[0], FFN[1], replace(FFN[2], inputs=("v1", "a4")))),
        key(signature=other_order),
        key(results=("v0",)),
        key(specialization=Specialization("exact", 1)),
        key(specialization=Specialization("padded", 1)),
        key(specialization=Specialization("exact", 2)),
    ]
    assert len(set(keys)) == len(keys)
    assert key(nodes=(replace(FFN[0], name="model.layers.7.norm"), *FFN[1:])) == key()


def test_the_worker_leaves_text_and_signature(tmp_path: Path) -> None:
    fields = lower_fields(FFN, FFN_SIGNATURE, ("v2",), Specialization("exact", 1))
    lower_worker(decode(encode(fields)), tmp_path / "no-inputs", tmp_path)
    source = lower_kernel(FFN, FFN_SIGNATURE, ("v2",), Specialization("exact", 1))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(OUTPUTS)
    assert (tmp_path / "kernel.mlir").read_text() == source.text
    assert Signature.from_json(json.loads((tmp_path / "signature.json").read_text())) == source.signature


def test_an_edited_comment_changes_the_digest_of_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "dsr1build"
    installed = Path(dsr1build.__file__).parent
    for room in SOURCE_ROOMS:
        shutil.copytree(installed / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(sources, "__file__", str(package / "lower" / "sources.py"))

    def digest() -> str:
        sources.sources_digest.cache_clear()
        return sources.sources_digest(SOURCE_ROOMS)

    try:
        before = digest()
        (package / "ops" / "__pycache__").mkdir()
        (package / "ops" / "__pycache__" / "norm.cpython-311.pyc").write_bytes(b"bytecode")
        assert digest() == before
        with (package / "ops" / "norm.py").open("a") as file:
            file.write("# A comment.\n")
        edited = digest()
        (package / "ops" / "norm.py").rename(package / "ops" / "norms.py")
        assert len({before, edited, digest()}) == 3
    finally:
        sources.sources_digest.cache_clear()


def test_an_unknown_room_is_refused() -> None:
    with pytest.raises(FileNotFoundError, match="dsr1build has no room 'attic'"):
        sources.sources_digest(("attic",))
