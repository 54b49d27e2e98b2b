"""What a build has to expect of a server: each fault by its kind, from a real server on loopback, over HTTP."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from pathlib import Path

import pytest
import servers_http as servers
from servers_http import Behaviour, FaultServer, Request, answer, drip, hang

from dsr1build.cache.remote import ActionName, Remote, RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.action_result import encode_action_result
from dsr1build.cache.remotes.http import open_http
from dsr1build.cache.remotes.proto import message
from dsr1build.digest import BlobRef, sha256_hex

TIMEOUTS = Timeouts(connect=0.5, request=0.4)
# A time-out and what a loaded machine adds to it.
AT_MOST = 1.5
CONTENT = servers.payload(50_000)
BLOB = BlobRef(sha256_hex(CONTENT))
BLOBS = {BLOB: len(CONTENT)}
KEY = ActionName("ab" * 32, 99)
RECORD = b"the record"

Start = Callable[[Behaviour], tuple[Remote, FaultServer]]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[tuple[Remote, FaultServer]] = []

    def start(behaviour: Behaviour) -> tuple[Remote, FaultServer]:
        server = FaultServer(behaviour)
        running.append((open_http(server.url, timeouts=TIMEOUTS, user="me", password="s3cr3t"), server))
        return running[-1]

    yield start
    for remote, server in running:
        remote.close()
        server.close()


def every_request(remote: Remote, directory: Path) -> list[Callable[[], object]]:
    path = directory / BLOB.sha256
    (directory / "upload").write_bytes(CONTENT)
    return [
        lambda: remote.find_records([KEY]),
        lambda: remote.fetch_blobs(BLOBS, directory),
        lambda: remote.missing_blobs(BLOBS),
        lambda: remote.store_blobs({BLOB: path.with_name("upload")}),
        lambda: remote.store_record(KEY, RECORD, {}),
    ]


def assert_all_raise(remote: Remote, directory: Path, kind: type[RemoteUnavailable], text: str) -> None:
    for request in every_request(remote, directory):
        began = time.monotonic()
        with pytest.raises(RemoteUnavailable, match=text) as raised:
            request()
        assert time.monotonic() - began < AT_MOST
        assert type(raised.value) is kind
        assert "s3cr3t" not in str(raised.value)
    assert [path.name for path in directory.iterdir()] == ["upload"]


@pytest.mark.parametrize("status", [500, 502, 503, 504, 507, 400, 413, 418])
def test_an_error_of_the_server(start: Start, tmp_path: Path, status: int) -> None:
    remote, _ = start(answer(status, b"oh no"))
    assert_all_raise(remote, tmp_path, RemoteUnavailable, f"answered {status} to")


@pytest.mark.parametrize("status", [401, 403, 405, 407])
def test_a_refusal(start: Start, tmp_path: Path, status: int) -> None:
    remote, _ = start(answer(status, b"no"))
    assert_all_raise(remote, tmp_path, RemoteDenied, f"answered {status} to")


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_asks_for_a_pause(start: Start, tmp_path: Path, status: int) -> None:
    remote, _ = start(answer(status, headers="Retry-After: 7\r\n"))
    assert_all_raise(remote, tmp_path, RemoteBusy, f"answered {status} to")
    with pytest.raises(RemoteBusy) as raised:
        remote.missing_blobs(BLOBS)
    assert raised.value.retry_after == 7.0


def test_a_pause_until_a_date(start: Start) -> None:
    remote, _ = start(answer(503, headers=f"Retry-After: {formatdate(time.time() + 90, usegmt=True)}\r\n"))
    with pytest.raises(RemoteBusy) as raised:
        remote.find_records([KEY])
    assert 60 < raised.value.retry_after <= 90


@pytest.mark.parametrize("retry_after", ["soon", "-5", "", "1e9", "Sun, 06 Nov 1994 08:49:37 GMT"])
def test_a_pause_that_says_nothing(start: Start, retry_after: str) -> None:
    remote, _ = start(answer(429, headers=f"Retry-After: {retry_after}\r\n"))
    with pytest.raises(RemoteBusy) as raised:
        remote.find_records([KEY])
    assert raised.value.retry_after == 0.0


def test_a_server_that_has_nothing(start: Start, tmp_path: Path) -> None:
    remote, server = start(answer(404, b"nothing here"))
    assert remote.find_records([KEY]) == {}
    assert remote.fetch_blobs(BLOBS, tmp_path) == frozenset()
    assert remote.missing_blobs(BLOBS) == {BLOB}
    with pytest.raises(RemoteUnavailable, match="answered 404 to PUT"):
        remote.store_record(KEY, RECORD, {})
    assert {request.connection for request in server.requests} == {1}, "misses keep their connection"


def test_a_server_that_hangs(start: Start, tmp_path: Path) -> None:
    remote, _ = start(hang(5))
    assert_all_raise(remote, tmp_path, RemoteUnavailable, r"did not finish .* within 0.4 s")


def test_many_questions_to_a_server_that_hangs_cost_one_time_out(start: Start) -> None:
    remote, server = start(hang(5))
    began = time.monotonic()
    with pytest.raises(RemoteUnavailable):
        remote.find_records([ActionName(f"{index:064x}", 1) for index in range(100)])
    assert time.monotonic() - began < AT_MOST
    assert len(server.requests) <= 16


@pytest.mark.parametrize(
    "data", [b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n" + CONTENT, b"HTTP/1.1 200 OK\r\nX: " + CONTENT]
)
def test_a_server_that_drips(start: Start, tmp_path: Path, data: bytes) -> None:
    """Every byte comes well within the time-out of a socket; in the body, and already in the head."""
    remote, _ = start(drip(data, 0.005))
    assert_all_raise_slow(remote, tmp_path)


def assert_all_raise_slow(remote: Remote, directory: Path) -> None:
    for request in every_request(remote, directory)[:2]:
        began = time.monotonic()
        with pytest.raises(RemoteUnavailable, match=r"did not finish GET .* within 0.4 s"):
            request()
        assert time.monotonic() - began < AT_MOST
    assert [path.name for path in directory.iterdir()] == ["upload"]


def test_a_server_that_takes_an_upload_in_drips(tmp_path: Path) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    ended = threading.Event()

    def sip() -> None:
        connection, _ = listener.accept()
        with connection:
            while not ended.wait(0.01) and connection.recv(256):
                pass

    thread = threading.Thread(target=sip)
    thread.start()
    content = servers.payload(1 << 16) * 256
    (tmp_path / "upload").write_bytes(content)
    remote = open_http(f"http://127.0.0.1:{listener.getsockname()[1]}", timeouts=TIMEOUTS)
    began = time.monotonic()
    try:
        with pytest.raises(RemoteUnavailable, match=r"did not finish PUT .* within 0.4 s"):
            remote.store_blobs({BlobRef(sha256_hex(content)): tmp_path / "upload"})
        assert time.monotonic() - began < AT_MOST
    finally:
        ended.set()
        thread.join()
        listener.close()


def test_a_server_that_breaks_off(start: Start, tmp_path: Path) -> None:
    remote, _ = start(servers.reset)
    assert_all_raise(remote, tmp_path, RemoteUnavailable, "broke off")


def test_a_server_that_closes_without_an_answer(start: Start, tmp_path: Path) -> None:
    remote, _ = start(lambda connection, request: False)
    assert_all_raise(remote, tmp_path, RemoteUnavailable, "broke off")


def test_a_server_that_is_no_http_server(start: Start, tmp_path: Path) -> None:
    remote, _ = start(lambda connection, request: bool(connection.sendall(b"220 mail.example.org ESMTP\r\n")))
    assert_all_raise(remote, tmp_path, RemoteUnavailable, "broke off")


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    remote = open_http(f"http://127.0.0.1:{servers.free_port()}", timeouts=TIMEOUTS)
    assert_all_raise(remote, tmp_path, RemoteUnavailable, "cannot be reached: Connection refused")


def test_a_host_that_takes_no_connection() -> None:
    """The queue of a listener that accepts nothing is full, so the kernel leaves further connections without an answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        queued = [socket.socket() for _ in range(4)]
        for waiting in queued:
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        remote = open_http(f"http://127.0.0.1:{port}", timeouts=Timeouts(connect=0.3, request=0.4))
        began = time.monotonic()
        with pytest.raises(RemoteUnavailable, match=r"cannot be reached within 0.3 s"):
            remote.find_records([KEY])
        assert time.monotonic() - began < AT_MOST
        for waiting in queued:
            waiting.close()


