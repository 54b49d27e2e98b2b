"""Bazel's HTTP layout on a real server: nginx with WebDAV, which anybody reads and one user writes."""

import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path

import pytest
import servers_http as servers

from dsr1build.cache.remote import ActionName, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.action_result import RECORD_NAME
from dsr1build.cache.remotes.http import open_http
from dsr1build.cache.remotes.proto import message
from dsr1build.digest import BlobRef, sha256_hex
from dsr1build.errors import InvalidInput

KEY = ActionName("ab" * 32, 321)
RECORD = b'{"outputs": {"kernel.o": "..."}}'


@pytest.fixture(scope="module")
def nginx(tmp_path_factory: pytest.TempPathFactory) -> Iterator[servers.Nginx]:
    with servers.run_nginx(tmp_path_factory.mktemp("nginx")) as running:
        yield running


def writer(nginx: servers.Nginx):
    return open_http(nginx.url, user=servers.NGINX_USER, password=servers.NGINX_PASSWORD)


def write_blob(directory: Path, content: bytes) -> tuple[BlobRef, Path]:
    blob = BlobRef(sha256_hex(content))
    (directory / "blob").mkdir(exist_ok=True)
    path = directory / "blob" / blob.sha256
    path.write_bytes(content)
    return blob, path


def test_what_is_stored_is_found(nginx: servers.Nginx, tmp_path: Path) -> None:
    contents = [b"", b"x", servers.payload(100_000), servers.payload(3_000_001)]
    files = dict(write_blob(tmp_path, content) for content in contents)
    sizes = {blob: path.stat().st_size for blob, path in files.items()}
    remote, reader = writer(nginx), open_http(nginx.url)
    assert reader.missing_blobs(sizes) == set(files)
    assert reader.fetch_blobs(sizes, tmp_path) == frozenset()
    assert reader.find_records([KEY]) == {}

    remote.store_blobs(files)
    remote.store_record(KEY, RECORD, {"kernel.o": (next(iter(files)), 0)})
    assert reader.missing_blobs(sizes) == frozenset()
    (target := tmp_path / "target").mkdir()
    assert reader.fetch_blobs(sizes, target) == set(files)
    assert {path.name: path.read_bytes() for path in target.iterdir()} == {sha256_hex(c): c for c in contents}
    assert reader.find_records([ActionName("cd" * 32, 1), KEY]) == {KEY.key: RECORD}


def test_an_action_is_an_action_result_whose_files_all_exist(nginx: servers.Nginx, tmp_path: Path) -> None:
    remote = writer(nginx)
    blob, path = write_blob(tmp_path, b"object code")
    remote.store_blobs({blob: path})
    remote.store_record(KEY, RECORD, {"kernel.o": (blob, 11)})
    result = message("ActionResult").FromString((nginx.root / "ac" / KEY.key).read_bytes())
    assert [(file.path, file.digest.size_bytes) for file in result.output_files] == [("dsr1-record.json", 32), ("kernel.o", 11)]
    for file in result.output_files:
        assert (nginx.root / "cas" / file.digest.hash).stat().st_size == file.digest.size_bytes


def test_a_record_that_is_not_inlined_is_read_from_its_blob(nginx: servers.Nginx) -> None:
    """Servers may drop inlined contents."""
    writer(nginx).store_record(KEY, RECORD, {})
    path = nginx.root / "ac" / KEY.key
    result = message("ActionResult").FromString(path.read_bytes())
    result.output_files[0].ClearField("contents")
    path.write_bytes(result.SerializeToString())
    assert open_http(nginx.url).find_records([KEY]) == {KEY.key: RECORD}
    (nginx.root / "cas" / sha256_hex(RECORD)).write_bytes(b"something else")
    assert open_http(nginx.url).find_records([KEY]) == {}


@pytest.mark.parametrize("content", [b"", b"\xff\xff\xff", b"<html>not here</html>", b"\x12\x03\x0a\x01a"])
def test_an_entry_that_is_none_of_ours_is_a_miss(nginx: servers.Nginx, content: bytes) -> None:
    (nginx.root / "ac").mkdir(exist_ok=True)
    (nginx.root / "ac" / KEY.key).write_bytes(content)
    assert open_http(nginx.url).find_records([KEY]) == {}


def test_a_record_that_was_changed_in_its_entry_is_a_miss(nginx: servers.Nginx) -> None:
    writer(nginx).store_record(KEY, RECORD, {})
    path = nginx.root / "ac" / KEY.key
    path.write_bytes(path.read_bytes().replace(b"kernel.o", b"kernel.p"))
    assert open_http(nginx.url).find_records([KEY]) == {}


