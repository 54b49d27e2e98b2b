"""The record of a build: what became of each action, what its key was made of, and why it missed.

A record is JSON (``RECORD_SCHEMA``). The fields of an action are given by the digests of their values; each value stands
once in ``values``, so the list of tools that all compiles share is written once. Values are JSON, with these forms for
what JSON does not have::

    {"blob": sha256}                                  a file by its digest
    {"fields": {name: value}}                         a mapping
    {"float": text}                                   an infinite number
    {"shortened": shape, "length": n, "sha256": ..}   a value by the SHA-256 of its encoding, left out for its length

A record takes at most ``SHARED_BYTES`` and ``BYTES_AN_ACTION`` for each action; beyond that values are shortened.
"""

import contextlib
import json
import math
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, get_args

from dsr1build import __version__
from dsr1build.digest import DEEPEST, BlobRef, Fields, FieldValue, decode, encode, sha256_hex
from dsr1build.errors import InvalidInput
from dsr1build.plan.action import Action, ActionKind, Results
from dsr1build.plan.explain import Difference, Explanation, Known, Reason, Shape, Shortened, Tree, is_list, shorten

RECORD_VERSION = 1
RECORD_PATH = Path(".dsr1build") / "last-build.json"
SHARED_BYTES = 64 << 10
BYTES_AN_ACTION = 4 << 10
_LONGEST_TEXT = 2000
_LARGEST_FILE = 256 << 20

OutcomeName: TypeAlias = Literal["local hit", "remote hit", "ran", "failed", "skipped"]


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """``fields`` has the digest of each field's value. A skipped action has no key and no fields."""

    kind: ActionKind
    label: str
    outcome: OutcomeName
    seconds: float
    key: str
    fields: Mapping[str, str]
    explanation: Explanation | None


@dataclass(frozen=True, slots=True)
class BuildRecord:
    """``actions`` by id in the order of the plan; ``values`` are the values of fields by their digests."""

    name: str
    dsr1build: str
    actions: Mapping[str, ActionRecord]
    values: Mapping[str, Tree]

    def known(self, origin: str) -> Iterator[Known]:
        """The actions whose fields are known."""
        for id, action in self.actions.items():
            if action.key:
                yield self.known_action(id, origin)

    def known_action(self, id: str, origin: str) -> Known:
        action = self.actions[id]
        return Known(origin, id, action.label, action.key, action.fields, lambda name: self.values[action.fields[name]])


@dataclass(frozen=True, slots=True)
class Done:
    """What became of an action, and the seconds that it ran."""

    outcome: OutcomeName
    seconds: float = 0.0


def watch_fields(actions: Mapping[str, Action], seen: dict[str, bytes]) -> dict[str, Action]:
    """The same actions; whenever the fields of one are computed, their encoding is put into ``seen`` under its id."""

    def watched(action: Action) -> Action:
        def fields(results: Results) -> Fields:
            found = action.fields(results)
            seen[action.id] = encode(found)
            return found

        return replace(action, fields=fields)

    return {id: watched(action) for id, action in actions.items()}


def make_record(
    name: str,
    actions: Mapping[str, Action],
    seen: Mapping[str, bytes],
    done: Mapping[str, Done],
    explanations: Mapping[str, Explanation],
    last: BuildRecord | None = None,
) -> BuildRecord:
    """``seen`` has the encoded fields of actions; an action that is not in ``done`` was skipped.

    What ``last`` says of an action with the same key is taken over, so that a build that does nothing pays next to nothing.
    """
    raw: dict[str, FieldValue] = {}
    kept: dict[str, Tree] = {}
    earlier = {action.key: action for action in last.actions.values()} if last else {}
    records: dict[str, ActionRecord] = {}
    for id, action in actions.items():
        became = done.get(id, Done("skipped"))
        fields: dict[str, str] = {}
        key = ""
        if id in seen:
            key = sha256_hex(seen[id])
        if last and key in earlier:
            fields = dict(earlier[key].fields)
            kept.update({digest: last.values[digest] for digest in fields.values()})
        elif key:
            for field, value in cast("Mapping[str, FieldValue]", decode(seen[id])).items():
                fields[field] = sha256_hex(encode(value))
                raw.setdefault(fields[field], value)
        explanation = explanations.get(id)
        records[id] = ActionRecord(action.kind, action.label, became.outcome, became.seconds, key, fields, explanation)
    values = _bounded(raw, kept, SHARED_BYTES + BYTES_AN_ACTION * len(records))
    return BuildRecord(name, __version__, records, values)


