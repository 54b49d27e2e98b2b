"""Real checkpoints of the small models in models/, written by transformers, and transformers' own numbers for them.

Importing torch takes seconds, so it happens inside of the functions. Checkpoints and loaded references are kept for the
session.
"""

import functools
import json
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MODELS = Path(__file__).parents[1] / "models"
SMALL_MODELS = ("r1-mini", "r1-mini-no-q-lora", "r1-mini-tied", "r1-mini-softmax", "qwen2-mini", "llama-mini")

# The longest prompt that tests use; how many of its tokens they generate from, and how many they generate.
PROMPT_TOKENS = 100
START_TOKENS = 12
NEW_TOKENS = 64

# Differences between two implementations in f32 stay far below this, so no expert is chosen by rounding.
ROUTER_MARGIN = 2e-5


def prompt_ids(name: str, length: int = PROMPT_TOKENS) -> list[int]:
    """The first ``length`` token ids of the prompt whose router margins ``write_checkpoint`` has checked."""
    vocabulary = json.loads((MODELS / name / "config.json").read_text())["vocab_size"]
    return [int(i) for i in np.random.default_rng(7).integers(0, vocabulary, PROMPT_TOKENS)[:length]]


@functools.cache
def checkpoint(name: str, dtype: str = "float32", shards: int = 1, mtp: bool = False) -> Path:
    """The directory of a checkpoint as ``write_checkpoint`` makes it, written once in a session. Do not change it."""
    return write_checkpoint(name, Path(_session_directory().name) / f"{name}-{dtype}-{shards}-{mtp}", dtype, shards, mtp=mtp)


@functools.cache
def _session_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dsr1build-checkpoints-")


def write_checkpoint(
    name: str, directory: Path, dtype: str = "float32", shards: int = 1, seed: int = 0, *, mtp: bool = False
) -> Path:
    """Write the model ``models/<name>`` with seeded weights to ``directory``, by transformers' ``save_pretrained``.

    Matrices keep the size of activations, logits spread over several units, selection biases are mostly negative. Seeds
    from ``seed`` on are tried until every choice of experts and groups is clear by ``ROUTER_MARGIN``, for the prompt of
    ``prompt_ids`` and for ``NEW_TOKENS`` greedily generated from its first ``START_TOKENS``. ``dtype`` is float32, bfloat16
    or float16; selection biases stay in float32. ``shards`` > 1 asks for at least so many files with an index. ``mtp`` adds
    the tensors of a multi-token prediction layer, as R1's checkpoint has them. With float8_e4m3fn there is one file, made by
    ``_write_fp8_checkpoint``.
    """
    import torch

    transformers = _quiet_transformers()
    directory.mkdir(parents=True, exist_ok=True)
    if dtype == "float8_e4m3fn":
        return _write_fp8_checkpoint(name, directory, seed)
    config = transformers.AutoConfig.from_pretrained(MODELS / name)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    _use_configured_scoring(model)
    stored = getattr(torch, dtype)
    for attempt in range(seed, seed + 200):
        _fill(model, attempt, stored)
        if _is_clear(model, name):
            break
    else:
        raise AssertionError(f"no seed from {seed} on keeps a router margin of {ROUTER_MARGIN}")

    _round(model, stored)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    model.save_pretrained(directory, max_shard_size=size + 2**20 if shards == 1 else size // shards)
    if getattr(config, "topk_method", "noaux_tc") != "noaux_tc":
        _edit_tensors(directory, _without_selection_bias)
    if mtp:
        _add_mtp_layer(directory, config.num_hidden_layers)
    return directory


def _is_clear(model: Any, name: str) -> bool:
    """Whether no choice of an expert or group is closer than ``ROUTER_MARGIN``, in the prompt and in what is generated."""
    with _RouterMargin(model) as margin:
        _generate(model, prompt_ids(name), 1)
        if margin.smallest > ROUTER_MARGIN:
            _generate(model, prompt_ids(name, START_TOKENS), NEW_TOKENS)
    return margin.smallest > ROUTER_MARGIN


def _round(model: Any, stored: Any) -> None:
    """Parameters in the dtype that they are stored in; selection biases stay in float32."""
    biases = {key: b.clone() for key, b in model.named_buffers() if key.endswith("e_score_correction_bias")}
    model.to(stored)
    for key, bias in biases.items():
        model.get_buffer(key).data = bias
    model.config.dtype = stored


# The matrices that R1's own checkpoint stores in FP8: all but embedding, head and router.
_FP8_MATRIX = re.compile(
    r".*\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|gate_proj|up_proj|down_proj)\.weight"
)
_FP8_BLOCK = 128


def dequantised_directory(directory: Path) -> Path:
    """Where ``write_checkpoint`` leaves the float32 twin of an FP8 checkpoint: the same weights, dequantised."""
    return directory.with_name(directory.name + "-dequantised")


def _write_fp8_checkpoint(name: str, directory: Path, seed: int) -> Path:
    """A checkpoint as R1's own: FP8 matrices with a scale for each block of 128 x 128, everything else in bfloat16."""
    import torch

    transformers = _quiet_transformers()
    config = transformers.AutoConfig.from_pretrained(MODELS / name)
    quantization = config.quantization_config
    del config.quantization_config
    twin = dequantised_directory(directory)
    for attempt in range(seed, seed + 200):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
        _fill(model, attempt, torch.bfloat16)
        _round(model, torch.bfloat16)
        model.save_pretrained(directory)
        model.save_pretrained(twin)
        _edit_tensors(directory, _quantised)
        _edit_tensors(twin, lambda tensors: _dequantised(_quantised(tensors)))
        if _is_clear(reference_model.__wrapped__(directory), name):
            break
    else:
        raise AssertionError(f"no seed from {seed} on keeps a router margin of {ROUTER_MARGIN}")
    written = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**written, "quantization_config": quantization}, indent=2))
    return directory


