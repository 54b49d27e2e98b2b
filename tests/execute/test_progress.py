import io
import json
import os
import pty
import subprocess
import sys

import pytest

from dsr1build.execute.events import Failed, Finished, Hit, Started, Summary, Warned
from dsr1build.execute.progress import show_events

KEY = "0" * 64
SUMMARY = Summary(1, 2, {"local": 3, "remote": 0}, 0, 0, 1.25, ("dist/m/t",))
EVENTS = [
    Hit("lower:a", "lower", "ffn a tokens=1", KEY),
    Started("compile:a", "compile", "ffn a tokens=1 for t"),
    Warned("the cache cannot be written"),
    Finished("compile:a", "compile", "ffn a tokens=1 for t", KEY, 0.5, 1 << 20),
    Failed("compile:b", "compile", "head b tokens=1 for t", "killed by SIGSEGV", "one\ntwo"),
    SUMMARY,
]


def show(view, events):
    out, err = io.StringIO(), io.StringIO()
    with show_events(view, 5, out, err) as emit:
        for event in events:
            emit(event)
    return out.getvalue(), err.getvalue()


def test_plain_lines_read_well_in_a_log():
    assert show("plain", EVENTS) == (
        "[2/5] compile ffn a tokens=1 for t  0.50 s\ncompiled 1 variant, 2 actions run, 3 cached, in 1.2 s\ndist/m/t\n",
        "warning: the cache cannot be written\n[3/5] compile head b tokens=1 for t failed: killed by SIGSEGV\n    one\n    two\n",
    )


def test_quiet_shows_warnings_and_failures_only():
    out, err = show("quiet", EVENTS)
    assert out == ""
    assert err.startswith("warning: ") and " failed: killed by SIGSEGV\n" in err


def test_json_is_one_object_a_line_and_the_summary_is_last():
    out, err = show("json", EVENTS)
    events = [json.loads(line) for line in out.splitlines()]
    assert err == ""
    assert [event["event"] for event in events] == ["hit", "started", "warning", "finished", "failed", "summary"]
    assert events[-1] == {
        "event": "summary",
        "compiled": 1,
        "executed": 2,
        "hits": {"local": 3, "remote": 0},
        "failed": 0,
        "skipped": 0,
        "seconds": 1.25,
        "artifacts": ["dist/m/t"],
    }


@pytest.mark.parametrize(
    ("summary", "line"),
    [
        (Summary(0, 0, {"local": 23, "remote": 0}, 0, 0, 0.1, ()), "nothing to compile: 23 actions cached"),
        (Summary(0, 2, {"local": 21, "remote": 0}, 0, 0, 0.4, ()), "nothing to compile: 2 actions run, 21 cached, in 0.4 s"),
        (Summary(2, 5, {"local": 1, "remote": 1}, 1, 3, 9.0, ()), "1 action failed, 5 done, 2 cached, 3 not started, in 9.0 s"),
    ],
)
def test_the_summary_says_what_happened(summary, line):
    assert show("plain", [summary])[0] == line + "\n"


def test_a_terminal_gets_a_live_view():
    script = (
        "import time\nfrom dsr1build.execute.events import *\nfrom dsr1build.execute.progress import show_events\n"
        "with show_events('live', 2) as emit:\n"
        "    emit(Started('a', 'compile', 'ffn a tokens=1 for t'))\n    time.sleep(0.4)\n"
        f"    emit(Finished('a', 'compile', 'ffn a tokens=1 for t', {KEY!r}, 0.5, 1))\n"
    )
    master, slave = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=slave, env=environment) as process:
        os.close(slave)
        shown = b""
        while True:
            try:
                data = os.read(master, 65536)
            except OSError:
                break
            if not data:
                break
            shown += data
    os.close(master)
    assert process.returncode == 0
    assert b"compile ffn a tokens=1 for t  0." in shown
    assert b"0/2 actions" in shown
    assert b"[1/2] compile ffn a tokens=1 for t  0.50 s" in shown


def test_a_security_warning_says_that_it_is_one():
    event = Warned("a result is not used", security=True)
    assert show("plain", [event]) == ("", "security warning: a result is not used\n")
    assert json.loads(show("json", [event])[0]) == {"event": "warning", "message": "a result is not used", "security": True}