def test_a_name_that_is_no_host() -> None:
    with pytest.raises(RemoteUnavailable, match="cannot be reached"):
        open_http("http://cache.invalid/", timeouts=TIMEOUTS).find_records([KEY])


def broken_off_in_the_body(half: bytes) -> Behaviour:
    def behave(connection: socket.socket, request: Request) -> bool:
        answer(200, half, length=len(CONTENT))(connection, request)
        time.sleep(0.05)
        return servers.reset(connection, request)

    return behave


@pytest.mark.parametrize(
    "behaviour", [broken_off_in_the_body(CONTENT[:20_000]), answer(200, CONTENT[:20_000], length=50_000, keep=False)]
)
def test_half_a_blob(start: Start, tmp_path: Path, behaviour: Behaviour) -> None:
    """Broken off with RST, and closed as if that were all."""
    remote, _ = start(behaviour)
    with pytest.raises(RemoteUnavailable, match=f"broke off GET cas/{BLOB.sha256}"):
        remote.fetch_blobs(BLOBS, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_half_a_blob_and_silence(start: Start, tmp_path: Path) -> None:
    remote, _ = start(answer(200, CONTENT[:20_000], length=50_000))
    with pytest.raises(RemoteUnavailable, match="did not finish"):
        remote.fetch_blobs(BLOBS, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(answer(200, CONTENT[:-1] + b"?"), id="wrong byte"),
        pytest.param(answer(200, CONTENT[:-1]), id="one byte less"),
        pytest.param(answer(200, CONTENT + b"?"), id="one byte more"),
        pytest.param(answer(200, b""), id="nothing"),
        pytest.param(answer(200, b"<html>Log in</html>", headers="Content-Type: text/html\r\n"), id="captive portal"),
        pytest.param(answer(200, CONTENT, headers="Content-Encoding: gzip\r\n", length=len(CONTENT) + 1, keep=False), id="lie"),
    ],
)
def test_a_wrong_blob_is_left_out(start: Start, tmp_path: Path, wrong: Behaviour) -> None:
    remote, _ = start(wrong)
    try:
        assert remote.fetch_blobs(BLOBS, tmp_path) == frozenset()
        assert remote.missing_blobs(BLOBS) == {BLOB}, "so that it is repaired"
    except RemoteUnavailable as error:
        assert "broke off" in str(error)
    assert list(tmp_path.iterdir()) == []


