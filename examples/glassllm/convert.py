"""Turn the trained language model inside the package ``glassllm`` into a Hugging Face Llama checkpoint.

    python examples/glassllm/convert.py [--language en|pt] [--output examples/glassllm/checkpoint]

The package (MIT licence, ``pip install glassllm==0.1.0``) holds two Llama-shaped models of 852,609 parameters. Only the
layout changes here: weights are stored [in, out] there and [out, in] in a checkpoint, and its RoPE rotates adjacent
pairs (2i, 2i+1) where Llama rotates (i, i + half), so the rows of the query and key projections are reordered.
"""

import argparse
import json
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

SPECIAL_TOKENS = ("<pad>", "<unk>", "<bos>", "<eos>")


def half_rotation_rows(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Reorder the output columns of ``weight`` [in, heads * width] within each head: even entries first, then odd ones."""
    width = weight.shape[1] // heads
    order = np.concatenate([np.arange(0, width, 2), np.arange(1, width, 2)])
    return weight.reshape(weight.shape[0], heads, width)[:, :, order].reshape(weight.shape)


def llama_tensors(source: Any, config: dict[str, Any]) -> dict[str, NDArray[np.float32]]:
    """The tensors of the checkpoint by their Hugging Face names, f32, [out, in]."""

    def get(name: str) -> NDArray[np.float32]:
        return np.asarray(source[name], dtype=np.float32)

    tensors = {"model.embed_tokens.weight": get("E"), "model.norm.weight": get("norm_f.gamma")}
    for layer in range(config["n_layers"]):
        old, new = f"blocks.{layer}.", f"model.layers.{layer}."
        tensors[new + "input_layernorm.weight"] = get(old + "norm1.gamma")
        tensors[new + "post_attention_layernorm.weight"] = get(old + "norm2.gamma")
        tensors[new + "self_attn.q_proj.weight"] = half_rotation_rows(get(old + "attn.W_Q"), config["n_heads"]).T
        tensors[new + "self_attn.k_proj.weight"] = half_rotation_rows(get(old + "attn.W_K"), config["n_kv_heads"]).T
        tensors[new + "self_attn.v_proj.weight"] = get(old + "attn.W_V").T
        tensors[new + "self_attn.o_proj.weight"] = get(old + "attn.W_O").T
        for theirs, ours in (("W1", "gate_proj"), ("W3", "up_proj"), ("W2", "down_proj")):
            tensors[new + f"mlp.{ours}.weight"] = get(old + f"ffn.{theirs}").T
    return {name: np.ascontiguousarray(value) for name, value in tensors.items()}


def llama_config(source: Any, config: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config["vocab_size"],
        "hidden_size": config["d_model"],
        "intermediate_size": int(source["blocks.0.ffn.W1"].shape[1]),
        "num_hidden_layers": config["n_layers"],
        "num_attention_heads": config["n_heads"],
        "num_key_value_heads": config["n_kv_heads"],
        "hidden_act": "silu",
        "max_position_embeddings": config["max_len"],
        "rms_norm_eps": config["eps"],
        "rope_theta": config["rope_base"],
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "bos_token_id": None,
        "eos_token_id": SPECIAL_TOKENS.index("<eos>"),
    }


def tokenizer_json(alphabet: list[str], merges: list[list[str]]) -> dict[str, Any]:
    """The package's character BPE in the format of the ``tokenizers`` library."""
    vocabulary = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": number,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for number, token in enumerate(SPECIAL_TOKENS)
        ],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
        },
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "\\n|▁*[^▁\\n]+|▁+"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "Fuse"}],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(vocabulary)},
            "merges": merges,
        },
    }


def convert(language: str, output: Path) -> None:
    """Write config.json, model.safetensors, tokenizer.json and tokenizer_config.json into ``output``."""
    weights = resources.files("glassllm") / "weights"
    output.mkdir(parents=True, exist_ok=True)
    with resources.as_file(weights / f"{language}.npz") as path, np.load(path) as source:
        config: dict[str, Any] = json.loads(str(source["__config__"]))
        save_file(llama_tensors(source, config), output / "model.safetensors", metadata={"format": "pt"})
        write_json(output / "config.json", llama_config(source, config))
    bpe = json.loads((weights / f"{language}.tokenizer.json").read_text(encoding="utf-8"))
    write_json(output / "tokenizer.json", tokenizer_json(bpe["alphabet"], bpe["merges"]))
    write_json(output / "tokenizer_config.json", {"add_bos_token": False, "unk_token": "<unk>", "eos_token": "<eos>"})


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write glassllm's model as a Hugging Face Llama checkpoint.")
    parser.add_argument("--language", choices=("en", "pt"), default="en")
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "checkpoint")
    arguments = parser.parse_args()
    convert(arguments.language, arguments.output)
    print(f"wrote {arguments.output}")


if __name__ == "__main__":
    main()
