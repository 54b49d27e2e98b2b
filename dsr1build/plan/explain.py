"""Why two actions have different keys: the first place where their fields differ."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsr1build.digest import BlobRef, FieldValue, decode

_LONGEST = 200


@dataclass(frozen=True, slots=True)
class Difference:
    """``path`` leads to the field (``pipeline[2][1]``, ``target.cpu``); ``before`` and ``after`` show its two values."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} -> {self.after}"


def first_difference(before: bytes, after: bytes) -> Difference | None:
    """The first field, in the order of the encoding, that two encoded field trees do not share; None where they are equal.

    Raises ValueError where one of them is not a canonical encoding.
    """
    return _compare("", decode(before), decode(after))


def _compare(path: str, before: FieldValue, after: FieldValue) -> Difference | None:
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for name in sorted({*before, *after}, key=lambda name: name.encode("utf-8")):
            inner = f"{path}.{name}" if path else name
            if name not in before or name not in after:
                shown = [show(side[name]) if name in side else "absent" for side in (before, after)]
                return Difference(inner, shown[0], shown[1])
            found = _compare(inner, before[name], after[name])
            if found:
                return found
        return None
    if _is_list(before) and _is_list(after):
        assert isinstance(before, Sequence) and isinstance(after, Sequence)
        for number, (left, right) in enumerate(zip(before, after, strict=False)):
            found = _compare(f"{path}[{number}]", left, right)
            if found:
                return found
        if len(before) != len(after):
            return Difference(path, f"{len(before)} items", f"{len(after)} items")
        return None
    # Python holds 1, 1.0 and True equal, and 0.0 and -0.0; their encodings differ.
    if type(before) is type(after) and repr(before) == repr(after):
        return None
    return Difference(path, show(before), show(after))


def _is_list(value: FieldValue) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def show(value: FieldValue) -> str:
    """A field's value in few characters."""
    if isinstance(value, BlobRef):
        return f"blob {value.sha256[:16]}"
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    if isinstance(value, Mapping):
        return f"{len(value)} fields"
    if _is_list(value):
        assert isinstance(value, Sequence)
        return f"{len(value)} items"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