def test_a_body_without_end(start: Start, tmp_path: Path) -> None:
    remote, _ = start(servers.endless)
    began = time.monotonic()
    assert remote.fetch_blobs(BLOBS, tmp_path) == frozenset()
    assert remote.find_records([KEY]) == {}
    assert time.monotonic() - began < 2 * AT_MOST
    assert list(tmp_path.iterdir()) == []


def test_one_bad_blob_does_not_spoil_the_others(start: Start, tmp_path: Path) -> None:
    other = servers.payload(999)

    def behave(connection: socket.socket, request: Request) -> bool:
        return answer(200, CONTENT[::-1] if request.path.endswith(BLOB.sha256) else other)(connection, request)

    remote, _ = start(behave)
    good = BlobRef(sha256_hex(other))
    assert remote.fetch_blobs({**BLOBS, good: len(other)}, tmp_path) == {good}
    assert [path.name for path in tmp_path.iterdir()] == [good.sha256]


def test_a_record_of_another_content_is_a_miss(start: Start) -> None:
    entry = encode_action_result(RECORD, {}).replace(RECORD, RECORD[::-1])
    remote, _ = start(answer(200, entry))
    assert remote.find_records([KEY]) == {}


def redirect(location: str, status: int = 302) -> Behaviour:
    def behave(connection: socket.socket, request: Request) -> bool:
        if request.path.startswith("/moved/"):
            return answer(200, encode_action_result(RECORD, {}))(connection, request)
        target = location.replace("{file}", request.path.removeprefix("/c/"))
        return answer(status, headers=f"Location: {target}\r\n")(connection, request)

    return behave


@pytest.mark.parametrize("location", ["https://127.0.0.1/c/{file}", "http://localhost/{file}", "//evil.example/{file}", "ftp:x"])
def test_redirects_to_another_host_are_not_followed(start: Start, tmp_path: Path, location: str) -> None:
    remote, _ = start(redirect(location))
    assert_all_raise(remote, tmp_path, RemoteUnavailable, "redirects .* to another host, which is not followed")


def test_redirects_to_another_port_get_no_credentials(start: Start, tmp_path: Path) -> None:
    _, elsewhere = start(answer(200, b"x"))
    remote, _ = start(redirect(f"http://127.0.0.1:{elsewhere.port}/c/{{file}}"))
    assert_all_raise(remote, tmp_path, RemoteUnavailable, "redirects .* to another host")
    assert elsewhere.requests == []


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_on_the_same_host_are_followed(start: Start, status: int) -> None:
    remote, server = start(redirect("/moved/{file}", status))
    assert remote.find_records([KEY]) == {KEY.key: RECORD}
    assert server.requests[-1].path == f"/moved/ac/{KEY.key}"
    assert server.requests[-1].headers["authorization"].startswith("Basic ")


@pytest.mark.parametrize("status", [307, 308])
def test_uploads_follow_a_redirect_that_keeps_the_method(start: Start, tmp_path: Path, status: int) -> None:
    remote, server = start(redirect("/moved/{file}", status))
    (tmp_path / "upload").write_bytes(CONTENT)
    remote.store_blobs({BLOB: tmp_path / "upload"})
    assert (server.requests[-1].method, server.requests[-1].body) == ("PUT", CONTENT)


