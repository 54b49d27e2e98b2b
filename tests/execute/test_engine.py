import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jsonschema
import pytest

from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, key_of, sha256_hex
from dsr1build.execute.engine import run_actions
from dsr1build.execute.events import EVENT_SCHEMA, Failed, Finished, Hit, Started, to_json
from dsr1build.execute.executor import Limits
from dsr1build.execute.options import Options
from dsr1build.execute.resources import usable_cpus
from dsr1build.plan.action import Action

HERE = Path(__file__).parent


def toy(id, function, inputs=(), outputs=("text",), kind="compile", **fields):
    return Action(
        id, kind, f"toy {id}", f"toy_workers:{function}", tuple(inputs), lambda results: {"toy": function, **fields}, outputs
    )


def join(id, parts):
    def fields(results):
        return {"toy": "join", "parts": [results[p].outputs["text"] for p in parts]}

    return Action(id, "link", f"join {id}", "toy_workers:join", tuple(parts), fields, ("sub/joined",))


class Build:
    """One build over a store, with its events."""

    def __init__(self, store_directory, *actions, **options):
        self.events = []
        self.warnings = []
        options = {"jobs": 2, "import_path": (HERE,), **options}
        self.store = LocalStore(store_directory, self.warnings.append)
        self.outcome = run_actions({a.id: a for a in actions}, self.store, Options(**options), self.events.append)
        self.store.close()
        for event in self.events:
            jsonschema.validate(to_json(event), EVENT_SCHEMA)

    def of(self, kind):
        return [e for e in self.events if isinstance(e, kind)]

    @property
    def failure(self):
        (failure,) = self.of(Failed)
        return failure


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def content(store_directory, outcome, id, name="text"):
    with LocalStore(store_directory, lambda text: None) as store:
        return store.read_blob(outcome.results[id].outputs[name])


def test_second_build_runs_nothing_and_gives_the_same_bytes(store):
    actions = [toy("a", "upper", text="left"), toy("b", "upper", text="right"), join("j", ["a", "b"])]
    first = Build(store, *actions)
    assert first.outcome.executed == ("a", "b", "j") or first.outcome.executed == ("b", "a", "j")
    assert content(store, first.outcome, "j", "sub/joined") == b"LEFT+RIGHT"
    second = Build(store, *actions)
    assert second.outcome.executed == ()
    assert set(second.outcome.hits) == {"a", "b", "j"}
    assert second.outcome.results == first.outcome.results
    assert not second.of(Started) and len(second.of(Hit)) == 3


def test_a_change_upstream_that_gives_the_same_text_stops_there(store):
    Build(store, toy("a", "upper", text="Left"), join("j", ["a"]))
    second = Build(store, toy("a", "upper", text="lEFT"), join("j", ["a"]))
    assert second.outcome.executed == ("a",)
    assert second.outcome.hits == ("j",)


@pytest.mark.parametrize(
    ("function", "reason", "output"),
    [
        ("crash", "killed by SIGSEGV", "about to die"),
        ("abort", "killed by SIGABRT", ""),
        ("exhaust", "out of memory at the limit of 1 GiB, ", "MemoryError"),
        ("fill", "exit code 1", "OSError: [Errno 27] File too large"),
        ("leave_nothing", "left no output text", ""),
        ("write_then_fail", "exit code 1", "RuntimeError: no good"),
        ("link_out", "left text, which is not a regular file", ""),
        ("no_such_function", "exit code 1", "AttributeError: module 'toy_workers' has no attribute 'no_such_function'"),
    ],
)
def test_a_bad_action_fails_alone_and_publishes_nothing(store, function, reason, output):
    limits = Limits(memory=256 << 20, file_size=8 << 20)
    good = [toy(f"good{i}", "upper", text=f"g{i}") for i in range(3)]
    build = Build(store, good[0], toy("bad", function), *good[1:], join("j", ["good0", "bad"]), limits=limits, keep_going=True)
    # How much was used is not the same every time.
    assert build.failure.reason == reason or (reason.endswith(", ") and build.failure.reason.startswith(reason))
    assert build.failure.output.splitlines()[-1:] == ([output] if output else [])
    assert build.failure.label == "toy bad"
    assert build.outcome.failed == ("bad",) and build.outcome.skipped == ("j",)
    assert set(build.outcome.executed) == {"good0", "good1", "good2"}
    again = Build(store, good[0], toy("bad", function), limits=limits)
    assert again.outcome.hits == ("good0",) and again.outcome.failed == ("bad",)


