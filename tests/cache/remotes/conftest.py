"""``open_remote``: every kind of remote in turn, for the contract tests; and the REAPI servers by name.

A module ``servers_*.py`` beside this file adds its kinds with ``FACTORIES``: name -> context manager over a directory, which
runs a server and gives ``open(timeouts=None) -> Remote``.
"""

import importlib
from pathlib import Path

import pytest

FACTORIES = {
    name: factory
    for path in sorted(Path(__file__).parent.glob("servers_*.py"))
    for name, factory in getattr(importlib.import_module(path.stem), "FACTORIES", {}).items()
}


@pytest.fixture(scope="module", params=sorted(FACTORIES))
def open_remote(request, tmp_path_factory):
    with FACTORIES[request.param](tmp_path_factory.mktemp("server")) as opens:
        yield opens


@pytest.fixture(scope="module")
def buildgrid(tmp_path_factory):
    import servers_reapi

    with servers_reapi.run_buildgrid(tmp_path_factory.mktemp("buildgrid")) as server:
        yield server


@pytest.fixture
def casd(tmp_path):
    import servers_reapi

    home = tmp_path / "casd"
    home.mkdir()
    with servers_reapi.run_casd(home) as server:
        yield server
