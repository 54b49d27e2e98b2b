"""The true configurations: partitions, kernels and parameters as counted in DeepSeek's and Qwen's own files."""

import time
from collections import Counter
from pathlib import Path

import pytest

from dsr1build.config.document import read_document
from dsr1build.config.load import shipped_directory
from dsr1build.config.schema import Recipe
from dsr1build.config.validate import validate
from dsr1build.frontends.load import load_model
from dsr1build.graph.model import Model
from dsr1build.partition.cut import partition_model

MODELS = Path(__file__).resolve().parents[2] / "models"


def load(name: str) -> tuple[Model, Recipe]:
    model = load_model(checkpoint=None, config=MODELS / name / "config.json", seed=0, context=None)
    path = shipped_directory("recipes") / f"{model.architecture}.yaml"
    return model, validate(read_document(path, path.name), Recipe)


def test_r1_is_15088_partitions_and_7_kernels_a_mode() -> None:
    model, recipe = load("deepseek-r1")
    started = time.process_time()
    partitioned = partition_model(model, recipe)
    seconds = time.process_time() - started
    assert (model.counts.parameters, model.counts.tensors) == (671_026_419_200, 45_395)
    for mode, partitions in partitioned.partitions.items():
        assert len(partitions) == 15_088
        assert Counter(p.kind for p in partitions) == {
            "embedding": 1,
            "attention": 61,
            "ffn": 3,
            "gating": 58,
            "expert": 58 * 257,
            "combine": 58,
            "head": 1,
        }
        assert len({p.kernel for p in partitions}) == 7
        assert len({p.name for p in partitions}) == len(partitions)
        assert len(partitioned.dispatches[mode]) == 58
    # Both forms of attention are kernels of their own; everything else is shared by the modes.
    assert len(partitioned.kernels) == 8
    # About 1.2 s; the limit leaves room for a busy machine and still catches work that is done for each expert anew.
    assert seconds < 5


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "layers"),
    [
        ("distill-qwen-1.5b", 1_777_088_000, 339, 28),
        ("distill-qwen-7b", 7_615_616_512, 339, 28),
        ("distill-llama-8b", 8_030_261_248, 291, 32),
    ],
)
def test_distills_are_4_kernels(name: str, parameters: int, tensors: int, layers: int) -> None:
    model, recipe = load(name)
    partitioned = partition_model(model, recipe)
    assert (model.counts.parameters, model.counts.tensors) == (parameters, tensors)
    assert len(partitioned.partitions["decode"]) == 2 * layers + 2
    assert [kernel.kind for kernel in partitioned.kernels.values()] == ["embedding", "attention", "ffn", "head"]


@pytest.mark.parametrize("name", ["r1-mini", "r1-mini-no-q-lora", "r1-mini-softmax", "r1-mini-tied", "qwen2-mini", "llama-mini"])
def test_small_models_are_at_most_10_kernels_a_mode_and_leave_nothing_over(name: str) -> None:
    model, recipe = load(name)
    partitioned = partition_model(model, recipe)
    for partitions in partitioned.partitions.values():
        assert len({p.kernel for p in partitions}) <= 10
        assert not [p for p in partitions if p.kind == "other"]
