"""``dsr1build completion``: completion scripts for shells, written from the parsers of the verbs."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

NAME = "completion"
SUMMARY = "print a completion script for a shell"
EPILOG = """examples:
  source <(dsr1build completion bash)
  dsr1build completion zsh > ~/.zfunc/_dsr1build
  dsr1build completion fish > ~/.config/fish/completions/dsr1build.fish
"""

# How options show values that may be paths. A target and a profile may also be the name of one that ships.
PATHS = ("DIR", "FILE", "PROFILE", "NAME")


@dataclass(frozen=True, slots=True)
class Option:
    """An option of a verb. ``takes_value`` is false for a switch; ``choices`` are its only values, if there are any.

    ``files`` says that its value may be a path.
    """

    names: tuple[str, ...]
    help: str
    takes_value: bool
    choices: tuple[str, ...]
    files: bool = False


@dataclass(frozen=True, slots=True)
class Syntax:
    """What can follow a verb: its options, and the values of its first positional argument (none: a file)."""

    summary: str
    options: tuple[Option, ...]
    words: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell to write the script for")


def run(arguments: argparse.Namespace) -> int:
    writers = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
    print(writers[arguments.shell](command_syntax()), end="")
    return 0


def command_syntax() -> Mapping[str, Syntax]:
    """The syntax of every verb, read from its parser."""
    # The frame imports this module as a verb; the other direction is needed only here.
    from dsr1build.cli.main import VERBS, load_verb, verb_parser

    syntax = {name: _syntax(entry.summary, verb_parser(name, load_verb(name))) for name, entry in VERBS.items()}
    syntax["cache"] = _cache_syntax(syntax["cache"])
    return syntax


def _cache_syntax(own: Syntax) -> Syntax:
    """The verb ``cache`` with its subverbs as words, and with the options of all of them."""
    from importlib import import_module

    from dsr1build.cli.cache import SUBVERBS, subverb_parser

    options = {option.names: option for option in own.options}
    for name, entry in SUBVERBS.items():
        for option in _syntax(entry.summary, subverb_parser(name, import_module(entry.module))).options:
            options.setdefault(option.names, option)
    words = dict.fromkeys(name.split()[0] for name in SUBVERBS)
    return Syntax(own.summary, tuple(options.values()), tuple(words))


def _syntax(summary: str, parser: argparse.ArgumentParser) -> Syntax:
    options: list[Option] = []
    words: list[str] = []
    for action in parser._actions:
        choices = tuple(str(choice) for choice in action.choices or ())
        if action.option_strings:
            files = action.metavar in PATHS
            options.append(Option(tuple(action.option_strings), _one_line(action.help), action.nargs != 0, choices, files))
        else:
            words += choices
    return Syntax(summary, tuple(options), tuple(words))


def _one_line(text: str | None) -> str:
    return " ".join((text or "").replace("%%", "%").split())


def bash_script(verbs: Mapping[str, Syntax]) -> str:
    """A bash completion function; files are completed where nothing else is known."""
    cases = []
    files = '$(compgen -f -- "$word")'
    for name, syntax in verbs.items():
        values = "".join(
            f'            {"|".join(option.names)}) COMPREPLY=($(compgen -W {_quoted(option.choices)} -- "$word")); return;;\n'
            for option in syntax.options
            if option.choices
        )
        values += "".join(
            f"            {'|'.join(option.names)}) COMPREPLY=({files if option.files else ''}); return;;\n"
            for option in syntax.options
            if option.takes_value and not option.choices
        )
        before = f'            case "$before" in\n{_indent(values)}            esac\n' if values else ""
        names = _quoted([option_name for option in syntax.options for option_name in option.names])
        cases.append(f"        {name})\n{before}            options={names}\n            words={_quoted(syntax.words)};;\n")
    return (
        "# bash completion of dsr1build; load it with: source <(dsr1build completion bash)\n"
        "_dsr1build() {\n"
        '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" options="" words=""\n'
        '    if [ "$COMP_CWORD" -eq 1 ]; then\n'
        f'        COMPREPLY=($(compgen -W {_quoted([*verbs, "--help", "--version"])} -- "$word"))\n'
        "        return\n"
        "    fi\n"
        '    case "${COMP_WORDS[1]}" in\n' + "".join(cases) + "    esac\n"
        '    if [ "${word#-}" != "$word" ]; then\n'
        '        COMPREPLY=($(compgen -W "$options" -- "$word"))\n'
        '    elif [ -n "$words" ] && [ "$COMP_CWORD" -eq 2 ]; then\n'
        '        COMPREPLY=($(compgen -W "$words" -- "$word"))\n'
        "    else\n"
        '        COMPREPLY=($(compgen -f -- "$word"))\n'
        "    fi\n"
        "}\n"
        "complete -o filenames -F _dsr1build dsr1build\n"
    )


def zsh_script(verbs: Mapping[str, Syntax]) -> str:
    """A zsh completion function for a directory of ``$fpath``."""
    listing = "\n".join(f"            {_quoted([f'{name}:{syntax.summary}'])}" for name, syntax in verbs.items())
    cases = []
    for name, syntax in verbs.items():
        specs = [_zsh_option(option, option_name) for option in syntax.options for option_name in option.names]
        if syntax.words:
            specs.append(_quoted([f"1:value:({' '.join(syntax.words)})"]))
        specs.append(_quoted(["*:file:_files"]))
        cases.append(f"        {name}) _arguments \\\n            " + " \\\n            ".join(specs) + ";;\n")
    return (
        "#compdef dsr1build\n"
        "# zsh completion of dsr1build; write it to a directory of $fpath as _dsr1build.\n"
        "_dsr1build() {\n"
        "    if (( CURRENT == 2 )); then\n"
        "        local -a verbs=(\n" + listing + "\n        )\n"
        "        _describe verb verbs\n"
        "        return\n"
        "    fi\n"
        "    local verb=$words[2]\n"
        "    shift words\n"
        "    (( CURRENT-- ))\n"
        "    case $verb in\n" + "".join(cases) + "    esac\n"
        "}\n"
        '_dsr1build "$@"\n'
    )


def _zsh_option(option: Option, name: str) -> str:
    help_text = option.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]").replace(":", "\\:")
    value = f":value:({' '.join(option.choices)})" if option.choices else ":file:_files" if option.files else ":value: "
    value = value if option.takes_value else ""
    return _quoted([f"{name}[{help_text}]{value}"])


def fish_script(verbs: Mapping[str, Syntax]) -> str:
    """Fish completion commands."""
    lines = ["# fish completion of dsr1build; write it to ~/.config/fish/completions/dsr1build.fish"]
    for name, syntax in verbs.items():
        lines.append(f"complete -c dsr1build -n __fish_use_subcommand -f -a {name} -d {_fish(syntax.summary)}")
        condition = f"-n '__fish_seen_subcommand_from {name}'"
        for option in syntax.options:
            names = " ".join(f"-l {n[2:]}" if n.startswith("--") else f"-s {n[1:]}" for n in option.names)
            value = f" -x -a {_fish(' '.join(option.choices))}" if option.choices else " -r" if option.files else " -x"
            value = value if option.takes_value else ""
            lines.append(f"complete -c dsr1build {condition} {names}{value} -d {_fish(option.help)}")
        if syntax.words:
            lines.append(f"complete -c dsr1build {condition} -f -a {_fish(' '.join(syntax.words))}")
    return "\n".join(lines) + "\n"


def _fish(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _quoted(words: Sequence[str]) -> str:
    """Words as one single-quoted shell string."""
    return "'" + " ".join(words).replace("'", "'\\''") + "'"


def _indent(lines: str) -> str:
    return "".join(f"    {line}\n" for line in lines.splitlines())
