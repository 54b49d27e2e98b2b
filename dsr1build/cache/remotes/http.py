"""Bazel's HTTP cache: ``GET``, ``PUT`` and ``HEAD`` of ``<url>/ac/<key>`` and ``<url>/cas/<sha256>``.

Under ``ac/`` lies a serialized ActionResult of REAPI v2, since servers such as bazel-remote look into it. It lists the
outputs and, as one more output file, the record; the record's bytes are inlined there, which saves a round trip, and are a
blob as well, since servers check that every listed file exists.
"""

import email.utils
import hashlib
import http.client
import io
import itertools
import math
import re
import socket
import ssl
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import unquote, urljoin, urlsplit

import urllib3
import urllib3.connection
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ProtocolError, SSLError
from urllib3.exceptions import TimeoutError as RequestTimeout

from dsr1build.cache.remote import ActionName, Remote, RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.action_result import decode_action_result, encode_action_result
from dsr1build.cache.remotes.transfer import CHUNK, LONGEST_RECORD, blob_chunks, file_size, in_parallel, receive_blob
from dsr1build.digest import BlobRef
from dsr1build.errors import InvalidInput

_CONNECTIONS = 8
_REDIRECTS = (301, 302, 303, 307, 308)
_MOST_REDIRECTS = 3
# The rest of an answer is read, to keep its connection, when it is at most this long; else the connection is dropped.
_WORTH_READING = 64 << 10

# A function, since a request that is repeated needs its body anew.
_Body: TypeAlias = Callable[[], Iterable[bytes]]


def open_http(
    url: str,
    *,
    timeouts: Timeouts | None = None,
    headers: Mapping[str, str] | None = None,
    user: str = "",
    password: str = "",
) -> Remote:
    """The cache at ``url`` (http or https; certificates are verified). Nothing is sent yet.

    ``user`` and ``password``, or those in the URL, go into every request (Basic), as do ``headers``; none of them appears
    in a name or message. Raises InvalidInput for another kind of URL.
    """
    parts = urlsplit(url)
    try:
        port = parts.port
    except ValueError:
        port = -1
    if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query or parts.fragment:
        raise InvalidInput(
            f"{_without_credentials(url)} is not the address of an HTTP cache",
            hint="expected http[s]://host[:port][/path], without a query",
        )
    user = user or unquote(parts.username or "")
    password = password or unquote(parts.password or "")
    sent = {"Accept-Encoding": "identity", "User-Agent": "dsr1build", **(headers or {})}
    if user or password:
        sent |= urllib3.make_headers(basic_auth=f"{user}:{password}")
    return _HttpRemote(url, timeouts or Timeouts(), sent)


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