def test_a_gigabyte_of_output_is_read_and_bounded(store):
    build = Build(store, toy("loud", "shout", kilobytes=1 << 20))
    assert build.failure.reason == "exit code 3"
    assert build.failure.output.endswith("\nthe last line")
    assert len(build.failure.output) <= 4000


def test_without_keep_going_nothing_new_starts_and_what_runs_is_kept(store):
    build = Build(
        store,
        toy("slow", "slow", seconds=0.5),
        toy("bad", "crash"),
        toy("late", "upper", text="late"),
        toy("later", "upper", text="l"),
    )
    assert build.outcome.failed == ("bad",)
    assert build.outcome.executed == ("slow",)
    assert build.outcome.skipped == ("late", "later")


def test_a_hanging_action_and_its_children_are_killed_at_the_limit(store, tmp_path):
    pid_file = tmp_path / "pid"
    build = Build(store, toy("hang", "hang", pid_file=str(pid_file)), limits=Limits(seconds=1))
    assert build.failure.reason == "killed after 1 seconds, the limit for one action"
    assert not group_members(int(pid_file.read_text()))


def test_a_lost_fork_server_costs_what_ran_in_it(store):
    build = Build(store, toy("bad", "kill_server"), toy("good", "upper", text="g"), jobs=1, keep_going=True)
    assert build.failure.reason == "its fork server was lost"
    assert build.outcome.executed == ("good",)


def test_actions_see_a_scrubbed_environment(store, monkeypatch):
    monkeypatch.setenv("DSR1_PLANTED", "1")
    monkeypatch.setenv("LC_ALL", "de_DE.UTF-8")
    old = os.umask(0o077)
    try:
        build = Build(store, toy("s", "surroundings"))
    finally:
        os.umask(old)
    names, *rest = eval(content(store, build.outcome, "s"))
    threads = ["OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"]
    assert names == ["HOME", "LC_ALL", *threads, "PATH", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "TMPDIR", "TZ"]
    assert rest == ["C.UTF-8", "UTC", 0o022, [], True]


def test_equal_keys_run_once(store):
    build = Build(store, toy("a", "slow", seconds=0.2), toy("b", "slow", seconds=0.2), jobs=4)
    assert build.outcome.executed == ("a",) and build.outcome.hits == ("b",)
    assert len(build.of(Finished)) == 1


def most_at_once(store, **options):
    actions = [toy(f"s{i}", "slow", seconds=0.1 + i / 1000) for i in range(6)]
    running = peak = 0
    for event in Build(store, *actions, **options).events:
        running += isinstance(event, Started) - isinstance(event, Finished)
        peak = max(peak, running)
    return peak


def test_jobs_bounds_what_runs_at_once(store):
    assert most_at_once(store, jobs=2) == 2


def test_without_a_number_of_jobs_the_usable_cpus_bound_what_runs_at_once(store):
    mask = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(mask)})
        assert most_at_once(store, jobs=0) == 1
    finally:
        os.sched_setaffinity(0, mask)


def test_memory_bounds_what_runs_at_once(store):
    # Nothing is known of these actions, and one such is taken to need half a gigabyte.
    assert most_at_once(store, jobs=6, memory=1 << 30) == 2


def test_what_earlier_runs_used_bounds_what_runs_at_once(store, tmp_path):
    (tmp_path / "out").write_bytes(b"")
    with LocalStore(store, pytest.fail) as opened:
        for number in range(6):
            fields = {"earlier": number}
            files = {"text": tmp_path / "out"}
            opened.publish(key_of(fields), fields, files, 1.0, "compile", f"toy s{number}", 800 << 20)
    assert most_at_once(store, jobs=6, memory=1 << 30) == 1


def test_what_an_action_used_is_kept_with_its_result(store):
    Build(store, toy("a", "upper", text="a"))
    with LocalStore(store, pytest.fail) as opened:
        (entry,) = opened.entries().values()
    assert 1 << 20 < entry.peak < 1 << 33


def test_a_truncated_blob_is_made_again_in_the_same_build(store):
    actions = [toy("a", "upper", text="left"), join("j", ["a"])]
    first = Build(store, *actions)
    blob = next(store.glob(f"v1/blobs/*/{first.outcome.results['a'].outputs['text'].sha256}"))
    blob.write_bytes(b"LE")
    second = Build(store, *actions)
    assert second.outcome.executed == ("a",) and second.outcome.hits == ("j",)
    assert content(store, second.outcome, "a") == b"LEFT"
    assert len(list((store / "v1/broken").iterdir())) == 1


