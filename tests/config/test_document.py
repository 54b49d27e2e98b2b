"""Everything that can be wrong with a YAML file before its keys are looked at: one message each, asserted verbatim."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsr1build.config.document import LARGEST_FILE, Items, Scalar, parse_document, read_document, to_data
from dsr1build.errors import Dsr1Error, InvalidInput


def message(data: bytes | str) -> str:
    raw = data.encode() if isinstance(data, str) else data
    with pytest.raises(InvalidInput) as caught:
        parse_document(raw, "BUILD.yaml")
    assert caught.value.exit_code == 2
    return caught.value.render()


def golden(place: str, text: str, line: str, column: int, hint: str) -> str:
    return f"BUILD.yaml:{place}: error: {text}\n    {line}\n    {' ' * (column - 1)}^\nhelp: {hint}"


GOLDEN = {
    "duplicate key": (
        "version: 1\nname: a\nversion: 1\n",
        golden("3:1", "the key `version` appears twice", "version: 1", 1, "It is given in line 1 already; keep one of the two."),
    ),
    "duplicate key in brackets": (
        "a: {b: 1, b: 2}\n",
        golden("1:11", "the key `b` appears twice", "a: {b: 1, b: 2}", 11, "It is given in line 1 already; keep one of the two."),
    ),
    "no": (
        "name: no\n",
        golden(
            "1:7",
            "`no` is the boolean false to some YAML readers and text to others",
            "name: no",
            7,
            'Write false for the boolean, or "no" in quotes for the text.',
        ),
    ),
    "on as a key": (
        "a: 1\non: 2\n",
        golden(
            "2:1",
            "`on` is the boolean true to some YAML readers and text to others",
            "on: 2",
            1,
            'Write true for the boolean, or "on" in quotes for the text.',
        ),
    ),
    "base 60": (
        "name: 12:30\n",
        golden(
            "1:7",
            "`12:30` is the number 750 in base 60 to some YAML readers and text to others",
            "name: 12:30",
            7,
            'Write 750 for the number, or "12:30" in quotes for the text.',
        ),
    ),
    "octal": (
        "context: 010\n",
        golden(
            "1:10",
            "`010` is the octal number 8 to some YAML readers and 10 to others",
            "context: 010",
            10,
            'Write 10 or 8 for the number that is meant, or "010" in quotes for the text.',
        ),
    ),
    "underscore": (
        "context: 1_000\n",
        golden(
            "1:10",
            "`1_000` is the number 1000 to some YAML readers and text to others",
            "context: 1_000",
            10,
            'Write 1000 for the number, or "1_000" in quotes for the text.',
        ),
    ),
    "date": (
        "name: 2024-01-02\n",
        golden(
            "1:7",
            "`2024-01-02` is a date to some YAML readers and text to others",
            "name: 2024-01-02",
            7,
            'Write "2024-01-02" in quotes for the text.',
        ),
    ),
    "tab": (
        "model:\n\tcheckpoint: x\n",
        golden(
            "2:1",
            "the line is indented with a tab",
            " checkpoint: x",
            1,
            "YAML allows only blanks there; use two blanks a level.",
        ),
    ),
    "tab after blanks": (
        "model:\n  \tcheckpoint: x\n",
        golden(
            "2:3",
            "the line is indented with a tab",
            "   checkpoint: x",
            3,
            "YAML allows only blanks there; use two blanks a level.",
        ),
    ),
    "tab in a blank line": (
        "a:\n\t\n  - b\n",
        "BUILD.yaml:2:1: error: the line is indented with a tab\nhelp: YAML allows only blanks there; use two blanks a level.",
    ),
    "merge marker": (
        "version: 1\n<<<<<<< HEAD\nname: a\n=======\nname: b\n>>>>>>> topic\n",
        golden(
            "2:1",
            "a merge conflict was left in the file",
            "<<<<<<< HEAD",
            1,
            "Choose one of the two sides and remove the marker lines.",
        ),
    ),
    "merge separator alone": (
        "version: 1\n=======\n",
        golden(
            "2:1",
            "a merge conflict was left in the file",
            "=======",
            1,
            "Choose one of the two sides and remove the marker lines.",
        ),
    ),
    "merge end alone": (
        "version: 1\n>>>>>>> topic\n",
        golden(
            "2:1",
            "a merge conflict was left in the file",
            ">>>>>>> topic",
            1,
            "Choose one of the two sides and remove the marker lines.",
        ),
    ),
    "merge key": (
        "a: 1\n<<: {b: 1}\n",
        golden("2:1", "the merge key `<<` is not allowed: values are written out here", "<<: {b: 1}", 1, "Write the keys out."),
    ),
    "alias bomb": (
        "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]\n",
        golden(
            "1:4",
            "the anchor `&a` is not allowed: values are written out here",
            "a: &a [x, x]",
            4,
            "Remove the anchor and write the value wherever it is needed.",
        ),
    ),
    "alias": (
        "a: 1\nb: *a\n",
        golden(
            "2:4",
            "the alias `*a` is not allowed: values are written out here",
            "b: *a",
            4,
            "Write the value in place of the alias.",
        ),
    ),
    "second document": (
        "a: 1\n---\nb: 2\n",
        golden(
            "2:1",
            "the file holds more than one YAML document",
            "---",
            1,
            "Keep one document in the file and remove the `---` lines between them.",
        ),
    ),
    "python tag": (
        "a: !!python/object/apply:os.system [id]\n",
        golden(
            "1:4",
            "the tag `!!python/object/apply:os.system` is not allowed",
            "a: !!python/object/apply:os.system [id]",
            4,
            "Write the plain value; the type follows from the key.",
        ),
    ),
    "own tag": (
        "a: !env HOME\n",
        golden(
            "1:4", "the tag `!env` is not allowed", "a: !env HOME", 4, "Write the plain value; the type follows from the key."
        ),
    ),
    "standard tag": (
        "a: !!str 1\n",
        golden("1:4", "the tag `!!str` is not allowed", "a: !!str 1", 4, "Write the plain value; the type follows from the key."),
    ),
    "empty": ("", "BUILD.yaml:1:1: error: the file is empty\nhelp: Begin with `version: 1`."),
    "comments only": ("# nothing\n", "BUILD.yaml:1:1: error: the file is empty\nhelp: Begin with `version: 1`."),
    "list": (
        "- a\n",
        golden("1:1", "the file must hold keys and values, but holds a list", "- a", 1, "Begin with `version: 1`."),
    ),
    "one value": (
        "# why\nr1\n",
        golden("2:1", "the file must hold keys and values, but holds one value", "r1", 1, "Begin with `version: 1`."),
    ),
    "key that is a list": ("? [a]\n: 1\n", golden("1:3", "a key must be text", "? [a]", 3, "Write `key: value`.")),
    "key without text": ("a: 1\n'': 2\n", golden("2:1", "a key must be text", "'': 2", 1, "Write `key: value`.")),
    "colon in a value": (
        "a: b: c\n",
        golden(
            "1:5",
            "this is not valid YAML: mapping values are not allowed in this context",
            "a: b: c",
            5,
            "Put a value that contains `: ` in quotes, and check the indentation.",
        ),
    ),
    "placeholder in brackets": (
        "a: [model.layers.{n}.mlp]\n",
        golden(
            "1:18",
            "this is not valid YAML: did not find expected ',' or ']'",
            "a: [model.layers.{n}.mlp]",
            18,
            "Close the bracket, and put items that contain { } [ ] or , in quotes.",
        ),
    ),
    "indentation": (
        "a:\n  b: 1\n c: 2\n",
        golden(
            "3:2", "this is not valid YAML: did not find expected key", " c: 2", 2, "Keys of one mapping must be indented alike."
        ),
    ),
    "open quotes": (
        "a: 1\nb: 'x\n",
        golden("2:4", "this is not valid YAML: found unexpected end of stream", "b: 'x", 4, "Close the quotes."),
    ),
    "control character": (
        "a: x\x00y\n",
        golden("1:5", "the control character U+0000 is not allowed", "a: x?y", 5, "Is this a text file? Remove the character."),
    ),
    "not UTF-8": (
        b"a: 1\nb: caf\xe9\n",
        golden("2:7", "the byte 0xe9 is not valid UTF-8", "b: caf", 7, "Save the file as UTF-8."),
    ),
    "UTF-16": (
        "\ufeffa: 1\n".encode("utf-16-le"),
        "BUILD.yaml: error: the file is UTF-16, not UTF-8\nhelp: Save the file as UTF-8.",
    ),
    "nesting": (
        f"a: {'[' * 40}{']' * 40}\n",
        golden("1:36", "values are nested deeper than 32 levels", f"a: {'[' * 40}{']' * 40}", 36, "No key needs as many."),
    ),
    "huge number": (
        f"a: {'9' * 130}\n",
        golden(
            "1:4",
            "a number of 130 characters is too long",
            f"a: {'9' * 130}",
            4,
            "Write at most 100 characters, or put the text in quotes.",
        ),
    ),
    "control characters in a message": (
        'a: 1\n"b\\e[31m": 1\n"b\\e[31m": 2\n',
        golden(
            "3:1",
            "the key `b\\x1b[31m` appears twice",
            '"b\\e[31m": 2',
            1,
            "It is given in line 2 already; keep one of the two.",
        ),
    ),
}


@pytest.mark.parametrize("case", GOLDEN)
def test_message(case: str) -> None:
    text, expected = GOLDEN[case]
    assert message(text) == expected


def test_deep_nesting_neither_overflows_nor_floods_the_terminal() -> None:
    text = message("a: " + "[" * 100_000)
    assert text.startswith("BUILD.yaml:1:1003: error: this is not valid YAML: exceeded maximum nesting depth\n")
    assert max(map(len, text.splitlines())) < 200


def test_long_line_is_cut_around_the_caret() -> None:
    _, line, caret, _ = message(f"a: [{'x, ' * 300}no, {'y, ' * 300}z]\n").splitlines()
    assert len(line) <= 170
    assert line[caret.index("^") :].startswith("no, y")


def test_values_and_places() -> None:
    document = parse_document(b"a:\n  - 1\n  - {b: true, c: 'no'}\nd: 0x10\n", "f")
    assert to_data(document.root) == {"a": (1, {"b": True, "c": "no"}), "d": 16}
    assert str(document.position("a", 1, "c")) == "f:3:18"
    assert str(document.find(("a", 1, "c"))[0]) == "f:3:15"
    node = document.find(("a",))[1]
    assert isinstance(node, Items) and isinstance(node.items[0], Scalar)
    # A path that leads nowhere ends where the file ends.
    assert document.position("a", 7) == document.position("a")
    assert document.position("x") == document.root.position


def test_byte_order_mark_and_windows_line_ends_keep_places() -> None:
    document = parse_document(b"\xef\xbb\xbfname: x\r\nlist:\r\n  - y\r\n", "f")
    assert to_data(document.root) == {"name": "x", "list": ("y",)}
    position = document.position("list", 0)
    assert (position.line, position.column, position.text) == (3, 5, "  - y")
    assert document.position("name").column == 7
    assert message(b"\xef\xbb\xbfname: x\r\nname: y\r\n") == message("name: x\nname: y\n")


def test_column_counts_characters() -> None:
    position = parse_document("größe: übergroß\n".encode(), "f").position("größe")
    assert position.column == 8


def test_tabs_that_yaml_allows() -> None:
    document = parse_document(b"a:\tb\t# comment\nc: 1\n", "f")
    assert to_data(document.root) == {"a": "b", "c": 1}


def unreadable(path: Path, shown: str = "BUILD.yaml") -> str:
    with pytest.raises(InvalidInput) as caught:
        read_document(path, shown)
    return caught.value.render()


def test_missing_file(tmp_path: Path) -> None:
    (tmp_path / "BUILD.yaml").write_text("version: 1\n")
    assert (
        unreadable(tmp_path / "BUILD.yml", "BUILD.yml")
        == "BUILD.yml: error: the file does not exist\nhelp: Did you mean BUILD.yaml?"
    )
    assert (
        unreadable(tmp_path / "x", "x") == "x: error: the file does not exist\n"
        "help: Check the path: one in a file is relative to that file, one on the command line to the current directory."
    )
    assert (
        unreadable(tmp_path / "nowhere" / "BUILD.yaml", "nowhere/BUILD.yaml")
        == "nowhere/BUILD.yaml: error: the file does not exist\n"
        "help: There is no directory nowhere that could be read either; check the path."
    )


def test_directory(tmp_path: Path) -> None:
    assert unreadable(tmp_path, "x") == "x: error: this is a directory, not a file\nhelp: Name a YAML file inside it."
    (tmp_path / "BUILD.yaml").write_text("version: 1\n")
    assert unreadable(tmp_path, "x") == "x: error: this is a directory, not a file\nhelp: Did you mean x/BUILD.yaml?"


def test_fifo_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert unreadable(tmp_path / "pipe") == "BUILD.yaml: error: this is not a regular file\nhelp: Name a YAML file."


def test_too_large(tmp_path: Path) -> None:
    file = tmp_path / "BUILD.yaml"
    with file.open("wb") as stream:
        stream.truncate(LARGEST_FILE + 1)
    assert (
        unreadable(file) == "BUILD.yaml: error: the file has 1,048,577 bytes, more than the 1,048,576 that are read\n"
        "help: Is this the YAML file that was meant?"
    )


def test_no_permission(tmp_path: Path) -> None:
    file = tmp_path / "BUILD.yaml"
    file.write_text("version: 1\n")
    file.chmod(0)
    user = os.geteuid()
    expected = "BUILD.yaml: error: the file cannot be read: Permission denied\nhelp: Check the path and its permissions."
    try:
        if user == 0:
            os.seteuid(65534)  # root may read everything
        assert unreadable(file) == expected
    finally:
        os.seteuid(user)


@given(
    st.binary(max_size=200)
    | st.text(alphabet="ab:{}[]&*!|>'\"-?,#\t\n \\0123._<=~%@\x85\u2028\ufeff", max_size=80).map(str.encode)
)
def test_any_bytes_give_a_tree_or_one_message(data: bytes) -> None:
    try:
        document = parse_document(data, "f")
    except Dsr1Error as error:
        assert error.exit_code == 2
        assert error.render().startswith("f:")
    else:
        assert isinstance(to_data(document.root), dict)
