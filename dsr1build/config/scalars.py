"""What a plain (unquoted) YAML scalar means here, and which ones are refused because readers of YAML disagree.

YAML 1.1 and YAML 1.2 read ``no``, ``12:30``, ``010`` and ``1_000`` differently. A file that builds must mean the same to
everybody, so such a scalar is an error that says how to write either meaning. What both versions agree on is accepted:
``true`` and ``false``, decimal and hexadecimal whole numbers, decimal fractions, and text.
"""

import re
from typing import TypeAlias

ScalarValue: TypeAlias = bool | int | float | str | None

_OLD_TRUE = frozenset({"yes", "Yes", "YES", "on", "On", "ON"})
_OLD_FALSE = frozenset({"no", "No", "NO", "off", "Off", "OFF"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_NULL = frozenset({"", "~", "null", "Null", "NULL"})

_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FRACTION = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_SEXAGESIMAL = re.compile(r"[-+]?[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?")
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+")
_OTHER_BASE = re.compile(r"[-+]?0(b[01_]+|o[0-7_]+|x[0-9a-fA-F_]*_[0-9a-fA-F_]*)")
_UNDERSCORE = re.compile(r"[-+]?[0-9][0-9_]*_[0-9_]*(\.[0-9_]*)?")
_DATE = re.compile(r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt \t].*)?")

# Python refuses to convert longer decimal numbers, and no field of any file needs one.
_LONGEST_NUMBER = 100


class AmbiguousScalar(ValueError):
    """A plain scalar without one meaning. ``message`` says what it could be, ``hint`` how to write what was meant."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def shown_text(text: str) -> str:
    """Text of a file as a message shows it: on one line, without control characters, not too long."""
    clean = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text[:61])
    return clean if len(text) <= 60 else f"{clean[:57]}..."


def resolve_plain(text: str) -> ScalarValue:
    """The value of an unquoted scalar. Raises AmbiguousScalar where YAML 1.1 and YAML 1.2 differ."""
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    _refuse_ambiguous(text)
    if _DECIMAL.fullmatch(text):
        return int(text)
    if _HEXADECIMAL.fullmatch(text):
        return int(text, 16)
    if _FRACTION.fullmatch(text):
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return text


def _refuse_ambiguous(text: str) -> None:
    if text in _OLD_TRUE or text in _OLD_FALSE:
        meaning = "true" if text in _OLD_TRUE else "false"
        raise AmbiguousScalar(
            f"`{text}` is the boolean {meaning} to some YAML readers and text to others",
            f'Write {meaning} for the boolean, or "{text}" in quotes for the text.',
        )
    if not text[0].isdigit() and text[0] not in "+-":
        return
    if len(text) > _LONGEST_NUMBER and re.fullmatch(r"[-+0-9a-fA-Fox_:.]+", text):
        raise AmbiguousScalar(
            f"a number of {len(text)} characters is too long",
            f"Write at most {_LONGEST_NUMBER} characters, or put the text in quotes.",
        )
    if _SEXAGESIMAL.fullmatch(text):
        value = _sexagesimal(text)
        raise AmbiguousScalar(
            f"`{text}` is the number {value} in base 60 to some YAML readers and text to others",
            f'Write {value} for the number, or "{text}" in quotes for the text.',
        )
    if _LEADING_ZERO.fullmatch(text):
        digits = text.replace("_", "")
        decimal = int(digits)
        if re.fullmatch(r"[-+]?[0-7]+", digits):
            octal = int(digits, 8)
            raise AmbiguousScalar(
                f"`{text}` is the octal number {octal} to some YAML readers and {decimal} to others",
                f'Write {decimal} or {octal} for the number that is meant, or "{text}" in quotes for the text.',
            )
        raise AmbiguousScalar(
            f"`{text}` is text to some YAML readers and the number {decimal} to others",
            f'Write {decimal} for the number, or "{text}" in quotes for the text.',
        )
    if _OTHER_BASE.fullmatch(text) or _UNDERSCORE.fullmatch(text):
        plain = text.replace("_", "")
        value = plain if "." in plain else str(int(plain, 0))
        raise AmbiguousScalar(
            f"`{text}` is the number {value} to some YAML readers and text to others",
            f'Write {value} for the number, or "{text}" in quotes for the text.',
        )
    if _DATE.fullmatch(text):
        raise AmbiguousScalar(
            f"`{shown_text(text)}` is a date to some YAML readers and text to others",
            f'Write "{shown_text(text)}" in quotes for the text.',
        )


def _sexagesimal(text: str) -> str:
    """The value in base 60 that YAML 1.1 gives to a scalar like ``12:30``; a fraction is left as it stands."""
    whole, dot, fraction = text.replace("_", "").partition(".")
    sign = "-" if whole.startswith("-") else ""
    value = 0
    for part in whole.lstrip("+-").split(":"):
        value = value * 60 + int(part)
    return f"{sign}{value}{dot}{fraction}"