def test_a_blob_that_vanishes_after_its_look_up_is_made_again(store):
    a = toy("a", "upper", text="left")
    first = Build(store, a)
    ref = first.outcome.results["a"].outputs["text"]

    def fields(results):
        with contextlib.suppress(FileNotFoundError):
            next(store.glob(f"v1/blobs/*/{ref.sha256}"), store / "none").unlink()
        return {"toy": "join", "parts": [results["a"].outputs["text"]]}

    lost_once = Action("j", "link", "j", "toy_workers:join", ("a",), fields, ("sub/joined",))
    # The look-up of "j" runs again after "a" was made; by then the file stays, for the glob finds nothing else to remove.
    calls = []

    def once(results):
        calls.append(1)
        return fields(results) if len(calls) == 1 else {"toy": "join", "parts": [results["a"].outputs["text"]]}

    build = Build(store, a, Action("j", "link", "j", "toy_workers:join", ("a",), once, lost_once.outputs))
    assert build.outcome.executed == ("a", "j") and build.outcome.hits == ()
    assert content(store, build.outcome, "j", "sub/joined") == b"LEFT"


def test_blobs_that_no_action_makes_come_from_the_plan(store):
    ref = BlobRef(sha256_hex(b"source"))
    action = Action("j", "link", "j", "toy_workers:join", (), lambda results: {"parts": [ref]}, ("sub/joined",))
    with LocalStore(store, print) as local:
        outcome = run_actions({"j": action}, local, Options(1, import_path=(HERE,)), lambda event: None, {ref.sha256: b"source"})
        assert local.read_blob(outcome.results["j"].outputs["sub/joined"]) == b"source"


def test_save_temps_keeps_what_a_compile_leaves_and_runs_it_even_when_cached(store, tmp_path):
    Build(store, toy("a", "upper", text="x"))
    build = Build(store, toy("a", "upper", text="x"), save_temps=tmp_path / "temps")
    assert build.outcome.executed == ("a",)
    assert (tmp_path / "temps/toy-a/00-parse.mlir").read_text() == "x"


BUILDER = """
import sys
sys.path.insert(0, {here!r})
from pathlib import Path
from test_engine import Build, toy, join
build = Build(Path({store!r}), *[toy(f"s{{i}}", "slow", seconds=0.05 + i / 1000) for i in range({count})], join("j", ["s0"]))
print(len(build.outcome.results), build.warnings)
"""


def start_builder(store, count=20):
    script = BUILDER.format(here=str(HERE), store=str(store), count=count)
    return subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def group_members(group):
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            after = stat.read_text().rpartition(")")[2].split()
            if int(after[2]) == group and after[0] != "Z":
                members.append(stat.parent.name)
    return members


def test_two_builders_at_once_agree(store):
    builders = [start_builder(store), start_builder(store)]
    for builder in builders:
        out, _ = builder.communicate(timeout=60)
        assert out == "21 []\n"


def test_kill_9_of_a_builder_leaves_nothing_trusted_wrongly(store, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for wait in (0.8, 1.1, 1.4):
        builder = start_builder(store)
        time.sleep(wait)
        builder.kill()
        builder.wait()
        builder.stdout.close()
    out, _ = start_builder(store).communicate(timeout=60)
    assert out == "21 []\n"
    actions = [toy(f"s{i}", "slow", seconds=0.05 + i / 1000) for i in range(20)]
    build = Build(store, *actions)
    assert len(build.outcome.hits) == 20
    assert all(content(store, build.outcome, a.id) == b"slow" for a in actions)
    # The next builder removed what the killed ones had left.
    assert not list(tmp_path.glob("dsr1build-work-*"))


def test_a_killed_builder_leaves_no_process_behind(store, tmp_path):
    pid_file = tmp_path / "pid"
    script = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from pathlib import Path
from test_engine import Build, toy
Build(Path({str(store)!r}), toy("h", "hang", pid_file={str(pid_file)!r}))
"""
    for number in (signal.SIGKILL, signal.SIGINT):
        pid_file.unlink(missing_ok=True)
        builder = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while not (pid_file.exists() and pid_file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        group = int(pid_file.read_text())
        assert group_members(group)
        builder.send_signal(number)
        started = time.monotonic()
        builder.wait(timeout=20)
        while group_members(group) and time.monotonic() - started < 20:
            time.sleep(0.02)
        assert not group_members(group)


def test_usable_cpus_follows_the_affinity_mask():
    mask = os.sched_getaffinity(0)
    one = {min(mask)}
    try:
        os.sched_setaffinity(0, one)
        assert usable_cpus() == 1
    finally:
        os.sched_setaffinity(0, mask)
