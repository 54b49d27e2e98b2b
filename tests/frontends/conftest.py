"""Loading of damaged sources, with the temporary directory cut off from the messages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_sources import config_of, expected_tensors, write_checkpoint_of

from dsr1build.errors import InvalidInput
from dsr1build.frontends.load import load_model
from dsr1build.graph.model import Model


@pytest.fixture
def load_config(tmp_path: Path) -> Callable[..., Model]:
    """``load_config("r1-mini", n_group=2)`` loads the model with fields changed; ``...`` as a value removes the field."""

    def load(name: str, **changes: Any) -> Model:
        values = {key: value for key, value in {**config_of(name), **changes}.items() if value is not ...}
        path = tmp_path / "config.json"
        path.write_text(json.dumps(values, indent=2))
        return load_model(checkpoint=None, config=path, seed=0, context=None)

    return load


@pytest.fixture
def refusal(load_config: Callable[..., Model], tmp_path: Path) -> Callable[..., str]:
    """The rendered error for a changed configuration."""

    def refuse(name: str, **changes: Any) -> str:
        with pytest.raises(InvalidInput) as caught:
            load_config(name, **changes)
        return caught.value.render().replace(f"{tmp_path}/", "")

    return refuse


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A sound checkpoint of qwen2-mini in one file, all zeros."""
    return write_checkpoint_of(tmp_path / "small", expected_tensors("qwen2-mini"))


@pytest.fixture
def checkpoint_refusal(tmp_path: Path) -> Callable[[Path], str]:
    """The rendered error for a damaged checkpoint."""

    def refuse(directory: Path) -> str:
        with pytest.raises(InvalidInput) as caught:
            load_model(checkpoint=directory, config=None, seed=None, context=None)
        return caught.value.render().replace(f"{tmp_path}/", "")

    return refuse
