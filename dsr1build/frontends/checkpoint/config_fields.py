"""A config.json whose fields are taken one by one, with the place of each field in the file for error messages.

A reader takes every field that its architecture knows. What nobody took and what is not listed as without effect is
unknown, and unknown fields are refused: a field that is silently ignored is a model that silently differs.
"""

import difflib
import json
import math
import stat
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dsr1build.errors import InvalidInput, Position

LARGEST_SIZE = 2**31 - 1
# The index of R1 has 9 MB.
LARGEST_FILE = 256 << 20
# Beyond these sizes a power of a number overflows; no model has such a constant.
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-30, 1e30

# Fields that change neither a shape nor a number of inference.
WITHOUT_EFFECT: frozenset[str] = frozenset(
    {
        # Training and regularisation.
        "attention_dropout",
        "aux_loss_alpha",
        "embd_pdrop",
        "output_router_logits",
        "resid_pdrop",
        "router_aux_loss_coef",
        "seq_aux",
        # How a framework runs or stores the model.
        "_attn_implementation_autoset",
        "_name_or_path",
        "attn_implementation",
        "auto_map",
        "chunk_size_feed_forward",
        "ep_size",
        "name_or_path",
        "output_attentions",
        "output_hidden_states",
        "pretraining_tp",
        "return_dict",
        "tie_last_hidden_states",
        "torchscript",
        "transformers_version",
        "use_bfloat16",
        "use_cache",
        # Classification heads, which a causal language model does not have.
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        # Defaults of text generation that old versions of transformers wrote into config.json.
        "do_sample",
        "max_length",
        "min_length",
        "num_beams",
        "pad_token_id",
        "repetition_penalty",
        "temperature",
        "top_k",
        "top_p",
    }
)


