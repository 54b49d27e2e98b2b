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
        super().__init__(message)
        self.message = message
        self.position = position
        self.where = where
        self.hint = hint

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


def _excerpt(position: Position) -> tuple[str, int]:
    """The line to show and the caret's column in it; of a long line, only what stands around the place."""
    # Tabs are shown as one blank so that the caret stands under the right column in every terminal.
    text = position.text.replace("\t", " ")
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
