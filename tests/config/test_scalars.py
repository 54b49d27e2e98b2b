import math

import pytest

from dsr1build.config.scalars import AmbiguousScalar, resolve_plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("0", 0),
        ("-12", -12),
        ("+7", 7),
        ("0xff", 255),
        ("1.5", 1.5),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("-.inf", -math.inf),
        ("x86-64-v3", "x86-64-v3"),
        ("y", "y"),
        ("none", "none"),
        ("1.2.3", "1.2.3"),
        ("+avx2", "+avx2"),
        ("-", "-"),
        ("12:x", "12:x"),
        ("nothing", "nothing"),
    ],
)
def test_value(text: str, value: object) -> None:
    result = resolve_plain(text)
    assert result == value and type(result) is type(value)


def test_not_a_number() -> None:
    result = resolve_plain(".nan")
    assert isinstance(result, float) and math.isnan(result)


@pytest.mark.parametrize("word", ["yes", "Yes", "YES", "no", "No", "NO", "on", "On", "ON", "off", "Off", "OFF"])
def test_old_booleans(word: str) -> None:
    with pytest.raises(AmbiguousScalar) as caught:
        resolve_plain(word)
    meaning = "true" if word.lower() in ("yes", "on") else "false"
    assert caught.value.message == f"`{word}` is the boolean {meaning} to some YAML readers and text to others"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("190:20:30", "`190:20:30` is the number 685230 in base 60 to some YAML readers and text to others"),
        ("-1:00.5", "`-1:00.5` is the number -60.5 in base 60 to some YAML readers and text to others"),
        ("0:30", "`0:30` is the number 30 in base 60 to some YAML readers and text to others"),
        ("-010", "`-010` is the octal number -8 to some YAML readers and -10 to others"),
        ("00", "`00` is the octal number 0 to some YAML readers and 0 to others"),
        ("089", "`089` is text to some YAML readers and the number 89 to others"),
        ("0b101", "`0b101` is the number 5 to some YAML readers and text to others"),
        ("0o17", "`0o17` is the number 15 to some YAML readers and text to others"),
        ("0x_ff", "`0x_ff` is the number 255 to some YAML readers and text to others"),
        ("1_000.5", "`1_000.5` is the number 1000.5 to some YAML readers and text to others"),
        ("2024-1-2 10:00:00", "`2024-1-2 10:00:00` is a date to some YAML readers and text to others"),
    ],
)
def test_ambiguous(text: str, message: str) -> None:
    with pytest.raises(AmbiguousScalar) as caught:
        resolve_plain(text)
    assert caught.value.message == message
