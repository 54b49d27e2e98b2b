"""The toy model's shared object, linked once, and a bundle made of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import toy_model

from dsr1build.runtime.session import Session, load


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("toy-library")
    return toy_model.link_library(directory / "objects", toy_model.toy_program(), directory / "zig")


@pytest.fixture(scope="session")
def toy_bundle(toy_library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy_model.build_toy_bundle(tmp_path_factory.mktemp("toy-bundle"), toy_library)


@pytest.fixture
def session(toy_bundle: Path) -> Iterator[Session]:
    with load(toy_bundle, threads=2) as opened:
        yield opened
