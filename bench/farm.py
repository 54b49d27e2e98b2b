"""What a farm costs: small actions through each executor, more workers, and a worker that is killed.

    python bench/farm.py [--quick] [--json FILE]

Every build is one of the real engine with an empty store; its results are known in advance and are compared. The workers
are processes of this machine, which they share with the builder: figures of larger farms are better, not worse.
"""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rows import Row, arguments, report
from stress_workers import HERE, leaf, leaf_content, make_leaf

from dsr1build.cache.store import LocalStore
from dsr1build.digest import Fields
from dsr1build.execute.dask_executor import open_dask
from dsr1build.execute.engine import Outcome, run_actions
from dsr1build.execute.events import Event, Finished
from dsr1build.execute.executor import Executor, OpenExecutor
from dsr1build.execute.options import Options
from dsr1build.plan.action import Action, Results

sys.path.append(str(HERE.parent / "tests/execute"))
from dask_cluster import Cluster, until

# What an action of the builds that show scaling waits for: a compile without the use of this machine's few processors.
WAIT_SECONDS = 0.1


@dataclass(frozen=True)
class Farm:
    """``open`` connects a builder to the workers; ``kill`` ends one of them; None where it has none to kill."""

    open: OpenExecutor | None
    jobs: int
    kill: Callable[[], None] | None = None


def small(number: int) -> Action:
    return replace(leaf(number), preload=("stress_workers",))


def waiting(number: int) -> Action:
    def fields(results: Results) -> Fields:
        return {"toy": "waiting leaf", "number": number, "seconds": WAIT_SECONDS}

    return replace(small(number), worker="stress_workers:wait_then_make_leaf", fields=fields)


@contextlib.contextmanager
def local(work: Path, workers: int) -> Iterator[Farm]:
    yield Farm(None, workers)


@contextlib.contextmanager
def dask(work: Path, workers: int) -> Iterator[Farm]:
    cluster = Cluster(Path(tempfile.mkdtemp(dir=work)))
    names = [f"worker-{number}" for number in range(workers)]

    def connect(scratch: Path, warn: Callable[[str], None]) -> Executor:
        executor = open_dask(cluster.url, import_path=[HERE], warn=warn)
        assert until(lambda: executor.slots == workers), "the workers of the cluster have not come"
        return executor

    try:
        for name in names:
            cluster.add(name)
        yield Farm(connect, 0, lambda: cluster.kill(names[0]))
    finally:
        cluster.close()


ENGINES: Mapping[str, Callable[[Path, int], contextlib.AbstractContextManager[Farm]]] = {"local": local, "dask": dask}


@dataclass(frozen=True)
class Built:
    """``seconds`` from the first to the last end of an action: neither the connection nor the first worker's start counts."""

    outcome: Outcome
    seconds: float
    wrong: int


def build(farm: Farm, work: Path, actions: list[Action], emit: Callable[[Event], None] = lambda event: None) -> Built:
    ends: list[float] = []

    def tell(event: Event) -> None:
        if isinstance(event, Finished):
            ends.append(time.perf_counter())
        emit(event)

    with LocalStore(Path(tempfile.mkdtemp(dir=work)), print) as store:
        options = Options(jobs=farm.jobs, executor=farm.open, import_path=(HERE,), keep_going=True)
        outcome = run_actions({action.id: action for action in actions}, store, options, tell)
        made = {id: store.read_blob(result.outputs["out"]) for id, result in outcome.results.items()}
    wrong = sum(content != leaf_content(int(id.split(":")[1])) for id, content in made.items())
    return Built(outcome, ends[-1] - ends[0] if ends else 0.0, wrong + len(outcome.failed) + len(outcome.skipped))


def bare(work: Path, count: int) -> float:
    """Seconds that the actions take as plain calls, an action."""
    started = time.perf_counter()
    for number in range(count):
        make_leaf({"number": number}, work, work)
    return (time.perf_counter() - started) / count


def measure(name: str, work: Path, count: int, waits: int) -> Iterator[Row]:
    engine = ENGINES[name]
    quick = [small(number) for number in range(count)]
    slow = [waiting(number) for number in range(waits)]
    spent: dict[int, float] = {}
    for workers in (1, 2):
        with engine(work, workers) as farm:
            built = build(farm, work, quick)
            spent[workers] = built.seconds / (count - 1)
            yield Row(f"{name}: wrong or missing results of {count}, {workers} at once", built.wrong, "results", goal=0)
    for workers, seconds in spent.items():
        peer = f"{1000 * bare(work, count):.2f} ms the action itself"
        goal = 10.0 if (name, workers) == ("local", 2) else None
        yield Row(f"{name}: an action, {workers} at once", 1000 * seconds, "ms", peer, goal)
    alone = 0.0
    for workers in (1, 2):
        with engine(work, workers) as farm:
            built = build(farm, work, slow)
            ideal = WAIT_SECONDS * (waits - 1) / workers
            peer = f"{waits} actions that wait for {1000 * WAIT_SECONDS:g} ms"
            yield Row(f"{name}: time over the ideal, {workers} at once", built.seconds / ideal, "times", peer)
            if workers == 1:
                alone = built.seconds
            else:
                yield Row(f"{name}: 2 at once against 1", built.seconds / alone, "of the time", peer)
    with engine(work, 2) as farm:
        if farm.kill is not None:
            yield from killed(name, farm, work, slow, built.seconds)


def killed(name: str, farm: Farm, work: Path, actions: list[Action], undisturbed: float) -> Iterator[Row]:
    """One of two workers dies in the middle of a build: what that costs beside the worker."""
    done = 0
    dead = 0.0
    next_end = 0.0

    def tell(event: Event) -> None:
        nonlocal done, dead, next_end
        if isinstance(event, Finished):
            done += 1
            if dead and not next_end:
                next_end = time.perf_counter() - dead
            if done == len(actions) // 2:
                assert farm.kill is not None
                farm.kill()
                dead = time.perf_counter()

    built = build(farm, work, actions, tell)
    yield Row(f"{name}: wrong or missing results after a kill", built.wrong, "results", goal=0)
    yield Row(f"{name}: from the kill to the next result", next_end, "s")
    # One half of the actions ran on two workers, the other half on the one that was left.
    yield Row(f"{name}: build with a kill over its ideal", built.seconds / (1.5 * undisturbed), "times")


def main() -> int:
    options = arguments(str(__doc__).splitlines()[0])
    count, waits = (200, 40) if options.quick else (2000, 200)
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        rows = [row for name in ENGINES for row in measure(name, Path(directory), count, waits)]
    return report(rows, options.json)


if __name__ == "__main__":
    sys.exit(main())