class _HttpRemote:
    """See ``dsr1build.cache.remote.Remote``. Holds at most 8 connections, each used by one thread at a time."""

    def __init__(self, url: str, timeouts: Timeouts, headers: Mapping[str, str]) -> None:
        self._name = _without_credentials(url).rstrip("/")
        self._timeouts = timeouts
        self._headers = headers
        self._path = urlsplit(self._name).path
        self._pool = _connection_pool(self._name, timeouts)
        self._executor = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="http-cache")
        # Blobs that the server has, but wrong. They count as missing, so that a build that made them anew repairs them.
        self._wrong: set[BlobRef] = set()

    @property
    def name(self) -> str:
        return self._name

    def find_records(self, actions: Sequence[ActionName]) -> Mapping[str, bytes]:
        records = in_parallel(self._executor, self._find_record, [action.key for action in actions])
        return {action.key: record for action, record in zip(actions, records, strict=True) if record is not None}

    def fetch_blobs(self, blobs: Mapping[BlobRef, int], directory: Path) -> frozenset[BlobRef]:
        def fetch(item: tuple[BlobRef, int]) -> bool:
            return self._fetch_blob(*item, directory)

        return _chosen(blobs, in_parallel(self._executor, fetch, list(blobs.items())))

    def missing_blobs(self, blobs: Mapping[BlobRef, int]) -> frozenset[BlobRef]:
        def is_missing(item: tuple[BlobRef, int]) -> bool:
            return item[0] in self._wrong or not self._has_blob(*item)

        return _chosen(blobs, in_parallel(self._executor, is_missing, list(blobs.items())))

    def store_blobs(self, blobs: Mapping[BlobRef, Path]) -> None:
        def store(item: tuple[BlobRef, Path]) -> None:
            blob, path = item
            size = file_size(path)
            self._put(f"cas/{blob.sha256}", size, lambda: blob_chunks(path, blob, size))
            self._wrong.discard(blob)

        in_parallel(self._executor, store, list(blobs.items()))

    def store_record(self, action: ActionName, record: bytes, outputs: Mapping[str, tuple[BlobRef, int]]) -> None:
        self._put(f"cas/{hashlib.sha256(record).hexdigest()}", len(record), lambda: [record])
        result = encode_action_result(record, outputs)
        self._put(f"ac/{action.key}", len(result), lambda: [result])

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._pool.break_off()
        self._pool.close()

    def _find_record(self, key: str) -> bytes | None:
        data = self._get(f"ac/{key}", LONGEST_RECORD)
        found = None if data is None else decode_action_result(data)
        if found is None or found.size > LONGEST_RECORD:
            return None
        record = found.contents or self._get(f"cas/{found.blob.sha256}", found.size)
        if record is None or hashlib.sha256(record).hexdigest() != found.blob.sha256:
            return None
        return record

    def _get(self, path: str, most: int) -> bytes | None:
        """What lies there, or None if nothing does or more than ``most`` bytes."""
        with self._exchange("GET", path) as response:
            if response is None:
                return None
            data, length = [], 0
            for chunk in _body(response):
                length += len(chunk)
                if length > most:
                    return None
                data.append(chunk)
            return b"".join(data)

    def _fetch_blob(self, blob: BlobRef, size: int, directory: Path) -> bool:
        with self._exchange("GET", f"cas/{blob.sha256}") as response:
            if response is None:
                return False
            whole = receive_blob(_body(response), blob, size, directory)
        if not whole:
            self._wrong.add(blob)
        return whole

    def _has_blob(self, blob: BlobRef, size: int) -> bool:
        with self._exchange("HEAD", f"cas/{blob.sha256}") as response:
            if response is None:
                return False
            length = response.headers.get("Content-Length", "")
            # The length of a compressed answer says nothing.
            return not re.fullmatch("[0-9]{1,19}", length) or "Content-Encoding" in response.headers or int(length) == size

    def _put(self, path: str, size: int, body: _Body) -> None:
        with self._exchange("PUT", path, size, body) as response:
            if response is None:
                raise RemoteUnavailable(f"{self._name} answered 404 to PUT {path}")

    @contextmanager
    def _exchange(
        self, method: str, path: str, size: int = 0, body: _Body | None = None
    ) -> Iterator[urllib3.BaseHTTPResponse | None]:
        """One request with its answer, all of it within ``timeouts.request``: the answer if it is a success, None for "not
        there". Its body is to be read inside the context, by this thread."""
        _thread.deadline = time.monotonic() + self._timeouts.request
        try:
            response = self._follow(method, path, size, body)
            whole = False
            try:
                self._refuse_errors(response, f"{method} {path}")
                yield None if response.status in (404, 410) else response
                whole = _read_rest(response)
            finally:
                if not whole:
                    response.close()
        except HTTPError as error:
            raise self._unavailable(error, f"{method} {path}") from error
        except (ValueError, http.client.HTTPException):
            # What the parsers of an answer raise that urllib3 does not wrap: a chunk of negative length, for example. Their
            # texts may hold what was sent.
            raise RemoteUnavailable(f"{self._name} answered {method} {path} with what is not HTTP") from None

    def _follow(self, method: str, path: str, size: int, body: _Body | None) -> urllib3.BaseHTTPResponse:
        """The answer after redirects, which may not lead to another scheme, host or port: credentials go with them."""
        target = f"{self._path}/{path}"
        for _ in range(_MOST_REDIRECTS + 1):
            response = self._send(method, target, size, body)
            if response.status not in _REDIRECTS:
                return response
            response.close()
            try:
                new = urlsplit(urljoin(f"{self._name}/{path}", response.headers.get("Location", "")))
            except ValueError:
                raise RemoteUnavailable(f"{self._name} redirects {method} {path} to no address") from None
            old = urlsplit(self._name)
            if (new.scheme, new.netloc) != (old.scheme, old.netloc):
                raise RemoteUnavailable(f"{self._name} redirects {method} {path} to another host, which is not followed")
            if body is not None and response.status not in (307, 308):
                break
            target = new._replace(scheme="", netloc="", fragment="").geturl()
        raise RemoteUnavailable(f"{self._name} redirects {method} {path} without end")

    def _send(self, method: str, target: str, size: int, body: _Body | None) -> urllib3.BaseHTTPResponse:
        headers = dict(self._headers)
        if body is not None:
            headers |= {"Content-Length": str(size), "Content-Type": "application/octet-stream"}

        def once() -> urllib3.BaseHTTPResponse:
            chunks = None
            if body is not None:
                # The first chunk before anything is sent: of an empty file, the header would already be the whole request.
                pieces = iter(body())
                chunks = itertools.chain([next(pieces, b"")], pieces)
            return self._pool.urlopen(
                method,
                target,
                body=chunks,
                headers=headers,
                retries=False,
                redirect=False,
                preload_content=False,
                decode_content=False,
            )

        try:
            return once()
        except ProtocolError as error:
            # A kept connection may have been closed by the server just when it was used again. All requests can be repeated.
            if _timed_out(error) or self._pool.broken_off:
                raise
            return once()

    def _refuse_errors(self, response: urllib3.BaseHTTPResponse, request: str) -> None:
        status = response.status
        if 200 <= status < 300 or status in (404, 410):
            return
        message = f"{self._name} answered {status} to {request}"
        if status in (401, 403, 405, 407):
            raise RemoteDenied(message)
        retry_after = response.headers.get("Retry-After")
        if status == 429 or (status == 503 and retry_after is not None):
            raise RemoteBusy(message, _seconds(retry_after or ""))
        raise RemoteUnavailable(message)

    def _unavailable(self, error: HTTPError, request: str) -> RemoteUnavailable:
        """The texts of urllib3 are not passed on: they may hold what stands in a URL or a header."""
        if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
            return RemoteUnavailable(f"{self._name} cannot be reached within {self._timeouts.connect:g} s")
        if isinstance(error, NewConnectionError):
            cause = error.__cause__
            reason = f": {cause.strerror}" if isinstance(cause, OSError) and cause.strerror else ""
            return RemoteUnavailable(f"{self._name} cannot be reached{reason}")
        if isinstance(error, SSLError):
            cause = error.args[0] if error.args else None
            reason = f": {cause.verify_message}" if isinstance(cause, ssl.SSLCertVerificationError) else ""
            return RemoteUnavailable(f"{self._name} cannot be reached over TLS{reason}")
        if _timed_out(error):
            return RemoteUnavailable(f"{self._name} did not finish {request} within {self._timeouts.request:g} s")
        return RemoteUnavailable(f"{self._name} broke off {request}")


