"""YAML read into a tree whose every key and value keeps its place in the file.

The tree is built from libyaml's event stream and holds only mappings, lists, text, numbers and booleans: there is no way
from a file to any other Python object. What makes YAML surprising is refused, each with one message: anchors and aliases
(and with them alias bombs), tags, merge keys, several documents, duplicate keys, tabs, left-over merge markers, and
scalars that versions of YAML read differently. A UTF-8 byte order mark and Windows line ends are accepted.
"""

import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import yaml

from dsr1build.config.scalars import AmbiguousScalar, ScalarValue, resolve_plain, shown_text
from dsr1build.errors import InvalidInput, Position

LARGEST_FILE = 1 << 20
DEEPEST_NESTING = 32

Data: TypeAlias = "ScalarValue | tuple[Data, ...] | dict[str, Data]"
Step: TypeAlias = str | int

# libyaml ends lines at all of these, and columns and lines must be counted as it counts them.
_LINE_END = re.compile("\r\n|[\r\n\x85\u2028\u2029]")
_UNPRINTABLE = re.compile("[^\t\n\r\x20-\x7e\x85\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_MERGE_MARKER = re.compile(r"(<{7}|>{7}|\|{7})( .*)?|={7}")
_TAB_INDENTATION = re.compile(r" *\t")


@dataclass(frozen=True, slots=True)
class Scalar:
    position: Position
    value: ScalarValue
    text: str


@dataclass(frozen=True, slots=True)
class Items:
    position: Position
    items: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Entry:
    key: str
    position: Position
    value: "Node"


@dataclass(frozen=True, slots=True)
class Entries:
    position: Position
    entries: tuple[Entry, ...]


Node: TypeAlias = Scalar | Items | Entries


@dataclass(frozen=True, slots=True)
class Document:
    """A parsed file: ``file`` is its path as messages show it, ``root`` its content."""

    file: str
    root: Entries

    def find(self, path: tuple[Step, ...]) -> tuple[Position, Node]:
        """The place of the key (or list item) that ``path`` leads to, and its value.

        A path that goes on where the file does not is followed as far as the file goes.
        """
        position: Position = self.root.position
        node: Node = self.root
        for step in path:
            if isinstance(node, Entries):
                entry = next((e for e in node.entries if e.key == step), None)
                if entry is None:
                    break
                position, node = entry.position, entry.value
            elif isinstance(node, Items) and isinstance(step, int) and step < len(node.items):
                node = node.items[step]
                position = node.position
            else:
                break
        return position, node

    def position(self, *path: Step) -> Position:
        """Where the value that ``path`` leads to is written."""
        return self.find(path)[1].position


def to_data(node: Node) -> Data:
    """The tree as plain data: dict, tuple, str, int, float, bool and None."""
    if isinstance(node, Scalar):
        return node.value
    if isinstance(node, Items):
        return tuple(to_data(item) for item in node.items)
    return {entry.key: to_data(entry.value) for entry in node.entries}


def read_document(path: Path, shown: str) -> Document:
    """Read and parse ``path``; messages call it ``shown``. Raises InvalidInput for everything wrong with the file."""
    return parse_document(_read_bytes(path, shown), shown)


def _read_bytes(path: Path, shown: str) -> bytes:
    try:
        info = path.stat()
        if stat.S_ISDIR(info.st_mode):
            raise InvalidInput("this is a directory, not a file", where=shown, hint=_directory_hint(path, shown))
        if not stat.S_ISREG(info.st_mode):
            raise InvalidInput("this is not a regular file", where=shown, hint="Name a YAML file.")
        if info.st_size > LARGEST_FILE:
            raise InvalidInput(
                f"the file has {info.st_size:,} bytes, more than the {LARGEST_FILE:,} that are read",
                where=shown,
                hint="Is this the YAML file that was meant?",
            )
        with path.open("rb") as stream:
            return stream.read(LARGEST_FILE)
    except FileNotFoundError:
        raise InvalidInput("the file does not exist", where=shown, hint=missing_file_hint(path)) from None
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise InvalidInput(
            f"the file cannot be read: {reason}", where=shown, hint="Check the path and its permissions."
        ) from None


def _directory_hint(path: Path, shown: str) -> str:
    if (path / "BUILD.yaml").is_file():
        return f"Did you mean {os.path.join(shown, 'BUILD.yaml')}?"  # noqa: PTH118 - keeps the path as the user wrote it
    return "Name a YAML file inside it."


def missing_file_hint(path: Path) -> str:
    """The next step for a path that does not exist: a similar name beside it, or the first part that is missing."""
    from difflib import get_close_matches

    parent = path.parent
    try:
        names = sorted(entry.name for entry in parent.iterdir())
    except OSError:
        return f"There is no directory {shown_text(parent.name or str(parent))} that could be read either; check the path."
    close = get_close_matches(path.name, names, n=1, cutoff=0.6)
    if close:
        return f"Did you mean {close[0]}?"
    return "Check the path: one in a file is relative to that file, one on the command line to the current directory."


def parse_document(data: bytes, shown: str) -> Document:
    """Parse the bytes of a file into a tree. Raises InvalidInput with the place of the first error."""
    text = _decode(data, shown)
    lines = _LINE_END.split(text)
    _refuse_lines(lines, shown)
    root = _Builder(shown, lines, text).document()
    if not isinstance(root, Entries):
        what = "a list" if isinstance(root, Items) else "one value"
        raise InvalidInput(
            f"the file must hold keys and values, but holds {what}",
            position=root.position,
            hint="Begin with `version: 1`.",
        )
    return Document(shown, root)


def _decode(data: bytes, shown: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise InvalidInput("the file is UTF-16, not UTF-8", where=shown, hint="Save the file as UTF-8.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # The exception counts from the end of the byte order mark, if there is one.
        body = data.removeprefix(b"\xef\xbb\xbf")
        before = body[: error.start].decode("utf-8")
        line = _LINE_END.split(before)[-1]
        number = len(_LINE_END.split(before))
        raise InvalidInput(
            f"the byte 0x{body[error.start]:02x} is not valid UTF-8",
            position=Position(shown, number, len(line) + 1, line),
            hint="Save the file as UTF-8.",
        ) from None


def _refuse_lines(lines: list[str], shown: str) -> None:
    """Faults that a parser would report badly or not at all, found line by line."""
    for number, line in enumerate(lines, 1):
        if match := _UNPRINTABLE.search(line):
            raise InvalidInput(
                f"the control character U+{ord(match.group()):04X} is not allowed",
                position=Position(shown, number, match.start() + 1, _UNPRINTABLE.sub("?", line)),
                hint="Is this a text file? Remove the character.",
            )
        if _MERGE_MARKER.fullmatch(line):
            raise InvalidInput(
                "a merge conflict was left in the file",
                position=Position(shown, number, 1, line),
                hint="Choose one of the two sides and remove the marker lines.",
            )
        if _TAB_INDENTATION.match(line):
            raise InvalidInput(
                "the line is indented with a tab",
                position=Position(shown, number, line.index("\t") + 1, line),
                hint="YAML allows only blanks there; use two blanks a level.",
            )


# What libyaml says, and what to do about it.
_SYNTAX_HINTS: tuple[tuple[str, str], ...] = (
    ("tab character", "YAML allows no tabs there; use blanks."),
    ("mapping values are not allowed", "Put a value that contains `: ` in quotes, and check the indentation."),
    ("did not find expected ',' or", "Close the bracket, and put items that contain { } [ ] or , in quotes."),
    ("cannot start any token", "Put a value that begins with @ ` or % in quotes."),
    ("did not find expected key", "Keys of one mapping must be indented alike."),
    ("could not find expected ':'", "A key is followed by a colon and a blank, a list item begins with a dash and a blank."),
    ("unexpected end of stream", "Close the quotes."),
    ("unknown escape character", "Use single quotes, or write the backslash twice."),
    ("incompatible YAML document", "Remove the %YAML line."),
    ("<document start>", "Keep one document in the file."),
)


class _Mark(Protocol):
    @property
    def line(self) -> int: ...
    @property
    def column(self) -> int: ...


class _Builder:
    """Turns the event stream of one file into its tree; the state is the stream and the text for messages."""

    def __init__(self, shown: str, lines: list[str], text: str) -> None:
        self.shown = shown
        self.lines = lines
        self.events: Iterator[yaml.Event] = yaml.parse(text, Loader=yaml.CSafeLoader)

    def at(self, mark: "_Mark | None") -> Position:
        # libyaml gives every event a place; the type of the bindings leaves it open.
        assert mark is not None
        line = self.lines[mark.line] if mark.line < len(self.lines) else ""
        return Position(self.shown, mark.line + 1, mark.column + 1, line)

    def next(self) -> yaml.Event:
        try:
            return next(self.events)
        except yaml.MarkedYAMLError as error:
            raise self.syntax_error(error) from None

    def syntax_error(self, error: yaml.MarkedYAMLError) -> InvalidInput:
        problem = error.problem or "the text cannot be parsed"
        mark = error.problem_mark
        position = self.at(mark) if mark else Position(self.shown, 1, 1)
        # At the end of the file there is nothing to point at; the construct that was not closed is what helps.
        if not position.text.strip() and error.context_mark:
            position = self.at(error.context_mark)
        hint = next((hint for part, hint in _SYNTAX_HINTS if part in problem), "Check the YAML syntax of this line.")
        return InvalidInput(f"this is not valid YAML: {problem}", position=position, hint=hint)

    def document(self) -> Node:
        self.next()  # the start of the stream
        event = self.next()
        if isinstance(event, yaml.StreamEndEvent):
            raise InvalidInput("the file is empty", position=Position(self.shown, 1, 1), hint="Begin with `version: 1`.")
        root = self.node(self.next(), 0)
        self.next()  # the end of the document
        event = self.next()
        if not isinstance(event, yaml.StreamEndEvent):
            raise InvalidInput(
                "the file holds more than one YAML document",
                position=self.at(event.start_mark),
                hint="Keep one document in the file and remove the `---` lines between them.",
            )
        return root

    def node(self, event: yaml.Event, depth: int) -> Node:
        position = self.at(event.start_mark)
        if isinstance(event, yaml.AliasEvent):
            raise InvalidInput(
                f"the alias `*{shown_text(event.anchor or '')}` is not allowed: values are written out here",
                position=position,
                hint="Write the value in place of the alias.",
            )
        if not isinstance(event, yaml.ScalarEvent | yaml.SequenceStartEvent | yaml.MappingStartEvent):
            raise AssertionError(f"{type(event).__name__} cannot begin a value")
        if event.anchor is not None:
            raise InvalidInput(
                f"the anchor `&{shown_text(event.anchor)}` is not allowed: values are written out here",
                position=position,
                hint="Remove the anchor and write the value wherever it is needed.",
            )
        if event.tag is not None:
            raise InvalidInput(
                f"the tag `{shown_text(_short_tag(event.tag))}` is not allowed",
                position=position,
                hint="Write the plain value; the type follows from the key.",
            )
        if depth > DEEPEST_NESTING:
            raise InvalidInput(
                f"values are nested deeper than {DEEPEST_NESTING} levels", position=position, hint="No key needs as many."
            )
        if isinstance(event, yaml.ScalarEvent):
            return self.scalar(event, position)
        if isinstance(event, yaml.SequenceStartEvent):
            items: list[Node] = []
            while not isinstance(event := self.next(), yaml.SequenceEndEvent):
                items.append(self.node(event, depth + 1))
            return Items(position, tuple(items))
        return self.mapping(position, depth)

    def scalar(self, event: yaml.ScalarEvent, position: Position) -> Scalar:
        if not event.implicit[0]:
            return Scalar(position, event.value, event.value)
        try:
            return Scalar(position, resolve_plain(event.value), event.value)
        except AmbiguousScalar as error:
            raise InvalidInput(error.message, position=position, hint=error.hint) from None

    def mapping(self, position: Position, depth: int) -> Entries:
        entries: dict[str, Entry] = {}
        while not isinstance(event := self.next(), yaml.MappingEndEvent):
            if isinstance(event, yaml.ScalarEvent) and event.value == "<<" and event.implicit[0]:
                raise InvalidInput(
                    "the merge key `<<` is not allowed: values are written out here",
                    position=self.at(event.start_mark),
                    hint="Write the keys out.",
                )
            key = self.node(event, depth + 1)
            if not isinstance(key, Scalar) or not key.text:
                raise InvalidInput("a key must be text", position=key.position, hint="Write `key: value`.")
            if first := entries.get(key.text):
                raise InvalidInput(
                    f"the key `{shown_text(key.text)}` appears twice",
                    position=key.position,
                    hint=f"It is given in line {first.position.line} already; keep one of the two.",
                )
            entries[key.text] = Entry(key.text, key.position, self.node(self.next(), depth + 1))
        return Entries(position, tuple(entries.values()))


def _short_tag(tag: str) -> str:
    return tag.replace("tag:yaml.org,2002:", "!!") if tag.startswith("tag:yaml.org,2002:") else tag
