"""Every field of a configuration that is unknown, wrong or not supported is refused by name, at its place."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_sources import config_of, random_model

from dsr1build.errors import InvalidInput
from dsr1build.frontends.load import load_model

Refusal = Callable[..., str]

YARN = config_of("r1-mini")["rope_scaling"]
LLAMA3 = config_of("llama-mini")["rope_scaling"]
FP8 = config_of("deepseek-r1")["quantization_config"]
CORRECT = "Correct the value."

# (model, changed field or path, new value, message, hint)
CASES: list[tuple[str, str, Any, str, str]] = [
    ("r1-mini", "scoring_func", "sqrtsoftplus", 'scoring_func "sqrtsoftplus" is not supported', "Supported: sigmoid, softmax."),
    (
        "r1-mini",
        "topk_method",
        "aux",
        'topk_method "aux" is not supported',
        "Supported: noaux_tc, greedy, group_limited_greedy.",
    ),
    ("r1-mini", "hidden_act", "gelu", 'hidden_act "gelu" is not supported', "Supported: silu, swish."),
    ("r1-mini", "model_type", "gpt2", 'model_type "gpt2" is not supported', "Supported: deepseek_v3, llama, qwen2."),
    (
        "r1-mini",
        "architectures",
        ["DeepseekV3ForTokenClassification"],
        "architectures ['DeepseekV3ForTokenClassification'] is not supported",
        "Supported: ['DeepseekV3ForCausalLM'].",
    ),
    ("r1-mini", "torch_dtype", "float64", 'torch_dtype "float64" is not supported', "Supported: float32, bfloat16, float16."),
    (
        "r1-mini",
        "num_key_value_heads",
        2,
        "num_key_value_heads 2 is not supported: latent attention has no groups",
        "Supported: the same as num_attention_heads, 4.",
    ),
    ("r1-mini", "n_group", 3, "n_routed_experts 16 is not a multiple of n_group 3", CORRECT),
    ("r1-mini", "topk_group", 5, "topk_group 5 is greater than n_group 4", CORRECT),
    (
        "r1-mini",
        "n_group",
        16,
        "n_group 16 leaves 1 expert in a group; the score of a group is the sum of its two best",
        CORRECT,
    ),
    (
        "r1-mini",
        "num_experts_per_tok",
        9,
        "num_experts_per_tok 9 is greater than the 8 experts that can be chosen",
        CORRECT,
    ),
    ("r1-mini", "qk_rope_head_dim", 7, "the rotated width of a head must be even, not 7", CORRECT),
    ("r1-mini", "hidden_size", "big", 'hidden_size must be an integer, not "big"', CORRECT),
    ("r1-mini", "hidden_size", True, "hidden_size must be an integer, not true", CORRECT),
    ("r1-mini", "hidden_size", 0, "hidden_size must be between 1 and 2147483647, not 0", CORRECT),
    ("r1-mini", "num_hidden_layers", 10**9, "num_hidden_layers must be between 1 and 4096, not 1000000000", CORRECT),
    ("r1-mini", "n_routed_experts", 10**6, "n_routed_experts must be between 1 and 4096, not 1000000", CORRECT),
    ("r1-mini", "rms_norm_eps", 0, "rms_norm_eps must be greater than 0, not 0", CORRECT),
    ("r1-mini", "rms_norm_eps", float("inf"), "rms_norm_eps must be a finite number, not Infinity", CORRECT),
    ("r1-mini", "rope_theta", [1], "rope_theta must be a finite number, not [1]", CORRECT),
    ("r1-mini", "rope_theta", 1e300, "rope_theta is out of range: its size must lie between 1e-30 and 1e+30", CORRECT),
    (
        "r1-mini",
        "routed_scaling_factor",
        1e-300,
        "routed_scaling_factor is out of range: its size must lie between 1e-30 and 1e+30",
        CORRECT,
    ),
    (
        "deepseek-r1",
        "num_hidden_layers",
        4000,
        "4000 layers of 256 experts are more than 1000000 experts in all",
        CORRECT,
    ),
    ("r1-mini", "norm_topk_prob", "yes", 'norm_topk_prob must be true or false, not "yes"', CORRECT),
    ("r1-mini", "eos_token_id", "x", 'eos_token_id must be a token id or a list of token ids, not "x"', CORRECT),
    ("r1-mini", "is_encoder_decoder", True, "an encoder-decoder model is not supported", "Supported: decoder-only models."),
    (
        "r1-mini",
        "partial_rotary_factor",
        0.5,
        "partial_rotary_factor other than 1.0 is not supported",
        "Supported: 1.0, where the whole head is rotated.",
    ),
    ("r1-mini", "rope_scaling", "yarn", 'rope_scaling must be an object, not "yarn"', CORRECT),
    (
        "r1-mini",
        "rope_scaling.type",
        "longrope",
        'rope_scaling.type "longrope" is not supported',
        "Supported: default, linear, yarn, llama3.",
    ),
    (
        "r1-mini",
        "rope_scaling.rope_type",
        "dynamic",
        'rope_scaling.rope_type "dynamic" is not supported',
        "Supported: default, linear, yarn, llama3.",
    ),
    (
        "r1-mini",
        "rope_scaling.partial_rotary_factor",
        0.25,
        "partial_rotary_factor other than 1.0 is not supported",
        "Supported: 1.0, where the whole head is rotated.",
    ),
    ("r1-mini", "rope_scaling.factor", 0.5, "rope_scaling.factor must be at least 1, not 0.5", CORRECT),
    (
        "r1-mini",
        "rope_scaling.mscales",
        1.0,
        "unknown field 'rope_scaling.mscales': its effect on the model is not known",
        "Did you mean 'mscale'? Remove the field if it does not change the model's numbers.",
    ),
    (
        "llama-mini",
        "rope_scaling.high_freq_factor",
        1.0,
        "rope_scaling.high_freq_factor must be greater than low_freq_factor 1.0, not 1.0",
        CORRECT,
    ),
    ("llama-mini", "mlp_bias", True, "mlp_bias true is not supported", "Supported: false."),
    ("llama-mini", "num_key_value_heads", 3, "num_attention_heads 4 is not a multiple of num_key_value_heads 3", CORRECT),
    (
        "llama-mini",
        "quantization_config",
        {"quant_method": "awq"},
        "unknown field 'quantization_config': its effect on the model is not known",
        "Remove the field if it does not change the model's numbers.",
    ),
    (
        "qwen2-mini",
        "num_attention_heads",
        10,
        "hidden_size 96 is not a multiple of num_attention_heads 10",
        "Correct the value, or give head_dim.",
    ),
    ("qwen2-mini", "head_dim", 15, "the rotated width of a head must be even, not 15", CORRECT),
    ("qwen2-mini", "use_mrope", True, "use_mrope true is not supported", "Supported: false."),
    (
        "qwen2-mini",
        "layer_types",
        ["full_attention", "sliding_attention", "full_attention"],
        "layer_types 'sliding_attention' of layer 1 is not supported",
        "Supported: full attention in every layer.",
    ),
    (
        "qwen2-mini",
        "layer_types",
        ["full_attention"],
        "layer_types must be a list with one entry for each of the 3 layers",
        "Supported: full attention in every layer.",
    ),
    (
        "qwen2-mini",
        "hiden_size",
        3,
        "unknown field 'hiden_size': its effect on the model is not known",
        "Did you mean 'hidden_size'? Remove the field if it does not change the model's numbers.",
    ),
    (
        "deepseek-r1",
        "quantization_config.quant_method",
        "gptq",
        'quantization_config.quant_method "gptq" is not supported',
        "Supported: fp8.",
    ),
    ("deepseek-r1", "quantization_config.fmt", "e5m2", 'quantization_config.fmt "e5m2" is not supported', "Supported: e4m3."),
    (
        "deepseek-r1",
        "quantization_config.activation_scheme",
        "static",
        'quantization_config.activation_scheme "static" is not supported',
        "Supported: dynamic.",
    ),
    (
        "deepseek-r1",
        "quantization_config.weight_block_size",
        [64, 64],
        "quantization_config.weight_block_size [64, 64] is not supported",
        "Supported: [128, 128].",
    ),
    (
        "deepseek-r1",
        "quantization_config.bits",
        4,
        "unknown field 'quantization_config.bits': its effect on the model is not known",
        "Remove the field if it does not change the model's numbers.",
    ),
]
NESTED = {"rope_scaling": {"r1-mini": YARN, "llama-mini": LLAMA3}, "quantization_config": {"deepseek-r1": FP8}}


@pytest.mark.parametrize(("name", "path", "value", "message", "hint"), CASES, ids=lambda v: str(v)[:40])
def test_refused(refusal: Refusal, tmp_path: Path, name: str, path: str, value: Any, message: str, hint: str) -> None:
    field, _, inner = path.partition(".")
    if inner:
        old = dict(NESTED[field][name])
        if inner == "rope_type":
            del old["type"]
        value = {**old, inner: value}
    rendered = refusal(name, **{field: value})
    lines = (tmp_path / "config.json").read_text().split("\n")
    key = json.dumps(inner or field) + ":"
    row = next(i for i, line in enumerate(lines) if line.strip().startswith(key))
    column = lines[row].index('"')
    assert rendered == (
        f"config.json:{row + 1}:{column + 1}: error: {message}\n    {lines[row]}\n    {' ' * column}^\nhelp: {hint}"
    )


@pytest.mark.parametrize("field", ["hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings"])
def test_missing_field(refusal: Refusal, field: str) -> None:
    hint = "Take the config.json that belongs to the model."
    assert refusal("r1-mini", **{field: ...}) == f"config.json: error: field {field!r} is missing\nhelp: {hint}"


def test_missing_model_type(refusal: Refusal) -> None:
    expected = "config.json: error: field 'model_type' is missing\nhelp: Supported: deepseek_v3, llama, qwen2."
    assert refusal("r1-mini", model_type=...) == expected


def test_missing_factor(refusal: Refusal) -> None:
    rendered = refusal("llama-mini", rope_scaling={"rope_type": "linear"})
    assert rendered.startswith("config.json: error: field 'rope_scaling.factor' is missing\n")


def test_both_spellings_at_once(refusal: Refusal) -> None:
    rendered = refusal("r1-mini", rope_parameters={"rope_type": "default"})
    assert "error: rope_scaling and rope_parameters are both given\n" in rendered
    assert rendered.endswith("help: Keep one of rope_scaling and rope_parameters.")


def test_contradicting_rope_types(refusal: Refusal) -> None:
    rendered = refusal("r1-mini", rope_scaling={**YARN, "rope_type": "linear"})
    assert "error: rope_scaling.type 'yarn' and rope_type 'linear' contradict each other\n" in rendered


def test_yarn_needs_a_base_above_one(refusal: Refusal) -> None:
    assert "error: YaRN needs rope_theta greater than 1, not 1.0\n" in refusal("r1-mini", rope_theta=1.0)


def test_sliding_window_in_effect(refusal: Refusal, load_config: Callable[..., object]) -> None:
    rendered = refusal("qwen2-mini", use_sliding_window=True, max_window_layers=1)
    message = "use_sliding_window true is not supported: layers 1 to 2 would use a window"
    assert f"error: {message}\n" in rendered
    assert rendered.endswith("help: Supported: full attention in every layer.")
    load_config("qwen2-mini", use_sliding_window=True, max_window_layers=3)


@pytest.mark.parametrize("context", [2561, 10**9])
def test_context_too_long(context: int) -> None:
    with pytest.raises(InvalidInput) as caught:
        random_model("r1-mini", context=context)
    assert caught.value.message == f"context {context} is longer than the model's max_position_embeddings 2560"
    assert caught.value.position is not None
    assert caught.value.position.text.strip() == '"max_position_embeddings": 2560,'
    assert caught.value.hint == "Set `context` to 2560 or less."


def test_context_of_nothing() -> None:
    with pytest.raises(InvalidInput, match="context must be at least 1 token, not 0"):
        random_model("r1-mini", context=0)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            b'{\n  "a": 1,\n  "b": ,\n}',
            'config.json:3:8: error: invalid JSON: Expecting value\n      "b": ,\n           ^\nhelp: Correct the JSON syntax.',
        ),
        (
            b"",
            "config.json:1:1: error: invalid JSON: Expecting value\nhelp: Correct the JSON syntax.",
        ),
        (
            b"[1]",
            "config.json:1:1: error: expected a JSON object\n    [1]\n    ^\nhelp: A configuration starts with `{`.",
        ),
        (
            b'{\n  "a": 1,\n  "a": 2\n}',
            "config.json:3:3: error: field 'a' is given twice\n      \"a\": 2\n      ^\nhelp: Keep one of the two.",
        ),
        (
            b"\xff\xfe{}",
            "config.json: error: not a text file: byte 0 is not UTF-8\nhelp: Save the file as UTF-8.",
        ),
        (
            b'{"a": ' + b"1" * 5000 + b"}",
            "config.json: error: invalid JSON: Exceeds the limit (4300 digits) for integer string conversion: value has 5000 "
            "digits; use sys.set_int_max_str_digits() to increase the limit\nhelp: Check that this is the right file.",
        ),
        (
            b"[" * 100_000,
            "config.json: error: invalid JSON: nested too deeply\nhelp: Check that this is the right file.",
        ),
    ],
)
def test_not_a_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert config_error(path) == expected


ODD_VALUES = [None, True, -1, 0, 1, 3, 10**400, -0.5, 1e-320, 1e308, float("nan"), "", "x", [], [None], {}, {"type": "yarn"}]


@pytest.mark.parametrize("name", ["r1-mini", "qwen2-mini", "llama-mini"])
def test_any_value_of_any_field_is_read_or_refused(load_config: Callable[..., object], name: str) -> None:
    config = config_of(name)
    inner = [("rope_scaling", key) for key in config.get("rope_scaling", {})]
    refused = 0
    for field, key in [*((field, "") for field in config), *inner]:
        for value in ODD_VALUES:
            changed = {**config[field], key: value} if key else value
            try:
                load_config(name, **{field: changed})
            except InvalidInput as error:
                refused += 1
                assert error.message
                assert error.hint
    assert refused > 250


def test_no_such_configuration(tmp_path: Path) -> None:
    assert config_error(tmp_path / "no.json") == "no.json: error: file not found\nhelp: Check the path."


def test_a_pipe_or_an_endless_file_as_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    hint = "help: Check the path."
    assert config_error(tmp_path / "pipe") == f"pipe: error: expected a JSON file, found neither file nor directory\n{hint}"
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert config_error(tmp_path / "sparse") == (
        "sparse: error: the file has 1099511627776 bytes, more than the 268435456 that are read\n"
        "help: Check that this is the right file."
    )


def test_a_directory_as_configuration(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    hint = "Name the file: model/config.json, or use `checkpoint:` for a directory with weights."
    assert config_error(tmp_path / "model") == f"model: error: expected a JSON file, found a directory\nhelp: {hint}"


def config_error(path: Path) -> str:
    with pytest.raises(InvalidInput) as caught:
        load_model(checkpoint=None, config=path, seed=0, context=None)
    return caught.value.render().replace(f"{path.parent}/", "")
