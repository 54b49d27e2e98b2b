"""Why an action is not in the cache: the first place where its fields differ from those of the nearest earlier action.

Fields are compared as trees. A tree is a field's value, in which long texts and deep parts may be given by their digests
alone (``Shortened``), as in a build record.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeAlias, cast

from dsr1build.digest import BlobRef, FieldValue, decode, encode, sha256_hex

Reason: TypeAlias = Literal["changed", "gone", "first", "unread"]
Shape: TypeAlias = Literal["text", "bytes", "list", "mapping"]

# Characters of a value that are shown as they are; of a longer one its length and digest are shown.
_LONGEST_SHOWN = 80
_EXCERPT = 40
# Of equally near earlier actions so many are compared leaf by leaf.
_COMPARED_BY_LEAVES = 8


@dataclass(frozen=True, slots=True)
class Shortened:
    """A value that is not at hand: its length (characters, bytes, items or fields) and the SHA-256 of its encoding."""

    shape: Shape
    length: int
    sha256: str


Tree: TypeAlias = "bool | int | float | str | bytes | BlobRef | Shortened | Sequence[Tree] | Mapping[str, Tree] | None"


@dataclass(frozen=True, slots=True)
class Difference:
    """``path`` leads to the field (``pipeline.lower``, ``target.cpu``); ``before`` and ``after`` show its two values."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path} was {self.before}, is {self.after}"


@dataclass(frozen=True)
class Known:
    """The fields of an action as far as they are known. ``tree`` gives the value of one of the fields by its name.

    ``digests`` has the SHA-256 of the encoding of each field; ``origin`` says where the action was found, ``action`` is its
    id there (empty in the cache), ``label`` what people call it.
    """

    origin: str
    action: str
    label: str
    key: str
    digests: Mapping[str, str]
    tree: Callable[[str], Tree]

    @cached_property
    def name(self) -> str:
        """The label without the kernel's id, which is another one for each form of the kernel."""
        return re.sub(r"\b[0-9a-f]{16}\b ?", "", self.label)

    @classmethod
    def from_encoded(cls, encoded: bytes, origin: str, action: str = "", label: str = "") -> "Known":
        """Raises ValueError where ``encoded`` is not the encoding of fields."""
        fields = decode(encoded)
        if not isinstance(fields, Mapping):
            raise ValueError("the fields of an action are a mapping")
        digests = {name: sha256_hex(encode(value)) for name, value in fields.items()}
        return cls(origin, action, label, sha256_hex(encoded), digests, lambda name: fields[name])


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why an action missed.

    * ``changed``: ``difference`` is the first field that differs from the nearest earlier action; ``others`` are the other
      top-level fields that differ.
    * ``gone``: an earlier build had the same key, and the result is no longer in the cache.
    * ``first``: there is no earlier action that it could be compared with.
    * ``unread``: the build did not look into the cache.

    ``origin``, ``action``, ``label`` and ``key`` name the earlier action, as in ``Known``.
    """

    reason: Reason
    origin: str = ""
    action: str = ""
    label: str = ""
    key: str = ""
    difference: Difference | None = None
    others: tuple[str, ...] = ()


def explain_miss(now: Known, last: Sequence[Known], cache: Callable[[], Iterable[Known]]) -> Explanation:
    """Compare with the action of the same id in the last build, else with the nearest one there, else with the nearest one
    in the cache, which is read only then."""
    same = next((known for known in last if known.action == now.action), None)
    if same is None:
        same = next((known for known in last if known.key == now.key), None)
    if same is not None and same.key == now.key:
        return Explanation("gone", same.origin, same.action, same.label, same.key)
    earlier = same or nearest(now, last) or nearest(now, cache())
    if earlier is None:
        return Explanation("first")
    difference, others = compare(earlier, now)
    return Explanation("changed", earlier.origin, earlier.action, earlier.label, earlier.key, difference, others)


def nearest(now: Known, candidates: Iterable[Known]) -> Known | None:
    """The candidate with the same field names and the fewest fields that differ, at most half of them; one of the same name
    goes before others, and of equals the one with the fewest different leaves."""
    ranked: list[tuple[tuple[bool, int], Known]] = []
    for known in candidates:
        if known.digests.keys() == now.digests.keys() and known.key != now.key:
            differing = len(_differing(known, now))
            if 2 * differing <= len(now.digests):
                ranked.append(((known.name != now.name, differing), known))
    if not ranked:
        return None
    best = min(rank for rank, _ in ranked)
    equals = [known for rank, known in ranked if rank == best][:_COMPARED_BY_LEAVES]
    if len(equals) == 1:
        return equals[0]
    return min(equals, key=lambda known: sum(_distance(known.tree(f), now.tree(f)) for f in _differing(known, now)))


def compare(before: Known, after: Known) -> tuple[Difference | None, tuple[str, ...]]:
    """The first difference in the order of the encoding, and the other top-level fields that differ."""
    first, *others = _differing(before, after) or [""]
    if not first:
        return None, ()
    return _field_difference(first, before, after), tuple(others)


def _field_difference(name: str, before: Known, after: Known) -> Difference:
    if name not in before.digests:
        return Difference(name, "absent", show(after.tree(name)))
    if name not in after.digests:
        return Difference(name, show(before.tree(name)), "absent")
    found = _compare(name, before.tree(name), after.tree(name))
    # What differs may lie in a part that one of the two does not hold.
    return found or Difference(name, f"digest {before.digests[name][:16]}", f"digest {after.digests[name][:16]}")


def _differing(before: Known, after: Known) -> list[str]:
    names = sorted({*before.digests, *after.digests}, key=lambda name: name.encode("utf-8"))
    return [name for name in names if before.digests.get(name) != after.digests.get(name)]


def first_difference(before: bytes, after: bytes) -> Difference | None:
    """The first field, in the order of the encoding, that two encoded field trees do not share; None where they are equal.

    Raises ValueError where one of them is not a canonical encoding.
    """
    return _compare("", decode(before), decode(after))


def _compare(path: str, before: Tree, after: Tree) -> Difference | None:
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
    if is_list(before) and is_list(after):
        left, right = cast("Sequence[Tree]", before), cast("Sequence[Tree]", after)
        for number, (old, new) in enumerate(zip(left, right, strict=False)):
            name = _entry_name(old, new)
            if name:
                found = _compare(f"{path}.{name}", cast("Sequence[Tree]", old)[1], cast("Sequence[Tree]", new)[1])
            else:
                found = _compare(f"{path}[{number}]", old, new)
            if found:
                return found
        if len(left) != len(right):
            return Difference(path, show(before), show(after))
        return None
    if isinstance(before, Shortened) or isinstance(after, Shortened):
        digests = [_digest(value) for value in (before, after)]
        if None in digests or digests[0] == digests[1]:
            return None
        return Difference(path, show(before), show(after))
    # Python holds 1, 1.0 and True equal, and 0.0 and -0.0; their encodings differ.
    if type(before) is type(after) and repr(before) == repr(after):
        return None
    if isinstance(before, str) and isinstance(after, str):
        return Difference(path, *_show_texts(before, after))
    return Difference(path, show(before), show(after))


def _entry_name(before: Tree, after: Tree) -> str:
    """The name of two entries [name, value] of ordered mappings, or "" where they are something else."""
    names: list[str] = []
    for entry in (before, after):
        if is_list(entry):
            items = cast("Sequence[Tree]", entry)
            if len(items) == 2 and isinstance(items[0], str):
                names.append(items[0])
    return names[0] if len(names) == 2 and names[0] == names[1] else ""


def _distance(before: Tree, after: Tree) -> int:
    """The number of leaves that differ."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        return sum(_distance(before.get(name), after.get(name)) for name in {*before, *after})
    if is_list(before) and is_list(after):
        left, right = cast("Sequence[Tree]", before), cast("Sequence[Tree]", after)
        return abs(len(left) - len(right)) + sum(_distance(a, b) for a, b in zip(left, right, strict=False))
    return int(type(before) is not type(after) or repr(before) != repr(after))