def _bounded(raw: Mapping[str, FieldValue], kept: Mapping[str, Tree], limit: int) -> dict[str, Tree]:
    """The values as trees; where they take more than ``limit`` bytes together, the largest keep less of their depth.
    ``kept`` are trees that an earlier record has already bounded."""
    trees = {**kept, **{digest: summarize(value, 100) for digest, value in raw.items() if digest not in kept}}
    sizes = {digest: len(json.dumps(tree_to_json(tree))) for digest, tree in trees.items()}
    for depth in (4, 3, 2, 1, 0):
        for digest in sorted(raw.keys() - kept.keys(), key=lambda d: (-sizes[d], d)):
            if sum(sizes.values()) <= limit:
                return trees
            trees[digest] = summarize(raw[digest], depth)
            sizes[digest] = len(json.dumps(tree_to_json(trees[digest])))
    return trees


def summarize(value: FieldValue, depth: int) -> Tree:
    """The value with long texts, byte strings, and lists and mappings below ``depth`` levels given by their digests."""
    if isinstance(value, bytes) or (isinstance(value, str) and len(value) > _LONGEST_TEXT):
        return shorten(value)
    if isinstance(value, Mapping):
        return {name: summarize(item, depth - 1) for name, item in value.items()} if depth else shorten(value)
    if is_list(cast("Tree", value)):
        items = cast("list[FieldValue]", value)
        return tuple(summarize(item, depth - 1) for item in items) if depth else shorten(value)
    return cast("Tree", value)


def tree_to_json(tree: Tree) -> Any:
    if isinstance(tree, BlobRef):
        return {"blob": tree.sha256}
    if isinstance(tree, Shortened):
        return {"shortened": tree.shape, "length": tree.length, "sha256": tree.sha256}
    if isinstance(tree, Mapping):
        return {"fields": {name: tree_to_json(item) for name, item in tree.items()}}
    if is_list(tree):
        return [tree_to_json(item) for item in cast("tuple[Tree, ...]", tree)]
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"float": repr(tree)}
    return tree


def tree_from_json(data: Any, depth: int = DEEPEST) -> Tree:
    """Raises KeyError, ValueError or TypeError where ``data`` is not what ``tree_to_json`` writes."""
    if depth < 0:
        raise ValueError("a value is nested too deeply")
    if isinstance(data, list):
        return tuple(tree_from_json(item, depth - 1) for item in data)
    if isinstance(data, dict):
        if "fields" in data:
            return {str(name): tree_from_json(item, depth - 1) for name, item in data["fields"].items()}
        if "blob" in data:
            return BlobRef(_digest(data["blob"]))
        if "float" in data:
            return float(_text(data["float"]))
        if type(data["length"]) is not int or data["length"] < 0:
            raise ValueError("the length of a value is not a number")
        return Shortened(_one_of(data["shortened"], get_args(Shape)), data["length"], _digest(data["sha256"]))
    return cast("Tree", data)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _digest(value: Any) -> str:
    if re.fullmatch("[0-9a-f]{64}", _text(value)) is None:
        raise ValueError(f"{value!r} is not a SHA-256")
    return _text(value)


def _one_of(value: Any, words: Sequence[str]) -> Any:
    if value not in words:
        raise ValueError(f"{value!r} is none of {', '.join(words)}")
    return value


def explanation_to_json(explanation: Explanation) -> dict[str, Any]:
    """The object that ``EXPLANATION_SCHEMA`` describes."""
    out: dict[str, Any] = {"reason": explanation.reason}
    if explanation.origin:
        out["against"] = {"origin": explanation.origin, "action": explanation.action, "label": explanation.label}
        out["against"]["key"] = explanation.key
    if explanation.difference is not None:
        out |= difference_to_json(explanation.difference, explanation.others)
    return out


