"""Many builders on one store, killed at random, with little room, on a full disk, and with damaged files.

    python bench/cache_stress.py [--quick] [--json FILE]

No artifact may be wrong, no build may fail, no lock may be left. The builds are those of a real engine with toy actions
whose outputs are known; the store's limit is so low that it evicts all the time.
"""

import argparse
import contextlib
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from rows import Row, report
from stress_workers import HERE, LEAVES, leaf, leaf_content, pair, pair_content

from dsr1build.cache.eviction import Limits
from dsr1build.cache.store import LocalStore
from dsr1build.execute.engine import run_actions
from dsr1build.execute.options import Options

# Less than all results take, so that every few builds evict.
ROOM = 600_000
TMPFS_BYTES = 5_000_000


@dataclass(frozen=True)
class Size:
    builders: int
    builds: int
    kills: int
    flips: int


def expected(id: str) -> bytes:
    kind, *numbers = id.split(":")
    return leaf_content(int(numbers[0])) if kind == "leaf" else pair_content(int(numbers[0]), int(numbers[1]))


def build_once(store: LocalStore, pick: random.Random, jobs: int) -> Counter[str]:
    """One build of a random subset; counts hits, actions that ran, failures and wrong artifacts."""
    numbers = pick.sample(range(LEAVES), 6)
    pairs = [pair(numbers[n], numbers[n + 1]) for n in range(0, 4, 2)]
    actions = {action.id: action for action in [*(leaf(n) for n in numbers), *pairs]}
    outcome = run_actions(actions, store, Options(jobs=jobs, import_path=(HERE,)), lambda event: None)
    count = Counter(hits=len(outcome.hits), ran=len(outcome.executed), failed=len(outcome.failed) + len(outcome.skipped))
    for id, result in outcome.results.items():
        count["wrong"] += store.read_blob(result.outputs["out"]) != expected(id)
    return count


def builder(store: Path, seed: int, builds: int, progress: Path, room: int) -> int:
    """The program of one builder: builds until its file of progress has ``builds`` lines."""
    with progress.open("a", encoding="ascii") as out:
        while (done := len(progress.read_text(encoding="ascii").splitlines())) < builds:
            warnings: list[str] = []
            with LocalStore(store, warnings.append, Limits(max_bytes=room)) as opened:
                count = build_once(opened, random.Random(seed * 100_000 + done), jobs=2)
            out.write(json.dumps({**count, "warnings": warnings}) + "\n")
            out.flush()
    return 0


def start(store: Path, seed: int, builds: int, progress: Path, room: int = ROOM, **environment: str) -> subprocess.Popen[bytes]:
    words = ["--builder", str(store), str(seed), str(builds), str(progress), str(room)]
    return subprocess.Popen(
        [sys.executable, __file__, *words], env={**os.environ, **environment}, stderr=progress.with_suffix(".err").open("ab")
    )


def crowd(store: Path, work: Path, size: Size) -> tuple[Counter[str], int, list[str]]:
    """Run the builders and kill some of them; gives the sums, the number of kills, and the text of failures."""
    pick = random.Random(1)
    files = [work / f"progress-{n}" for n in range(size.builders)]
    for file in files:
        file.touch()
    running = {n: start(store, n, size.builds, files[n]) for n in range(size.builders)}
    trouble: list[str] = []
    kills = 0
    started = time.monotonic()
    while running:
        # The kills come evenly over what is done; each hits at a random moment.
        time.sleep(pick.uniform(0.0, 0.05))
        for n, process in list(running.items()):
            code = process.poll()
            if code is None:
                continue
            del running[n]
            if code != 0:
                trouble.append(f"builder {n} ended with {code}: {files[n].with_suffix('.err').read_text()[-2000:]}")
        done = sum(file.read_text(encoding="ascii").count("\n") for file in files)
        due = size.kills * min(1.0, 0.05 + done / (size.builders * size.builds * 0.95))
        if running and kills < due:
            n = pick.choice(sorted(running))
            running[n].send_signal(signal.SIGKILL)
            running[n].wait()
            kills += 1
            # A line that was cut off is a build that is not done.
            whole, _, _ = files[n].read_text(encoding="ascii").rpartition("\n")
            files[n].write_text(whole + "\n" if whole else "", encoding="ascii")
            running[n] = start(store, n, size.builds, files[n])
        if time.monotonic() - started > 3600:
            trouble.append("the builders did not end within an hour")
            for process in running.values():
                process.kill()
            break
    return total(files), kills, trouble


def total(files: list[Path]) -> Counter[str]:
    count: Counter[str] = Counter()
    for file in files:
        for line in file.read_text(encoding="ascii").splitlines():
            row = json.loads(line)
            count["builds"] += 1
            warnings = row.pop("warnings")
            # A builder that waits long for another one's eviction says so; that is a matter of load.
            waits = [text for text in warnings if text.startswith("waiting for process")]
            count["waits"] += len(waits)
            count["warnings"] += len(warnings) - len(waits)
            for text in {*warnings} - {*waits}:
                print(f"{file.name}: {text}")
            count.update(row)
    return count


def leftover_locks(store: Path) -> int:
    """Locks that somebody still holds, and files of those who are gone after the store was used once more."""
    with LocalStore(store, lambda text: None) as opened:
        opened.lookup("0" * 64)
        opened.evict(Limits(max_bytes=ROOM))
    left = 0
    for path in [*store.glob("v1/*.lock"), *store.glob("v1/leases/*")]:
        with path.open("r+b") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                left += 1
    return left + len(list(store.glob("v1/leases/*"))) + len(list(store.glob("v1/tmp/*")))