def is_list(value: Tree) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def shorten(value: FieldValue) -> Shortened:
    """A text, byte string, list or mapping by its length and digest alone."""
    shape: Shape = "mapping"
    if isinstance(value, (str, bytes)):
        shape = "text" if isinstance(value, str) else "bytes"
    elif isinstance(value, Sequence):
        shape = "list"
    return Shortened(shape, len(cast("Sequence[object]", value)), sha256_hex(encode(value)))


def _digest(value: Tree) -> str | None:
    """The SHA-256 of the value's encoding, or None where a part of it is not at hand."""
    if isinstance(value, Shortened):
        return value.sha256
    try:
        return sha256_hex(encode(cast("FieldValue", value)))
    except TypeError:
        return None


def show(value: Tree) -> str:
    """A field's value in few characters: as it is where it is short, else by its length and digest."""
    if isinstance(value, BlobRef):
        return f"blob {value.sha256[:16]}"
    if isinstance(value, Shortened):
        unit = {"text": "characters", "bytes": "bytes", "list": "items", "mapping": "fields"}[value.shape]
        return f"{value.length} {unit} (digest {value.sha256[:16]})"
    if isinstance(value, bytes):
        return f"{len(value)} bytes (digest {sha256_hex(encode(value))[:16]})"
    if isinstance(value, Mapping) or is_list(value):
        text = _as_json(value)
        if text is not None and len(text) <= _LONGEST_SHOWN:
            return text
        digest = _digest(value)
        unit = "fields" if isinstance(value, Mapping) else "items"
        return f"{len(cast('Sequence[object]', value))} {unit}" + (f" (digest {digest[:16]})" if digest else "")
    if isinstance(value, str):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(value) <= _LONGEST_SHOWN else show(shorten(value))
    text = json.dumps(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _as_json(value: Tree) -> str | None:
    try:
        return json.dumps(value, ensure_ascii=False)
    except TypeError:
        return None


def _show_texts(before: str, after: str) -> tuple[str, str]:
    """Two different texts; of long ones the part around the first difference, the length and the digest."""
    if max(len(before), len(after)) <= _LONGEST_SHOWN:
        return show(before), show(after)
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), min(len(before), len(after)))

    def around(text: str) -> str:
        if len(text) <= _LONGEST_SHOWN:
            return show(text)
        start, end = max(0, at - _EXCERPT // 2), min(len(text), at + _EXCERPT)
        excerpt = f"{'...' if start else ''}{text[start:end]}{'...' if end < len(text) else ''}"
        return f"{json.dumps(excerpt, ensure_ascii=False)}, {show(shorten(text))}"

    return around(before), around(after)


def render_explanation(explanation: Explanation, action: str = "") -> str:
    """One line for people; ``action`` is the id of the action that missed."""
    if explanation.reason == "first":
        return "nothing like it in the last build or in the cache"
    if explanation.reason == "unread":
        return "the cache was not read"
    if explanation.reason == "gone":
        return f"its key is that of the {explanation.origin}; the result is no longer in the cache"
    text = str(explanation.difference)
    if explanation.others:
        text += f"; also {', '.join(explanation.others)}"
    if explanation.origin == "cache":
        return f"{text} (compared with the entry {explanation.key[:16]} of the cache)"
    if explanation.action != action:
        return f"{text} (compared with {explanation.label} of the {explanation.origin})"
    return text
