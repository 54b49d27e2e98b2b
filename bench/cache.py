"""What the cache costs and saves: look-ups, keys, warm builds, builds through a shared cache, and a dead one.

    python bench/cache.py [--quick] [--json FILE]

Builds are those of the scaled-down R1, run as a user runs them; ratios are given as parts, so that less is better.
"""

import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rows import Row, arguments, median, report

from builds import build, project
from dsr1build.cache.store import LocalStore
from dsr1build.digest import key_of

ROOT = Path(__file__).resolve().parents[1]
ARTIFACT_BYTES = 100_000
# The time-out of a whole request where the profile says nothing; a dead remote may cost it once.
REQUEST_SECONDS = 10.0


def local_hits(work: Path, count: int) -> Row:
    """The median time of a look-up that verifies one artifact of 100 KB, in a store of many."""
    with LocalStore(work / "hits", print) as store:
        keys = []
        for number in range(count):
            source = work / "artifact"
            source.write_bytes(os.urandom(ARTIFACT_BYTES))
            store.publish(key_of({"number": number}), {"number": number}, {"out": source}, 1.0)
            keys.append(key_of({"number": number}))
    with LocalStore(work / "hits", print) as store:
        times = []
        for key in keys + keys:
            started = time.perf_counter()
            found = store.lookup(key)
            times.append(time.perf_counter() - started)
            assert found is not None
    return Row(
        "local hit, 100 KB warm: median", 1000 * median(times[count:]), "ms", f"{1000 * max(times):.2f} ms the slowest", goal=5.0
    )


def keys(file: Path, cache: Path) -> Row:
    """The time to compute the keys of all actions of a cached build, an action: fields, encoding, digest."""
    from dsr1build.cli.planning import plan_build
    from dsr1build.config.load import load_build
    from dsr1build.digest import encode, sha256_hex

    os.environ["XDG_CACHE_HOME"] = str(cache)
    config = load_build(str(file))
    spent = []
    for _ in range(5):
        with LocalStore(config.cache_directory, print) as store:
            planned = plan_build(config, store)
            results: dict[str, Any] = {}
            seconds = 0.0
            for id, action in planned.plan.actions.items():
                given = {source: results[source] for source in action.inputs}
                # Processor time: what others do on the machine is no part of it.
                started = time.process_time()
                key = sha256_hex(encode(action.fields(given)))
                seconds += time.process_time() - started
                found = store.lookup(key, peek=True)
                assert found is not None, f"{action.label} is not cached"
                results[id] = found
        spent.append(1000 * seconds / len(results))
    peer = f"{spent[0]:.2f} ms with the first look at the tools; {len(results)} actions"
    return Row("key of an action, processor time: mean of a build, median", statistics.median(spent), "ms", peer, goal=1.0)


def profile(directory: Path, url: str, mode: str = "read-write") -> Path:
    """A project beside whose BUILD.yaml the cache's profile names a remote."""
    file = project(directory)
    (directory / "shared.yaml").write_text(f"version: 1\nname: shared\nremotes: [{{url: '{url}', mode: {mode}}}]\n")
    file.write_text(file.read_text(encoding="utf-8") + "cache: shared.yaml\n", encoding="utf-8")
    return file


@contextmanager
def silent_server() -> Iterator[int]:
    """A port where connections are taken up and nothing is ever answered."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(64)
        yield listening.getsockname()[1]


def forget_link(cache: Path) -> None:
    """Take one cheap result out of a filled cache, so that the next build has a question for the remote."""
    with LocalStore(cache / "dsr1build", print) as store:
        for entry in store.entries().values():
            if entry.kind == "link" and entry.label.startswith("library"):
                store.files.manifests.remove(entry.manifest)


def anew(file: Path) -> Path:
    """The workspace of a BUILD.yaml without anything that a build left."""
    for left in (".dsr1build", "dist"):
        shutil.rmtree(file.parent / left, ignore_errors=True)
    return file


def warm_row(what: str, seconds: list[float], cold: float) -> Row:
    return Row(f"{what}: part of cold, median", median(seconds) / cold, "", f"{median(seconds):.2f} s", goal=0.05)


def dead_remotes(work: Path, cache: Path, repeat: int) -> list[Row]:
    plain = []
    base = project(work / "plain")
    for _ in range(repeat):
        forget_link(cache)
        plain.append(build(anew(base), cache)[1])
    rows = []
    with silent_server() as silent, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ports = {"closed": closed.getsockname()[1], "silent": silent}
        for scheme in ("http", "grpc"):
            # A closed port answers at once, so what it adds is the adapter; what a silent one adds to that is its time-out.
            before = median(plain)
            for what, port in ports.items():
                file = profile(work / f"{scheme}-{what}", f"{scheme}://127.0.0.1:{port}")
                seconds = []
                for _ in range(1 if what == "silent" else repeat):
                    forget_link(cache)
                    summary, spent = build(file, cache)
                    assert summary["failed"] == 0
                    seconds.append(spent)
                name = f"{what} {scheme} remote: more than {'none' if what == 'closed' else 'a closed one'}"
                rows.append(Row(name, median(seconds) - before, "s", "1 action to run", REQUEST_SECONDS + 0.5))
                before = median(seconds)
    return rows


def through_reapi(work: Path, cold: float, repeat: int) -> list[Row]:
    sys.path.append(str(ROOT / "tests" / "cache" / "remotes"))
    from servers_reapi import casd_program, run_casd

    program = casd_program()
    if isinstance(program, str):
        print(f"not measured: a build through a REAPI server, for buildbox-casd cannot be had ({program})")
        return []
    (work / "casd").mkdir()
    with run_casd(work / "casd") as server:
        file = profile(work / "reapi", server.url())
        build(file, work / "first machine")
        times = []
        for number in range(repeat):
            summary, seconds = build(file, work / f"other machine {number}")
            assert summary["executed"] == 0, "not everything was remote"
            times.append(seconds)
    part = median(times) / cold
    return [Row("everything from REAPI (buildbox-casd): part of cold", part, "", f"{median(times):.2f} s", goal=0.1)]


def main() -> int:
    options = arguments("What the cache costs and what it saves.")
    work = Path(tempfile.mkdtemp(prefix="dsr1build-bench-"))
    try:
        repeat = 3 if options.quick else 7
        rows = [local_hits(work, 50 if options.quick else 300)]
        cache = work / "cache"
        base = project(work / "base")
        _, cold = build(base, cache)
        fresh = [build(anew(base), cache)[1] for _ in range(repeat)]
        build(base, cache)
        unchanged = [build(base, cache)[1] for _ in range(repeat)]
        rows.append(Row("cold build", cold, "s"))
        rows.append(warm_row("unchanged workspace", unchanged, cold))
        rows.append(warm_row("fresh workspace, everything in the local cache", fresh, cold))
        rows.append(keys(base, cache))
        rows += through_reapi(work, cold, repeat)
        rows += dead_remotes(work, cache, repeat)
        return report(rows, options.json)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
