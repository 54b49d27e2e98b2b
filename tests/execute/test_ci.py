"""What a job of GitHub Actions is told: annotations, and the summary of a step."""

from dsr1build.cli.main import main
from dsr1build.errors import InvalidInput, Position
from dsr1build.execute.ci import (
    StepSummary,
    append_step_summary,
    error_annotation,
    event_annotation,
    github_actions,
    hit_rate,
    render_step_summary,
)
from dsr1build.execute.events import Failed, Finished, Summary, Warned
from dsr1build.execute.progress import show_events


def summary(executed=2, local=6, remote=2, failed=0, skipped=0):
    return Summary(1, executed, {"local": local, "remote": remote}, failed, skipped, 1.25, ("dist/x",))


def test_an_error_is_shown_at_its_place_relative_to_the_checkout(tmp_path, monkeypatch):
    (tmp_path / "models, ü").mkdir()
    monkeypatch.chdir(tmp_path / "models, ü")
    error = InvalidInput("100% wrong\nreally", position=Position("BUILD.yaml", 3, 7, "x: y"), hint="Fix it.")
    assert error_annotation(error, {"GITHUB_WORKSPACE": str(tmp_path)}) == (
        "::error file=models%2C ü/BUILD.yaml,line=3,col=7,title=dsr1build::100%25 wrong%0Areally%0AFix it."
    )
    assert error_annotation(error, {}).startswith("::error file=BUILD.yaml,line=3,col=7,")
    assert error_annotation(error, {"GITHUB_WORKSPACE": "/elsewhere"}).startswith("::error file=BUILD.yaml,")
    assert error_annotation(InvalidInput("bad", where="x"), {}) == "::error title=dsr1build::x: bad"


def test_failures_and_warnings_are_annotations_and_nothing_else_is():
    failed = Failed("a", "compile", "expert: a, b", "exit code 1", "one\r\ntwo\n")
    assert event_annotation(failed) == "::error title=compile expert%3A a%2C b failed::exit code 1%0Aone%0D%0Atwo"
    assert event_annotation(Warned("::error::forged\n::set-env")) == "::warning title=dsr1build::::error::forged%0A::set-env"
    assert event_annotation(summary()) == ""
    assert event_annotation(Finished("a", "lower", "x", "0" * 64, 1.0, 1)) == ""


def test_only_github_is_github():
    assert github_actions({"GITHUB_ACTIONS": "true"})
    assert not github_actions({"GITHUB_ACTIONS": "false"}) and not github_actions({"CI": "true"})


def test_the_hit_rate_counts_what_was_looked_up():
    assert hit_rate(summary()) == 80.0
    assert hit_rate(summary(executed=0, local=0, remote=0)) == 100.0
    assert hit_rate(summary(executed=1, local=1, remote=1, failed=1, skipped=9)) == 50.0


def test_names_are_no_markup_and_no_commands():
    hostile = "a\r# heading\n::error::x\u2028<b>`\x1b[2J\x0b\x85"
    failure = Failed("a", "compile", hostile, hostile, "out\r<b>\u2028::error::y")
    text = render_step_summary(StepSummary(hostile, summary(failed=1), [(hostile, hostile)], [failure]))
    assert not any(line.startswith(("#", "::", "<b>")) for line in text.splitlines() if not line.startswith("### dsr1build"))
    assert not {"\r", "\x1b", "\x0b", "\u2028"} & set(text)
    assert len(event_annotation(failure).splitlines()) == len(event_annotation(failure).split("\n")) == 1


def test_the_summary_in_markdown():
    failure = Failed("a", "compile", "expert `x`", "exit code 1", "# not a heading\n<b>")
    text = render_step_summary(StepSummary("r1", summary(failed=1), [("lower a", "x was `1`, is 2")] * 130, [failure]))
    assert text.startswith("### dsr1build: `r1`\n\n| | |\n|---|---|\n| compiled | 1 variants |\n")
    assert "| cached | 6 local, 2 remote |\n| hit rate | 72.7 % |\n" in text
    assert "`compile expert 'x'` failed: `exit code 1`\n\n    # not a heading\n    <b>\n" in text
    assert "<details><summary>130 misses</summary>\n\n- `lower a`: `x was '1', is 2`\n" in text
    assert text.count("- `lower a`") == 100 and "- and 30 more\n\n</details>" in text


def test_the_summary_is_appended_and_bounded(tmp_path):
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    environment = {"GITHUB_STEP_SUMMARY": str(path)}
    assert append_step_summary("one\n", environment) == append_step_summary("two\n", environment) == ""
    assert path.read_text() == "before\none\ntwo\n"
    append_step_summary("ü" * (1 << 20), environment)
    assert path.stat().st_size < 600 << 10
    assert path.read_text().endswith("(cut for its length)\n")
    assert append_step_summary("x", {}) == ""
    assert append_step_summary("x", {"GITHUB_STEP_SUMMARY": str(tmp_path)}) == (
        f"the step summary cannot be written to {tmp_path} (Is a directory)"
    )


def test_output_of_an_action_is_no_command_to_the_runner(monkeypatch, capsys):
    failure = Failed("a", "compile", "x", "exit code 1", "::stop-commands::x\n \u2003::error::y\na::b\nz ##[error]w")
    printed = []
    for value in ("true", "false"):
        monkeypatch.setenv("GITHUB_ACTIONS", value)
        with show_events("plain", 1) as show:
            show(failure)
        printed.append(capsys.readouterr().err.splitlines())
    guarded, plain = printed
    assert guarded[1:] == ["    | ::stop-commands::x", "     \u2003| ::error::y", "    a::b", "    z ## [error]w"]
    assert plain[1:] == ["    ::stop-commands::x", "     \u2003::error::y", "    a::b", "    z ##[error]w"]


def test_an_error_of_the_users_is_no_command_to_the_runner(tmp_path, monkeypatch, capsys):
    (tmp_path / "BUILD.yaml").write_text("version: 1\n::stop-commands::x: 1\n")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    assert main(["plan", str(tmp_path / "BUILD.yaml")]) == 2
    commands = [line for line in capsys.readouterr().err.splitlines() if line.lstrip().startswith("::")]
    assert len(commands) == 1 and commands[0].startswith("::error file=")
