"""Frequencies and the two uses of YaRN's magnitude, against published numbers and against transformers."""

from collections.abc import Callable
from typing import Any

import pytest
from model_sources import MODELS, config_of, random_model

from dsr1build.graph.model import Model, RopeTable

# R1's inverse frequencies, computed once from the formula of the YaRN paper with d = 64, L0 = 4096, s = 40.
R1_FREQUENCIES = {
    0: 1.0,
    9: 7.49894e-2,
    10: 5.62341e-2,
    11: 3.90069e-2,
    12: 2.68794e-2,
    16: 5.5e-3,
    20: 7.90569e-4,
    22: 1.77828e-4,
    23: 3.33380e-5,
    24: 2.5e-5,
    31: 3.33380e-6,
}


def table(model: Model, name: str = "rope.cos") -> RopeTable:
    source = model.sources[name]
    assert isinstance(source, RopeTable)
    return source


def attention_scale(model: Model) -> object:
    function = model.graphs["decode"].functions["self_attn"]
    return next(n for n in function.nodes if n.op in ("LatentAttentionAbsorbed", "GroupedAttention")).attribute("scale")


def test_r1_yarn() -> None:
    model = random_model("deepseek-r1")
    cos, sin = table(model), table(model, "rope.sin")
    assert len(cos.inverse_frequencies) == 32
    for j, frequency in R1_FREQUENCIES.items():
        assert cos.inverse_frequencies[j] == pytest.approx(frequency, rel=1e-5)
    assert (cos.function, sin.function, cos.scale, sin.scale) == ("cos", "sin", 1.0, 1.0)
    assert cos.inverse_frequencies == sin.inverse_frequencies
    assert attention_scale(model) == pytest.approx(0.13523378, rel=1e-7)


def test_the_two_magnitudes_are_separate(load_config: Callable[..., Model]) -> None:
    scaling = config_of("deepseek-r1")["rope_scaling"] | {"mscale": 0.707, "mscale_all_dim": 1.0}
    model = load_config("deepseek-r1", rope_scaling=scaling)
    assert table(model).scale == pytest.approx((0.1 * 0.707 * 3.68887945 + 1) / 1.368887945, rel=1e-8)
    assert attention_scale(model) == pytest.approx(0.13523378, rel=1e-7)
    # Without mscale_all_dim the scores keep the plain scale and the tables take the whole magnitude.
    del scaling["mscale_all_dim"], scaling["mscale"]
    model = load_config("deepseek-r1", rope_scaling=scaling)
    assert table(model).scale == pytest.approx(1.368887945, rel=1e-8)
    assert attention_scale(model) == pytest.approx(192**-0.5)
    model = load_config("deepseek-r1", rope_scaling=scaling | {"attention_factor": 1.25})
    assert table(model).scale == 1.25


def test_llama_frequency_classes() -> None:
    scaled = table(random_model("distill-llama-8b")).inverse_frequencies
    plain = [500000.0 ** (-2 * j / 128) for j in range(64)]
    unchanged = sum(s == pytest.approx(p, rel=1e-12) for s, p in zip(scaled, plain, strict=True))
    divided = sum(s == pytest.approx(p / 8, rel=1e-12) for s, p in zip(scaled, plain, strict=True))
    assert (unchanged, 64 - unchanged - divided, divided) == (29, 6, 29)


def test_the_small_llama_has_all_three_classes() -> None:
    scaled = table(random_model("llama-mini")).inverse_frequencies
    ratios = [s / 10000.0 ** (-2 * j / 32) for j, s in enumerate(scaled)]
    assert ratios[0] == 1.0
    assert ratios[-1] == pytest.approx(1 / 8)
    assert any(1 / 8 + 1e-3 < ratio < 1 - 1e-3 for ratio in ratios)


def test_plain_and_linear(load_config: Callable[..., Model]) -> None:
    plain = table(random_model("qwen2-mini"))
    assert plain.inverse_frequencies == pytest.approx([10000.0 ** (-2 * j / 16) for j in range(8)], rel=1e-15)
    linear = table(load_config("qwen2-mini", rope_scaling={"type": "linear", "factor": 4}))
    assert linear.inverse_frequencies == tuple(f / 4 for f in plain.inverse_frequencies)


def test_both_spellings_are_one_model(load_config: Callable[..., Model]) -> None:
    config = config_of("r1-mini")
    parameters = {**config["rope_scaling"], "rope_theta": config["rope_theta"], "rope_type": "yarn"}
    del parameters["type"]
    new = load_config(
        "r1-mini",
        **dict.fromkeys(("rope_scaling", "rope_theta", "torch_dtype", "topk_method", "scoring_func", "ep_size"), ...),
        rope_parameters=parameters,
        dtype="bfloat16",
        head_dim=8,
        qk_head_dim=24,
        rope_interleave=True,
        pretraining_tp=1,
        output_router_logits=False,
    )
    assert new == random_model("r1-mini")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2, "truncate": False}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "mscale": 0.707, "mscale_all_dim": 0.8}, "rope_theta": 50000.0},
        {"rope_scaling": {"type": "linear", "factor": 2.5}},
        {"rope_scaling": None},
    ],
)
@pytest.mark.parametrize("name", ["r1-mini", "llama-mini"])
def test_as_transformers(load_config: Callable[..., Model], name: str, changes: dict[str, Any]) -> None:
    import transformers
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding, yarn_apply_mscale
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    transformers.logging.set_verbosity_error()
    model = load_config(name, **changes)
    config = transformers.AutoConfig.from_pretrained(MODELS / name)
    values = {**config_of(name), **changes}
    config = type(config)(**{key: value for key, value in values.items() if key not in ("architectures", "model_type")})
    embedding = (DeepseekV3RotaryEmbedding if name == "r1-mini" else LlamaRotaryEmbedding)(config)
    assert table(model).inverse_frequencies == pytest.approx(embedding.inv_freq.tolist(), rel=1e-6)
    assert table(model).scale == pytest.approx(embedding.attention_scaling, rel=1e-12)
    if name == "r1-mini":
        expected = yarn_apply_mscale(config.rope_parameters, config.qk_head_dim**-0.5)
        assert attention_scale(model) == pytest.approx(expected, rel=1e-12)