def _chosen(blobs: Mapping[BlobRef, object], flags: Sequence[bool]) -> frozenset[BlobRef]:
    return frozenset(blob for blob, flag in zip(blobs, flags, strict=True) if flag)


def _body(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    while chunk := response.read(CHUNK, decode_content=False):
        yield chunk


def _read_rest(response: urllib3.BaseHTTPResponse) -> bool:
    """Read what is left, so that the connection can be used again. False if that would be too much."""
    length = getattr(response, "length_remaining", None)
    if length is not None and length > _WORTH_READING:
        return False
    return len(response.read(_WORTH_READING, decode_content=False)) < _WORTH_READING


def _seconds(retry_after: str) -> float:
    """The wait that a ``Retry-After`` asks for (RFC 9110, 10.2.3): seconds or a date. 0 for neither."""
    if re.fullmatch(r"[0-9]+", retry_after.strip()):
        return float(retry_after)
    with suppress(ValueError, TypeError, OverflowError):
        wait = email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time()
        if math.isfinite(wait):
            return max(0.0, wait)
    return 0.0


def _timed_out(error: BaseException) -> bool:
    """urllib3 wraps a time-out of the socket in one to three errors, by the stage of the request."""
    seen: list[BaseException] = [error]
    while seen:
        current = seen.pop()
        if isinstance(current, (TimeoutError, RequestTimeout)):
            return True
        seen += [item for item in (current.__cause__, *current.args) if isinstance(item, BaseException)]
    return False


# Time-outs of a socket begin anew with every byte. Hence each read and write gets what is left until the deadline of the
# request that this thread makes.
_thread = threading.local()


def _time_left() -> float:
    left: float = _thread.deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline of the request has passed")
    return left


class _DeadlineReader(io.RawIOBase):
    def __init__(self, sock: socket.socket, raw: io.RawIOBase) -> None:
        super().__init__()
        self._sock, self._raw = sock, raw

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        self._sock.settimeout(_time_left())
        count: int | None = self._raw.readinto(buffer)
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


class _DeadlineResponse(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        self.fp = io.BufferedReader(_DeadlineReader(sock, self.fp.detach()))


class _Connection(urllib3.connection.HTTPConnection):
    response_class = _DeadlineResponse
    broken_off = False

    def send(self, data: Any) -> None:
        # The pool may be broken off while this connection is made, when there is no socket yet to shut down.
        if self.broken_off:
            raise ConnectionAbortedError("the remote was closed")
        if self.sock is not None:
            self.sock.settimeout(_time_left())
        super().send(data)


class _TlsConnection(urllib3.connection.HTTPSConnection):
    response_class = _DeadlineResponse
    broken_off = False

    def send(self, data: Any) -> None:
        # The pool may be broken off while this connection is made, when there is no socket yet to shut down.
        if self.broken_off:
            raise ConnectionAbortedError("the remote was closed")
        if self.sock is not None:
            self.sock.settimeout(_time_left())
        super().send(data)


class _Breakable:
    """A connection pool that can end the requests in flight, so that a hung server does not hold the program's end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._connections: weakref.WeakSet[Any] = weakref.WeakSet()
        self.broken_off = False
        super().__init__(*args, **kwargs)

    def _new_conn(self) -> Any:
        connection = super()._new_conn()  # type: ignore[misc]
        self._connections.add(connection)
        connection.broken_off = self.broken_off
        return connection

    def break_off(self) -> None:
        self.broken_off = True
        for connection in list(self._connections):
            connection.broken_off = True
            if (sock := connection.sock) is not None:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class _Pool(_Breakable, urllib3.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(_Breakable, urllib3.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


def _connection_pool(url: str, timeouts: Timeouts) -> _Pool | _TlsPool:
    parts = urlsplit(url)
    timeout = urllib3.Timeout(connect=timeouts.connect, read=timeouts.request)
    assert parts.hostname is not None
    if parts.scheme == "http":
        return _Pool(parts.hostname, parts.port, timeout=timeout, maxsize=_CONNECTIONS)
    context = ssl.create_default_context()
    return _TlsPool(parts.hostname, parts.port, timeout=timeout, maxsize=_CONNECTIONS, ssl_context=context)
