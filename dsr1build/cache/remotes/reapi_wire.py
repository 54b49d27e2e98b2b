"""Calls of gRPC services with deadlines, and what their statuses mean to a cache.

``grpc`` is imported here, at module level: this module is loaded when a profile names a REAPI remote, never before.
"""

import math
import re
import threading
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import grpc

from dsr1build.cache.remote import RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.proto import message, method
from dsr1build.errors import InvalidInput

# The number of each status on the wire (google.rpc.Code), which batch responses use for single blobs.
CODES: Mapping[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}

# What a server answers for a blob that it cannot give: it never had it, it lost it, or only a part of it is left.
ABSENT = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.DATA_LOSS, grpc.StatusCode.OUT_OF_RANGE})

# gRPC's default is 4 MiB, which is also the largest batch that is asked for; a stream's pieces may be a little larger.
MAX_MESSAGE = 16 << 20

# gRPC watches a new channel from a thread that looks every 0.2 s whether anybody still wants to know, and prints a traceback
# when the channel is closed under it. Seconds that it is given to end.
_LAST_POLL = 0.4


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. ``instance`` is "" for the server's only one; ``name`` is the address as users read it."""

    target: str
    secure: bool
    instance: str
    name: str


def parse_address(url: str) -> Address:
    """The parts of ``grpc://host:port[/instance]`` or ``grpcs://host[:port][/instance]`` (port 443).

    Raises InvalidInput for any other form, also for a user name or password: credentials belong into headers.
    """
    expected = "expected grpc://HOST:PORT[/INSTANCE] or grpcs://HOST[:PORT][/INSTANCE]"
    hint = "Give credentials as headers of the remote in the profile, not in its address."
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidInput(f"the address of a remote cache cannot be read, {expected}", hint=hint) from None
    secure = parts.scheme == "grpcs"
    port = port or (443 if secure else None)
    if "@" in parts.netloc:
        raise InvalidInput(f"the address of a remote cache has a user name or password, {expected}", hint=hint)
    if parts.scheme not in ("grpc", "grpcs") or not parts.hostname or not port or parts.query or parts.fragment:
        raise InvalidInput(f"{url} is no address of a remote cache, {expected}", hint=hint)
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    instance = parts.path.strip("/")
    name = f"{parts.scheme}://{host}:{port}" + (f"/{instance}" if instance else "")
    return Address(f"{host}:{port}", secure, instance, name)


