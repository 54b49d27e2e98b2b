"""A Dask cluster of real processes on the loopback interface, for the tests and the benchmark of the Dask executor."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from dsr1build.digest import BlobRef, encode, key_of
from dsr1build.execute.executor import Limits, Request


class Cluster:
    """``dask scheduler`` and its workers; ``tls`` are options of Dask for both."""

    def __init__(self, directory, tls=(), allowed_failures="0"):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.tls = list(tls)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"{'dask+tls' if tls else 'dask'}://127.0.0.1:{self.port}"
        self.workers = {}
        options = ["--host", f"tls://127.0.0.1:{self.port}"] if tls else ["--host", "127.0.0.1", "--port", str(self.port)]
        environment = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": allowed_failures}
        self.scheduler = self._start("scheduler", "scheduler", *options, "--no-jupyter", environment=environment)

    def add(self, name, threads=1, python_path=None):
        address = f"{'tls' if self.tls else 'tcp'}://127.0.0.1:{self.port}"
        options = ["--name", name, "--nthreads", str(threads), "--no-nanny", "--memory-limit", "0"]
        environment = {} if python_path is None else {"PYTHONPATH": str(python_path)}
        self.workers[name] = self._start(
            name, "worker", address, *options, "--local-directory", str(self.directory), environment=environment
        )

    def kill(self, name):
        process = self.workers.pop(name)
        process.kill()
        process.wait()

    def close(self):
        for process in (*self.workers.values(), self.scheduler):
            # A stopped process takes no other signal.
            process.send_signal(signal.SIGKILL)
            process.wait()

    def log(self, name):
        return (self.directory / f"{name}.log").read_text()

    def _start(self, name, kind, *options, environment):
        with (self.directory / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "dask", kind, *options, "--no-dashboard", *self.tls],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.directory,
                env={**os.environ, "TMPDIR": str(self.directory), **environment},
            )


def until(condition, seconds=30.0):
    """Wait for something that other processes bring about; says whether it came."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def request(directory: Path, id: str, function: str, inputs=(), outputs=("text",), limits=None, module="toy_workers", **fields):
    """An action of a toy, laid out as the scheduler of actions does it."""
    root = directory / id
    for name in ("inputs", "outputs", "work"):
        (root / name).mkdir(parents=True)
    if inputs:
        fields["parts"] = [BlobRef(digest) for digest in inputs]
        for digest, content in dict(inputs).items():
            (root / "inputs" / digest).write_bytes(content)
    (root / "fields").write_bytes(encode(fields))
    limits = limits or Limits(memory=1 << 30, seconds=30.0, file_size=64 << 20)
    return Request(id, key_of(fields), "compile", f"toy {id}", f"{module}:{function}", root, (), outputs, limits)