def full_disk(work: Path, builds: int) -> tuple[Counter[str] | None, str]:
    """Builds on a file system of 5 MB; None and the reason where none can be mounted."""
    place = work / "small disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={TMPFS_BYTES}", "tmpfs", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        return None, mounted.stderr.strip()
    try:
        with contextlib.suppress(OSError), (place / "filler").open("wb") as filler:
            # What is left is too little for the store's index, then for its blobs: the disk fills up during the builds.
            filler.write(bytes(TMPFS_BYTES - 700_000))
        progress = work / "progress-full"
        progress.touch()
        process = start(place / "store", 999, builds, progress, room=1 << 40)
        code = process.wait()
        count = total([progress])
        if code:
            count["failed"] += 1
        return count, progress.with_suffix(".err").read_text()[-2000:]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def damage(work: Path, flips: int) -> tuple[int, int, int]:
    """Cut every file of a store at every 4 KiB and flip single bits; gives cuts, flips and wrong artifacts."""
    directory = work / "damaged"
    pick = random.Random(2)
    with LocalStore(directory, lambda text: None) as store:
        actions = {action.id: action for action in [*(leaf(n) for n in range(LEAVES)), *(pair(n, n + 1) for n in range(8))]}
        outcome = run_actions(actions, store, Options(jobs=2, import_path=(HERE,)), lambda event: None)
        keys = {result.key: id for id, result in outcome.results.items()}
        wrong = 0

        def look(path: Path) -> int:
            """Wrong artifacts of a look-up of every result that the file belongs to."""
            bad = 0
            for key, id in owners[path]:
                found = store.lookup(key)
                bad += found is not None and store.read_blob(found.outputs["out"]) != expected(id)
            return bad

        owners: dict[Path, list[tuple[str, str]]] = {}
        for key, id in keys.items():
            entry = store.entries()[key]
            record = store.record(key, counted=False)
            assert record is not None
            for path in [
                store.files.manifests.path(entry.manifest),
                *(store.files.blobs.path(r) for r, _ in record.outputs.values()),
            ]:
                owners.setdefault(path, []).append((key, id))
        cuts = 0
        for path in sorted(owners):
            good = path.read_bytes()
            for length in range(0, len(good), 4096):
                path.write_bytes(good[:length])
                wrong += look(path)
                path.write_bytes(good)
                cuts += 1
        for _ in range(flips):
            path = pick.choice(sorted(owners))
            good = path.read_bytes()
            bad = bytearray(good)
            bad[pick.randrange(len(bad))] ^= 1 << pick.randrange(8)
            path.write_bytes(bad)
            wrong += look(path)
            path.write_bytes(good)
    return cuts, flips, wrong


def main() -> int:
    if sys.argv[1:2] == ["--builder"]:
        store, seed, builds, progress, room = sys.argv[2:]
        return builder(Path(store), int(seed), int(builds), Path(progress), int(room))
    parser = argparse.ArgumentParser(description="Many builders on one store, killed, without room, with damaged files.")
    parser.add_argument("--quick", action="store_true", help="8 builders with 20 builds each")
    parser.add_argument("--size", type=int, nargs=4, metavar="N", help="builders, builds of each, kills, flipped bits")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    options = parser.parse_args()
    size = Size(*options.size) if options.size else Size(8, 20, 16, 200) if options.quick else Size(8, 500, 200, 1000)
    work = Path(tempfile.mkdtemp(prefix="dsr1build-stress-"))
    try:
        started = time.perf_counter()
        count, kills, trouble = crowd(work / "store", work, size)
        seconds = time.perf_counter() - started
        locks = leftover_locks(work / "store")
        wanted = size.builders * size.builds
        rate = 100 * count["hits"] / max(1, count["hits"] + count["ran"])
        rows = [
            Row("builds on one store", count["builds"], "builds", f"{seconds:.0f} s, {rate:.0f} % hits"),
            Row("builders killed with SIGKILL", kills, "kills"),
            Row("builds that did not end", wanted - count["builds"], "builds", goal=0),
            Row("failed actions", count["failed"], "actions", goal=0),
            Row("wrong artifacts", count["wrong"], "artifacts", goal=0),
            Row("warnings", count["warnings"], "warnings", f"{count['waits']} waits for an eviction", goal=0),
            Row("locks and temporary files left", locks, "files", goal=0),
        ]
        full, reason = full_disk(work, max(3, size.builds // 10))
        if full is None:
            print(f"not measured: a full disk, for none can be mounted ({reason})")
        else:
            rows += [
                Row("full disk: builds", full["builds"], "builds", f"{full['warnings']} warnings"),
                Row("full disk: failed actions and wrong artifacts", full["failed"] + full["wrong"], "actions", goal=0),
            ]
            if full["failed"]:
                print(reason)
        cuts, flips, wrong = damage(work, size.flips)
        rows += [
            Row("files cut at every 4 KiB", cuts, "cuts"),
            Row("files with one bit flipped", flips, "flips"),
            Row("damaged files taken for right ones", wrong, "artifacts", goal=0),
        ]
        for text in trouble:
            print(text)
        return report(rows, options.json) or bool(trouble)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
