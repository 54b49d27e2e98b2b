"""A shared cache behind the Remote Execution API, version 2, over gRPC (https://github.com/bazelbuild/remote-apis).

An action's digest is {its key, the length of its encoded fields}. Its ActionResult lists the outputs and one more file,
``dsr1-record.json``, whose content is the record. The encoded fields themselves are not uploaded: servers take the blob of an
action's digest for a REAPI Action message (BuildGrid then answers every look-up of it with INTERNAL) and do without it where
there is none.
"""

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, TypeAlias, TypeVar

from grpc import StatusCode

from dsr1build.cache.remote import ActionName, RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.action_result import RECORD_NAME
from dsr1build.cache.remotes.proto import message
from dsr1build.cache.remotes.reapi_compress import IDENTITY, NAMES, PREFERENCE, Damaged, compress, decompress
from dsr1build.cache.remotes.reapi_wire import ABSENT, CODES, Absent, Connection, parse_address, refusal
from dsr1build.digest import BlobRef, decode, sha256_hex

_SHA256 = 1
_CAS = "ContentAddressableStorage"
_BYTE_STREAM = "google.bytestream.ByteStream"

# gRPC servers refuse messages over 4 MiB by default, so batches stay under that whatever a server says of itself.
# buildbox-casd names no limit and keeps 64 KiB of a message for itself.
_LARGEST_BATCH = (4 << 20) - (128 << 10)
# What a blob takes in a batch besides its content: digest, status, field headers.
_BATCH_OVERHEAD = 256
_DIGESTS_PER_CALL = 10_000
_WRITE_PIECE = 1 << 20
_PARALLEL_TRANSFERS = 4
_LOOKUPS_IN_FLIGHT = 64
# ``Timeouts.request`` is for so much data or so many look-ups; what moves more has proportionally more time, so that a
# large cache is not a slow one, and one that drips bytes is.
_BYTES_PER_TIMEOUT = 16 << 20
_LOOKUPS_PER_TIMEOUT = 1_000

_EMPTY = BlobRef(sha256_hex(b""))

_Result = TypeVar("_Result")
_Accept: TypeAlias = Callable[[BlobRef, Iterable[bytes]], None]


@dataclass(frozen=True, slots=True)
class _Capabilities:
    """``batch`` is in bytes and counts the overhead; compressors are by their number in the API, 0 for none."""

    batch: int
    updates: bool
    stream_compressor: int
    read_compressors: tuple[int, ...]
    update_compressor: int


def open_reapi(url: str, *, timeouts: Timeouts, headers: Mapping[str, str] | None = None) -> "ReapiRemote":
    """The cache at ``grpc://host:port[/instance]`` or ``grpcs://host[:port][/instance]``. Nothing is sent before the first
    look-up. ``headers`` go with every call and are never shown. Raises InvalidInput for an address or header that gRPC cannot
    carry."""
    address = parse_address(url)
    return ReapiRemote(Connection(address, timeouts, headers or {}), address.instance, timeouts)