@pytest.mark.parametrize("wrong", [b"object codf", b"object cod", b"object code.", b""])
def test_a_wrong_blob_is_left_out_and_repaired_by_the_next_upload(nginx: servers.Nginx, tmp_path: Path, wrong: bytes) -> None:
    remote = writer(nginx)
    blob, path = write_blob(tmp_path, b"object code")
    remote.store_blobs({blob: path})
    (nginx.root / "cas" / blob.sha256).write_bytes(wrong)
    (target := tmp_path / "target").mkdir()
    assert remote.fetch_blobs({blob: 11}, target) == frozenset()
    assert list(target.iterdir()) == []
    assert remote.missing_blobs({blob: 11}) == {blob}
    remote.store_blobs({blob: path})
    assert remote.missing_blobs({blob: 11}) == frozenset()
    assert remote.fetch_blobs({blob: 11}, target) == {blob}


def test_a_blob_of_another_length_counts_as_missing(nginx: servers.Nginx, tmp_path: Path) -> None:
    blob, path = write_blob(tmp_path, b"a whole blob")
    writer(nginx).store_blobs({blob: path})
    (nginx.root / "cas" / blob.sha256).write_bytes(b"half")
    assert open_http(nginx.url).missing_blobs({blob: 12}) == {blob}


@pytest.mark.parametrize("size", [0, 10, 1 << 20, (2 << 20) + 5])
def test_a_file_that_changed_is_not_uploaded(nginx: servers.Nginx, tmp_path: Path, size: int) -> None:
    blob = BlobRef(sha256_hex(b"what the file was, of %d bytes" % size))
    path = tmp_path / "file"
    path.write_bytes(servers.payload(size))
    with pytest.raises(RemoteUnavailable, match=r"is no longer the blob"):
        writer(nginx).store_blobs({blob: path})
    path.unlink()
    with pytest.raises(RemoteUnavailable, match=r"cannot read .*No such file"):
        writer(nginx).store_blobs({blob: path})
    assert not (nginx.root / "cas" / blob.sha256).exists()


@pytest.mark.parametrize("credentials", [{}, {"user": servers.NGINX_USER, "password": "wrong-pass"}])
def test_who_may_not_write_is_told_so(nginx: servers.Nginx, tmp_path: Path, credentials: dict[str, str]) -> None:
    blob, path = write_blob(tmp_path, servers.payload(200_000))
    with pytest.raises(RemoteDenied) as raised:
        open_http(nginx.url, **credentials).store_blobs({blob: path})
    expected = 401 if not credentials else "40[13]"
    assert raised.match(rf"^{nginx.url} answered {expected} to PUT cas/{blob.sha256}$")


def test_credentials_show_nowhere(nginx: servers.Nginx) -> None:
    address = nginx.url.replace("http://", f"http://{servers.NGINX_USER}:{servers.NGINX_PASSWORD}@")
    remote = open_http(address + "/", headers={"X-Token": "t0ken"})
    remote.store_record(KEY, RECORD, {})
    assert remote.name == nginx.url
    dead = open_http(f"http://me:s3cr3t@127.0.0.1:{servers.free_port()}/x", headers={"Authorization": "Bearer t0ken"})
    with pytest.raises(RemoteUnavailable) as raised:
        dead.find_records([KEY])
    assert str(raised.value) == f"{dead.name} cannot be reached: Connection refused"
    assert "s3cr3t" not in dead.name


def test_downloads_into_a_directory_that_is_gone_say_so(nginx: servers.Nginx, tmp_path: Path) -> None:
    blob, path = write_blob(tmp_path, b"something")
    writer(nginx).store_blobs({blob: path})
    with pytest.raises(RemoteUnavailable, match=r"cannot write to .*gone: No such file or directory"):
        open_http(nginx.url).fetch_blobs({blob: 9}, tmp_path / "gone")


def test_a_closed_remote_raises_what_callers_expect(nginx: servers.Nginx) -> None:
    remote = open_http(nginx.url)
    remote.close()
    with pytest.raises(RemoteUnavailable, match="closed"):
        remote.find_records([KEY])


@pytest.mark.parametrize("url", ["ftp://host/x", "http://", "http://host:port/", "https://host/?sig=abc", "host/cache"])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        open_http(url)
    assert "is not the address of an HTTP cache" in raised.value.message
    assert "abc" not in str(raised.value)


def make_certificate(directory: Path) -> tuple[Path, Path]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    paths = directory / "certificate.pem", directory / "key.pem"
    paths[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return paths


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate = make_certificate(tmp_path)
    (home := tmp_path / "tls").mkdir()
    with servers.run_nginx(home, certificate) as nginx:
        with pytest.raises(RemoteUnavailable, match=r"cannot be reached over TLS: self.signed certificate"):
            open_http(nginx.url, timeouts=Timeouts(2, 2)).find_records([KEY])
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
        remote = open_http(nginx.url, user=servers.NGINX_USER, password=servers.NGINX_PASSWORD)
        remote.store_record(KEY, RECORD, {})
        assert remote.find_records([KEY]) == {KEY.key: RECORD}


def test_the_name_of_the_record_is_fixed() -> None:
    assert RECORD_NAME == "dsr1-record.json"
