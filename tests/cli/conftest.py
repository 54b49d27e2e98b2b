"""The command line is tested below a directory whose name holds blanks, a quotation mark and letters beyond ASCII, and
with a bundle of the toy model where a verb takes one."""

from pathlib import Path

import pytest
from toy_fixtures import toy_bundle, toy_library

__all__ = ["toy_bundle", "toy_library"]


@pytest.fixture
def tmp_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ein Ordner, größer als 'dieser'")
