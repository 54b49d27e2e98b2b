"""`dsr1build cache`: its frame, and `cache key new`."""

import os
from importlib import import_module

import pytest
from test_main import dsr1build

from dsr1build.cli.cache import SUBVERBS


def test_a_new_key_prints_the_line_to_paste(tmp_path):
    file = tmp_path / "key.pem"
    result = dsr1build("cache", "key", "new", "--output", str(file))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("ed25519:") and len(result.stdout) == 73
    assert file.stat().st_mode & 0o777 == 0o600
    secret = file.read_text().splitlines()[1]
    again = dsr1build("cache", "key", "new", "--output", str(file))
    assert again.returncode == 2
    assert again.stderr == f"{file}: error: the file exists\nhelp: Name a new file; a key is never overwritten.\n"
    assert secret == file.read_text().splitlines()[1] and secret not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "no subverb is given\nhelp: The subverbs are "),
        (["key"], "unknown subverb `key`\nhelp: Did you mean `dsr1build cache key new`? The subverbs are "),
        (["key", "nwe"], "unknown subverb `key nwe`\nhelp: Did you mean `dsr1build cache key new`? The subverbs are "),
        (["zzz", "--all"], "unknown subverb `zzz`\nhelp: The subverbs are "),
    ],
)
def test_unknown_subverbs(words, message):
    result = dsr1build("cache", *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == f"dsr1build cache: error: {message}{', '.join(SUBVERBS)}.\n"


@pytest.mark.parametrize("name", SUBVERBS)
def test_every_subverb_has_help_with_examples(name):
    result = dsr1build("cache", *name.split(), "--help")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"usage: dsr1build cache {name}")
    assert f"examples:\n  dsr1build cache {name}" in result.stdout
    assert SUBVERBS[name].summary == import_module(SUBVERBS[name].module).SUMMARY


def test_mistakes_in_options_name_the_subverb():
    result = dsr1build("cache", "key", "new", "--outptu", "x", env={**os.environ, "COLUMNS": "200"})
    assert result.returncode == 2
    assert result.stderr == (
        "dsr1build cache key new: error: the following arguments are required: --output\n"
        "help: `dsr1build cache key new --help` shows the options and examples.\n"
    )
