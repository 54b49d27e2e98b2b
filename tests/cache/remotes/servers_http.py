"""Servers on loopback for the HTTP and object-store adapters: nginx, moto's S3, and one that does wrong what can be."""

import contextlib
import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import urllib3

from dsr1build.cache.remote import Remote
from dsr1build.cache.remotes.http import open_http
from dsr1build.cache.remotes.objects import open_objects

NGINX_USER, NGINX_PASSWORD = "builder", "s3cr3t-pass"
BUCKET = "builds"

_NGINX_CONF = """
{module}
daemon off;
master_process off;
worker_processes 1;
pid {home}/nginx.pid;
error_log {home}/error.log;
events {{ worker_connections 64; }}
http {{
  access_log off;
  client_body_temp_path {home}/body;
  proxy_temp_path {home}/proxy;
  fastcgi_temp_path {home}/fastcgi;
  uwsgi_temp_path {home}/uwsgi;
  scgi_temp_path {home}/scgi;
  server {{
    listen 127.0.0.1:{port}{tls};
    {certificate}
    root {home}/root;
    client_max_body_size 0;
    location /cache/ {{
      dav_methods PUT;
      create_full_put_path on;
      limit_except GET HEAD {{
        auth_basic "cache";
        auth_basic_user_file {home}/passwords;
      }}
    }}
  }}
}}
"""


@dataclass(frozen=True, slots=True)
class Nginx:
    """``root`` holds what is stored, as ``ac/`` and ``cas/``. Anybody reads, ``NGINX_USER`` writes."""

    url: str
    root: Path


@contextlib.contextmanager
def run_nginx(home: Path, certificate: tuple[Path, Path] | None = None) -> Iterator[Nginx]:
    """``certificate``: the files of a certificate and its key, for https."""
    program = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None:
        pytest.skip("nginx is not installed: run .ci/install-servers")
    (home / "root/cache").mkdir(parents=True)
    (home / "passwords").write_text(f"{NGINX_USER}:{{PLAIN}}{NGINX_PASSWORD}\n", encoding="ascii")
    dav = Path("/usr/lib/nginx/modules/ngx_http_dav_ext_module.so")
    port = free_port()
    conf = home / "nginx.conf"
    conf.write_text(
        _NGINX_CONF.format(
            home=home,
            port=port,
            module=f"load_module {dav};" if dav.exists() else "",
            tls=" ssl" if certificate else "",
            certificate=f"ssl_certificate {certificate[0]}; ssl_certificate_key {certificate[1]};" if certificate else "",
        ),
        encoding="ascii",
    )
    with _running([program, "-p", str(home), "-c", str(conf), "-e", str(home / "error.log")], port):
        yield Nginx(f"http{'s' if certificate else ''}://127.0.0.1:{port}/cache", home / "root/cache")


@contextlib.contextmanager
def run_s3() -> Iterator[str]:
    """The endpoint of a server that speaks S3, with the empty bucket ``BUCKET``."""
    pytest.importorskip("moto", reason="moto[server] is not installed: it is in the extra 'test'")
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with _running([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port):
        answer = urllib3.request("PUT", f"{endpoint}/{BUCKET}", timeout=20, retries=False)
        assert answer.status == 200, answer.data
        yield endpoint


def s3_options(endpoint: str) -> dict[str, str]:
    return {
        "endpoint": endpoint,
        "region": "us-east-1",
        "access_key_id": "AKIATESTTESTTEST",
        "secret_access_key": "secret-access-key-of-the-tests",
        "allow_http": "true",
    }


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def _running(command: list[str], port: int) -> Iterator[None]:
    """The program, from when it listens on ``port`` until the end of the block."""
    # A file and not a pipe: nobody reads while the server runs, and a server with a full pipe hangs.
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            until = time.monotonic() + 60
            while True:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                    break
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} does not listen: {log.read().decode()}")
                time.sleep(0.02)
            yield
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes
    connection: int


# Answers a request by writing to its connection. True: the connection stays open for the next one.
Behaviour = Callable[[socket.socket, Request], bool]


@dataclass
class FaultServer:
    """Every connection has a thread; every request gets ``behaviour`` and is kept in ``requests``."""

    behaviour: Behaviour
    requests: list[Request] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/c"
        self._count = 0
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self._open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._open.append(connection)
                self._count += 1
                threading.Thread(target=self._serve, args=(connection, self._count), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        with contextlib.suppress(OSError), connection, connection.makefile("rb") as stream:
            while request := _read_request(stream.readline, stream.read, number):
                self.requests.append(request)
                if not self.behaviour(connection, request):
                    break
        with contextlib.suppress(OSError):
            connection.close()


def _read_request(readline: Callable[[], bytes], read: Callable[[int], bytes], number: int) -> Request | None:
    first = readline().decode().split()
    if len(first) != 3:
        return None
    headers = {}
    while line := readline().decode().strip():
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Request(first[0], first[1], headers, read(int(headers.get("content-length", 0))), number)


def answer(status: int, body: bytes = b"", *, length: int | None = None, headers: str = "", keep: bool = True) -> Behaviour:
    """``status`` with ``body``, of which ``length`` is claimed."""

    def behave(connection: socket.socket, request: Request) -> bool:
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Length: {len(body) if length is None else length}\r\n{headers}\r\n"
        connection.sendall(head.encode() + (b"" if request.method == "HEAD" else body))
        return keep

    return behave


def reset(connection: socket.socket, request: Request) -> bool:
    """Break off with RST instead of FIN."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return False


def hang(seconds: float) -> Behaviour:
    def behave(connection: socket.socket, request: Request) -> bool:
        time.sleep(seconds)
        return False

    return behave


def drip(data: bytes, pause: float) -> Behaviour:
    """One byte of ``data`` at a time."""

    def behave(connection: socket.socket, request: Request) -> bool:
        for byte in data:
            connection.sendall(bytes([byte]))
            time.sleep(pause)
        return False

    return behave


def endless(connection: socket.socket, request: Request) -> bool:
    """A chunked body that has no end."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + bytes(0x10000) + b"\r\n")


@functools.cache
def payload(size: int) -> bytes:
    """Bytes without a pattern, the same ones every time."""
    return b"".join(struct.pack("<I", index * 2654435761 % 2**32) for index in range(size // 4 + 1))[:size]


Open = Callable[..., Remote]


@contextlib.contextmanager
def _nginx_opens(home: Path) -> Iterator[Open]:
    with run_nginx(home) as server:
        yield lambda timeouts=None: open_http(server.url, timeouts=timeouts, user=NGINX_USER, password=NGINX_PASSWORD)


@contextlib.contextmanager
def _s3_opens(home: Path) -> Iterator[Open]:
    with run_s3() as endpoint:
        options = s3_options(endpoint)
        yield lambda timeouts=None: open_objects(f"s3://{BUCKET}/contract", timeouts=timeouts, options=options)


@contextlib.contextmanager
def _directory_opens(home: Path) -> Iterator[Open]:
    yield lambda timeouts=None: open_objects(home.as_uri(), timeouts=timeouts)


FACTORIES = {"nginx": _nginx_opens, "s3": _s3_opens, "directory": _directory_opens}
