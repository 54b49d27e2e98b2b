"""The frame of the command line, run as users run it: as a process."""

import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsr1build import __version__
from dsr1build.cli.completion import bash_script, command_syntax, fish_script, zsh_script
from dsr1build.cli.main import VERBS, load_verb, main
from dsr1build.cli.schema import FILES, OUTPUTS

HEAVY = {
    "cryptography",
    "pydantic",
    "yaml",
    "numpy",
    "onnx",
    "mlir",
    "networkx",
    "rich",
    "tokenizers",
    "diskcache",
    "safetensors",
}


def dsr1build(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dsr1build", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]


def test_overview_lists_every_verb() -> None:
    result = dsr1build("--help")
    assert (result.returncode, result.stderr) == (0, "")
    for name, entry in VERBS.items():
        assert f"  {name:<12}{entry.summary}\n" in result.stdout
    assert "examples:\n  dsr1build build BUILD.yaml\n" in result.stdout


def test_no_verb_prints_the_overview_as_an_error() -> None:
    result = dsr1build()
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == dsr1build("--help").stdout


def test_version() -> None:
    assert dsr1build("--version").stdout == f"dsr1build {__version__}\n"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["schema", "--help"], ["bulid"]])
def test_starts_without_heavy_imports(arguments: list[str]) -> None:
    code = (
        "import sys\nfrom dsr1build.cli.main import main\nmain(sys.argv[1:])\n"
        f"print(sorted({HEAVY | {'json'}} & set(sys.modules)), file=sys.stderr)"
    )
    result = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=True)
    loaded = result.stderr.splitlines()[-1]
    assert loaded == ("['json']" if arguments[0] == "schema" else "[]")


