"""What a build tells the service that runs it: annotations and a step summary for GitHub Actions."""

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsr1build.errors import Dsr1Error
from dsr1build.execute.events import Event, Failed, Summary, Warned

# GitHub refuses a step's summary of more than 1 MiB.
_LARGEST_SUMMARY = 512 << 10
_MISSES_SHOWN = 100


def github_actions(environment: Mapping[str, str] | None = None) -> bool:
    """Whether this process runs in a job of GitHub Actions."""
    return (os.environ if environment is None else environment).get("GITHUB_ACTIONS") == "true"


def error_annotation(error: Dsr1Error, environment: Mapping[str, str] | None = None) -> str:
    """The workflow command that shows ``error`` at its line of the file. A path is given relative to the checkout
    (GITHUB_WORKSPACE), for nothing else finds its file there."""
    message = error.message + (f"\n{error.hint}" if error.hint else "")
    if error.position is None:
        where = f"{error.where}: " if error.where else ""
        return _command("error", {"title": "dsr1build"}, where + message)
    workspace = (os.environ if environment is None else environment).get("GITHUB_WORKSPACE")
    path = Path.cwd() / error.position.file
    shown = error.position.file
    if workspace:
        with contextlib.suppress(ValueError, OSError):
            shown = path.resolve().relative_to(Path(workspace).resolve()).as_posix()
    place = {"file": shown, "line": str(error.position.line), "col": str(error.position.column), "title": "dsr1build"}
    return _command("error", place, message)


def event_annotation(event: Event) -> str:
    """The workflow command for a failure or a warning; "" for any other event."""
    if isinstance(event, Failed):
        return _command("error", {"title": f"{event.kind} {event.label} failed"}, f"{event.reason}\n{event.output}".rstrip())
    if isinstance(event, Warned):
        return _command("warning", {"title": "dsr1build"}, event.message)
    return ""


def without_commands(text: str) -> str:
    """``text`` with what a runner of GitHub Actions would take for commands made harmless: it obeys `::` behind the blanks
    that begin a line, and `##[` anywhere."""
    return re.sub(r"(\A|[\r\n])(\s*)(?=::)", r"\1\2| ", text).replace("##[", "## [")


def _command(name: str, properties: Mapping[str, str], message: str) -> str:
    given = ",".join(f"{key}={_escape(_escape_data(value))}" for key, value in properties.items())
    return f"::{name} {given}::{_escape_data(message)}"


def _escape_data(text: str) -> str:
    text = text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
    # Some readers of a log know more line ends than these two.
    return "".join(c if c.isprintable() or c == "\t" else repr(c)[1:-1] for c in text)


def _escape(text: str) -> str:
    return text.replace(":", "%3A").replace(",", "%2C")


@dataclass(frozen=True, slots=True)
class StepSummary:
    """What stands in the summary of a step: the build's name and numbers, why actions missed and how they failed."""

    name: str
    summary: Summary
    misses: Sequence[tuple[str, str]]
    failures: Sequence[Failed]


def render_step_summary(step: StepSummary) -> str:
    """The summary in Markdown. ``misses`` are pairs of an action and its explanation."""
    numbers = step.summary
    rate = hit_rate(numbers)
    rows = [
        ("compiled", f"{numbers.compiled} variants"),
        ("run", f"{numbers.executed} actions"),
        ("cached", ", ".join(f"{count} {place}" for place, count in numbers.hits.items())),
        ("hit rate", f"{rate:.1f} %"),
        ("failed", str(numbers.failed)),
        ("not started", str(numbers.skipped)),
        ("time", f"{numbers.seconds:.1f} s"),
    ]
    lines = [
        f"### dsr1build: {_code(step.name)}",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
    ]
    for failure in step.failures:
        lines += [f"{_code(f'{failure.kind} {failure.label}')} failed: {_code(failure.reason)}", ""]
        lines += [*(f"    {line}" for line in failure.output.splitlines()), ""]
    if step.misses:
        lines += [f"<details><summary>{len(step.misses)} misses</summary>", ""]
        lines += [f"- {_code(action)}: {_code(why)}" for action, why in step.misses[:_MISSES_SHOWN]]
        if len(step.misses) > _MISSES_SHOWN:
            lines.append(f"- and {len(step.misses) - _MISSES_SHOWN} more")
        lines += ["", "</details>", ""]
    return "\n".join(lines)


def hit_rate(summary: Summary) -> float:
    """Hits of all actions that were looked up, in percent; 100 where there were none."""
    hits = sum(summary.hits.values())
    total = hits + summary.executed + summary.failed
    return 100.0 * hits / total if total else 100.0


def append_step_summary(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Append ``text`` to the file that GITHUB_STEP_SUMMARY names, if there is one. Gives a warning, or ""."""
    path = (os.environ if environment is None else environment).get("GITHUB_STEP_SUMMARY")
    if not path:
        return ""
    data = text.encode("utf-8", "replace")
    if len(data) > _LARGEST_SUMMARY:
        data = data[:_LARGEST_SUMMARY].decode("utf-8", "ignore").encode() + b"\n\n(cut for its length)\n"
    try:
        with Path(path).open("ab") as out:
            out.write(data)
    except OSError as error:
        return f"the step summary cannot be written to {path} ({error.strerror})"
    return ""


def _code(text: str) -> str:
    """Text as code, so that nothing in it is markup. Every line end that Markdown or a terminal knows would end the code."""
    return "`" + "".join(c if c.isprintable() else " " for c in text.replace("`", "'")) + "`"
