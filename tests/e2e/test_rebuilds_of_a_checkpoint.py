"""A checkpoint whose weights or whose build's context change: the bundle follows, and no compiler runs."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dsr1build
from builds import Built, write_build_file
from dsr1build.cli.main import main

pytestmark = pytest.mark.slow
LAYER = "model.layers.1."
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture
def built(build_model: Callable[..., Built], tmp_path: Path) -> Built:
    """The small Llama, built here from a copy of its checkpoint."""
    first = build_model("llama-mini", "llama", dtype="float16", shards=2)
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(first.checkpoint, checkpoint)
    build_file = write_build_file(tmp_path, "llama-mini", checkpoint, "llama")
    assert main(["build", str(build_file), "--quiet"]) == 0
    return Built(checkpoint, tmp_path / "dist" / "llama-mini" / "x86-64-v3", build_file)


def rebuild(built: Built, capfd: pytest.CaptureFixture[str], *options: str) -> dict[str, object]:
    capfd.readouterr()
    assert main(["build", str(built.build_file), "--json", *options]) == 0
    summary: dict[str, object] = json.loads(capfd.readouterr().out.splitlines()[-1])
    return summary


def test_other_weights_of_one_layer(built: Built, capfd: pytest.CaptureFixture[str]) -> None:
    from checkpoints import reference_logits

    with dsr1build.load(built.bundle) as session:
        before = session.prefill(PROMPT)
    changed = 0
    for path in sorted(built.checkpoint.glob("*.safetensors")):
        tensors = load_file(path)
        mine = [name for name in tensors if name.startswith(LAYER) and name.endswith("proj.weight")]
        path.unlink()
        save_file({**tensors, **{name: tensors[name][::-1].copy() for name in mine}}, path, metadata={"format": "pt"})
        changed += len(mine)
    assert changed == 7
    summary = rebuild(built, capfd)
    assert (summary["executed"], summary["compiled"], summary["failed"]) == (0, 0, 0)
    with dsr1build.load(built.bundle) as session:
        after = session.prefill(PROMPT)
    theirs = np.asarray(reference_logits(built.checkpoint, PROMPT))
    spread = float(theirs.max() - theirs.min())
    assert float(np.abs(after - theirs).max()) < 2e-4 * spread
    assert float(np.abs(after - before).max()) > 1e-2 * spread


@pytest.mark.parametrize("context", [1, 7, 63])
def test_a_context_shorter_than_a_chunk(built: Built, context: int, capfd: pytest.CaptureFixture[str]) -> None:
    ids = [i % 50 for i in range(63)]
    with dsr1build.load(built.bundle) as session:
        expected = session.prefill(ids)[:context]
    assert rebuild(built, capfd, "--context", str(context))["executed"] == 0
    with dsr1build.load(built.bundle) as session:
        ours = session.prefill(ids[:context])
        assert float(np.abs(ours - expected).max()) < 2e-4 * float(expected.max() - expected.min())
        with pytest.raises(ValueError, match=f"do not fit into the context of {context} tokens"):
            session.decode(1)
