"""The documentation agrees with what stands: links, examples, commands, options, messages and exit codes."""

import argparse
import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from dsr1build.cli.cache import SUBVERBS, subverb_parser
from dsr1build.cli.main import VERBS, load_verb, verb_parser
from dsr1build.cli.schema import FILES, OUTPUTS
from dsr1build.config.document import parse_document
from dsr1build.config.json_schema import FILES as FORMS
from dsr1build.config.validate import validate
from dsr1build.errors import BuildFailed, EnvironmentUnfit, InvalidInput, VerificationFailed
from dsr1build.execute.events import EVENT_SCHEMA

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
FENCE = re.compile(r"^```(\S*)[ ]*(\S*)[ ]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What makes a fragment of a file, an example that has no `version`, a whole one.
WHOLE: dict[str, dict[str, str]] = {
    "build": {
        "version": "1",
        "name": "example",
        "model": "{checkpoint: somewhere}",
        "recipe": "llama",
        "targets": "[native]",
    },
    "recipe": {
        "version": "1",
        "name": "example",
        "architectures": "[llama]",
        "partitions": "[{kind: head, modules: [lm_head]}]",
    },
    "target": {"version": "1", "name": "example", "triple": "x86_64-unknown-linux-gnu"},
    "profile": {"version": "1", "name": "example"},
}


def shown(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=shown)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{shown(page)}: {target}"
        assert file.is_relative_to(ROOT), f"{shown(page)}: {target}"
        assert not anchor or anchor in anchors(file), f"{shown(page)}: {target}"


def test_the_readme_links_every_page() -> None:
    text = prose(ROOT / "README.md")
    assert [page.name for page in PAGES if page.name != "README.md" and f"(docs/{page.name})" not in text] == []


def examples() -> list[tuple[str, str, str]]:
    """(place, form, text) of every YAML example; those marked `ci` belong to another tool."""
    found = []
    for page in PAGES:
        for number, (language, form, text) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")), 1):
            if language == "yaml" and form != "ci":
                found.append((f"{shown(page)}, block {number}", form or form_of(text), text))
    return found


def form_of(text: str) -> str:
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    return "build" if "model" in keys else "recipe" if "partitions" in keys else "target" if "triple" in keys else "profile"


@pytest.mark.parametrize(("place", "form", "text"), examples(), ids=lambda value: value if "block" in value else "")
def test_examples_are_of_their_form(place: str, form: str, text: str) -> None:
    schema: type[BaseModel] = FORMS[form]
    keys = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    if "version" not in keys:
        text += "".join(f"{key}: {value}\n" for key, value in WHOLE[form].items() if key not in keys)
    assert validate(parse_document(text.encode(), place), schema)


def test_a_wrong_example_would_be_found() -> None:
    with pytest.raises(InvalidInput, match="unknown key `receipe`"):
        test_examples_are_of_their_form("nowhere", "build", "receipe: llama\n")


def commands() -> list[tuple[str, str, list[str]]]:
    """(page, verb, words) of every command line of ours that a page shows, in a block or in prose."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        spans = re.findall(r"`([^`\n]+)`", prose(page))
        lines = [line for language, _, block in FENCE.findall(text) if language != "yaml" for line in block.splitlines()]
        for line in [*spans, *lines]:
            for part in re.split(r" && | \| | > |;", line):
                words = shlex.split(part, comments=True) if part.count("'") % 2 == 0 and part.count('"') % 2 == 0 else []
                while words and words[0] in ("$", "-", "run:"):
                    words = words[1:]
                if len(words) > 1 and Path(words[0]).name == "dsr1build" and words[1] in VERBS:
                    found.append((shown(page), words[1], words[2:]))
    return found


@cache
def options(verb: str) -> dict[str, argparse.Action]:
    return {name: action for action in verb_parser(verb, load_verb(verb))._actions for name in action.option_strings}


def test_commands_have_the_options_that_are_shown() -> None:
    seen = commands()
    assert {verb for _, verb, _ in seen} >= {"build", "plan", "run", "inspect", "schema", "completion"}
    for page, verb, words in seen:
        known = options(verb)
        if verb == "cache":
            name = next((name for name in SUBVERBS if " ".join(words).startswith(name)), "")
            assert name or not words, f"{page}: dsr1build cache {' '.join(words)}"
            if name:
                parser = subverb_parser(name, __import__(SUBVERBS[name].module, fromlist=["run"]))
                known = {option: action for action in parser._actions for option in action.option_strings}
        for word in words:
            if re.fullmatch(r"--?[A-Za-z][\w-]*", word):
                assert word in known, f"{page}: dsr1build {verb} {word}"


# Options of opt, llc, mlir-opt and a C compiler, and the form in which a target takes a CPU feature away.
FOREIGN_OPTIONS = ("-I", "-L", "-l", "-lpthread", "-rpath", "-O2", "-O3", "--pass-pipeline", "-name")


def test_options_in_prose_exist() -> None:
    known = {name for verb in VERBS for name in options(verb)} | {"--help", "--version"}
    for page in PAGES:
        for span in re.findall(r"`(--?[A-Za-z][\w-]*)[^`\n]*`", prose(page)):
            assert span in known or span in FOREIGN_OPTIONS, f"{shown(page)}: {span}"


def test_schemas_that_are_mentioned_exist() -> None:
    for page, verb, words in commands():
        if verb == "schema" and words and words[0].islower():
            assert set(words[0].split("|")) <= {*FILES, *OUTPUTS}, f"{page}: dsr1build schema {words[0]}"


def test_the_readme_tests_as_ci_does() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    ours = re.search(r"^\.venv/bin/pip install -e '\.\[test\]' && \.venv/bin/(python -m pytest .*)$", readme, re.MULTILINE)
    theirs = re.search(r'^"\$venv/bin/python" (-m pytest .*)$', (ROOT / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE)
    assert ours and theirs
    assert ours[1] == f"python {theirs[1]}"


def test_the_readme_builds_the_sample() -> None:
    first = next(
        line for line in (ROOT / "README.md").read_text(encoding="utf-8").splitlines() if line.startswith("python3 -m venv")
    )
    steps = first.split(" && ")
    assert steps[0] == "python3 -m venv .venv"
    assert (ROOT / shlex.split(steps[1])[-1]).is_file() and (ROOT / shlex.split(steps[3])[-1]).is_file()
    build = validate(parse_document((ROOT / "BUILD.yaml").read_bytes(), "BUILD.yaml"), FORMS["build"]).model_dump()
    assert shlex.split(steps[4])[2] == f"{build['output']}/{build['name']}/{Path(build['targets'][0]).stem}"


@cache
def texts_of_the_code() -> str:
    """Every text constant of the sources, one a line; expressions inside of f-strings are left out."""
    out: list[str] = []
    for file in sorted((ROOT / "dsr1build").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                out.append(node.value)
    for file in sorted((ROOT / "dsr1build" / "runtime" / "c").glob("*.c")):
        out.append(re.sub(r'"\s*\n\s*"', "", file.read_text(encoding="utf-8")))
    return "\n".join(out)


def messages() -> list[str]:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    return [message for row in rows for message in re.findall(r"`([^`]+)`", row) if message not in ("SIGKILL", "plan")]


# The words of libyaml.
FOREIGN = ("did not find expected",)


@pytest.mark.parametrize("message", messages())
def test_messages_are_those_of_the_code(message: str) -> None:
    pieces = [piece for piece in message.split("…") if re.search(r"\w", piece)]
    assert pieces
    for piece in pieces:
        assert piece in FOREIGN or piece.strip() in texts_of_the_code(), piece


def test_exit_codes_are_those_of_the_errors() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| ([^|]+) \|", (ROOT / "docs" / "ci.md").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(rows) == {"0", "1", "2", "3", "4", "130", "141"}
    for error, words in (
        (BuildFailed, "the build failed"),
        (InvalidInput, "the input is wrong"),
        (EnvironmentUnfit, "the environment is not fit"),
        (VerificationFailed, "a verification failed"),
    ):
        assert rows[str(error.exit_code)] == words


def test_events_are_those_of_the_schema() -> None:
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `(\w+)` \| (`action`[^|]*|`message`[^|]*|`compiled`[^|]*) \|", page, re.MULTILINE))
    for form in EVENT_SCHEMA["oneOf"]:
        name = form["properties"]["event"]["const"]
        assert set(re.findall(r"`(\w+)`", table[name])) == set(form["properties"]) - {"event"}
    assert len(table) == len(EVENT_SCHEMA["oneOf"])
