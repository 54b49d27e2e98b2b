"""What the local executor costs: beside a bare fork and compile, on many trivial actions, at Ctrl-C, and in a cold build.

    python bench/executor.py [--quick] [--json FILE]

What is compared runs by turns in one run. A bare fork is ``bench/bare_worker.py``: no limits, no directories, no cache.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rows import Row, arguments, median, report

from builds import ROOT, project
from dsr1build.cache.store import LocalStore
from dsr1build.execute.action_directory import prepare
from dsr1build.execute.engine import run_actions
from dsr1build.execute.events import Event, Finished, Started
from dsr1build.execute.options import Options
from dsr1build.execute.ready_queue import critical_paths
from dsr1build.execute.resources import usable_cpus
from dsr1build.plan.action import Action, Results

HERE = Path(__file__).resolve().parent
PRELOAD = ("dsr1build.toolchains.compile", "executor_workers")


@contextlib.contextmanager
def bare_parent() -> Iterator[subprocess.Popen[str]]:
    program = [sys.executable, str(HERE / "bare_worker.py")]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        ask(process, "-")
        yield process
        assert process.stdin is not None
        process.stdin.close()


def ask(process: subprocess.Popen[str], line: str) -> float:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


class Clock:
    """Takes events and the moments at which they came."""

    def __init__(self) -> None:
        self.times: list[tuple[float, Event]] = []

    def __call__(self, event: Event) -> None:
        self.times.append((time.perf_counter(), event))

    def when(self, kind: type, id: str | None = None) -> list[float]:
        return [at for at, event in self.times if isinstance(event, kind) and id in (None, getattr(event, "action", None))]


def trivial(number: int, warm: bool = False) -> Action:
    """A trivial action. All but the warm one wait for that, so that the start of the fork server is not counted."""
    inputs = () if warm else ("warm",)
    return Action(
        "warm" if warm else f"t{number}",
        "lower",
        f"trivial {number}",
        "executor_workers:trivial",
        inputs,
        lambda results: {"toy": "trivial", "number": number},
        ("out",),
        PRELOAD,
    )


def after_warm(clock: Clock) -> float:
    return clock.times[-1][0] - clock.when(Finished, "warm")[0]


def many_trivial(work: Path, count: int, bare: subprocess.Popen[str]) -> list[Row]:
    """``count`` actions that do nothing, in turns with as many bare forks of the same parent."""
    turns = 4
    engine: list[float] = []
    forks: list[float] = []
    for turn in range(turns):
        share = range(turn * count // turns, (turn + 1) * count // turns)
        actions = {"warm": trivial(-1 - turn, warm=True), **{f"t{number}": trivial(number) for number in share}}
        clock = Clock()
        with LocalStore(work / "trivial", print) as store:
            run_actions(actions, store, Options(import_path=(HERE,)), clock)
        engine.append(after_warm(clock) / len(share))
        forks.append(sum(ask(bare, "-") for _ in share) / len(share))
    each, fork = median(engine), median(forks)
    return [
        Row(f"a trivial action, {count} of them", 1000 * each, "ms", f"bare fork and wait {1000 * fork:.2f} ms", goal=10.0),
        Row("the same, of a bare fork and wait", median([e / f for e, f in zip(engine, forks, strict=True)]), "times", goal=1.5),
    ]


def planned_actions(work: Path, store: LocalStore) -> tuple[dict[str, Action], Mapping[str, bytes]]:
    from dsr1build.cli.planning import plan_build
    from dsr1build.config.load import load_build

    planned = plan_build(load_build(str(project(work / "project"))), store)
    return dict(planned.plan.actions), planned.plan.contents


def against_bare_compiles(work: Path, rounds: int, bare: subprocess.Popen[str]) -> Row:
    """The compiles of the sample one after the other through the executor, in turns with the same in bare forks."""
    ratios: list[float] = []
    with LocalStore(work / "lowered", print) as lowered:
        actions, contents = planned_actions(work, lowered)
        lowers = {id: action for id, action in actions.items() if action.kind == "lower"}
        texts = run_actions(lowers, lowered, Options(), lambda event: None).results
        compiles = [action for action in actions.values() if action.kind == "compile"][:6]
        for turn in range(rounds):
            clock = Clock()
            alone = {"warm": trivial(-turn, warm=True)}
            alone |= {action.id: constant(action, texts) for action in compiles}
            blobs = {ref: lowered.read_blob(found) for ref, found in input_blobs(compiles, texts)}
            with LocalStore(work / f"compiled{turn}", print) as store:
                run_actions(alone, store, Options(jobs=1, import_path=(HERE,)), clock, {**contents, **blobs})
            seconds = 0.0
            for action in compiles:
                directory = work / f"bare{turn}" / action.id.replace("/", "-")
                directory.parent.mkdir(exist_ok=True)
                prepare(directory, action.fields(texts), lowered, contents)
                seconds += ask(bare, f"{action.worker} {directory}")
            ratios.append(after_warm(clock) / seconds)
    return Row("compiles through the executor, beyond bare ones", 100 * (median(ratios) - 1), "%", "six of the sample", goal=3.0)


def constant(action: Action, texts: Results) -> Action:
    fields = action.fields(texts)
    return replace(action, inputs=("warm",), fields=lambda results: fields, preload=(*action.preload, *PRELOAD))


def input_blobs(compiles: list[Action], texts: Results) -> list[tuple[str, object]]:
    from dsr1build.digest import blob_refs

    return [(ref.sha256, ref) for action in compiles for ref in blob_refs(action.fields(texts))]


def idle_memory(bare: subprocess.Popen[str]) -> Row:
    """What a warm parent keeps while nothing runs; an action's process shares it until it writes."""
    rollup = Path(f"/proc/{bare.pid}/smaps_rollup").read_text("ascii").splitlines()
    kilobytes = next(int(line.split()[1]) for line in rollup if line.startswith("Pss:"))
    return Row("idle memory of the warm parent (PSS)", kilobytes / 1024, "MiB", "one for all workers")