def difference_to_json(difference: Difference, others: tuple[str, ...]) -> dict[str, Any]:
    return {"field": difference.path, "before": difference.before, "after": difference.after, "others": list(others)}


def explanation_from_json(data: Any) -> Explanation:
    """Raises KeyError, ValueError, TypeError or AttributeError where ``data`` is not what ``explanation_to_json`` writes."""
    reason = _one_of(data["reason"], get_args(Reason))
    against = data.get("against", {"origin": "", "action": "", "label": "", "key": ""})
    difference = None
    if "field" in data or reason == "changed":
        difference = Difference(_text(data["field"]), _text(data["before"]), _text(data["after"]))
    place = (_text(against["origin"]), _text(against["action"]), _text(against["label"]), _text(against["key"]))
    return Explanation(reason, *place, difference, tuple(map(_text, data.get("others", ()))))


def record_to_json(record: BuildRecord) -> dict[str, Any]:
    """The object that ``RECORD_SCHEMA`` describes."""

    def entry(action: ActionRecord) -> dict[str, Any]:
        out: dict[str, Any] = {"kind": action.kind, "label": action.label, "outcome": action.outcome, "seconds": action.seconds}
        if action.key:
            out |= {"key": action.key, "fields": dict(action.fields)}
        if action.explanation is not None:
            out["explanation"] = explanation_to_json(action.explanation)
        return out

    return {
        "version": RECORD_VERSION,
        "name": record.name,
        "dsr1build": record.dsr1build,
        "actions": {id: entry(action) for id, action in record.actions.items()},
        "values": {digest: tree_to_json(tree) for digest, tree in record.values.items()},
    }


def record_from_json(data: Any) -> BuildRecord:
    """Raises KeyError, ValueError, TypeError or AttributeError where ``data`` is not a record of this version."""
    if data["version"] != RECORD_VERSION:
        raise ValueError(f"version {data['version']} of the build record is unknown")

    def entry(given: Any) -> ActionRecord:
        explanation = explanation_from_json(given["explanation"]) if "explanation" in given else None
        fields = {str(name): str(digest) for name, digest in given.get("fields", {}).items()}
        if any(digest not in values for digest in fields.values()):
            raise ValueError("a field has no value")
        seconds = given["seconds"]
        if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
            raise ValueError(f"{seconds!r} is not a number of seconds")
        key = _digest(given["key"]) if "key" in given else ""
        kind, outcome = _one_of(given["kind"], get_args(ActionKind)), _one_of(given["outcome"], get_args(OutcomeName))
        return ActionRecord(kind, _text(given["label"]), outcome, seconds, key, fields, explanation)

    values = {str(digest): tree_from_json(tree) for digest, tree in data["values"].items()}
    actions = {str(id): entry(given) for id, given in data["actions"].items()}
    return BuildRecord(str(data["name"]), str(data["dsr1build"]), actions, values)


def write_record(record: BuildRecord, build_file: Path, warn: Callable[[str], None]) -> None:
    """Write the record beside the build file, as a whole or not at all. One warning where it cannot be written."""
    path = build_file.parent / RECORD_PATH
    scratch = ""
    try:
        path.parent.mkdir(exist_ok=True)
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            json.dump(record_to_json(record), out, separators=(",", ":"), ensure_ascii=False)
            os.fchmod(descriptor, 0o644)
        Path(scratch).replace(path)
    except OSError as error:
        if scratch:
            with contextlib.suppress(OSError):
                Path(scratch).unlink()
        warn(f"the build record {RECORD_PATH} cannot be written ({error.strerror}); explanations will know the cache alone")


def last_record(build_file: Path) -> BuildRecord | None:
    """The record of the last build beside the build file, or None where there is none that can be read."""
    try:
        return _read(build_file.parent / RECORD_PATH)
    except (OSError, KeyError, ValueError, TypeError, AttributeError):
        return None


