"""Results from cache to cache: between two stores, and between a store and a remote."""

import contextlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from dsr1build.cache.archive import Moved
from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.checks import Check
from dsr1build.cache.policy import AttachedRemote
from dsr1build.cache.record import Record, parse_record, render_record
from dsr1build.cache.remote import ActionName, RemoteDenied, RemoteUnavailable
from dsr1build.cache.scratch import scratch_directory
from dsr1build.cache.signing import SigningKey, Trust, refusal, sign_record
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, encode, sha256_hex
from dsr1build.errors import EnvironmentUnfit

# So many results travel at once: few round trips, and temporary files that fit every disk.
_PORTION = 32

_T = TypeVar("_T")


def parse_names(text: str) -> list[ActionName]:
    """Actions from lines of a key and a size, as ``dsr1build cache push --list`` writes them. Raises ValueError."""
    names = []
    for number, line in enumerate(text.splitlines(), 1):
        match = re.fullmatch(r"([0-9a-f]{64}) ([0-9]{1,18})", line)
        if match is None:
            raise ValueError(f"line {number} is not a key and a size")
        names.append(ActionName(match[1], int(match[2])))
    return names


def names_of(store: LocalStore) -> list[ActionName]:
    """The results of a store whose fields are there, as remotes call them, in order."""
    names = []
    for key in sorted(store.entries()):
        with contextlib.suppress(OSError):
            names.append(ActionName(key, store.files.blobs.path(BlobRef(key)).stat().st_size))
    return names


def copy_results(source: LocalStore, target: LocalStore) -> Moved:
    """Every result that ``target`` has not. Raises EnvironmentUnfit where ``target`` cannot be written."""
    results = size = refused = 0
    for key in sorted(source.entries()):
        if target.record(key, counted=False) is not None:
            continue
        with scratch_directory("dsr1build-copy-") as directory:
            found = _unpacked(source, key, directory)
            if found is None:
                refused += 1
                continue
            record, data, files = found
            try:
                target.adopt(data, files)
            except ValueError:
                refused += 1
                continue
            except OSError as error:
                raise EnvironmentUnfit(
                    f"the cache cannot be written: {error.strerror}", where=str(target.directory), hint="Free some room there."
                ) from None
        results += 1
        size += sum(length for _, length in record.outputs.values())
    return Moved(results, size, refused)


def push_results(store: LocalStore, attached: AttachedRemote, signer: SigningKey | None) -> Moved:
    """Upload every result; one without a signature is signed. Raises EnvironmentUnfit where the remote does not take it."""
    results = size = refused = 0
    remote = attached.remote
    with _remote_errors(attached):
        for portion in _portions(sorted(store.entries())):
            with scratch_directory("dsr1build-push-") as directory:
                uploads: list[tuple[ActionName, bytes, Record]] = []
                files: dict[BlobRef, Path] = {}
                for key in portion:
                    found = _unpacked(store, key, directory)
                    if found is None or BlobRef(key) not in found[2]:
                        refused += 1
                        continue
                    record, data, blobs = found
                    if record.signature is None and signer is not None:
                        data = render_record(sign_record(record, signer))
                    files.update(blobs)
                    uploads.append((ActionName(key, blobs[BlobRef(key)].stat().st_size), data, record))
                missing = remote.missing_blobs({ref: path.stat().st_size for ref, path in files.items()})
                if missing:
                    remote.store_blobs({ref: files[ref] for ref in missing})
                for action, data, record in uploads:
                    remote.store_record(action, data, record.outputs)
                    results += 1
                    size += sum(length for _, length in record.outputs.values())
    return Moved(results, size, refused)


def pull_results(
    store: LocalStore, attached: AttachedRemote, names: Sequence[ActionName], trust: Trust, warn: Callable[[str], None]
) -> Moved:
    """Those of ``names`` that the remote has and ``store`` has not. Raises EnvironmentUnfit where the remote fails."""
    results = size = refused = 0
    remote = attached.remote
    with _remote_errors(attached):
        for portion in _portions([name for name in names if store.record(name.key, counted=False) is None]):
            records: dict[ActionName, tuple[Record, bytes]] = {}
            answers = remote.find_records(portion)
            for name in portion:
                if name.key not in answers:
                    continue
                try:
                    record = parse_record(answers[name.key], name.key)
                    if (why := refusal(record, trust)) is not None:
                        raise ValueError(why)
                    records[name] = record, answers[name.key]
                except ValueError as error:
                    refused += 1
                    if refused == 1:
                        warn(f"the result {name.key} of {remote.name} is not taken: {error}")
            with scratch_directory("dsr1build-pull-") as directory:
                blobs = dict(pair for record, _ in records.values() for pair in record.outputs.values())
                blobs.update({BlobRef(name.key): name.size for name in records})
                there = remote.fetch_blobs(blobs, directory)
                files = {ref: directory / ref.sha256 for ref in there}
                for record, data in records.values():
                    try:
                        store.adopt(data, files)
                    except ValueError as error:
                        refused += 1
                        if refused == 1:
                            warn(f"the result {record.key} of {remote.name} is not taken: {error}")
                        continue
                    results += 1
                    size += sum(length for _, length in record.outputs.values())
    return Moved(results, size, refused)