class ReapiRemote:
    """``dsr1build.cache.remote.Remote`` over one connection; see there for what each method promises."""

    def __init__(self, connection: Connection, instance: str, timeouts: Timeouts) -> None:
        self._rpc = connection
        self._instance = instance
        self._timeouts = timeouts
        self._lock = threading.Lock()
        self._asked: Future[_Capabilities] | None = None

    @property
    def name(self) -> str:
        return self._rpc.name

    def close(self) -> None:
        self._rpc.close()

    # Look-ups

    def find_records(self, actions: Sequence[ActionName]) -> Mapping[str, bytes]:
        records: dict[str, bytes] = {}
        elsewhere: dict[str, BlobRef] = {}
        sizes: dict[BlobRef, int] = {}
        for key, result in self._action_results(actions):
            file = next((file for file in result.output_files if file.path == RECORD_NAME), None)
            if file is None:
                continue
            blob = BlobRef(file.digest.hash)
            if file.contents:
                if _is_whole(file.contents, blob, file.digest.size_bytes):
                    records[key] = file.contents
            elif 0 < file.digest.size_bytes <= _LARGEST_BATCH:
                elsewhere[key] = blob
                sizes[blob] = file.digest.size_bytes
        if elsewhere:
            # Servers may ignore the hint to put the record into the answer.
            contents: dict[BlobRef, bytes] = {}
            self._read_all(sizes, lambda blob, pieces: contents.__setitem__(blob, b"".join(pieces)))
            records |= {key: contents[blob] for key, blob in elsewhere.items() if blob in contents}
        return records

    def _action_results(self, actions: Sequence[ActionName]) -> list[tuple[str, Any]]:
        """Key and ActionResult of the actions that the server knows, with many questions on the way at once.

        A server that works on fewer at a time (BuildGrid: 20) refuses the others. They are asked again, as many at a time
        as it took before, as long as it takes any.
        """
        until = time.monotonic() + self._timeouts.request * (1 + len(actions) // _LOOKUPS_PER_TIMEOUT)
        results = []
        waiting = list(dict.fromkeys(actions))
        window = _LOOKUPS_IN_FLIGHT
        while waiting:
            asked, waiting = waiting[:window], waiting[window:]
            refused: list[ActionName] = []
            calls: list[Any] = []
            try:
                for action in asked:
                    calls.append(self._ask_for_result(action, until - time.monotonic()))
                for action, call in zip(asked, calls, strict=True):
                    try:
                        result = self._rpc.finish(call, "GetActionResult", absent=frozenset({StatusCode.NOT_FOUND}))
                    except RemoteBusy as busy:
                        refused.append(action)
                        if busy.retry_after or len(refused) == len(asked):
                            raise
                        continue
                    if result is not None:
                        results.append((action.key, result))
            finally:
                for call in calls:
                    call.cancel()
            if refused:
                window = len(asked) - len(refused)
                waiting = refused + waiting
        return results

    def _ask_for_result(self, action: ActionName, seconds: float) -> Any:
        request = message("GetActionResultRequest")(
            instance_name=self._instance,
            action_digest=_digest(BlobRef(action.key), action.size),
            inline_output_files=[RECORD_NAME],
            digest_function=_SHA256,
        )
        return self._rpc.start("ActionCache", "GetActionResult", request, min(seconds, self._timeouts.request))

    # Downloads

    def fetch_blobs(self, blobs: Mapping[BlobRef, int], directory: Path) -> frozenset[BlobRef]:
        def place(blob: BlobRef, pieces: Iterable[bytes]) -> None:
            with _arriving(directory, blob) as file:
                for piece in pieces:
                    file.write(piece)

        return self._read_all(blobs, place)

    def _read_all(self, blobs: Mapping[BlobRef, int], accept: _Accept) -> frozenset[BlobRef]:
        """Give the content of every blob that the server has to ``accept``. The pieces raise ``_Wrong`` at their end when
        they are not the blob; ``accept`` lets it pass."""
        arrived = set()
        if _EMPTY in blobs:
            accept(_EMPTY, ())
            arrived.add(_EMPTY)
        wanted = {blob: size for blob, size in blobs.items() if blob != _EMPTY}
        if not wanted:
            return frozenset(arrived)
        capabilities = self._capabilities()
        small = {blob: size for blob, size in wanted.items() if size + _BATCH_OVERHEAD <= capabilities.batch}
        jobs = [partial(self._read_batch, batch, capabilities, accept) for batch in _batches(small, capabilities.batch)]
        jobs += [
            partial(self._read_stream, blob, size, capabilities, accept) for blob, size in wanted.items() if blob not in small
        ]
        return frozenset(arrived.union(*_side_by_side(jobs)))

    def _read_batch(
        self,
        batch: Mapping[BlobRef, int],
        capabilities: _Capabilities,
        accept: _Accept,
    ) -> set[BlobRef]:
        request = message("BatchReadBlobsRequest")(
            instance_name=self._instance,
            digests=[_digest(blob, size) for blob, size in batch.items()],
            acceptable_compressors=capabilities.read_compressors,
            digest_function=_SHA256,
        )
        response = self._rpc.call(_CAS, "BatchReadBlobs", request, self._seconds(sum(batch.values())))
        arrived: set[BlobRef] = set()
        for entry in response.responses:
            blob = BlobRef(entry.digest.hash)
            if blob not in batch or blob in arrived or (entry.compressor != IDENTITY and entry.compressor not in NAMES):
                continue
            code = CODES.get(entry.status.code, StatusCode.UNKNOWN)
            if code in ABSENT:
                continue
            if code is not StatusCode.OK:
                raise refusal(f"{self.name}: BatchReadBlobs", code, entry.status.message)
            size = batch[blob]
            try:
                accept(blob, _checked(decompress(entry.compressor, [entry.data]), blob, size))
            except (_Wrong, Damaged):
                continue
            arrived.add(blob)
        return arrived

    def _read_stream(
        self,
        blob: BlobRef,
        size: int,
        capabilities: _Capabilities,
        accept: _Accept,
    ) -> set[BlobRef]:
        compressor = capabilities.stream_compressor
        request = message("google.bytestream.ReadRequest")(resource_name=self._resource(blob, size, compressor))
        answers = self._rpc.pieces(_BYTE_STREAM, "Read", request, self._seconds(size))
        try:
            accept(blob, _checked(decompress(compressor, (answer.data for answer in answers)), blob, size))
        except (Absent, _Wrong, Damaged):
            return set()
        finally:
            answers.close()
        return {blob}

    # Uploads

    def missing_blobs(self, blobs: Mapping[BlobRef, int]) -> frozenset[BlobRef]:
        asked = [_digest(blob, size) for blob, size in blobs.items() if blob != _EMPTY]
        missing: set[BlobRef] = set()
        for start in range(0, len(asked), _DIGESTS_PER_CALL):
            request = message("FindMissingBlobsRequest")(
                instance_name=self._instance, blob_digests=asked[start : start + _DIGESTS_PER_CALL], digest_function=_SHA256
            )
            response = self._rpc.call(_CAS, "FindMissingBlobs", request)
            missing.update(BlobRef(digest.hash) for digest in response.missing_blob_digests)
        return frozenset(missing & blobs.keys())

    def store_blobs(self, blobs: Mapping[BlobRef, Path]) -> None:
        wanted = {blob: path for blob, path in blobs.items() if blob != _EMPTY}
        if not wanted:
            return
        capabilities = self._capabilities()
        try:
            sizes = {blob: path.stat().st_size for blob, path in wanted.items()}
        except OSError as error:
            raise _unreadable(self.name, error) from None
        small = {blob: size for blob, size in sizes.items() if size + _BATCH_OVERHEAD <= capabilities.batch}
        jobs: list[Callable[[], None]] = [
            partial(self._write_files, {blob: wanted[blob] for blob in batch}, capabilities)
            for batch in _batches(small, capabilities.batch)
        ]
        jobs += [
            partial(self._write_stream, blob, sizes[blob], path, capabilities)
            for blob, path in wanted.items()
            if blob not in small
        ]
        _side_by_side(jobs)

    def _write_files(self, files: Mapping[BlobRef, Path], capabilities: _Capabilities) -> None:
        contents = {}
        for blob, path in files.items():
            try:
                contents[blob] = path.read_bytes()
            except OSError as error:
                raise _unreadable(self.name, error) from None
            if sha256_hex(contents[blob]) != blob.sha256:
                raise RemoteUnavailable(f"{self.name}: {path} changed while it was uploaded; it is not stored")
        uploads = {blob: data for blob, data in contents.items() if not _is_encoded_fields(data)}
        if uploads:
            self._write_batch(uploads, capabilities)

    def _write_batch(self, contents: Mapping[BlobRef, bytes], capabilities: _Capabilities) -> None:
        entry = message("BatchUpdateBlobsRequest").Request
        compressor = capabilities.update_compressor
        request = message("BatchUpdateBlobsRequest")(
            instance_name=self._instance,
            requests=[
                entry(digest=_digest(blob, len(data)), data=b"".join(compress(compressor, [data])), compressor=compressor)
                for blob, data in contents.items()
            ],
            digest_function=_SHA256,
        )
        seconds = self._seconds(sum(map(len, contents.values())))
        response = self._rpc.call(_CAS, "BatchUpdateBlobs", request, seconds)
        accepted = set()
        for answer in response.responses:
            code = CODES.get(answer.status.code, StatusCode.UNKNOWN)
            if code is not StatusCode.OK:
                raise refusal(f"{self.name}: BatchUpdateBlobs", code, answer.status.message)
            accepted.add(BlobRef(answer.digest.hash))
        if forgotten := contents.keys() - accepted:
            raise RemoteUnavailable(f"{self.name}: BatchUpdateBlobs: no answer for {len(forgotten)} of {len(contents)} blobs")

    def _write_stream(self, blob: BlobRef, size: int, path: Path, capabilities: _Capabilities) -> None:
        compressor = capabilities.stream_compressor
        resource = f"uploads/{uuid.uuid4()}/{self._resource(blob, size, compressor, instance=False)}"
        resource = f"{self._instance}/{resource}" if self._instance else resource
        source = _Checksum(path, blob, size)
        request = message("google.bytestream.WriteRequest")

        def requests() -> Iterator[Any]:
            # The last piece is held back until the whole file has been read and has its digest: a server commits a blob
            # at finish_write and not before.
            offset, held = 0, b""
            for piece in compress(compressor, source.pieces()):
                if held:
                    yield request(resource_name=resource if offset == 0 else "", write_offset=offset, data=held)
                    offset += len(held)
                held = piece
            if source.whole:
                yield request(resource_name=resource if offset == 0 else "", write_offset=offset, data=held, finish_write=True)

        call = self._rpc.start(_BYTE_STREAM, "Write", requests(), self._seconds(size))
        try:
            response = self._rpc.finish(call, "Write")
        except RemoteUnavailable:
            if source.error:
                raise RemoteUnavailable(f"{self.name}: {source.error}; it is not stored") from None
            raise
        if source.error:
            raise RemoteUnavailable(f"{self.name}: {source.error}; it is not stored")
        # A server that has the blob already may answer early, with the whole size; of compressed writes it may say -1.
        if compressor == IDENTITY and response.committed_size != size:
            raise RemoteUnavailable(f"{self.name}: Write: the server kept {response.committed_size} of {size} bytes")

    def store_record(self, action: ActionName, record: bytes, outputs: Mapping[str, tuple[BlobRef, int]]) -> None:
        capabilities = self._capabilities()
        if not capabilities.updates:
            raise RemoteDenied(f"{self.name}: the server's action cache takes no updates")
        blob = BlobRef(sha256_hex(record))
        if len(record) + _BATCH_OVERHEAD > capabilities.batch:
            raise RemoteUnavailable(f"{self.name}: a record of {len(record)} bytes is larger than a batch of this server")
        self._write_batch({blob: record}, capabilities)
        output_file = message("OutputFile")
        files = {**outputs, RECORD_NAME: (blob, len(record))}
        request = message("UpdateActionResultRequest")(
            instance_name=self._instance,
            action_digest=_digest(BlobRef(action.key), action.size),
            action_result=message("ActionResult")(
                output_files=[output_file(path=path, digest=_digest(*files[path])) for path in sorted(files)]
            ),
            digest_function=_SHA256,
        )
        self._rpc.call("ActionCache", "UpdateActionResult", request)

    # The server

    def _capabilities(self) -> _Capabilities:
        """What the server says of itself, asked once. Threads that need it at the same time wait for one answer; after a
        failure the next call asks again."""
        with self._lock:
            asked = self._asked
            mine = asked is None
            if asked is None:
                asked = self._asked = Future()
        if mine:
            try:
                asked.set_result(self._ask_capabilities())
            except BaseException as error:
                with self._lock:
                    self._asked = None
                asked.set_exception(error)
        return asked.result()

    def _ask_capabilities(self) -> _Capabilities:
        request = message("GetCapabilitiesRequest")(instance_name=self._instance)
        cache = self._rpc.call("Capabilities", "GetCapabilities", request).cache_capabilities
        if _SHA256 not in cache.digest_functions:
            raise RemoteUnavailable(f"{self.name}: the server does not name blobs by SHA-256")
        limit = cache.max_batch_total_size_bytes
        return _Capabilities(
            batch=min(limit, _LARGEST_BATCH) if limit > 0 else _LARGEST_BATCH,
            updates=cache.action_cache_update_capabilities.update_enabled,
            stream_compressor=_best(cache.supported_compressors),
            read_compressors=tuple(number for number in PREFERENCE if number in cache.supported_compressors),
            update_compressor=_best(cache.supported_batch_update_compressors),
        )

    def _resource(self, blob: BlobRef, size: int, compressor: int, *, instance: bool = True) -> str:
        """``[instance/]blobs/HASH/SIZE`` or ``[instance/]compressed-blobs/COMPRESSOR/HASH/SIZE``; SIZE is always the size
        of the content."""
        kind = "blobs" if compressor == IDENTITY else f"compressed-blobs/{NAMES[compressor]}"
        path = f"{kind}/{blob.sha256}/{size}"
        return f"{self._instance}/{path}" if instance and self._instance else path

    def _seconds(self, size: int) -> float:
        return self._timeouts.request * (1 + size // _BYTES_PER_TIMEOUT)


class _Wrong(Exception):
    """Bytes that are not the blob they were said to be."""


class _Checksum:
    """A file read once, which knows at its end whether it still was the blob it is uploaded as.

    gRPC reads it in a thread of its own, where an exception would only be logged: what went wrong is kept in ``error``.
    """

    def __init__(self, path: Path, blob: BlobRef, size: int) -> None:
        self._path = path
        self._blob = blob
        self._size = size
        self.whole = False
        self.error = ""

    def pieces(self) -> Iterator[bytes]:
        state, length = hashlib.sha256(), 0
        try:
            with self._path.open("rb") as file:
                while piece := file.read(_WRITE_PIECE):
                    state.update(piece)
                    length += len(piece)
                    yield piece
        except OSError as error:
            self.error = f"{self._path} cannot be read ({error.strerror})"
            return
        self.whole = length == self._size and state.hexdigest() == self._blob.sha256
        if not self.whole:
            self.error = f"{self._path} changed while it was uploaded"


def _checked(pieces: Iterable[bytes], blob: BlobRef, size: int) -> Iterator[bytes]:
    """``pieces``, and ``_Wrong`` as soon as there are more bytes than ``size``, or at the end when they are not ``blob``."""
    state, length = hashlib.sha256(), 0
    for piece in pieces:
        length += len(piece)
        if length > size:
            raise _Wrong
        state.update(piece)
        yield piece
    if length != size or state.hexdigest() != blob.sha256:
        raise _Wrong


def _is_whole(data: bytes, blob: BlobRef, size: int) -> bool:
    return len(data) == size and sha256_hex(data) == blob.sha256


@contextmanager
def _arriving(directory: Path, blob: BlobRef) -> Iterator[IO[bytes]]:
    """A file that becomes ``directory/<sha256>`` when the block ends well, and is gone when it does not."""
    part = directory / f".{blob.sha256}.{uuid.uuid4().hex}.part"
    try:
        try:
            with part.open("xb") as file:
                yield file
            part.replace(directory / blob.sha256)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise RemoteUnavailable(f"a download cannot be written to {directory}: {error.strerror}") from error


def _is_encoded_fields(data: bytes) -> bool:
    """Whether ``data`` is the encoded fields of an action, which may not lie under the action's digest (see above)."""
    if data[:1] != b"M":
        return False
    try:
        decode(data)
    except ValueError:
        return False
    return True


def _digest(blob: BlobRef, size: int) -> Any:
    return message("Digest")(hash=blob.sha256, size_bytes=size)


def _best(offered: Iterable[int]) -> int:
    return next((number for number in PREFERENCE if number in offered), IDENTITY)


def _batches(blobs: Mapping[BlobRef, int], limit: int) -> Iterator[Mapping[BlobRef, int]]:
    batch: dict[BlobRef, int] = {}
    taken = 0
    for blob, size in blobs.items():
        cost = size + _BATCH_OVERHEAD
        if batch and taken + cost > limit:
            yield batch
            batch, taken = {}, 0
        batch[blob] = size
        taken += cost
    if batch:
        yield batch


def _side_by_side(jobs: Sequence[Callable[[], _Result]]) -> list[_Result]:
    """The results of all jobs, a few at a time. After the first failure no further job begins."""
    if len(jobs) == 1:
        return [jobs[0]()]
    with ThreadPoolExecutor(max_workers=_PARALLEL_TRANSFERS, thread_name_prefix="reapi") as pool:
        futures = [pool.submit(job) for job in jobs]
        wait(futures, return_when=FIRST_EXCEPTION)
        pool.shutdown(wait=False, cancel_futures=True)
        for future in futures:
            if future.done() and not future.cancelled() and (error := future.exception()):
                raise error
        return [future.result() for future in futures]


def _refused_for_load(call: Any) -> bool:
    return call.done() and call.code() is StatusCode.RESOURCE_EXHAUSTED


def _unreadable(name: str, error: OSError) -> RemoteUnavailable:
    return RemoteUnavailable(f"{name}: {error.filename} cannot be read ({error.strerror}); it is not stored")
