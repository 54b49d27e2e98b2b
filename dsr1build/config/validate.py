"""A document checked against its schema: one message, at the place of the mistake, with the nearest right word."""

import types
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from dsr1build.config.document import Document, Entries, Items, Node, Scalar, Step, to_data
from dsr1build.config.scalars import shown_text
from dsr1build.config.schema import describe
from dsr1build.errors import InvalidInput, Position

Section = TypeVar("Section", bound=BaseModel)

_EXPECTED: Mapping[str, str] = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "bool_type": "true or false",
    "tuple_type": "a list",
    "mapping_type": "a mapping",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}


def validate(document: Document, schema: type[Section]) -> Section:
    """Build the frozen model that a document describes. Raises InvalidInput for the first mistake.

    An unknown key is reported before anything else, because a misspelt key also makes the right one missing; then what is
    wrong, in the order of the file; then what is missing.
    """
    _refuse_empty(document.root, ())
    try:
        return schema.model_validate(to_data(document.root))
    except ValidationError as failure:
        errors = failure.errors(include_url=False)
    raise min((_to_message(document, schema, error) for error in errors), key=lambda found: found[0])[1]


def _refuse_empty(node: Node, path: tuple[Step, ...]) -> None:
    """No key may be left without a value: it would silently mean the default."""
    if isinstance(node, Scalar) and node.value is None:
        raise InvalidInput(
            f"{_dotted(path)} has no value", position=node.position, hint="Write a value, or remove the line for the default."
        )
    if isinstance(node, Items):
        for index, item in enumerate(node.items):
            _refuse_empty(item, (*path, index))
    if isinstance(node, Entries):
        for entry in node.entries:
            _refuse_empty(entry.value, (*path, entry.key))


_Rank = tuple[int, int, int]


def _to_message(document: Document, schema: type[BaseModel], error: ErrorDetails) -> tuple[_Rank, InvalidInput]:
    kind, loc, context = error["type"], error["loc"], error.get("ctx", {})
    if loc and loc[-1] == "[key]":
        return _key_message(document, schema, error)
    if kind == "fault":
        loc = (*loc, *context["at"])
    key_position, node = document.find(loc)
    name = _dotted(loc)
    if kind == "extra_forbidden":
        known = list(_fields(_annotation(schema, loc[:-1])))
        owner = f" in {_dotted(loc[:-1])}" if len(loc) > 1 else ""
        return _ranked(
            0,
            f"unknown key `{shown_text(str(loc[-1]))}`{owner}",
            key_position,
            _choices(str(loc[-1]), known, "The keys here are"),
        )
    if kind == "missing":
        owner = f" in {_dotted(loc[:-1])}" if len(loc) > 1 else ""
        field = _fields(_annotation(schema, loc[:-1]))[str(loc[-1])]
        # The mapping that lacks the key has no line of its own for it: point at the key that the mapping belongs to.
        hint = f"Add `{loc[-1]}:`. {field.description or ''}".strip()
        return _ranked(2, f"the key `{loc[-1]}` is missing{owner}", key_position, hint)
    if kind == "fault":
        return _ranked(1, context["message"], node.position if loc else document.root.position, context["hint"])
    message, hint = _value_message(kind, name, error["input"], context)
    # A list whose items are wrong is called too short as well; that is the last thing to say about it.
    return _ranked(3 if kind == "too_short" else 1, message, node.position, hint)


def _key_message(document: Document, schema: type[BaseModel], error: ErrorDetails) -> tuple[_Rank, InvalidInput]:
    """A key of a mapping with free keys is not one of those allowed, or not of the right form."""
    *parents, key, _ = error["loc"]
    position = document.find((*parents, key))[0]
    context = error.get("ctx", {})
    if error["type"] == "literal_error":
        allowed = [str(choice) for choice in get_args(get_args(_annotation(schema, tuple(parents)))[0])]
        hint = _choices(str(key), allowed, "The keys here are")
        return _ranked(0, f"unknown key `{shown_text(str(key))}` in {_dotted(tuple(parents))}", position, hint)
    return _ranked(0, context.get("message", error["msg"]), position, context.get("hint", ""))


