"""The least that isolates a compile: a parent that has imported mlir forks, the child runs one worker, the parent waits.

Standard input has one line for each run, ``-`` for a child that ends at once or ``MODULE:FUNCTION DIRECTORY``; each is
answered with the seconds from the fork to the end of the wait, or ``failed``. ``DIRECTORY`` is laid out as for the executor.
"""

import importlib
import os
import sys
import time
from pathlib import Path

import dsr1build.toolchains.compile  # noqa: F401 - what a fork of the real server inherits
from dsr1build.digest import decode


def run(worker: str, directory: Path) -> None:
    os.chdir(directory / "work")
    module, _, function = worker.partition(":")
    call = getattr(importlib.import_module(module), function)
    call(decode((directory / "fields").read_bytes()), directory / "inputs", directory / "outputs")


def main() -> None:
    for line in sys.stdin:
        worker, _, directory = line.strip().partition(" ")
        started = time.perf_counter()
        pid = os.fork()
        if pid == 0:
            try:
                if worker != "-":
                    run(worker, Path(directory))
            except BaseException:
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        print(time.perf_counter() - started if status == 0 else "failed", flush=True)


if __name__ == "__main__":
    main()
