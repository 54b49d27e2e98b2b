"""Every error a user can cause, and the exit code that belongs to it.

The command line prints exactly one of these and leaves; it never shows a traceback for them. An error says where
(file:line:col, or a node or tensor name), what was expected, and what to do next.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a text file. ``line`` and ``column`` count from 1; ``text`` is the whole line, without its end."""

    file: str
    line: int
    column: int
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


class Dsr1Error(Exception):
    """The base of all errors shown to the user. ``hint`` is the next step, a full sentence or a command."""

    exit_code = 1

    def __init__(self, message: str, *, position: Position | None = None, where: str = "", hint: str = "") -> None:
        super().__init__(without_credentials(message))
        self.message = without_credentials(message)
        self.position = position
        self.where = without_credentials(where)
        self.hint = without_credentials(hint)

    def render(self) -> str:
        """The text for a terminal or a log: place, message, the line with a caret under it, the next step."""
        place = str(self.position) if self.position else self.where
        out = [f"{place}: error: {self.message}" if place else f"error: {self.message}"]
        if self.position and self.position.text.strip():
            text, column = _excerpt(self.position)
            out += ["    " + text, "    " + " " * (column - 1) + "^"]
        if self.hint:
            out.append(f"help: {self.hint}")
        return _CONTROL.sub(lambda match: repr(match[0])[1:-1], "\n".join(out))

    def __str__(self) -> str:
        return self.render()


_LONGEST_LINE = 160
# Names from a file of a stranger may hold sequences that a terminal obeys; only line ends pass.
_CONTROL = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f]")


# What stands before the last @ of an address, its query, and the value of an Authorization header.
_USER = re.compile(r"""(:/{1,2})([^\s"'`/][^\s"'`]{0,2000})(?=@)""")
_QUERY = re.compile(r"""(://[^\s"'`?]{0,2000}\?)([^\s"'`]+)""")
_HEADER = re.compile(r"""(\b(?:Bearer|Basic) +)([^\s"'`}\]]+)""")


def without_credentials(text: str) -> str:
    """``text`` with stars for what addresses and headers in it may hold of names, passwords and tokens; its length stays."""
    for secret in (_USER, _QUERY, _HEADER):
        text = secret.sub(lambda match: match[1] + "*" * len(match[2]), text)
    return text


def _excerpt(position: Position) -> tuple[str, int]:
    """The line to show and the caret's column in it; of a long line, only what stands around the place."""
    # Tabs are shown as one blank so that the caret stands under the right column in every terminal.
    text = without_credentials(position.text.replace("\t", " "))
    if len(text) <= _LONGEST_LINE:
        return text, position.column
    start = max(0, min(position.column - 1 - _LONGEST_LINE // 2, len(text) - _LONGEST_LINE))
    before, after = "..." if start else "", "..." if start + _LONGEST_LINE < len(text) else ""
    return before + text[start : start + _LONGEST_LINE] + after, position.column - start + len(before)


class BuildFailed(Dsr1Error):
    """An action failed: the input was fine, the build was not."""

    exit_code = 1


class InvalidInput(Dsr1Error):
    """The user's file, model or option is wrong."""

    exit_code = 2


class EnvironmentUnfit(Dsr1Error):
    """A tool is missing, the disk is full, the CPU lacks a feature."""

    exit_code = 3


class VerificationFailed(Dsr1Error):
    """Numbers, digests or signatures do not agree."""

    exit_code = 4