@pytest.mark.parametrize("name", VERBS)
def test_every_verb_has_help_with_examples_and_no_heavy_imports(name: str) -> None:
    code = (
        "import sys\nfrom dsr1build.cli.main import main\ncode = main(sys.argv[1:])\n"
        f"print(sorted({HEAVY} & set(sys.modules)), file=sys.stderr)\nsys.exit(code)"
    )
    result = subprocess.run([sys.executable, "-c", code, name, "--help"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (0, "[]\n")
    assert result.stdout.startswith(f"usage: dsr1build {name}")
    assert f"examples:\n  {'source <(' if name == 'completion' else ''}dsr1build {name}" in result.stdout


@pytest.mark.parametrize("name", VERBS)
def test_verb_modules_agree_with_the_overview(name: str) -> None:
    verb = load_verb(name)
    assert (name, VERBS[name].summary) == (verb.NAME, verb.SUMMARY)


def test_unknown_verb() -> None:
    result = dsr1build("bulid")
    assert result.returncode == 2
    assert result.stderr == (
        f"dsr1build: error: unknown verb `bulid`\nhelp: Did you mean `dsr1build build`? The verbs are {', '.join(VERBS)}.\n"
    )


def test_unknown_option_before_the_verb() -> None:
    assert dsr1build("--hlep").stderr == (
        f"dsr1build: error: unknown option `--hlep`\nhelp: Did you mean `dsr1build --help`? The verbs are {', '.join(VERBS)}.\n"
    )


def test_wrong_choice() -> None:
    result = dsr1build("schema", "bild")
    assert result.returncode == 2
    assert result.stderr == (
        "dsr1build schema: error: argument what: invalid choice: 'bild'"
        f" (choose from {', '.join(repr(name) for name in (*FILES, *OUTPUTS))})\n"
        "help: Did you mean build?\n"
    )


def test_unknown_option_of_a_verb() -> None:
    result = dsr1build("plan", "BUILD.yaml", "--jsno")
    assert result.returncode == 2
    assert result.stderr == "dsr1build plan: error: unrecognized arguments: --jsno\nhelp: Did you mean --json?\n"


def test_options_are_not_abbreviated() -> None:
    result = dsr1build("plan", "BUILD.yaml", "--js")
    assert (result.returncode, result.stderr.splitlines()[0]) == (
        2,
        "dsr1build plan: error: unrecognized arguments: --js",
    )


def test_missing_argument() -> None:
    assert dsr1build("schema").stderr == (
        "dsr1build schema: error: the following arguments are required: what\n"
        "help: `dsr1build schema --help` shows the options and examples.\n"
    )


def test_mistake_in_the_build_file_is_one_message(tmp_path: Path) -> None:
    (tmp_path / "BUILD.yaml").write_text("version: 1\nname: no\n")
    result = dsr1build("build", "BUILD.yaml", cwd=tmp_path)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        "BUILD.yaml:2:7: error: `no` is the boolean false to some YAML readers and text to others\n"
        "    name: no\n"
        "          ^\n"
        'help: Write false for the boolean, or "no" in quotes for the text.\n'
    )
    assert sorted(tmp_path.iterdir()) == [tmp_path / "BUILD.yaml"]


def test_main_gives_the_exit_code_and_prints_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nothing"]) == 2
    assert capsys.readouterr().err.startswith("dsr1build: error: unknown verb `nothing`\n")
    assert main(["--version"]) == 0
    assert main(["schema", "--help"]) == 0


def test_reader_that_goes_away() -> None:
    command = [sys.executable, "-m", "dsr1build", "schema", "recipe"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as gone:
        result = subprocess.run(command, stdout=gone, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (result.returncode, result.stderr) == (141, "")


def test_full_disk() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "dsr1build", "schema", "recipe"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 3
    assert result.stderr == "error: the disk is full\nhelp: Free some space and run it again.\n"


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize(("words", "code"), [(("schema", "recipe"), 0), (("plan", "BUILD.yaml"), 2)])
def test_closed_standard_streams(tmp_path: Path, closed: tuple[int, ...], words: tuple[str, ...], code: int) -> None:
    redirections = " ".join(f"{descriptor}>&-" for descriptor in closed)
    command = ["sh", "-c", f'exec "$@" {redirections}', "sh", sys.executable, "-m", "dsr1build", *words]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert (result.returncode, "Traceback" in result.stderr) == (code, False)
    assert bool(result.stdout) == (code == 0 and 1 not in closed)
    assert bool(result.stderr) == (code != 0 and 2 not in closed)


@pytest.mark.parametrize("words", [("build", "BUILD.yaml"), ("plan", "BUILD.yaml"), ("run", "bundle", "--ids", "1")])
def test_a_current_directory_that_was_removed(tmp_path: Path, words: tuple[str, ...]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', gone, sys.executable, "-m", "dsr1build", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (3, "")
    assert result.stderr == "error: the current directory has been removed\nhelp: Change to a directory that exists.\n"


@pytest.mark.parametrize(
    ("encoding", "written"),
    [("utf-8:strict", b"\xff \xc3\xbc \xf0\x9f\x98\x80\n"), ("latin-1:strict", b"\\udcff \xfc \\U0001f600\n")],
)
def test_no_character_is_beyond_standard_output(encoding: str, written: bytes) -> None:
    code = (
        "import sys\nfrom dsr1build.cli import main, schema\n"
        "def show(arguments):\n    print('\\udcff \\xfc \\U0001f600')\n    return 0\n"
        "schema.run = show\nsys.exit(main.main(['schema', 'build']))"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, env=environment)
    assert (result.returncode, result.stdout) == (0, written), result.stderr


def test_interrupt(tmp_path: Path) -> None:
    # No verb waits for anything reliably, so one is made to.
    code = (
        "import sys, time\nfrom dsr1build.cli import main, schema\n"
        "def wait(arguments):\n    print('ready', flush=True)\n    time.sleep(60)\n"
        "schema.run = wait\nsys.exit(main.main(['schema', 'build']))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (130, "interrupted\n")


@pytest.mark.parametrize(
    ("environment", "coloured"),
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "xterm", "NO_COLOR": ""}, True),
        ({"TERM": "dumb"}, False),
    ],
)
def test_colour_only_on_a_terminal_that_wants_it(environment: dict[str, str], coloured: bool) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "TERM")}
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "dsr1build", "bulid"]
    process = subprocess.Popen(command, stderr=slave, env=clean | environment)
    os.close(slave)
    process.wait(timeout=60)
    text = os.read(master, 4096).decode()
    os.close(master)
    assert text.startswith("\x1b[31m") == coloured
    assert "\x1b" not in dsr1build("bulid", env=clean | environment).stderr


