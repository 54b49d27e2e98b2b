"""Fixtures of the toy model, for the conftest of each room that needs them."""

from pathlib import Path

import pytest
import toy_model


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy model's shared object, linked once."""
    directory = tmp_path_factory.mktemp("toy-library")
    return toy_model.link_library(directory / "objects", toy_model.toy_program(), directory / "zig")


@pytest.fixture(scope="session")
def toy_bundle(toy_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the toy model. It has no tokenizer."""
    return toy_model.build_toy_bundle(tmp_path_factory.mktemp("toy-bundle"), toy_library)