def test_redirects_in_a_circle(start: Start, tmp_path: Path) -> None:
    remote, _ = start(redirect("/c/{file}"))
    assert_all_raise(remote, tmp_path, RemoteUnavailable, "redirects .* without end")


@pytest.mark.parametrize("linger", [0.0, 0.02])
def test_connections_that_are_closed_between_requests_are_made_anew(start: Start, tmp_path: Path, linger: float) -> None:
    """The server says that it keeps the connection and does not; at once, and so late that the next request is on its way."""

    def behave(connection: socket.socket, request: Request) -> bool:
        answer(200, encode_action_result(RECORD, {}))(connection, request)
        time.sleep(linger)
        return False

    remote, server = start(behave)
    for _ in range(8):
        assert remote.find_records([KEY]) == {KEY.key: RECORD}
    (tmp_path / "upload").write_bytes(CONTENT)
    remote.store_blobs({BLOB: tmp_path / "upload"})
    assert len({request.connection for request in server.requests}) >= 9


def test_a_kept_connection_is_used_again(start: Start) -> None:
    remote, server = start(answer(200, encode_action_result(RECORD, {})))
    for _ in range(5):
        remote.find_records([KEY])
    assert {request.connection for request in server.requests} == {1}


def test_every_request_carries_the_credentials_and_no_other_encoding(start: Start, tmp_path: Path) -> None:
    remote, server = start(answer(200))
    for request in every_request(remote, tmp_path):
        request()
    # Nothing is asked of the blob above, which has been seen to be wrong.
    remote.missing_blobs({BlobRef("0" * 64): 1})
    sent = {(request.method, request.path.split("/")[2]) for request in server.requests}
    assert sent == {("GET", "ac"), ("GET", "cas"), ("HEAD", "cas"), ("PUT", "cas"), ("PUT", "ac")}
    for request in server.requests:
        assert request.headers["authorization"] == "Basic bWU6czNjcjN0"
        assert request.headers["accept-encoding"] == "identity"


def test_closing_ends_requests_in_flight(start: Start) -> None:
    server = FaultServer(hang(20))
    remote = open_http(server.url, timeouts=Timeouts(connect=1, request=20))
    outcome: list[RemoteUnavailable] = []

    def ask() -> None:
        try:
            remote.find_records([KEY])
        except RemoteUnavailable as error:
            outcome.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not server.requests:
        time.sleep(0.005)
    remote.close()
    thread.join(timeout=5)
    server.close()
    assert not thread.is_alive()
    assert len(outcome) == 1


def _raw(data: bytes) -> Behaviour:
    def behave(connection: socket.socket, request: Request) -> bool:
        connection.sendall(data)
        return False

    return behave


@pytest.mark.parametrize(
    "data",
    [
        # Characters that are digits to Python and no numbers.
        b"HTTP/1.1 429 X\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 503 X\r\nRetry-After: " + b"9" * 5000 + b"\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 X\r\nContent-Length: \xb2\r\n\r\n",
        b"HTTP/1.1 200 X\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/1.1 302 X\r\nLocation: http://[x\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 X\r\nLocation: http://a\xbd.x:y/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 X\r\nLocation: /\xe9 \x01\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 X\r\nLocation: file:///etc/hostname\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 X\r\nTransfer-Encoding: chunked\r\n\r\n-5\r\nabc",
        b"HTTP/1.1 200 X\r\n" + b"a: b\r\n" * 5000,
        b"HTTP/1.1 \xb2\xb2\xb2 X\r\n\r\n",
        b"\0" * 100,
    ],
)
def test_whatever_a_server_sends_is_a_failure_of_the_server(start: Start, tmp_path: Path, data: bytes) -> None:
    remote, _ = start(_raw(data))
    for request in every_request(remote, tmp_path):
        try:
            answered = request()
        except RemoteUnavailable as error:
            assert "s3cr3t" not in str(error)
        else:
            assert answered in ({}, frozenset(), frozenset(BLOBS), None)
    assert [path.name for path in tmp_path.iterdir()] == ["upload"]


@pytest.mark.parametrize("name", ["é" * 32, "../../secret", "a b", "?x"])
def test_a_digest_that_is_none_is_asked_of_nobody(start: Start, name: str) -> None:
    result = message("ActionResult")(
        output_files=[message("OutputFile")(path="dsr1-record.json", digest=message("Digest")(hash=name, size_bytes=len(RECORD)))]
    )
    remote, server = start(answer(200, result.SerializeToString()))
    assert remote.find_records([KEY]) == {}
    assert len(server.requests) == 1