def _quantised(tensors: dict[str, Any]) -> dict[str, Any]:
    """FP8 matrices, each with ``weight_scale_inv``: the largest element of a block becomes 448, the largest e4m3fn."""
    import torch

    result = dict(tensors)
    for name, tensor in tensors.items():
        if not _FP8_MATRIX.fullmatch(name):
            continue
        rows, columns = tensor.shape
        down, across = -(-rows // _FP8_BLOCK), -(-columns // _FP8_BLOCK)
        padded = torch.zeros(down * _FP8_BLOCK, across * _FP8_BLOCK)
        padded[:rows, :columns] = tensor.float()
        scale = padded.abs().view(down, _FP8_BLOCK, across, _FP8_BLOCK).amax(dim=(1, 3)) / 448
        codes = (padded / _per_element(scale, *padded.shape)).clamp(-448, 448)
        result[name] = codes[:rows, :columns].contiguous().to(torch.float8_e4m3fn)
        result[name + "_scale_inv"] = scale
    return result


def _dequantised(tensors: dict[str, Any]) -> dict[str, Any]:
    """All tensors in float32, FP8 matrices times their block scales, which are left out."""
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale_inv")}
    wide = {name: tensor.float() for name, tensor in tensors.items() if name not in scales}
    for name, scale in scales.items():
        weight = name.removesuffix("_scale_inv")
        wide[weight] = wide[weight] * _per_element(scale, *wide[weight].shape)
    return wide


def _per_element(scale: Any, rows: int, columns: int) -> Any:
    """Block scales as a matrix [rows, columns]."""
    return scale.repeat_interleave(_FP8_BLOCK, 0).repeat_interleave(_FP8_BLOCK, 1)[:rows, :columns]


def reference_logits(directory: Path, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """transformers' logits [len(ids), vocabulary] in float32, with eager attention."""
    import torch

    with torch.no_grad():
        return reference_model(directory)(torch.tensor([list(ids)])).logits[0].float().numpy()


def reference_generate(
    directory: Path, ids: Sequence[int], max_new: int
) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float32]]]:
    """Greedily chosen tokens and the logits [max_new, vocabulary] that each was chosen from; no end of text."""
    return _generate(reference_model(directory), ids, max_new)


def _quiet_transformers() -> Any:
    """The library on one thread, without progress bars and without its report of missing and unexpected tensors."""
    import torch
    import transformers

    # The models are so small that a second thread only waits, and waits long where tests run side by side.
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


@functools.lru_cache(maxsize=8)
def reference_model(directory: Path) -> Any:
    """transformers' own model of a checkpoint, in float32 with eager attention; of FP8 weights their dequantised twin."""
    import torch

    transformers = _quiet_transformers()
    twin = dequantised_directory(directory)
    directory = twin if twin.exists() else directory
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    _use_configured_scoring(model)
    return model.eval()


def _generate(model: Any, ids: Sequence[int], max_new: int) -> tuple[list[int], np.ndarray[Any, np.dtype[np.float32]]]:
    import torch
    import transformers

    tokens: list[int] = []
    rows = []
    cache, step = transformers.DynamicCache(config=model.config), list(ids)
    with torch.no_grad():
        for _ in range(max_new):
            logits = model(torch.tensor([step]), cache=cache, use_cache=True).logits
            rows.append(logits[0, -1].float().numpy())
            tokens.append(int(rows[-1].argmax()))
            step = [tokens[-1]]
    return tokens, np.stack(rows)


