"""Bundles built once a test session from real checkpoints that ``transformers`` wrote."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from builds import Built, write_build_file
from dsr1build.cli.main import main


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One compilation cache for all builds of the session, away from the user's own."""
    directory = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(directory)
    yield directory
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="session")
def build_model(cache_home: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Built]:
    """``build_model("r1-mini", recipe="deepseek_v3")``: the checkpoint, its bundle and its BUILD.yaml."""
    from checkpoints import write_checkpoint

    done: dict[tuple[object, ...], Built] = {}

    def build(name: str, recipe: str, dtype: str = "float32", shards: int = 1) -> Built:
        key = (name, recipe, dtype, shards)
        if key not in done:
            directory = tmp_path_factory.mktemp(name)
            checkpoint = directory / "checkpoint"
            write_checkpoint(name, checkpoint, dtype=dtype, shards=shards)
            build_file = write_build_file(directory, name, checkpoint, recipe)
            assert main(["build", str(build_file), "--quiet"]) == 0
            done[key] = Built(checkpoint, directory / "dist" / name / "x86-64-v3", build_file)
        return done[key]

    return build