def _value_message(kind: str, name: str, value: object, context: Mapping[str, Any]) -> tuple[str, str]:
    """The message and the hint for a value of the wrong type or outside its bounds."""
    if kind in _EXPECTED:
        return f"{name} must be {_EXPECTED[kind]}, but is {describe(value)}", _type_hint(_EXPECTED[kind], value)
    if kind == "literal_error":
        allowed = [part.strip("' ") for part in context["expected"].replace(" or ", ",").split(",")]
        one = f"`{allowed[0]}`" if len(allowed) == 1 else "one of " + ", ".join(f"`{choice}`" for choice in allowed)
        message = f"{name} must be {one}, but is {describe(value)}"
        if str(value) in allowed:
            return message, f"Write {value} without quotes."
        close = get_close_matches(str(value), allowed, n=1)
        return message, f"Did you mean `{close[0]}`?" if close else f"Write {one}."
    bounds = {"greater_than_equal": ("at least", "ge"), "less_than_equal": ("at most", "le"), "less_than": ("less than", "lt")}
    if kind in bounds:
        words, key = bounds[kind]
        return f"{name} must be {words} {context[key]}, but is {value}", "Write a number within the bounds."
    if kind == "too_short":
        return f"{name} must not be an empty list", "Add an item."
    raise AssertionError(f"no message for the validation error {kind!r}")


def _type_hint(expected: str, value: object) -> str:
    if expected == "text" and isinstance(value, bool | int | float):
        shown = str(value).lower() if isinstance(value, bool) else str(value)
        return f'Put it in quotes for the text: "{shown}".'
    if expected == "a whole number" and isinstance(value, str) and value.isascii() and value.isdecimal():
        return f"Write {int(value)} without quotes."
    if expected == "a list" and isinstance(value, str):
        return f"Write [{value}]." if value.isascii() and value.isprintable() and len(value) <= 60 else "Put it in brackets."
    if expected == "true or false" and value in ("true", "false"):
        return f"Write {value} without quotes."
    return f"Write {expected}."


def _ranked(rank: int, message: str, position: Position, hint: str) -> tuple[_Rank, InvalidInput]:
    return (rank, position.line, position.column), InvalidInput(message, position=position, hint=hint)


def _choices(wrong: str, known: Sequence[str], lead: str) -> str:
    """A did-you-mean where one is near, and all that is possible."""
    close = get_close_matches(wrong, known, n=1)
    listed = f"{lead} {', '.join(known)}."
    return f"Did you mean `{close[0]}`? {listed}" if close else listed


def _dotted(loc: tuple[Step, ...]) -> str:
    """A path in the file as text: ``partitions[0].kind`` in backquotes."""
    out = ""
    for step in loc:
        out += f"[{step}]" if isinstance(step, int) else f"{'.' if out else ''}{shown_text(step)}"
    return f"`{out}`"


def _annotation(schema: type[BaseModel], loc: tuple[Step, ...]) -> Any:
    """The type that the schema gives to the value at ``loc``."""
    annotation: Any = schema
    for step in loc:
        annotation = _bare(annotation)
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            annotation = annotation.model_fields[str(step)].annotation
        elif get_origin(annotation) is tuple:
            annotation = get_args(annotation)[0]
        else:
            annotation = get_args(annotation)[1]
    return _bare(annotation)


def _bare(annotation: Any) -> Any:
    """A type without its metadata and without ``| None``."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType) and type(None) in get_args(annotation):
            annotation = next(a for a in get_args(annotation) if a is not type(None))
        else:
            return annotation


def _fields(annotation: Any) -> Mapping[str, FieldInfo]:
    assert isinstance(annotation, type) and issubclass(annotation, BaseModel)
    return annotation.model_fields
