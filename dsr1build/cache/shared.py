"""The caches of one build as one: the local store first, then the remotes, without holding up what runs.

Requests run in threads of their own; everything else (deciding, checking signatures, writing to the store) happens in the
thread that calls ``collect``, so nothing here is locked. A wave of look-ups costs one request a remote; what a remote has
is fetched in portions, checked, and adopted by the local store before it counts. Results made here are uploaded meanwhile.

A remote that fails or is silent for longer than its time-outs is given up (``dsr1build.cache.breaker``), and all that
waits for it goes on at once without it: whatever is wrong with a remote costs a build at most one time-out.
"""

import contextlib
import hashlib
import os
import queue
import select
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from dsr1build.cache.blobs import BlobLost
from dsr1build.cache.breaker import Breaker
from dsr1build.cache.policy import AttachedRemote
from dsr1build.cache.record import Record, parse_record, render_record
from dsr1build.cache.remote import ActionName, RemoteDenied, RemoteUnavailable
from dsr1build.cache.scratch import make_scratch
from dsr1build.cache.signing import SigningKey, Trust, refusal, sign_record
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, Fields, encode
from dsr1build.plan.action import ActionResult

LOCAL = "local"
# Requests that one remote is sent at once; uploads go one at a time beside them.
_AT_ONCE = 4
# One portion of a download or upload has at most so many files and bytes, unless a single action has more: so progress
# shows, and a time-out costs little.
_PORTION_FILES = 64
_PORTION_BYTES = 8 << 20

Source: TypeAlias = str


@dataclass(frozen=True, slots=True)
class Found:
    """A result and where it was: ``local`` or ``remote:<name>``."""

    result: ActionResult
    source: Source


@dataclass(frozen=True, slots=True)
class Notices:
    """Who is told what the user should know: ``warn`` of remotes that fail, ``alarm`` of entries that somebody forged."""

    warn: Callable[[str], None]
    alarm: Callable[[str], None]


@dataclass(slots=True, eq=False)
class _Call:
    """A request: ``work`` runs in a thread and its result goes to ``done``; without a result, ``given_up`` is called."""

    work: Callable[[], object]
    done: Callable[[Any], None]
    given_up: Callable[[], None]
    sent: float | None = None


@dataclass(slots=True, eq=False)
class _Side:
    """One remote in this build: its breaker, its requests, and what is to be uploaded to it.

    ``bad`` are files that the remote has and that could not be fetched whole: they are uploaded again.
    """

    number: int
    attached: AttachedRemote
    breaker: Breaker
    writable: bool
    running: list[_Call] = field(default_factory=list)
    waiting: deque[_Call] = field(default_factory=deque)
    offers: deque["_Offer"] = field(default_factory=deque)
    uploading: tuple["_Offer", ...] = ()
    bad: set[BlobRef] = field(default_factory=set)
    forged: int = 0

    @property
    def name(self) -> str:
        return self.attached.remote.name


@dataclass(frozen=True, slots=True)
class _Offer:
    """What was built here: a record ready to upload, with files for its blobs."""

    action: ActionName
    record: bytes
    outputs: Mapping[str, tuple[BlobRef, int]]
    files: Mapping[BlobRef, Path]
    size: int


