"""Writes docs/build-yaml.md from the schema: ``python -m dsr1build.config.reference > docs/build-yaml.md``."""

import json
from collections.abc import Mapping
from typing import Any

from dsr1build.config.json_schema import json_schema
from dsr1build.config.load import SHELVES, Shelf, shipped_directory, shipped_names

_INTRODUCTION = """# BUILD.yaml, recipes, targets and cache profiles

<!-- Made by `python -m dsr1build.config.reference > docs/build-yaml.md`; change the descriptions in
dsr1build/config/schema.py instead. -->

A build is described by four kinds of YAML files. `dsr1build schema build|recipe|target|profile` prints their JSON
Schemas, which editors use for completion and checks.

| file | says |
|---|---|
| [BUILD.yaml](#buildyaml) | what to build, how, for which targets, and where to |
| [recipe](#recipe) | how a model is cut into partitions and for which sizes its kernels are compiled |
| [target](#target) | what to compile for, and with which toolchain |
| [cache profile](#cache-profile) | which caches to use |

A relative path is relative to the file that names it. A recipe, target or cache profile that ships with the package can
also be named without a path; there are:

{shelves}

A file means the same to every reader of YAML, or it is refused with its line and column: every key must be known and may
stand only once; `yes`, `no`, `on`, `off`, `12:30`, `010`, `1_000` and dates must be written as `true` or `false`, as plain
decimal numbers, or in quotes; there are no anchors, aliases, tags, merge keys, tabs as indentation or second documents. A
key without a value is refused, too: leave the line out for the default. Files are UTF-8 of at most 1 MiB.
"""

_FILES: tuple[tuple[str, str, tuple[Shelf, str] | None], ...] = (
    ("build", "BUILD.yaml", None),
    ("recipe", "Recipe", ("recipes", "deepseek_v3.yaml")),
    ("target", "Target", ("targets", "x86-64-v3.yaml")),
    ("profile", "Cache profile", ("cache", "local.yaml")),
)

_BUILD_SAMPLE = """version: 1
name: r1-mini
model:
  checkpoint: path/to/directory    # or: config: path/to/config.json, with weights: {random: {seed: 0}}
recipe: recipes/deepseek_v3.yaml
targets: [targets/x86-64-v3.yaml]
context: 512
cache: cache/local.yaml
output: dist
"""


def reference() -> str:
    """The whole document, in Markdown."""
    shelves = "\n".join(f"* {shelf}: {', '.join(f'`{name}`' for name in shipped_names(shelf))}" for shelf in SHELVES)
    parts = [_INTRODUCTION.format(shelves=shelves)]
    for name, title, sample in _FILES:
        if sample is None:
            caption, text = "For example:", _BUILD_SAMPLE
        else:
            link = "/".join(sample)
            caption, text = f"The shipped [{link}](../{link}):", (shipped_directory(sample[0]) / sample[1]).read_text("utf-8")
        schema = json_schema(name)
        parts.append(f"## {title}\n\n{schema['description']}\n\n{_table(schema)}\n{caption}\n\n```yaml\n{text}```\n")
        parts += [_section(title, definition) for title, definition in _definitions(schema)]
    return "\n".join(parts)


def _definitions(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The sections that a file refers to, in the order in which its keys lead to them."""
    found: dict[str, Mapping[str, Any]] = {}

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            if "$ref" in node:
                name = node["$ref"].rpartition("/")[2]
                if name not in found:
                    found[name] = schema["$defs"][name]
                    visit(found[name]["properties"])
            for value in node.values():
                visit(value)
        elif isinstance(node, list):
            for value in node:
                visit(value)

    visit(schema["properties"])
    return list(found.items())


def _section(title: str, definition: Mapping[str, Any]) -> str:
    return f"### {title}\n\n{' '.join(definition['description'].split())}\n\n{_table(definition)}"


def _table(schema: Mapping[str, Any]) -> str:
    required = schema.get("required", [])
    lines = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in schema["properties"].items():
        default = "required" if key in required else _code(field["default"]) if field.get("default", []) != [] else ""
        meaning = field.get("description", "")
        if field.get("examples"):
            meaning += f" Example: {', '.join(_code(example) for example in field['examples'])}."
        lines.append(f"| `{key}` | {_type(field)} | {default} | {meaning.strip()} |")
    return "\n".join(lines) + "\n"


def _type(field: Mapping[str, Any]) -> str:
    """The type of a value in words."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "allOf" in field:
        return _type(field["allOf"][0])
    if "anyOf" in field:
        return " or ".join(_type(choice) for choice in field["anyOf"])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{choice}`" for choice in field["enum"])
    kind = field["type"]
    if kind == "array":
        return f"list of {_type(field['items'])}"
    if kind == "object":
        names = field.get("propertyNames", {})
        keys = _type(names) if "enum" in names else "name"
        # Keys of one form are described by a pattern, keys from a list by name.
        value = field["additionalProperties"] if "enum" in names else next(iter(field["patternProperties"].values()))
        return f"mapping of {keys} to {_type(value)}"
    if kind == "integer":
        return f"whole number, at least {field['minimum']}" if "minimum" in field else "whole number"
    return {"string": "text", "boolean": "`true` or `false`", "number": "number"}[kind]


def _code(value: object) -> str:
    """A value as it is written in YAML's flow form."""
    return f"`{_flow(value)}`"


def _flow(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_flow(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_flow(item) for item in value) + "]"
    return value if isinstance(value, str) and value else json.dumps(value)


if __name__ == "__main__":
    print(reference(), end="")
