"""What is made from the schema: JSON Schemas and the reference document; and that it agrees with the rooms it speaks of."""

from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
import yaml

from dsr1build.config import schema
from dsr1build.config.json_schema import FILES, json_schema
from dsr1build.config.reference import reference
from dsr1build.graph.model import Kind

ROOT = Path(__file__).parents[2]
SHIPPED = [("build", "BUILD.yaml")] + [
    (name, f"{shelf}/{file.name}")
    for name, shelf in (("recipe", "recipes"), ("target", "targets"), ("profile", "cache"))
    for file in sorted((ROOT / shelf).glob("*.yaml"))
]


def test_the_committed_reference_is_current() -> None:
    assert (ROOT / "docs" / "build-yaml.md").read_text() == reference()


def test_every_key_is_described() -> None:
    for name in FILES:
        described = json_schema(name)
        for section in (described, *described.get("$defs", {}).values()):
            assert section["description"]
            for key, field in section["properties"].items():
                assert field.get("description") or "$ref" in field, f"{name}: {key}"


@pytest.mark.parametrize("name", FILES)
def test_is_a_json_schema(name: str) -> None:
    described = json_schema(name)
    jsonschema.Draft202012Validator.check_schema(described)
    assert described["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert "null" not in str(described)


@pytest.mark.parametrize(("name", "file"), SHIPPED)
def test_shipped_files_are_valid_by_the_json_schema(name: str, file: str) -> None:
    jsonschema.validate(yaml.safe_load((ROOT / file).read_text()), json_schema(name))


@pytest.mark.parametrize(
    "change",
    [
        {"nam": "x"},
        {"name": "../x"},
        {"targets": []},
        {"context": 0},
        {"context": None},
        {"version": 2},
        {"model": {}},
        {"model": {"config": "c"}},
        {"model": {"checkpoint": "c", "weights": {"random": {"seed": 0}}}},
        {"model": {"checkpoint": "c", "config": "d", "weights": {"random": {"seed": 0}}}},
    ],
)
def test_json_schema_refuses(change: dict[str, Any]) -> None:
    good = {"version": 1, "name": "x", "model": {"checkpoint": "c"}, "recipe": "qwen2", "targets": ["x86-64-v3"]}
    jsonschema.validate(good, json_schema("build"))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(good | change, json_schema("build"))


def test_kinds_agree_with_the_graph() -> None:
    assert get_args(schema.Kind) == get_args(Kind)
    assert get_args(schema.KindOrAll) == ("all", *get_args(Kind))


def test_schedules_and_pass_groups_agree_with_the_toolchain() -> None:
    from dsr1build.toolchains.target import PIPELINE, SCHEDULES

    assert set(get_args(schema.ScheduleName)) == set(SCHEDULES)
    assert set(get_args(schema.ScheduleOption)) == {option for options in SCHEDULES.values() for option in options}
    assert get_args(schema.PassGroup) == tuple(PIPELINE)
