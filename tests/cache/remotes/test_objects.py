"""Object stores: moto's S3 server, directories, memory; and what an S3 server can do wrong."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import servers_http as servers
from servers_http import Behaviour, FaultServer, Request, answer, drip, hang

from dsr1build.cache.remote import ActionName, Remote, RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.objects import open_objects
from dsr1build.digest import BlobRef, sha256_hex
from dsr1build.errors import InvalidInput

KEY = ActionName("ab" * 32, 321)
RECORD = b'{"outputs": {"kernel.o": "..."}}'
CONTENT = servers.payload(50_000)
BLOB = BlobRef(sha256_hex(CONTENT))
TIMEOUTS = Timeouts(connect=0.5, request=0.6)
AT_MOST = 1.8


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with servers.run_s3() as endpoint:
        yield endpoint


@pytest.fixture(params=["s3", "file", "memory"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Remote]:
    """An empty store of each kind."""
    match request.param:
        case "s3":
            endpoint = request.getfixturevalue("s3")
            url = f"s3://{servers.BUCKET}/{request.node.name}"
            opened = open_objects(url, options=servers.s3_options(endpoint))
        case "file":
            opened = open_objects((tmp_path / "a store").as_uri())
        case _:
            opened = open_objects("memory:///")
    yield opened
    opened.close()


def write_blob(directory: Path, content: bytes) -> tuple[BlobRef, Path]:
    blob = BlobRef(sha256_hex(content))
    (directory / "blob").mkdir(exist_ok=True)
    path = directory / "blob" / blob.sha256
    path.write_bytes(content)
    return blob, path


def test_what_is_stored_is_found(remote: Remote, tmp_path: Path) -> None:
    contents = [b"", b"x", CONTENT, servers.payload(1 << 20) * 17]
    files = dict(write_blob(tmp_path, content) for content in contents)
    sizes = {blob: path.stat().st_size for blob, path in files.items()}
    assert remote.missing_blobs(sizes) == set(files)
    assert remote.fetch_blobs(sizes, tmp_path) == frozenset()
    assert remote.find_records([KEY]) == {}

    remote.store_blobs(files)
    remote.store_record(KEY, RECORD, {})
    assert remote.missing_blobs(sizes) == frozenset()
    (target := tmp_path / "target").mkdir()
    assert remote.fetch_blobs(sizes, target) == set(files)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {sha256_hex(c): c for c in contents}
    assert remote.find_records([ActionName("cd" * 32, 1), KEY]) == {KEY.key: RECORD}


def test_storing_again_is_no_error_and_a_record_is_replaced(remote: Remote, tmp_path: Path) -> None:
    blob, path = write_blob(tmp_path, CONTENT)
    for record in (RECORD, b"a newer record"):
        remote.store_blobs({blob: path})
        remote.store_record(KEY, record, {})
    assert remote.find_records([KEY]) == {KEY.key: b"a newer record"}


@pytest.mark.parametrize("size", [0, 10, (2 << 20) + 5, 17 << 20])
def test_a_file_that_changed_is_not_uploaded(remote: Remote, tmp_path: Path, size: int) -> None:
    """Also not a large one, which goes up in parts."""
    blob = BlobRef(sha256_hex(b"what the file was"))
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with pytest.raises(RemoteUnavailable, match=r"is no longer the blob"):
        remote.store_blobs({blob: path})
    assert remote.missing_blobs({blob: size}) == {blob}


@pytest.fixture
def directory(tmp_path: Path) -> tuple[Remote, Path]:
    """A store in a directory, to look into and to damage; and the directory."""
    return open_objects((tmp_path / "store").as_uri()), tmp_path / "store"


def test_the_layout(directory: tuple[Remote, Path], tmp_path: Path) -> None:
    remote, root = directory
    remote.store_blobs(dict([write_blob(tmp_path, CONTENT)]))
    remote.store_record(KEY, RECORD, {})
    stored = {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
    assert stored == {f"ac/{KEY.key}": RECORD, f"cas/{BLOB.sha256}": CONTENT}


@pytest.mark.parametrize("wrong", [CONTENT[:-1] + b"?", CONTENT[:-1], CONTENT + b"?", b""])
def test_a_wrong_blob_is_left_out_and_repaired(directory: tuple[Remote, Path], tmp_path: Path, wrong: bytes) -> None:
    remote, root = directory
    blob, path = write_blob(tmp_path, CONTENT)
    remote.store_blobs({blob: path})
    (root / "cas" / blob.sha256).write_bytes(wrong)
    (target := tmp_path / "target").mkdir()
    assert remote.fetch_blobs({blob: len(CONTENT)}, target) == frozenset()
    assert list(target.iterdir()) == []
    assert remote.missing_blobs({blob: len(CONTENT)}) == {blob}
    remote.store_blobs({blob: path})
    assert remote.missing_blobs({blob: len(CONTENT)}) == frozenset()
    assert remote.fetch_blobs({blob: len(CONTENT)}, target) == {blob}


def test_a_blob_of_another_length_is_replaced(directory: tuple[Remote, Path], tmp_path: Path) -> None:
    """By a builder that has never read it."""
    remote, root = directory
    blob, path = write_blob(tmp_path, CONTENT)
    (root / "cas").mkdir()
    (root / "cas" / blob.sha256).write_bytes(b"half")
    assert remote.missing_blobs({blob: len(CONTENT)}) == {blob}
    remote.store_blobs({blob: path})
    assert (root / "cas" / blob.sha256).read_bytes() == CONTENT


def test_an_object_too_large_to_be_a_record_is_a_miss(directory: tuple[Remote, Path]) -> None:
    remote, root = directory
    (root / "ac").mkdir()
    with (root / "ac" / KEY.key).open("wb") as file:
        file.truncate(1 << 40)
    assert remote.find_records([KEY]) == {}


def test_settings_come_from_the_environment_too(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIATESTTESTTEST")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    remote = open_objects(f"s3://{servers.BUCKET}/from-environment")
    remote.store_record(KEY, RECORD, {})
    assert remote.find_records([KEY]) == {KEY.key: RECORD}


def test_a_bucket_that_is_not_there(s3: str) -> None:
    remote = open_objects("s3://no-such-bucket/x", options=servers.s3_options(s3))
    assert remote.find_records([KEY]) == {}
    with pytest.raises(RemoteUnavailable, match=r"s3://no-such-bucket/x does not exist"):
        remote.store_record(KEY, RECORD, {})


@pytest.mark.parametrize(
    "url", ["ftp://host/x", "s3:///prefix", "s3://key:secret@bucket/x", "az://account/c?sig=secret", "bucket/x"]
)
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_objects(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("options", [{"secret_acces_key": "hidden"}, {"region": "x", "allow_http": "hidden"}])
def test_wrong_options_are_refused_without_their_values(options: dict[str, str]) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_objects("s3://bucket/x", options=options)
    assert raised.value.message.startswith("the object store s3://bucket/x cannot be used: ")
    assert "secret-access" not in str(raised.value)


def against(behaviour: Behaviour) -> tuple[Remote, FaultServer]:
    server = FaultServer(behaviour)
    options = servers.s3_options(f"http://127.0.0.1:{server.port}")
    return open_objects("s3://bucket/p", timeouts=TIMEOUTS, options=options), server


@pytest.mark.parametrize(
    ("behaviour", "kind", "text"),
    [
        pytest.param(answer(500), RemoteUnavailable, "answered 500 to", id="500"),
        pytest.param(answer(503, headers="Retry-After: 3\r\n"), RemoteBusy, "answered 503 to", id="slow down"),
        pytest.param(answer(429), RemoteBusy, "answered 429 to", id="429"),
        pytest.param(answer(401), RemoteDenied, "refuses", id="401"),
        pytest.param(answer(403), RemoteDenied, "refuses", id="403"),
        pytest.param(answer(405), RemoteDenied, "answered 405 to", id="405"),
        pytest.param(hang(5), RemoteUnavailable, "was too slow for", id="hang"),
        pytest.param(servers.reset, RemoteUnavailable, "broke off|cannot be reached for", id="reset"),
        pytest.param(
            answer(302, headers="Location: http://localhost:1/\r\n"),
            RemoteUnavailable,
            "cannot be reached for|broke off|answered 302 to",
            id="redirect",
        ),
    ],
)
def test_faults(tmp_path: Path, behaviour: Behaviour, kind: type[RemoteUnavailable], text: str) -> None:
    remote, server = against(behaviour)
    blob, path = write_blob(tmp_path, CONTENT)
    for request in (
        lambda: remote.find_records([KEY]),
        lambda: remote.fetch_blobs({BLOB: 50_000}, tmp_path),
        lambda: remote.missing_blobs({BLOB: 50_000}),
        lambda: remote.store_blobs({blob: path}),
        lambda: remote.store_record(KEY, RECORD, {}),
    ):
        began = time.monotonic()
        with pytest.raises(RemoteUnavailable, match=text) as raised:
            request()
        assert time.monotonic() - began < AT_MOST
        assert type(raised.value) is kind
        assert "secret" not in str(raised.value)
    server.close()


def test_a_store_that_is_not_there() -> None:
    options = servers.s3_options(f"http://127.0.0.1:{servers.free_port()}")
    with pytest.raises(RemoteUnavailable, match=r"^s3://bucket/p cannot be reached for GET ac/abab"):
        open_objects("s3://bucket/p", timeouts=TIMEOUTS, options=options).find_records([KEY])


_HEAD = 'HTTP/1.1 200 OK\r\nLast-Modified: Sun, 06 Nov 1994 08:49:37 GMT\r\nETag: "x"\r\n'


def body(content: bytes, length: int, pause: float = 0.0) -> Behaviour:
    def behave(connection: socket.socket, request: Request) -> bool:
        head = f"{_HEAD}Content-Length: {length}\r\n\r\n".encode()
        if pause:
            return drip(head + content, pause)(connection, request)
        connection.sendall(head + content)
        return len(content) == length

    return behave


@pytest.mark.parametrize("behaviour", [body(CONTENT, 50_000, 0.005), body(CONTENT[:20_000], 50_000)])
def test_a_blob_in_drips_or_in_half(tmp_path: Path, behaviour: Behaviour) -> None:
    remote, server = against(behaviour)
    began = time.monotonic()
    with pytest.raises(RemoteUnavailable):
        remote.fetch_blobs({BLOB: 50_000}, tmp_path)
    assert time.monotonic() - began < AT_MOST
    assert list(tmp_path.iterdir()) == []
    server.close()


@pytest.mark.parametrize("content", [CONTENT[::-1], CONTENT[:-1], CONTENT + b"?", b""])
def test_a_wrong_blob_is_left_out(tmp_path: Path, content: bytes) -> None:
    remote, server = against(body(content, len(content)))
    assert remote.fetch_blobs({BLOB: 50_000}, tmp_path) == frozenset()
    assert list(tmp_path.iterdir()) == []
    server.close()


def test_a_store_without_conditional_writes_is_written_all_the_same(tmp_path: Path) -> None:
    """Some answer 501 to If-None-Match. They are asked once."""

    def behave(connection: socket.socket, request: Request) -> bool:
        conditional = "if-none-match" in request.headers
        return answer(501 if conditional else 200, headers='ETag: "x"\r\n')(connection, request)

    remote, server = against(behave)
    blobs = dict(write_blob(tmp_path, content) for content in (b"one", b"two"))
    for blob, path in blobs.items():
        remote.store_blobs({blob: path})
    stored = [request.path for request in server.requests if "if-none-match" not in request.headers]
    assert stored == [f"/bucket/p/cas/{blob.sha256}" for blob in blobs]
    assert {request.path for request in server.requests if "if-none-match" in request.headers} == set(stored[:1])
    server.close()
