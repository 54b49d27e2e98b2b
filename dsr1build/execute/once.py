"""Runs one action that was kept after it failed, without a build and without a cache::

    python -m dsr1build.execute.once DIRECTORY [--timeout SECONDS] [--memory MIB]

``DIRECTORY`` holds ``fields``, ``inputs/`` and ``request.json`` as ``dsr1build.execute.reproducer`` keeps them; it is not
changed. The action runs with the limits, the environment and the empty directory that it has in a build. What it printed goes
to standard error; the outputs and, for a compile, the IR after each pass group stay in a new directory, which is named.
Ends with 0 where the action ends well, 1 where it fails, 2 where DIRECTORY holds no action.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from dsr1build.errors import Dsr1Error, InvalidInput
from dsr1build.execute.action_directory import collect
from dsr1build.execute.executor import Limits, Request
from dsr1build.execute.failure import judge
from dsr1build.execute.server import ForkServer
from dsr1build.toolchains.pass_groups import read_groups

_MOST_REQUEST_BYTES = 1 << 20


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m dsr1build.execute.once", description="Run one kept action again.")
    parser.add_argument("directory", type=Path, help="a directory of .dsr1build/failures")
    parser.add_argument("--timeout", type=float, default=Limits().seconds, metavar="SECONDS", help="kill it after this time")
    parser.add_argument("--memory", type=int, default=Limits().memory >> 20, metavar="MIB", help="address space it may use")
    given = parser.parse_args(words)
    try:
        return run_kept(given.directory, Limits(memory=given.memory << 20, seconds=given.timeout))
    except Dsr1Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


def run_kept(kept: Path, limits: Limits) -> int:
    """Run the action of ``kept`` and print what came of it. Raises InvalidInput where there is none."""
    request = _read_request(kept)
    place = Path(tempfile.mkdtemp(prefix="dsr1build-once-"))
    shutil.copyfile(kept / "fields", place / "fields")
    shutil.copytree(kept / "inputs", place / "inputs")
    for name in ("outputs", "work"):
        (place / name).mkdir()
    # Workers that are no part of the package are found where this program's own search path has them.
    extra = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    with contextlib.closing(ForkServer(place, extra)) as server:
        server.start(
            Request(
                "once",
                "",
                request["kind"],
                request["label"],
                request["worker"],
                place,
                tuple(request["preload"]),
                tuple(request["outputs"]),
                limits,
                temps=request["kind"] == "compile",
            )
        )
        (ended,) = server.wait()
    failure = judge(ended, limits, read_groups(place / "work"))
    _, absent = collect(place / "outputs", tuple(request["outputs"]))
    sys.stderr.write(ended.tail)
    where = f" in pass group {failure.pass_group}" if failure is not None and failure.pass_group else ""
    reason = absent if failure is None else failure.reason
    told = f"failed{where}: {reason}" if reason else "ended well"
    print(f"{request['kind']} {request['label']} {told} after {ended.seconds:.2f} s; what it left is in {place}")
    return 1 if reason else 0


def _read_request(kept: Path) -> dict[str, Any]:
    try:
        with (kept / "request.json").open("rb") as file:
            request = json.loads(file.read(_MOST_REQUEST_BYTES))
        texts = [request["kind"], request["label"], request["worker"], *request["preload"], *request["outputs"]]
        if not all(isinstance(text, str) for text in texts) or not (kept / "fields").is_file() or not (kept / "inputs").is_dir():
            raise ValueError("a part of it is missing")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInput(
            f"no action is kept here ({error})", where=str(kept), hint="Name a directory of .dsr1build/failures."
        ) from None
    return dict(request)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
