"""The command line: finds the verb, parses its options, runs it, prints its error.

Only the module of the chosen verb is imported, and that imports the rest of the project when it runs: `dsr1build --help`
must start in milliseconds.

A verb is a module of this folder with ``NAME``, ``SUMMARY`` (one line), ``EPILOG`` (examples),
``add_arguments(parser)`` and ``run(arguments) -> int`` (the exit code).
"""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import IO, NoReturn, Protocol, cast

from dsr1build import __version__
from dsr1build.errors import Dsr1Error, EnvironmentUnfit, InvalidInput

INTERRUPTED = 130
# What a shell reports for a program that ended because nobody reads its output: 128 + SIGPIPE.
NO_READER = 141


@dataclass(frozen=True, slots=True)
class VerbEntry:
    """Where a verb is implemented. The summary stands here as well so that the overview imports no verb."""

    module: str
    summary: str


VERBS: Mapping[str, VerbEntry] = {
    "build": VerbEntry("dsr1build.cli.build", "build the bundles that a BUILD.yaml describes"),
    "plan": VerbEntry("dsr1build.cli.plan", "show what a build consists of and what is cached, without building"),
    "explain": VerbEntry("dsr1build.cli.explain", "say why actions are cached or not"),
    "query": VerbEntry("dsr1build.cli.query", "answer questions over the plan: kernels, their users, what a change runs"),
    "run": VerbEntry("dsr1build.cli.run", "generate text or token ids from a bundle"),
    "inspect": VerbEntry("dsr1build.cli.inspect", "show what a bundle holds"),
    "cache": VerbEntry("dsr1build.cli.cache", "look after caches: statistics, size, checks, moving, keys"),
    "schema": VerbEntry("dsr1build.cli.schema", "print the JSON Schema of a file or of a verb's output"),
    "completion": VerbEntry("dsr1build.cli.completion", "print a completion script for a shell"),
}

EPILOG = """examples:
  dsr1build build BUILD.yaml
  dsr1build plan BUILD.yaml
  dsr1build run dist/r1-mini/x86-64-v3 --ids 1,2,3 --max-new 16
  dsr1build VERB --help

exit codes: 0 done, 1 the build failed, 2 the input is wrong, 3 the environment is not fit, 4 a verification failed,
130 interrupted
"""


class Verb(Protocol):
    """The interface of a verb's module."""

    NAME: str
    SUMMARY: str
    EPILOG: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


class ArgumentParser(argparse.ArgumentParser):
    """A parser whose errors are errors of this project, with a did-you-mean for options."""

    def error(self, message: str) -> NoReturn:
        raise InvalidInput(message, where=self.prog, hint=self._hint(message))

    def _hint(self, message: str) -> str:
        if choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            close = get_close_matches(choice[1], re.findall(r"'([^']*)'", choice[2]), n=1)
            if close:
                return f"Did you mean {close[0]}?"
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            wrong = message.removeprefix(prefix).split()[0].split("=")[0]
            close = get_close_matches(wrong, list(self._option_string_actions), n=1) if wrong.startswith("-") else []
            if close:
                return f"Did you mean {close[0]}?"
        return f"`{self.prog} --help` shows the options and examples."


def load_verb(name: str) -> Verb:
    """Import the module of one verb."""
    return cast(Verb, import_module(VERBS[name].module))


def verb_parser(name: str, verb: Verb) -> ArgumentParser:
    """The parser of one verb, with its options and examples."""
    parser = ArgumentParser(
        prog=f"dsr1build {name}",
        description=f"{verb.SUMMARY[:1].upper()}{verb.SUMMARY[1:]}.",
        epilog=verb.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    verb.add_arguments(parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line (without the program's name) and give its exit code. Errors of the user's are printed here."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    open_standard_streams()
    try:
        code = _dispatch(arguments)
        # A reader that has gone away must show here, not when the interpreter shuts down.
        sys.stdout.flush()
        return code
    except Dsr1Error as error:
        return _report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (RuntimeError, ImportError, SystemError) as error:
        # An interrupt while a class is made or a module is loaded comes out as an error of that.
        if not isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The interpreter flushes standard output once more when it ends; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return NO_READER
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "Free some space and run it again."
            return _report(EnvironmentUnfit("the disk is full", where=str(error.filename or ""), hint=hint))
        if error.errno == errno.ENOENT and _directory_is_gone():
            hint = "Change to a directory that exists."
            return _report(EnvironmentUnfit("the current directory has been removed", hint=hint))
        raise


def open_standard_streams() -> None:
    """Open standard streams that the caller has closed on the null device, and keep output from failing on a character.

    A free descriptor below 3 would be taken by the next file that is opened, a database for example.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest free descriptor is this one, since those below are open by now.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    elif isinstance(sys.stdout, TextIOWrapper) and sys.stdout.errors == "strict":
        # File names that are not UTF-8 leave as they came; another encoding writes characters that it lacks as numbers.
        sys.stdout.reconfigure(errors="surrogateescape" if sys.stdout.encoding == "utf-8" else "backslashreplace")
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _directory_is_gone() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _dispatch(arguments: list[str]) -> int:
    if not arguments:
        print(_overview(), end="", file=sys.stderr)
        return InvalidInput.exit_code
    first, rest = arguments[0], arguments[1:]
    if first in ("-h", "--help"):
        print(_overview(), end="")
        return 0
    if first in ("-V", "--version"):
        print(f"dsr1build {__version__}")
        return 0
    if first == "help":
        return _dispatch([*rest[:1], "--help"])
    if first not in VERBS:
        raise _unknown(first)
    verb = load_verb(first)
    try:
        return verb.run(verb_parser(first, verb).parse_args(rest))
    except SystemExit as end:
        # argparse leaves this way after it has printed the help.
        return end.code if isinstance(end.code, int) else 0


def _overview() -> str:
    width = max(map(len, VERBS)) + 2
    listing = "".join(f"  {name:<{width}}{entry.summary}\n" for name, entry in VERBS.items())
    return (
        "usage: dsr1build VERB [options]\n       dsr1build --version\n\n"
        "A declarative build system for compiled large language models.\n\n"
        f"verbs:\n{listing}\n{EPILOG}"
    )


def _unknown(word: str) -> InvalidInput:
    what = "option" if word.startswith("-") else "verb"
    close = get_close_matches(word, ["--help", "--version"] if what == "option" else list(VERBS), n=1)
    lead = f"Did you mean `dsr1build {close[0]}`? " if close else ""
    return InvalidInput(f"unknown {what} `{word}`", where="dsr1build", hint=f"{lead}The verbs are {', '.join(VERBS)}.")


def _report(error: Dsr1Error) -> int:
    text = error.render()
    if os.environ.get("GITHUB_ACTIONS") == "true":
        from dsr1build.execute.ci import error_annotation, without_commands

        print(f"{without_commands(text)}\n{error_annotation(error)}", file=sys.stderr)
        return error.exit_code
    print(f"\x1b[31m{text}\x1b[0m" if _colours(sys.stderr) else text, file=sys.stderr)
    return error.exit_code


def _colours(stream: IO[str]) -> bool:
    """Whether to colour: only on a terminal, never with a non-empty NO_COLOR (no-color.org) or on a dumb terminal."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