class SharedCache:
    """The caches of one build. Close it, after ``finish`` where the build went to its end.

    * ``trust``: whose records count, those of remotes and those that the store keeps from remotes.
    * ``signer`` signs what is uploaded.
    * ``unchanged`` tells whether the tools and sources that keys were computed from are still the same.
    """

    def __init__(
        self,
        store: LocalStore,
        remotes: Sequence[AttachedRemote],
        trust: Trust,
        signer: SigningKey | None,
        unchanged: Callable[[], bool],
        notices: Notices,
    ) -> None:
        self._store = store
        self._trust = trust
        self._signer = signer
        self._unchanged = unchanged
        self._notices = notices
        self._sides = [
            _Side(number, a, Breaker(a.remote.name, a.timeouts, notices.warn), a.writable) for number, a in enumerate(remotes)
        ]
        for side in self._sides:
            if side.writable and signer is None and not trust.accept_unsigned:
                side.writable = False
                notices.warn(f"nothing is uploaded to {side.name}: results without a signature are refused, and there is no key")
        self._asked: dict[str, tuple[Fields, bytes]] = {}
        self._answered: list[tuple[str, Found | None]] = []
        self._ended: queue.SimpleQueue[tuple[_Side, _Call, object]] = queue.SimpleQueue()
        # Sockets, not bare descriptors: a thread that ends after `close` must not write into somebody else's file.
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._rope.setblocking(False)
        self._directory: tuple[Path, int] | None = None
        self._portions = 0
        self._forged_local = False
        self.uploaded = 0

    @property
    def wake(self) -> int:
        """A file descriptor that can be read when ``collect`` has something to do."""
        return self._bell.fileno()

    @property
    def pending(self) -> int:
        """The number of look-ups without an answer yet."""
        return len(self._asked) + len(self._answered)

    def lookup_local(self, key: str) -> Found | None:
        """What the local store has. A record that came from elsewhere counts only while its signer is trusted."""
        record = self._store.record(key)
        if record is None:
            return None
        if record.signature is not None and (why := refusal(record, self._trust)) is not None:
            if not self._forged_local:
                self._forged_local = True
                self._notices.alarm(
                    f"the cache at {self._store.directory} holds results that are not used: {why}, first for the key {key}"
                )
            return None
        return Found(_result(record), LOCAL)

    def lookup_many(self, wave: Mapping[str, Fields]) -> dict[str, Found]:
        """What the caches have of ``wave`` (key -> fields); waits for the remotes. Not to be mixed with ``begin``."""
        found = {key: hit for key in wave if (hit := self.lookup_local(key)) is not None}
        self.begin({key: fields for key, fields in wave.items() if key not in found})
        while self.pending:
            found |= {key: hit for key, hit in self.collect(wait=True) if hit is not None}
        return found

    def begin(self, wave: Mapping[str, Fields]) -> None:
        """Ask the remotes for ``wave``, which the local store does not have. ``collect`` gives the answers."""
        self._asked |= {key: (fields, encode(fields)) for key, fields in wave.items()}
        self._ask(0, list(wave))

    def collect(self, wait: bool = False) -> list[tuple[str, Found | None]]:
        """The look-ups that have been answered since, each once; what was found is in the local store.

        Sends what can be sent and gives up what is out of time. With ``wait`` it returns with the first answer, or when
        no look-up is open.
        """
        while True:
            self._step()
            if self._answered or not wait or not self._asked:
                answered, self._answered = self._answered, []
                return answered
            select.select([self._bell], [], [], self.patience())

    def patience(self) -> float | None:
        """In how many seconds ``collect`` has to be called even if ``wake`` stays silent; None for never."""
        if self._answered:
            return 0.0
        times = [call.sent + side.breaker.limit for side in self._sides for call in side.running if call.sent is not None]
        times += [side.breaker.resume_at for side in self._sides if side.waiting and len(side.running) < _AT_ONCE]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def offer(self, key: str, fields: Fields, result: ActionResult, seconds: float, kind: str, label: str, peak: int = 0) -> None:
        """Upload, in the background, what was built here and is in the local store."""
        sides = [side for side in self._sides if side.writable and not side.breaker.given_up]
        if not sides:
            return
        encoded = encode(fields)
        files: dict[BlobRef, Path] = {}
        outputs: dict[str, tuple[BlobRef, int]] = {}
        try:
            directory = self._portion()
            files[BlobRef(key)] = directory / key
            files[BlobRef(key)].write_bytes(encoded)
            for name, ref in result.outputs.items():
                if ref not in files:
                    files[ref] = directory / ref.sha256
                    self._store.materialize(ref, files[ref])
                outputs[name] = ref, files[ref].stat().st_size
            record = Record(key, outputs, seconds, None, kind, label, peak)
            data = render_record(record if self._signer is None else sign_record(record, self._signer))
        except BlobLost:
            # The next build misses it too, makes it again and offers it again; the other results are not concerned.
            return
        except (OSError, ValueError) as error:
            self._stop_uploads(sides, f"{label} cannot be prepared: {error}")
            return
        size = len(encoded) + sum(size for _, size in outputs.values())
        for side in sides:
            side.offers.append(_Offer(ActionName(key, len(encoded)), data, outputs, files, size))
        self._step()

    def finish(self) -> None:
        """Wait for the uploads, at most for the longest time-out of a remote, and tell what did not get through."""
        give_up = time.monotonic() + max((side.breaker.limit for side in self._sides), default=0.0)
        while any(side.offers or side.uploading for side in self._sides):
            self._step()
            left = give_up - time.monotonic()
            if left <= 0:
                break
            patience = self.patience()
            if any(side.offers or side.uploading for side in self._sides):
                select.select([self._bell], [], [], left if patience is None else min(left, patience))
        for side in self._sides:
            if late := len(side.offers) + len(side.uploading):
                side.offers.clear()
                self._notices.warn(f"{late} results were not uploaded to {side.name} in time")
            if side.forged > 1:
                self._notices.alarm(f"{side.forged} results of {side.name} in all were not used")

    def close(self) -> None:
        """End the requests and remove temporary files. A request that hangs is left to its own end."""
        closing = [threading.Thread(target=_close, args=(side.attached,), daemon=True) for side in self._sides]
        for thread in closing:
            thread.start()
        for side, thread in zip(self._sides, closing, strict=True):
            # A remote that was given up may hang here as well.
            thread.join(0.0 if side.breaker.given_up else side.attached.timeouts.connect)
        if self._directory is not None:
            directory, lock = self._directory
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
            self._directory = None
        self._bell.close()
        self._rope.close()

    def __enter__(self) -> "SharedCache":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _ask(self, number: int, keys: Iterable[str]) -> None:
        """Ask the first remote from ``number`` on that is still in use, or answer that nobody has it."""
        keys = list(keys)
        side = next((side for side in self._sides[number:] if not side.breaker.given_up), None)
        if side is None or not keys:
            self._answer(dict.fromkeys(keys))
            return
        actions = [ActionName(key, len(self._asked[key][1])) for key in keys]
        remote = side.attached.remote
        next_number = side.number + 1
        self._send(
            side,
            _Call(
                lambda: remote.find_records(actions),
                lambda records: self._records(side, keys, records),
                lambda: self._ask(next_number, keys),
            ),
        )

    def _records(self, side: _Side, keys: Sequence[str], answers: Mapping[str, bytes]) -> None:
        """Fetch the files of those records that count; the other look-ups go to the next remote."""
        records: dict[str, tuple[Record, bytes]] = {}
        for key in keys:
            if key in answers and (record := self._believed(side, key, answers[key])) is not None:
                records[key] = record, answers[key]
        self._ask(side.number + 1, [key for key in keys if key not in records])
        for portion in _portions(records):
            self._fetch(side, {key: records[key] for key in portion})

    def _believed(self, side: _Side, key: str, data: bytes) -> Record | None:
        """The record, if it is the record of ``key`` and its signer is trusted."""
        try:
            record = parse_record(data, key)
            why: str | None = refusal(record, self._trust)
        except ValueError as error:
            why = str(error)
        if why is None:
            return record
        side.forged += 1
        if side.forged == 1:
            self._notices.alarm(f"a result of {side.name} is not used: {why} (key {key})")
        return None

    def _fetch(self, side: _Side, records: Mapping[str, tuple[Record, bytes]]) -> None:
        try:
            directory = self._portion()
        except OSError:
            # Without room for temporary files nothing can be fetched; the engine says so when it needs some itself.
            self._answer(dict.fromkeys(records))
            return
        wanted: dict[BlobRef, int] = {}
        for record, _ in records.values():
            for ref, size in record.outputs.values():
                if ref not in wanted and not (directory / ref.sha256).exists():
                    try:
                        # An equal file may have come with another action.
                        self._store.materialize(ref, directory / ref.sha256)
                    except (BlobLost, OSError):
                        wanted[ref] = size
        remote = side.attached.remote
        self._send(
            side,
            _Call(
                lambda: remote.fetch_blobs(wanted, directory) if wanted else frozenset(),
                lambda _: self._adopt(side, records, directory),
                lambda: self._ask(side.number + 1, records),
            ),
        )

    def _adopt(self, side: _Side, records: Mapping[str, tuple[Record, bytes]], directory: Path) -> None:
        """Give what has arrived to the local store; what did not is asked of the next remote."""
        absent: list[str] = []
        for key, (record, data) in records.items():
            files = {ref: directory / ref.sha256 for ref, _ in record.outputs.values()}
            result = self._keep(record, data, files, directory / key)
            if result is None:
                absent.append(key)
                side.bad.update(files)
            else:
                self._answer({key: Found(result, f"remote:{side.name}")})
        shutil.rmtree(directory, ignore_errors=True)
        self._ask(side.number + 1, absent)

    def _keep(self, record: Record, data: bytes, files: Mapping[BlobRef, Path], scratch: Path) -> ActionResult | None:
        """The result in the local store, or None where a file is missing or is not what its name says."""
        fields, encoded = self._asked[record.key]
        if not all(path.is_file() for path in files.values()):
            return None
        try:
            scratch.write_bytes(encoded)
            return self._store.adopt(data, {**files, BlobRef(record.key): scratch})
        except ValueError:
            return None
        except OSError:
            # A store that cannot be written keeps results for this build alone; it does not compare digests then.
            paths = {name: files[ref] for name, (ref, _) in record.outputs.items()}
            with contextlib.suppress(OSError):
                if all(_sha256(path) == ref.sha256 for ref, path in files.items()):
                    return self._store.publish(
                        record.key, fields, paths, record.seconds or 0.0, record.kind, record.label, record.peak
                    )
        return None

    def _answer(self, found: Mapping[str, Found | None]) -> None:
        for key, hit in found.items():
            del self._asked[key]
            self._answered.append((key, hit))

    def _step(self) -> None:
        """Take what has ended, give up what is out of time, send what may be sent."""
        with contextlib.suppress(BlockingIOError):
            while self._bell.recv(4096):
                pass
        while True:
            try:
                side, call, outcome = self._ended.get_nowait()
            except queue.Empty:
                break
            # A call that was given up is not in the list any more, and what it brings is too late.
            if call in side.running:
                side.running.remove(call)
                self._end(side, call, outcome)
        now = time.monotonic()
        for side in self._sides:
            limit = side.breaker.limit
            if any(call.sent is not None and now >= call.sent + limit for call in side.running):
                side.breaker.give_up(f"no answer within {limit:g} seconds")
                self._abandon(side)
            self._upload(side)
            self._start(side)

    def _end(self, side: _Side, call: _Call, outcome: object) -> None:
        if isinstance(outcome, OSError):
            outcome = RemoteUnavailable(str(outcome))
        if isinstance(outcome, RemoteUnavailable):
            if side.breaker.may_repeat(outcome, call.sent or 0.0, time.monotonic()):
                side.waiting.append(call)
            else:
                call.given_up()
                self._abandon(side)
        elif isinstance(outcome, BaseException):
            raise outcome
        else:
            call.done(outcome)

    def _abandon(self, side: _Side) -> None:
        """Go on without a remote that was given up."""
        calls = [*side.running, *side.waiting]
        side.running.clear()
        side.waiting.clear()
        side.offers.clear()
        side.uploading = ()
        for call in calls:
            call.given_up()

    def _send(self, side: _Side, call: _Call) -> None:
        if side.breaker.given_up:
            call.given_up()
            return
        side.waiting.append(call)
        self._start(side)

    def _start(self, side: _Side) -> None:
        now = time.monotonic()
        while side.waiting and len(side.running) < _AT_ONCE and now >= side.breaker.resume_at:
            call = side.waiting.popleft()
            # The time of a call that is repeated counts from the first try.
            call.sent = now if call.sent is None else call.sent
            side.running.append(call)
            threading.Thread(target=self._work, args=(side, call), daemon=True).start()

    def _work(self, side: _Side, call: _Call) -> None:
        outcome: object
        try:
            outcome = call.work()
        except BaseException as error:  # handed to the thread that calls `collect`, which raises it
            outcome = error
        self._ended.put((side, call, outcome))
        with contextlib.suppress(OSError):
            self._rope.send(b"x")

    def _upload(self, side: _Side) -> None:
        if side.uploading or not side.offers or side.breaker.given_up:
            return
        if not self._unchanged():
            self._stop_uploads(self._sides, "tools or sources have changed since the build began")
            return
        portion = [side.offers.popleft()]
        size, files = portion[0].size, len(portion[0].files)
        while side.offers and size + side.offers[0].size <= _PORTION_BYTES and files < _PORTION_FILES:
            portion.append(side.offers.popleft())
            size, files = size + portion[-1].size, files + len(portion[-1].files)
        side.uploading = tuple(portion)
        offers = side.uploading
        remote = side.attached.remote
        bad = frozenset(side.bad)

        def work() -> str | None:
            """Why the remote takes no uploads, or None where it took these."""
            try:
                paths = {ref: path for offer in offers for ref, path in offer.files.items()}
                sizes = {ref: path.stat().st_size for ref, path in paths.items()}
                missing = remote.missing_blobs(sizes) | (bad & paths.keys())
                if missing:
                    remote.store_blobs({ref: paths[ref] for ref in missing})
                for offer in offers:
                    remote.store_record(offer.action, offer.record, offer.outputs)
            except RemoteDenied as error:
                return str(error)
            return None

        def done(denied: str | None) -> None:
            side.uploading = ()
            if denied is not None:
                self._stop_uploads([side], denied)
            else:
                self.uploaded += len(offers)
                self._upload(side)

        def given_up() -> None:
            side.uploading = ()

        self._send(side, _Call(work, done, given_up))

    def _stop_uploads(self, sides: Sequence[_Side], reason: str) -> None:
        for side in sides:
            if side.writable:
                side.writable = False
                side.offers.clear()
                self._notices.warn(f"nothing more is uploaded to {side.name}: {reason}")

    def _portion(self) -> Path:
        """A new directory for the files of one portion."""
        if self._directory is None:
            self._directory = make_scratch("dsr1build-shared-")
        self._portions += 1
        directory = self._directory[0] / str(self._portions)
        directory.mkdir()
        return directory


def _result(record: Record) -> ActionResult:
    return ActionResult(record.key, {name: ref for name, (ref, _) in record.outputs.items()})


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _portions(records: Mapping[str, tuple[Record, bytes]]) -> list[list[str]]:
    """The keys of ``records`` in groups of at most so many files and bytes."""
    groups: list[list[str]] = []
    size = files = 0
    for key, (record, _) in records.items():
        more = sum(size for _, size in record.outputs.values())
        if not groups or size + more > _PORTION_BYTES or files + len(record.outputs) > _PORTION_FILES:
            groups.append([])
            size = files = 0
        groups[-1].append(key)
        size, files = size + more, files + len(record.outputs)
    return groups


def _close(attached: AttachedRemote) -> None:
    with contextlib.suppress(RemoteUnavailable, OSError):
        attached.remote.close()
