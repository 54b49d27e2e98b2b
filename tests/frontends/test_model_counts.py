"""The true configurations give the published numbers of parameters and tensors."""

import pytest
from model_sources import random_model

from dsr1build.graph.model import Counts


@pytest.mark.parametrize(
    ("name", "parameters", "tensors", "size"),
    [
        # FP8 matrices of one byte, everything else bf16 but for 58 selection biases of 256 f32.
        ("deepseek-r1", 671_026_419_200, 45_395, 669_065_609_216 + 2 * 1_960_809_984 + 2 * 58 * 256),
        ("distill-qwen-1.5b", 1_777_088_000, 339, 3_554_176_000),
        ("distill-qwen-7b", 7_615_616_512, 339, 15_231_233_024),
        ("distill-llama-8b", 8_030_261_248, 291, 16_060_522_496),
    ],
)
def test_counts(name: str, parameters: int, tensors: int, size: int) -> None:
    assert random_model(name).counts == Counts(parameters, tensors, size)


def test_r1_has_a_scale_for_every_fp8_matrix() -> None:
    weights = random_model("deepseek-r1").graphs["prefill"].weights
    matrices = [name for name, type_ in weights.items() if type_.dtype == "f8e4m3fn"]
    scales = [name for name in weights if name.endswith("_scale_inv")]
    assert len(scales) == 45_032
    assert [f"{name}_scale_inv" for name in matrices] == scales
    layer = "model.layers.60."
    shapes = {
        "self_attn.kv_a_proj_with_mqa": (5, 56),
        "self_attn.q_b_proj": (192, 12),
        "self_attn.o_proj": (56, 128),
        "mlp.experts.255.down_proj": (56, 16),
        "mlp.shared_experts.gate_proj": (16, 56),
    }
    for module, shape in shapes.items():
        assert weights[f"{layer}{module}.weight_scale_inv"].shape == shape
    # The byte count of the published files of the main model, scales included.
    stored = random_model("deepseek-r1").counts.bytes + sum(
        4 * int(weights[name].shape[0]) * int(weights[name].shape[1]) for name in scales
    )
    assert stored == 673_150_611_808


def test_a_tied_head_is_one_tensor() -> None:
    untied, tied = random_model("r1-mini").counts, random_model("r1-mini-tied").counts
    assert untied.tensors - tied.tensors == 1
    assert untied.parameters - tied.parameters == 257 * 128
