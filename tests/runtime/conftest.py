"""The toy model's shared object, linked once, and a bundle made of it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from toy_fixtures import toy_bundle, toy_library

from dsr1build.runtime.session import Session, load

__all__ = ["toy_bundle", "toy_library"]


@pytest.fixture
def session(toy_bundle: Path) -> Iterator[Session]:
    with load(toy_bundle, threads=2) as opened:
        yield opened
