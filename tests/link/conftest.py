"""The toy model's shared object, linked once."""

from pathlib import Path

import pytest
import toy_model


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy-library")
    return toy_model.link_library(directory / "objects", toy_model.toy_program(), directory / "zig")
