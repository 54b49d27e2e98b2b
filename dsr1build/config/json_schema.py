"""The JSON Schemas of the files that a user writes."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from dsr1build.config.schema import BuildFile, Profile, Recipe, Target

FILES: Mapping[str, type[BaseModel]] = {"build": BuildFile, "recipe": Recipe, "target": Target, "profile": Profile}


class _Generator(GenerateJsonSchema):
    """An optional key may be left out but never be null, because a document never holds null."""

    def nullable_schema(self, schema: core_schema.NullableSchema) -> JsonSchemaValue:
        return self.generate_inner(schema["schema"])

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        described = super().default_schema(schema)
        if described.get("default", ...) is None:
            del described["default"]
        return described

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def json_schema(file: str) -> dict[str, Any]:
    """The JSON Schema (2020-12) of one of ``FILES``, by name."""
    schema = FILES[file].model_json_schema(schema_generator=_Generator)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
