"""examples/shared-cache/start: one command, and a build machine can store and find."""

import contextlib
import hashlib
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from dsr1build.cache.remotes.http import open_http
from dsr1build.config.document import parse_document
from dsr1build.config.schema import Profile
from dsr1build.config.validate import validate
from dsr1build.digest import BlobRef

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/shared-cache"


@contextlib.contextmanager
def running(directory):
    if shutil.which("nginx", path="/usr/bin:/usr/sbin:/usr/local/sbin") is None:
        pytest.skip("nginx is not installed: run .ci/install-servers")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([EXAMPLE / "start", directory, f"127.0.0.1:{port}"], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr.readline() == f"shared cache at http://127.0.0.1:{port}/cache, files in {directory.resolve()}\n"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/cache"
    finally:
        process.terminate()
        process.wait(20)


def test_what_one_machine_stores_another_finds_after_a_restart(tmp_path):
    directory = tmp_path / "gemeinsamer Speicher"
    data = b"object code" * 10_000
    ref = BlobRef(hashlib.sha256(data).hexdigest())
    (tmp_path / "source").write_bytes(data)
    with running(directory) as url:
        remote = open_http(url)
        assert remote.missing_blobs({ref: len(data)}) == {ref}
        remote.store_blobs({ref: tmp_path / "source"})
        assert remote.missing_blobs({ref: len(data)}) == frozenset()
        remote.close()
    (tmp_path / "received").mkdir()
    with running(directory) as url:
        remote = open_http(url)
        assert remote.fetch_blobs({ref: len(data)}, tmp_path / "received") == {ref}
        remote.close()
    assert (tmp_path / "received" / ref.sha256).read_bytes() == data


def test_its_profile_names_the_address_that_it_listens_on_by_default():
    path = EXAMPLE / "profile.yaml"
    profile = validate(parse_document(path.read_bytes(), str(path)), Profile)
    (remote,) = profile.remotes
    address = (EXAMPLE / "start").read_text().split("listen=${2:-")[1].split("}")[0]
    assert (remote.url, remote.mode) == (f"http://{address}/cache", "read-write")
