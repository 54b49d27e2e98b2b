"""Small checkpoints and configurations that a test can damage, without torch."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from dsr1build.frontends.load import load_model
from dsr1build.graph.model import Model

MODELS = Path(__file__).parents[2] / "models"
# safetensors dtype and shape by tensor name
Tensors: TypeAlias = dict[str, tuple[str, tuple[int, ...]]]
ITEM_BYTES: Mapping[str, int] = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "F8_E4M3": 1}
SAFETENSORS_NAMES: Mapping[str, str] = {"f32": "F32", "bf16": "BF16", "f16": "F16", "f8e4m3fn": "F8_E4M3"}


def random_model(name: str, context: int | None = None) -> Model:
    """The model of ``models/<name>/config.json`` with random weights."""
    return load_model(checkpoint=None, config=MODELS / name / "config.json", seed=0, context=context)


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((MODELS / name / "config.json").read_text())
    return config


def expected_tensors(name: str) -> Tensors:
    """What a checkpoint of ``models/<name>`` holds."""
    weights = random_model(name).graphs["prefill"].weights
    return {
        tensor: (SAFETENSORS_NAMES[type_.dtype], tuple(int(d) for d in type_.shape))
        for tensor, type_ in weights.items()
        if not tensor.startswith("rope.")
    }


def write_checkpoint_of(directory: Path, tensors: Tensors, name: str = "qwen2-mini") -> Path:
    """A checkpoint of zeros with the configuration of ``models/<name>`` and these tensors in one file."""
    directory.mkdir()
    (directory / "config.json").write_text((MODELS / name / "config.json").read_text())
    write_safetensors(directory / "model.safetensors", tensors)
    return directory


def write_safetensors(path: Path, tensors: Tensors) -> None:
    header, offset = header_of(tensors)
    write_raw(path, json.dumps(header).encode(), offset)


def header_of(tensors: Tensors) -> tuple[dict[str, Any], int]:
    """The header of a file and the number of data bytes after it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        length = ITEM_BYTES[dtype]
        for dim in shape:
            length *= dim
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + length]}
        offset += length
    return header, offset


def write_raw(path: Path, header: bytes, data: int, claimed: int | None = None) -> None:
    """A file with this header, claiming this length for it, and so many zero bytes after it."""
    path.write_bytes(struct.pack("<Q", len(header) if claimed is None else claimed) + header + bytes(data))
