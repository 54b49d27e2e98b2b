"""Shows a build's events: a live view on a terminal, plain lines elsewhere, JSON lines for scripts."""

import contextlib
import json
import shlex
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, TextIO, TypeAlias

from dsr1build.execute.ci import github_actions, without_commands
from dsr1build.execute.events import Emit, Event, Failed, Finished, Hit, Started, Summary, Warned, to_json

if TYPE_CHECKING:
    from rich.console import Group

View: TypeAlias = Literal["live", "plain", "quiet", "json"]


@contextlib.contextmanager
def show_events(view: View, total: int, out: TextIO | None = None, err: TextIO | None = None) -> Iterator[Emit]:
    """Yields the function that takes the events of a build of ``total`` actions.

    Results go to ``out`` (standard output), warnings and failures to ``err`` (standard error); with ``json`` all goes to
    ``out``, one object a line. ``quiet`` shows warnings and failures only.
    """
    out = out or sys.stdout
    err = err or sys.stderr
    if view == "json":
        yield lambda event: print(json.dumps(to_json(event)), file=out, flush=True)
    elif view == "live":
        with _live(total, out) as emit:
            yield emit
    else:
        done = 0

        def plain(event: Event) -> None:
            nonlocal done
            if isinstance(event, Hit | Finished | Failed):
                done += 1
            text = render(event, done, total)
            if github_actions():
                text = without_commands(text)
            if isinstance(event, Warned | Failed):
                print(text, file=err, flush=True)
            elif text and view == "plain":
                print(text, file=out, flush=True)

        yield plain


def render(event: Event, done: int, total: int) -> str:
    """One or more plain lines for an event; "" for one that a log does not need."""
    match event:
        case Finished():
            return f"[{done}/{total}] {event.kind} {event.label}  {event.seconds:.2f} s"
        case Failed():
            where = f" in pass group {event.pass_group}" if event.pass_group else ""
            lines = [f"[{done}/{total}] {event.kind} {event.label} failed{where}: {event.reason}"]
            lines += [f"    {line}" for line in event.output.splitlines()]
            if event.reproducer:
                lines += [
                    f"    {event.again}",
                    f"    run it alone: python -m dsr1build.execute.once {shlex.quote(event.reproducer)}",
                ]
            return "\n".join(lines)
        case Warned():
            return f"{'security warning' if event.security else 'warning'}: {event.message}"
        case Summary():
            return render_summary(event)
    return ""


def render_summary(event: Summary) -> str:
    cached = sum(event.hits.values())
    if event.failed:
        tail = f", {event.skipped} not started" if event.skipped else ""
        head = f"{_count(event.failed, 'action')} failed, {event.executed} done, {cached} cached{tail}, in {event.seconds:.1f} s"
    elif not event.executed:
        head = f"nothing to compile: {_count(cached, 'action')} cached"
    elif not event.compiled:
        head = f"nothing to compile: {_count(event.executed, 'action')} run, {cached} cached, in {event.seconds:.1f} s"
    else:
        head = (
            f"compiled {_count(event.compiled, 'variant')}, {_count(event.executed, 'action')} run, {cached} cached, "
            f"in {event.seconds:.1f} s"
        )
    return "\n".join([head, *event.artifacts])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


@contextlib.contextmanager
def _live(total: int, out: TextIO) -> Iterator[Emit]:
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    console = Console(file=out, highlight=False)
    running: dict[str, tuple[str, float]] = {}
    done = 0

    def view() -> "Group":
        now = time.monotonic()
        lines = [Text(f"  {label}  {now - since:.1f} s", "dim") for label, since in list(running.values())]
        return Group(*lines, Text(f"{done}/{total} actions"))

    # The view is made anew at each refresh, so that the age of what runs is shown while nothing happens.
    with Live(get_renderable=view, console=console, refresh_per_second=8, transient=True):

        def emit(event: Event) -> None:
            nonlocal done
            if isinstance(event, Started):
                running[event.action] = (f"{event.kind} {event.label}", time.monotonic())
            elif isinstance(event, Hit | Finished | Failed):
                done += 1
                running.pop(event.action, None)
            text = render(event, done, total)
            if text:
                console.print(Text(text, "red" if isinstance(event, Failed) else "yellow" if isinstance(event, Warned) else ""))

        yield emit