def complete(*words: str, cwd: Path | None = None) -> list[str]:
    """What bash offers for the last of the words."""
    script = (
        bash_script(command_syntax())
        + f"COMP_WORDS=({' '.join(repr(word) for word in words)}); COMP_CWORD={len(words) - 1}; _dsr1build\n"
        + 'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, cwd=cwd, check=True)
    assert result.stderr == ""
    return result.stdout.split()


def test_bash_completes_verbs_options_choices_and_files(tmp_path: Path) -> None:
    (tmp_path / "BUILD.yaml").touch()
    assert complete("dsr1build", "pl") == ["plan"]
    assert complete("dsr1build", "--v") == ["--version"]
    assert complete("dsr1build", "plan", "--js") == ["--json"]
    assert complete("dsr1build", "schema", "ta") == ["target"]
    assert complete("dsr1build", "plan", "BU", cwd=tmp_path) == ["BUILD.yaml"]
    assert complete("dsr1build", "plan", "--cache", "BU", cwd=tmp_path) == ["BUILD.yaml"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_every_option(shell: str) -> None:
    result = dsr1build("completion", shell)
    assert (result.returncode, result.stderr) == (0, "")
    for name, syntax in command_syntax().items():
        assert name in result.stdout
        for option in syntax.options:
            for option_name in option.names:
                shown = option_name.lstrip("-") if shell == "fish" else option_name
                assert shown in result.stdout


def completed(line: str, directory: Path) -> list[str]:
    """What bash offers for the last word of ``line``."""
    words = line.split(" ")
    script = (
        f"source <({sys.executable} -m dsr1build completion bash); COMP_WORDS=({' '.join(words[:-1])} '{words[-1]}'); "
        f'COMP_CWORD={len(words) - 1}; _dsr1build; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    run = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True, cwd=directory)
    return run.stdout.split()


def test_completion_offers_files_only_where_a_file_can_stand(tmp_path: Path) -> None:
    (tmp_path / "a-file").touch()
    assert completed("dsr1build bu", tmp_path) == ["build"]
    assert completed("dsr1build build a", tmp_path) == ["a-file"]
    assert completed("dsr1build build --cache a", tmp_path) == ["a-file"]
    assert completed("dsr1build build --context a", tmp_path) == []
    assert completed("dsr1build cache e", tmp_path) == ["export"]
    assert completed("dsr1build cache export a", tmp_path) == ["a-file"]
    assert completed("dsr1build cache gc --max-b", tmp_path) == ["--max-bytes"]


def test_help_is_also_a_word() -> None:
    assert dsr1build("help").stdout == dsr1build("--help").stdout
    assert dsr1build("help", "build").stdout == dsr1build("build", "--help").stdout
    assert "unknown verb `bild`" in dsr1build("help", "bild").stderr


def test_quotes_in_help_texts_cannot_break_a_script() -> None:
    from dsr1build.cli.completion import Option, Syntax

    syntax = {"verb": Syntax("it's", (Option(("--x",), "a [list]: it's `x` $(y)", True, ("it's",)),), ())}
    assert "'it'\\''s'" in bash_script(syntax)
    assert "'--x[a \\[list\\]\\: it'\\''s `x` $(y)]:value:(it'\\''s)'" in zsh_script(syntax)
    assert "-d 'a [list]: it\\'s `x` $(y)'" in fish_script(syntax)


@pytest.mark.parametrize("wrapped", [RuntimeError, ImportError, SystemError])
def test_an_interrupt_that_comes_out_as_another_error(wrapped, monkeypatch, capsys):
    def interrupted(arguments):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise wrapped("Error calling __set_name__") from error

    monkeypatch.setattr("dsr1build.cli.main._dispatch", interrupted)
    assert main(["cache", "verify"]) == 130
    assert capsys.readouterr().err == "interrupted\n"

    def failed(arguments):
        raise wrapped("another")

    monkeypatch.setattr("dsr1build.cli.main._dispatch", failed)
    with pytest.raises(wrapped, match="another"):
        main(["cache", "verify"])
