"""What the end-to-end tests build: a checkpoint, its BUILD.yaml and the bundle."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Built:
    checkpoint: Path
    bundle: Path
    build_file: Path


def write_build_file(directory: Path, name: str, checkpoint: Path, recipe: str, context: int = 256) -> Path:
    path = directory / "BUILD.yaml"
    path.write_text(
        f"version: 1\nname: {name}\nmodel:\n  checkpoint: {checkpoint}\nrecipe: {recipe}\ntargets: [x86-64-v3]\n"
        f"context: {context}\noutput: dist\n",
        encoding="utf-8",
    )
    return path
