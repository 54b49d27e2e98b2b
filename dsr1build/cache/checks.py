"""What a cache holds, whether it is what it should be, and whether this machine's file system keeps a cache's promises."""

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.record import LARGEST_RECORD, Record, parse_record
from dsr1build.cache.statistics import REASONS
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, Fields, key_of

Verdict: TypeAlias = Literal["ok", "unfit", "wrong"]


_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "number", "minimum": 0}
_RESULTS_SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "key": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
            "kind": {"type": "string"},
            "label": {"type": "string"},
            "bytes": _COUNT,
            "seconds": _SECONDS,
        },
        "required": ["key", "kind", "label", "bytes", "seconds"],
        "additionalProperties": False,
    },
}
_STATS: Mapping[str, Any] = {
    "directory": {"type": "string"},
    "builds": _COUNT,
    "hits": _COUNT,
    "misses": {"type": "object", "propertyNames": {"enum": list(REASONS)}, "additionalProperties": _COUNT},
    "seconds_saved": _SECONDS,
    "bytes_served": _COUNT,
    "entries": _COUNT,
    "bytes": _COUNT,
    "files": _COUNT,
    "set_aside": _COUNT,
    "limits": {
        "type": "object",
        "properties": {"max_bytes": _COUNT, "max_files": _COUNT},
        "required": ["max_bytes", "max_files"],
        "additionalProperties": False,
    },
    "largest": _RESULTS_SCHEMA,
    "costliest": _RESULTS_SCHEMA,
}
STATS_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "`dsr1build cache stats --json`",
    "type": "object",
    "properties": _STATS,
    "required": list(_STATS),
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """A result that is not whole. ``reason`` is one of `lost`, `damaged`, `unreadable`."""

    key: str
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check of ``doctor``: `unfit` blames the surroundings, `wrong` means wrong bytes."""

    subject: str
    name: str
    verdict: Verdict
    detail: str
    seconds: float


def survey(store: LocalStore, top: int) -> dict[str, Any]:
    """What the store did and holds, as ``STATS_SCHEMA`` describes it; nothing is verified. ``top`` bounds the two lists."""
    entries = store.entries()
    counters = store.counters()
    files = store.files
    sizes = [size for tree in (files.blobs.root, files.manifests.root) for size in _file_sizes(tree)]
    listed: list[dict[str, Any]] = [
        {"key": key, "kind": e.kind, "label": e.label, "bytes": e.bytes, "seconds": round(e.seconds, 3)}
        for key, e in sorted(entries.items())
    ]
    return {
        "directory": str(store.directory),
        "builds": counters.builds,
        "hits": counters.hits,
        "misses": dict(sorted(counters.misses.items())),
        "seconds_saved": round(counters.seconds_saved, 3),
        "bytes_served": counters.bytes_served,
        "entries": len(entries),
        "bytes": sum(sizes),
        "files": len(sizes),
        "set_aside": len(list(_file_sizes(files.blobs.broken))),
        "limits": {"max_bytes": store.limits.max_bytes, "max_files": store.limits.max_files},
        "largest": sorted(listed, key=lambda item: -item["bytes"])[:top],
        "costliest": sorted(listed, key=lambda item: -item["seconds"])[:top],
    }


def _file_sizes(directory: Path) -> Iterator[int]:
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                yield (Path(folder) / name).stat().st_size


def verify_store(store: LocalStore) -> tuple[int, list[Fault]]:
    """Read every manifest and every file behind it; gives the number of manifests and what is wrong. Bad files are set
    aside where the store can be written."""
    files = store.files
    faults: list[Fault] = []
    manifests = list(files.manifests.entries())
    good: dict[BlobRef, int] = {}
    for ref in manifests:
        try:
            record = parse_record(files.manifests.read(ref, LARGEST_RECORD))
        except BlobLost as lost:
            faults.append(Fault(ref.sha256, "its manifest", lost.reason))
            continue
        except ValueError:
            faults.append(Fault(ref.sha256, "its manifest", "damaged"))
            continue
        for name, (blob, size) in _named_files(record).items():
            if good.get(blob, -1) == (size if size is not None else good.get(blob)):
                continue
            try:
                if size is None:
                    good[blob] = len(files.blobs.read(blob))
                else:
                    files.blobs.verify(blob, size)
                    good[blob] = size
            except BlobLost as lost:
                faults.append(Fault(record.key, f"{name} of {record.kind} {record.label}".rstrip(), lost.reason))
    named = {ref.sha256 for ref in good}
    for blob in files.blobs.entries():
        if blob.sha256 not in named:
            with contextlib.suppress(BlobLost):
                files.blobs.read(blob)
    return len(manifests), faults


def _named_files(record: Record) -> Mapping[str, tuple[BlobRef, int | None]]:
    return {"its fields": (BlobRef(record.key), None), **record.outputs}


def check_directory(directory: Path) -> list[Check]:
    """Do with a small store beside the cache what builds do with the cache, on the same file system."""
    started = time.monotonic()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix="doctor-", dir=directory))
    except OSError as error:
        return [Check(str(directory), "writable", "unfit", error.strerror or str(error), time.monotonic() - started)]
    checks = {
        "round trip": _round_trip,
        "corruption": _corruption,
        "relocation": _relocation,
        "read-only": _read_only,
        "concurrent writers": _concurrent_writers,
        "locks": _locks,
        "latency": _latency,
        "room": _room,
    }
    try:
        return [_run(str(directory), name, check, scratch / str(n)) for n, (name, check) in enumerate(checks.items())]
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _run(subject: str, name: str, check: Callable[[Path], tuple[Verdict, str]], directory: Path) -> Check:
    started = time.monotonic()
    try:
        directory.mkdir()
        verdict, detail = check(directory)
    except OSError as error:
        verdict, detail = "unfit", error.strerror or str(error)
    return Check(subject, name, verdict, detail, time.monotonic() - started)


@contextlib.contextmanager
def _store(directory: Path, *, read_only: bool = False) -> Iterator[tuple[LocalStore, list[str]]]:
    warnings: list[str] = []
    with LocalStore(directory / "store", warnings.append, read_only=read_only) as store:
        yield store, warnings


def _publish(store: LocalStore, directory: Path, number: int, data: bytes) -> str:
    fields: Fields = {"doctor": number}
    source = directory / f"source-{number}"
    source.write_bytes(data)
    store.publish(key_of(fields), fields, {"out": source}, kind="lower", label=f"check {number}")
    return key_of(fields)


def _content(store: LocalStore, key: str) -> bytes | None:
    found = store.lookup(key)
    return None if found is None else store.read_blob(found.outputs["out"])


def _round_trip(directory: Path) -> tuple[Verdict, str]:
    data = os.urandom(300_000)
    with _store(directory) as (store, warnings):
        key = _publish(store, directory, 1, data)
    with _store(directory) as (store, _):
        found = _content(store, key)
    if warnings:
        return "unfit", warnings[0]
    return ("ok", "300 kB came back as they were") if found == data else ("wrong", "other bytes came back, or none")


def _corruption(directory: Path) -> tuple[Verdict, str]:
    with _store(directory) as (store, _):
        key = _publish(store, directory, 1, b"x" * 10_000)
        found = store.lookup(key)
        if found is None:
            return "unfit", "nothing came back"
        path = store.files.blobs.path(found.outputs["out"])
        for damage in (b"x" * 9_999, b"x" * 9_999 + b"y", b""):
            path.write_bytes(damage)
            if store.lookup(key) is not None:
                return "wrong", "a damaged file was taken for the right one"
            if path.exists():
                return "unfit", "a damaged file cannot be moved aside"
            _publish(store, directory, 1, b"x" * 10_000)
        if _content(store, key) != b"x" * 10_000:
            return "wrong", "a damaged file was not replaced"
    return "ok", "damaged files are misses, and replaced"


def _relocation(directory: Path) -> tuple[Verdict, str]:
    with _store(directory) as (store, _):
        key = _publish(store, directory, 1, b"moved")
    elsewhere = directory / "elsewhere \N{LATIN SMALL LETTER U WITH DIAERESIS}"
    elsewhere.mkdir()
    (directory / "store").rename(elsewhere / "store")
    with _store(elsewhere) as (store, _):
        found = _content(store, key)
    return ("ok", "a moved store keeps its results") if found == b"moved" else ("wrong", "a moved store lost its results")


def _read_only(directory: Path) -> tuple[Verdict, str]:
    with _store(directory) as (store, _):
        key = _publish(store, directory, 1, b"read")
    before = _times(directory / "store")
    with _store(directory, read_only=True) as (store, _):
        found = _content(store, key)
        _publish(store, directory, 2, b"kept elsewhere")
    if found != b"read":
        return "wrong", "a store that is only read gave nothing"
    return ("ok", "reading writes nothing") if _times(directory / "store") == before else ("wrong", "reading wrote something")


def _times(directory: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(directory.rglob("*"))}


_WRITER = """
import sys
from pathlib import Path
from dsr1build.cache.checks import write_many
write_many(Path(sys.argv[1]), int(sys.argv[2]))
"""
_WRITERS, _RESULTS = 4, 12


def write_many(directory: Path, writer: int) -> None:
    """What one of the concurrent writers of ``doctor`` does: results that all writers make, with the same bytes."""
    sources = directory / f"writer-{writer}"
    sources.mkdir()
    warnings: list[str] = []
    with LocalStore(directory / "store", warnings.append) as store:
        for step in range(_RESULTS):
            number = (step + writer * 3) % _RESULTS
            _publish(store, sources, number, b"%d" % number * 1000)
    sys.exit(warnings[0] if warnings else 0)


def _concurrent_writers(directory: Path) -> tuple[Verdict, str]:
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    writers: list[subprocess.Popen[str]] = []
    try:
        for number in range(_WRITERS):
            command = [sys.executable, "-c", _WRITER, str(directory), str(number)]
            writers.append(subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True))
        ended = [(writer.communicate()[1], writer.returncode) for writer in writers]
    finally:
        # After an interrupt they would write on, into a directory that is being removed.
        for writer in writers:
            writer.kill()
            writer.wait()
    for text, code in ended:
        if code:
            return "unfit", (text.strip().splitlines() or ["a writer failed"])[-1]
    with _store(directory) as (store, _):
        for number in range(_RESULTS):
            if _content(store, key_of({"doctor": number})) != b"%d" % number * 1000:
                return "wrong", f"result {number} of {_WRITERS} writers is missing or wrong"
    return "ok", f"{_WRITERS} writers, {_RESULTS} results each"


_LOCKER = """
import fcntl, sys
file = open(sys.argv[1], "r+")
try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    sys.exit(7)
"""


def _locks(directory: Path) -> tuple[Verdict, str]:
    """Locks of the kernel have to hold between processes; some network file systems only pretend."""
    import fcntl

    with (directory / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        code = subprocess.run([sys.executable, "-c", _LOCKER, str(directory / "lock")], check=False).returncode
        if code != 7:
            return "unfit", "a lock that one process holds is given to another one, too; what builds use may be evicted"
    return "ok", "locks hold between processes"


def _latency(directory: Path) -> tuple[Verdict, str]:
    with _store(directory) as (store, _):
        keys = [_publish(store, directory, number, os.urandom(100_000)) for number in range(20)]
        times = []
        for key in keys:
            started = time.perf_counter()
            store.lookup(key)
            times.append(time.perf_counter() - started)
    middle = sorted(times)[len(times) // 2] * 1000
    return ("ok" if middle < 1000 else "unfit"), f"{middle:.2f} ms for a result of 100 kB"


def _room(directory: Path) -> tuple[Verdict, str]:
    status = os.statvfs(directory)
    room, nodes = status.f_bavail * status.f_frsize, status.f_favail
    enough = room > 100_000_000 and (status.f_files == 0 or nodes > 1000)
    return ("ok" if enough else "unfit"), f"{room / 1e9:.1f} GB" + (f" and {nodes} files" if status.f_files else "") + " are free"