def metadata_of(headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Headers as gRPC metadata. Raises InvalidInput, which names a header and never its value."""
    out = []
    for name, value in headers.items():
        key = name.lower()
        if not re.fullmatch(r"[0-9a-z_.-]+", key) or key.endswith("-bin") or not re.fullmatch(r"[\x20-\x7e]*", value):
            raise InvalidInput(
                f"the header {name!r} of a remote cache cannot be sent over gRPC",
                hint="Header names are letters, digits and _ . -, and do not end in -bin; values are printable ASCII.",
            )
        out.append((key, value))
    return tuple(out)


def refusal(where: str, code: grpc.StatusCode, details: str, retry_after: float = 0.0) -> RemoteUnavailable:
    """The error for a status other than OK."""
    text = f"{where}: {code.name}" + (f": {details[:500]}" if details else "")
    match code:
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return RemoteBusy(text, retry_after)
        case grpc.StatusCode.PERMISSION_DENIED | grpc.StatusCode.UNAUTHENTICATED:
            return RemoteDenied(text)
        case grpc.StatusCode.UNIMPLEMENTED:
            return RemoteUnavailable(f"{text} (the server does not offer this part of the Remote Execution API)")
    return RemoteUnavailable(text)


def _retry_after(error: grpc.RpcError) -> float:
    """Seconds from the google.rpc.RetryInfo of a refused call, 0 where there is none that can be read."""
    from google.protobuf.message import DecodeError

    info = message("google.rpc.RetryInfo")()
    for key, value in error.trailing_metadata() or ():
        if key != "grpc-status-details-bin":
            continue
        try:
            for detail in message("google.rpc.Status").FromString(value).details:
                if detail.type_url.rpartition("/")[2] == "google.rpc.RetryInfo":
                    info.ParseFromString(detail.value)
        except DecodeError:
            return 0.0
    seconds = info.retry_delay.seconds + info.retry_delay.nanos / 1e9
    return seconds if math.isfinite(seconds) and seconds > 0 else 0.0


class Connection:
    """One channel to a server. All calls raise RemoteUnavailable or a subclass, and none outlasts its deadline.

    A connection is made on the first call. It has ``timeouts.connect`` seconds for that once, whatever number of calls and
    threads wait for it: a server that never answers costs this time, and every later call fails at once.
    """

    def __init__(self, address: Address, timeouts: Timeouts, headers: Mapping[str, str]) -> None:
        self.name = address.name
        self._timeouts = timeouts
        self._metadata = metadata_of(headers)
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE),
            ("grpc.primary_user_agent", "dsr1build"),
            # Two remotes at one address have nothing to do with each other; by default they would share their back-off.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self._channel: Any = (
            grpc.secure_channel(address.target, grpc.ssl_channel_credentials(), options)
            if address.secure
            else grpc.insecure_channel(address.target, options)
        )
        self._lock = threading.Lock()
        self._connect_by: float | None = None
        self._settled = threading.Event()
        self._watched_until = 0.0
        self._closed = False

    def _connect(self, name: str) -> None:
        if self._settled.is_set():
            return
        with self._lock:
            if self._closed:
                raise ValueError("closed")
            if self._connect_by is None:
                self._channel.subscribe(self._notice, try_to_connect=True)
                self._connect_by = time.monotonic() + self._timeouts.connect
            connect_by = self._connect_by
        settled = self._settled.wait(max(0.0, connect_by - time.monotonic()))
        with self._lock:
            if settled and not self._watched_until:
                self._unwatch()
        if not settled:
            raise RemoteUnavailable(f"{self.name}: {name}: no connection within {self._timeouts.connect:g} s")

    def _unwatch(self) -> None:
        self._channel.unsubscribe(self._notice)
        self._watched_until = time.monotonic() + _LAST_POLL

    def _notice(self, state: grpc.ChannelConnectivity) -> None:
        # A failed attempt settles it too: the call that follows fails at once, and its status says why.
        if state in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE):
            self._settled.set()

    def start(self, service: str, name: str, request: Any, timeout: float | None = None) -> Any:
        """Begin a call and return it. ``request`` is an iterator where the method takes a stream. ``timeout`` is in seconds;
        without it the call has ``timeouts.request``."""
        called = method(service, name)
        seconds = max(0.001, self._timeouts.request if timeout is None else timeout)
        try:
            self._connect(name)
            make = getattr(self._channel, called.kind)
            invoke = make(called.path, request_serializer=called.serialize, response_deserializer=called.parse)
            if called.kind.endswith("unary"):
                return invoke.future(request, timeout=seconds, metadata=self._metadata)
            return invoke(request, timeout=seconds, metadata=self._metadata)
        except ValueError:
            # This is how gRPC says that the channel has been closed. Its message could show the headers.
            raise RemoteUnavailable(f"{self.name}: {name}: the connection has been closed") from None

    def finish(self, call: Any, name: str, absent: frozenset[grpc.StatusCode] = frozenset()) -> Any:
        """The response of a call that was started, or None when its status is one of ``absent``."""
        try:
            return call.result()
        except grpc.FutureCancelledError:
            raise RemoteUnavailable(f"{self.name}: {name}: cancelled") from None
        except grpc.RpcError as error:
            if error.code() in absent:
                return None
            raise self.failure(error, name) from None

    def call(self, service: str, name: str, request: Any, timeout: float | None = None) -> Any:
        """The response of a call."""
        return self.finish(self.start(service, name, request, timeout), name)

    def pieces(self, service: str, name: str, request: Any, timeout: float | None = None) -> Generator[Any, None, None]:
        """The responses of a call that answers with a stream. The call ends when the iterator is closed. Raises Absent when
        the server does not have what was asked for."""
        call = self.start(service, name, request, timeout)
        try:
            yield from call
        except grpc.RpcError as error:
            if error.code() in ABSENT:
                raise Absent from None
            raise self.failure(error, name) from None
        finally:
            call.cancel()

    def failure(self, error: grpc.RpcError, name: str) -> RemoteUnavailable:
        return refusal(f"{self.name}: {name}", error.code(), error.details() or "", _retry_after(error))

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._connect_by is not None and not self._watched_until:
                self._unwatch()
        time.sleep(max(0.0, self._watched_until - time.monotonic()))
        self._channel.close()


class Absent(Exception):
    """The server does not have, or no longer has whole, the blob that a stream was to bring."""