def check_remote(attached: AttachedRemote, warn: Callable[[str], None]) -> list[Check]:
    """Ask a remote for what nobody has; where it may be written, store one small result and take it back."""
    remote = attached.remote
    fields = encode({"doctor": "dsr1build cache doctor", "time": time.time_ns()})
    action = ActionName(sha256_hex(fields), len(fields))
    output = f"result of {action.key}".encode()
    record = Record(action.key, {"out": (BlobRef(sha256_hex(output)), len(output))})
    checks: list[Check] = []

    def check(name: str, attempt: Callable[[], str]) -> bool:
        started = time.monotonic()
        try:
            wrong = attempt()
            checks.append(Check(remote.name, name, "wrong" if wrong else "ok", wrong, time.monotonic() - started))
        except RemoteDenied as error:
            checks.append(Check(remote.name, name, "unfit", f"refused: {error}", time.monotonic() - started))
        except RemoteUnavailable as error:
            checks.append(Check(remote.name, name, "unfit", str(error), time.monotonic() - started))
        return checks[-1].verdict == "ok"

    with scratch_directory("dsr1build-doctor-") as directory:
        sources = {BlobRef(action.key): directory / "fields", record.outputs["out"][0]: directory / "out"}
        (directory / "fields").write_bytes(fields)
        (directory / "out").write_bytes(output)
        (directory / "fetched").mkdir()

        def absent() -> str:
            return "it has what nobody made" if remote.find_records([action]) else ""

        def upload() -> str:
            sizes = {ref: path.stat().st_size for ref, path in sources.items()}
            remote.store_blobs({ref: sources[ref] for ref in remote.missing_blobs(sizes)})
            remote.store_record(action, render_record(record), record.outputs)
            return "it lacks blobs that it took" if remote.missing_blobs(sizes) else ""

        def download() -> str:
            if remote.find_records([action]).get(action.key) != render_record(record):
                return "another record came back, or none"
            ref, size = record.outputs["out"]
            there = remote.fetch_blobs({ref: size}, directory / "fetched")
            if ref not in there or (directory / "fetched" / ref.sha256).read_bytes() != output:
                return "other bytes came back, or none"
            return ""

        if check("look-up", absent) and attached.writable and check("upload", upload):
            check("round trip", download)
    try:
        remote.close()
    except RemoteUnavailable as error:
        warn(f"{remote.name}: {error}")
    return checks


def _unpacked(store: LocalStore, key: str, directory: Path) -> tuple[Record, bytes, dict[BlobRef, Path]] | None:
    """A result as files in ``directory``; None where it is not whole. Its fields may be missing among the files."""
    record = store.record(key, counted=False)
    data = store.record_bytes(key)
    if record is None or data is None:
        return None
    files: dict[BlobRef, Path] = {}
    for ref in (BlobRef(key), *(ref for ref, _ in record.outputs.values())):
        path = directory / ref.sha256
        try:
            store.materialize(ref, path)
            files[ref] = path
        except BlobLost:
            if ref.sha256 != key:
                return None
    return record, data, files


@contextlib.contextmanager
def _remote_errors(attached: AttachedRemote) -> Iterator[None]:
    """Close the remote afterwards; a remote that fails is an error here, where nothing can be done without it."""
    try:
        yield
    except RemoteUnavailable as error:
        raise EnvironmentUnfit(
            f"the shared cache failed: {error}",
            where=attached.remote.name,
            hint="`dsr1build cache doctor` with its profile tells more; what went over is kept.",
        ) from None
    finally:
        with contextlib.suppress(RemoteUnavailable):
            attached.remote.close()


def _portions(items: Iterable[_T]) -> Iterator[list[_T]]:
    listed = list(items)
    for start in range(0, len(listed), _PORTION):
        yield listed[start : start + _PORTION]