def read_json_object(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of a JSON file and its object. Raises InvalidInput with file:line:col for anything that is not one."""
    try:
        information = path.stat()
        if not stat.S_ISREG(information.st_mode) and not stat.S_ISDIR(information.st_mode):
            raise InvalidInput("expected a JSON file, found neither file nor directory", where=str(path), hint="Check the path.")
        if information.st_size > LARGEST_FILE:
            message = f"the file has {information.st_size} bytes, more than the {LARGEST_FILE} that are read"
            raise InvalidInput(message, where=str(path), hint="Check that this is the right file.")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InvalidInput("file not found", where=str(path), hint="Check the path.") from None
    except IsADirectoryError:
        hint = f"Name the file: {path / 'config.json'}, or use `checkpoint:` for a directory with weights."
        raise InvalidInput("expected a JSON file, found a directory", where=str(path), hint=hint) from None
    except UnicodeDecodeError as error:
        hint = "Save the file as UTF-8."
        raise InvalidInput(f"not a text file: byte {error.start} is not UTF-8", where=str(path), hint=hint) from None
    except OSError as error:
        raise InvalidInput(f"cannot read the file: {error.strerror}", where=str(path), hint="Check its permissions.") from None
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = [name for name, _ in pairs]
            duplicates.extend(name for name in members if names.count(name) > 1)
        return members

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        position = _position(path, text, error.pos)
        raise InvalidInput(f"invalid JSON: {error.msg}", position=position, hint="Correct the JSON syntax.") from None
    except ValueError as error:
        hint = "Check that this is the right file."
        raise InvalidInput(f"invalid JSON: {error}", where=str(path), hint=hint) from None
    except RecursionError:
        hint = "Check that this is the right file."
        raise InvalidInput("invalid JSON: nested too deeply", where=str(path), hint=hint) from None
    if not isinstance(value, dict):
        hint = "A configuration starts with `{`."
        raise InvalidInput("expected a JSON object", position=_position(path, text, 0), hint=hint)
    if duplicates:
        name = duplicates[0]
        at = text.rfind(json.dumps(name))
        place = _position(path, text, at) if at >= 0 else None
        hint = "Keep one of the two."
        raise InvalidInput(f"field {name!r} is given twice", position=place, where=str(path), hint=hint)
    return text, value


def _position(path: Path, text: str, offset: int) -> Position:
    start = text.rfind("\n", 0, offset) + 1
    end = text.find("\n", offset)
    line = text[start : end if end >= 0 else len(text)].rstrip("\r")
    return Position(str(path), text.count("\n", 0, offset) + 1, offset - start + 1, line)


def _members(text: str, offset: int) -> Iterator[tuple[str, int, int]]:
    """(key, offset of the key, offset of the value) for the object at ``offset`` of a text that is known to be valid."""
    decoder = json.JSONDecoder()
    at = text.index("{", offset) + 1
    while True:
        while text[at] in " \t\r\n,":
            at += 1
        if text[at] == "}":
            return
        key_offset = at
        key, at = decoder.raw_decode(text, at)
        at = text.index(":", at) + 1
        while text[at] in " \t\r\n":
            at += 1
        yield key, key_offset, at
        _, at = decoder.raw_decode(text, at)


def _locate(text: str, keys: Sequence[str]) -> int | None:
    """The offset of the key at the end of the path ``keys``, or None."""
    offset = max(text.find("{"), 0)
    found: int | None = None
    for key in keys:
        found = None
        for name, key_offset, value_offset in _members(text, offset):
            if name == key:
                found, offset = key_offset, value_offset
                break
        if found is None or (key != keys[-1] and text[offset] != "{"):
            return found
    return found


class Fields:
    """The fields of one JSON object of a configuration; each ``take`` method marks its field as known.

    ``path`` holds the keys that lead to this object. A field that is null counts as absent where a default is given.
    """

    def __init__(self, file: Path, text: str, values: Mapping[str, Any], path: tuple[str, ...] = ()) -> None:
        self.file = file
        self.text = text
        self.values = values
        self.path = path
        self.taken: set[str] = set()

    def refuse(self, name: str, message: str, hint: str) -> NoReturn:
        """Raise InvalidInput at the field's place in the file."""
        raise InvalidInput(message, position=self.position(name), where=str(self.file), hint=hint)

    def position(self, name: str) -> Position | None:
        offset = _locate(self.text, (*self.path, name))
        return None if offset is None else _position(self.file, self.text, offset)

    def label(self, name: str) -> str:
        return ".".join((*self.path, name))

    def present(self, name: str) -> bool:
        """Whether the field is there and not null. Marks it as known."""
        self.taken.add(name)
        return self.values.get(name) is not None

    def raw(self, name: str) -> Any:
        self.taken.add(name)
        return self.values.get(name)

    def _required(self, name: str) -> NoReturn:
        hint = "Take the config.json that belongs to the model."
        raise InvalidInput(f"field {self.label(name)!r} is missing", where=str(self.file), hint=hint)

    def integer(self, name: str, default: int | None = None, *, low: int = 1, high: int = LARGEST_SIZE) -> int:
        """An integer in [low, high]; required where no default is given."""
        value = self.raw(name)
        if value is None:
            if default is None:
                self._required(name)
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            self.refuse(name, f"{self.label(name)} must be an integer, not {json.dumps(value)}", "Correct the value.")
        if not low <= value <= high:
            message = f"{self.label(name)} must be between {low} and {high}, not {value}"
            self.refuse(name, message, "Correct the value.")
        return int(value)

    def number(self, name: str, default: float | None = None, *, positive: bool = True) -> float:
        """A finite number; required where no default is given."""
        value = self.raw(name)
        if value is None:
            if default is None:
                self._required(name)
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or (isinstance(value, float) and not math.isfinite(value))
        ):
            self.refuse(name, f"{self.label(name)} must be a finite number, not {json.dumps(value)}", "Correct the value.")
        if value != 0 and not SMALLEST_NUMBER <= abs(value) <= LARGEST_NUMBER:
            message = f"{self.label(name)} is out of range: its size must lie between {SMALLEST_NUMBER} and {LARGEST_NUMBER}"
            self.refuse(name, message, "Correct the value.")
        if positive and value <= 0:
            self.refuse(name, f"{self.label(name)} must be greater than 0, not {json.dumps(value)}", "Correct the value.")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(name, f"{self.label(name)} must be true or false, not {json.dumps(value)}", "Correct the value.")
        return value

    def choice(self, name: str, default: str, allowed: Sequence[str]) -> str:
        """One of ``allowed``; anything else is an unsupported value, refused by name."""
        value = self.raw(name)
        if value is None:
            return default
        if value not in allowed:
            message = f"{self.label(name)} {json.dumps(value)} is not supported"
            self.refuse(name, message, f"Supported: {', '.join(allowed)}.")
        return str(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self.raw(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in ids):
            message = f"{self.label(name)} must be a token id or a list of token ids, not {json.dumps(value)}"
            self.refuse(name, message, "Correct the value.")
        return tuple(ids)

    def nested(self, name: str) -> "Fields | None":
        """The fields of an object inside this one, or None where it is absent or null."""
        value = self.raw(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(name, f"{self.label(name)} must be an object, not {json.dumps(value)}", "Correct the value.")
        return Fields(self.file, self.text, value, (*self.path, name))

    def refuse_unknown(self, without_effect: frozenset[str] = frozenset()) -> None:
        """Refuse the first field, in the order of the file, that was neither taken nor is without effect."""
        for name in self.values:
            if name in self.taken or name in without_effect:
                continue
            close = difflib.get_close_matches(name, sorted(self.taken | without_effect), n=1)
            known = f"Did you mean {close[0]!r}? " if close else ""
            hint = f"{known}Remove the field if it does not change the model's numbers."
            self.refuse(name, f"unknown field {self.label(name)!r}: its effect on the model is not known", hint)


def read_fields(path: Path) -> Fields:
    """The top-level fields of a config.json."""
    text, values = read_json_object(path)
    return Fields(path, text, values)