def _fill(model: Any, seed: int, stored: Any) -> None:
    """Weights as a function of the seed, already rounded to the dtype that they will be stored in."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name:
                continue
            values = torch.randn(tensor.shape, generator=generator)
            if name.endswith("e_score_correction_bias"):
                # Scores of a sigmoid less half of one: often negative, so that masking by 0 would choose other experts.
                tensor.copy_(values * 0.2 - 0.5)
                continue
            if "norm" in name:
                values = 1 + 0.1 * values
            elif name.endswith("embed_tokens.weight"):
                # A tied table is the head too, whose logits should not be larger than an untied head's.
                values = values * (3 * tensor.shape[-1] ** -0.5 if model.config.tie_word_embeddings else 1.0)
            elif name.endswith("lm_head.weight"):
                values = values * 3 * tensor.shape[-1] ** -0.5
            elif name.endswith("gate.weight"):
                values = values * 2 * tensor.shape[-1] ** -0.5
            elif name.endswith("bias"):
                values = values * 0.3
            elif name.endswith(("q_proj.weight", "q_b_proj.weight")):
                # Sharp enough that positions matter.
                values = values * 2 * tensor.shape[-1] ** -0.5
            else:
                values = values * tensor.shape[-1] ** -0.5
            tensor.copy_(values.to(stored).to(torch.float32))


def routers(model: Any) -> list[Any]:
    """The router modules of transformers' DeepSeek-V3, in the order of their layers."""
    return [module for module in model.modules() if type(module).__name__ == "DeepseekV3TopkRouter"]


def _use_configured_scoring(model: Any) -> None:
    """transformers' DeepSeek-V3 knows sigmoid scores with groups alone; softmax with greedy choice is written out here."""
    if getattr(model.config, "scoring_func", "sigmoid") != "softmax":
        return
    import torch

    def forward(router: Any, hidden: Any) -> tuple[Any, Any, Any]:
        logits = torch.nn.functional.linear(hidden.view(-1, router.hidden_dim).float(), router.weight.float())
        weights, indices = torch.topk(logits.softmax(dim=-1), router.top_k, dim=-1, sorted=False)
        if router.norm_topk_prob:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return logits, weights * router.routed_scaling_factor, indices

    for router in routers(model):
        router.forward = functools.partial(forward, router)


class _RouterMargin:
    """The smallest distance between a chosen and the next best group or expert, over all calls inside of the block."""

    def __init__(self, model: Any) -> None:
        self.smallest = float("inf")
        softmax = getattr(model.config, "scoring_func", "sigmoid") == "softmax"
        self._handles = []
        for router in routers(model):
            self._handles.append(router.register_forward_hook(functools.partial(self._measure, softmax)))

    def __enter__(self) -> "_RouterMargin":
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _measure(self, softmax: bool, router: Any, _: Any, output: Any) -> None:
        logits = output[0]
        if softmax:
            self._gap(logits.softmax(-1), router.top_k)
            return
        scores = logits.sigmoid() + router.e_score_correction_bias
        grouped = scores.view(-1, router.num_group, router.num_experts // router.num_group)
        groups = grouped.topk(2, dim=-1)[0].sum(-1)
        self._gap(groups, router.topk_group)
        chosen = groups >= groups.topk(router.topk_group, dim=-1)[0][:, -1:]
        self._gap(grouped.masked_fill(~chosen.unsqueeze(-1), float("-inf")).flatten(1), router.top_k)

    def _gap(self, scores: Any, count: int) -> None:
        if count < scores.shape[-1]:
            ordered = scores.sort(dim=-1, descending=True)[0]
            self.smallest = min(self.smallest, float((ordered[:, count - 1] - ordered[:, count]).min()))


def _without_selection_bias(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("e_score_correction_bias")}


def _edit_tensors(directory: Path, edit: Any) -> None:
    from safetensors.torch import load_file, save_file

    index = directory / "model.safetensors.index.json"
    weight_map = {}
    for path in sorted(directory.glob("*.safetensors")):
        tensors = edit(load_file(path))
        save_file(tensors, path, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, path.name))
    if index.exists():
        content = json.loads(index.read_text())
        index.write_text(json.dumps({**content, "weight_map": weight_map}))


def _add_mtp_layer(directory: Path, layers: int) -> None:
    """A file with one more layer (a copy of the last) and its own embedding, norms, projection and head, and an index."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors: dict[str, Any] = {}
    weight_map = {}
    for path in sorted(directory.glob("*.safetensors")):
        loaded = load_file(path)
        tensors.update(loaded)
        weight_map.update(dict.fromkeys(loaded, path.name))
    last, new = f"model.layers.{layers - 1}.", f"model.layers.{layers}."
    extra = {new + name.removeprefix(last): t.clone() for name, t in tensors.items() if name.startswith(last)}
    norm, table = tensors["model.norm.weight"], tensors["model.embed_tokens.weight"]
    extra |= {f"{new}{part}.weight": norm.clone() for part in ("enorm", "hnorm", "shared_head.norm")}
    extra |= {f"{new}{part}.weight": table.clone() for part in ("embed_tokens", "shared_head.head")}
    extra[f"{new}eh_proj.weight"] = torch.zeros(norm.shape[0], 2 * norm.shape[0], dtype=norm.dtype)
    save_file(extra, directory / "model-mtp.safetensors", metadata={"format": "pt"})
    weight_map.update(dict.fromkeys(extra, "model-mtp.safetensors"))
    size = sum(t.numel() * t.element_size() for t in [*tensors.values(), *extra.values()])
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