def read_record(path: Path) -> BuildRecord:
    """Raises InvalidInput where the file is not a build record."""
    hint = f"Each build writes one to {RECORD_PATH} beside its BUILD.yaml."
    try:
        return _read(path)
    except OSError as error:
        raise InvalidInput(f"the build record cannot be read: {error.strerror}", where=str(path), hint=hint) from None
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        why = str(error) if str(error).startswith("version ") else "the file is not a build record"
        raise InvalidInput(why, where=str(path), hint=hint) from None


def _read(path: Path) -> BuildRecord:
    if path.exists() and not path.is_file():
        # A named pipe would make the build wait for a writer.
        raise ValueError("the file is not a build record")
    with path.open("rb") as file:
        data = file.read(_LARGEST_FILE + 1)
    if len(data) > _LARGEST_FILE:
        raise ValueError("the file is too long")
    try:
        return record_from_json(json.loads(data))
    except RecursionError:
        raise ValueError("the file is nested too deeply") from None


def _object(properties: Mapping[str, Any], optional: tuple[str, ...] = ()) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": dict(properties), "required": required, "additionalProperties": False}


_TEXT = {"type": "string"}
_SHA256 = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
KIND_SCHEMA = {"enum": ["lower", "compile", "runtime", "link"]}
DIFFERENCE_PROPERTIES: Mapping[str, Any] = {
    "field": {**_TEXT, "description": "The first field that differs."},
    "before": {**_TEXT, "description": "Its earlier value; a long one by its length and digest."},
    "after": {**_TEXT, "description": "Its value now."},
    "others": {"type": "array", "items": _TEXT, "description": "Other top-level fields that differ."},
}
EXPLANATION_SCHEMA: Mapping[str, Any] = {
    **_object(
        {
            "reason": {
                "enum": ["changed", "gone", "first", "unread"],
                "description": "`changed`: a field differs; `gone`: the result of this key is no longer in the cache; `first`: "
                "there is nothing to compare with; `unread`: the build did not look into the cache.",
            },
            "against": {
                **_object({"origin": _TEXT, "action": _TEXT, "label": _TEXT, "key": _SHA256}),
                "description": "The earlier action; its id and label are empty where it was found in the cache.",
            },
            **DIFFERENCE_PROPERTIES,
        },
        ("against", *DIFFERENCE_PROPERTIES),
    ),
    "description": "Why the action was not in the cache.",
}

RECORD_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "Record of a build (.dsr1build/last-build.json)",
    **_object(
        {
            "version": {"const": RECORD_VERSION},
            "name": {**_TEXT, "description": "Name of the build."},
            "dsr1build": {**_TEXT, "description": "Version of the program that built."},
            "actions": {
                "type": "object",
                "description": "By id, inputs before what uses them.",
                "additionalProperties": _object(
                    {
                        "kind": KIND_SCHEMA,
                        "label": _TEXT,
                        "outcome": {"enum": ["local hit", "remote hit", "ran", "failed", "skipped"]},
                        "seconds": {"type": "number", "minimum": 0, "description": "How long it ran; 0 for a hit."},
                        "key": {**_SHA256, "description": "Absent for a skipped action."},
                        "fields": {
                            "type": "object",
                            "description": "What the key was made of: each field with the digest of its value.",
                            "additionalProperties": _SHA256,
                        },
                        "explanation": EXPLANATION_SCHEMA,
                    },
                    ("key", "fields", "explanation"),
                ),
            },
            "values": {
                "type": "object",
                "description": "The values of fields by the SHA-256 of their encodings.",
                "propertyNames": _SHA256,
                "additionalProperties": {"$ref": "#/$defs/value"},
            },
        }
    ),
    "$defs": {
        "value": {
            "anyOf": [
                {"type": ["null", "boolean", "number", "string"]},
                {"type": "array", "items": {"$ref": "#/$defs/value"}},
                _object({"fields": {"type": "object", "additionalProperties": {"$ref": "#/$defs/value"}}}),
                _object({"blob": _SHA256}),
                _object({"float": {"enum": ["inf", "-inf"]}}),
                _object(
                    {
                        "shortened": {"enum": ["text", "bytes", "list", "mapping"]},
                        "length": {"type": "integer", "minimum": 0},
                        "sha256": _SHA256,
                    }
                ),
            ]
        }
    },
}