def interrupts(work: Path, rounds: int) -> Row:
    """From Ctrl-C in a cold build to the end of the program."""
    times: list[float] = []
    for turn in range(rounds):
        file = project(work / f"interrupted{turn}", seed=turn)
        process = subprocess.Popen(
            [sys.executable, "-m", "dsr1build", "build", str(file), "--json"],
            env={**os.environ, "XDG_CACHE_HOME": str(work / f"cache{turn}"), "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None
        compiling = 0
        for line in process.stdout:
            compiling += '"started"' in line and '"compile"' in line
            if compiling == 2:
                break
        started = time.perf_counter()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(60) == 130
        times.append(time.perf_counter() - started)
    return Row("from Ctrl-C to the end", median(times), "s", f"{max(times):.2f} s the slowest", goal=2.0)


def cold_build(work: Path) -> Row:
    """From the first action to the last, against what no schedule can beat: the longest chain, and all work on all CPUs."""
    clock = Clock()
    with LocalStore(work / "cold", print) as store:
        actions, contents = planned_actions(work, store)
        run_actions(actions, store, Options(), clock, contents)
    done = {event.action: event for _, event in clock.times if isinstance(event, Finished)}
    assert len(done) == len(actions) >= 40
    wall = clock.times[-1][0] - clock.when(Started)[0]
    chain = max(critical_paths({id: a.inputs for id, a in actions.items()}, {id: e.seconds for id, e in done.items()}).values())
    bound = max(chain, sum(event.cpu for event in done.values()) / usable_cpus())
    return Row(
        f"cold build of {len(actions)} actions, of the least it can take",
        wall / bound,
        "times",
        f"{wall:.2f} s; {chain:.2f} s the longest chain, {bound:.2f} s the bound on {usable_cpus()} CPUs",
        goal=1.10,
    )


def main() -> int:
    given = arguments("What the local executor costs, against its goals.")
    with tempfile.TemporaryDirectory() as name, bare_parent() as bare:
        work = Path(name)
        rows = many_trivial(work, 400 if given.quick else 2000, bare)
        rows.append(against_bare_compiles(work, 2 if given.quick else 5, bare))
        rows.append(idle_memory(bare))
        rows.append(interrupts(work, 2 if given.quick else 5))
        rows.append(cold_build(work))
    return report(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
