"""Runs one action that was kept after it failed, without a build and without a cache::

    python -m dsr1build.execute.once DIRECTORY [--timeout SECONDS] [--memory MIB] [--import-path DIR]

``DIRECTORY`` holds ``fields``, ``inputs/`` and ``request.json`` as ``dsr1build.execute.reproducer`` keeps them; it is not
changed. The action runs with the limits, the environment and the empty directory that it has in a build. What it printed goes
to standard error; the outputs and, for a compile, the IR after each pass group stay in a new directory, which is named.
A directory may come from a stranger: it can name workers of this package and, with ``--import-path``, of modules that lie there.
Ends with 0 where the action ends well, 1 where it fails, 2 where DIRECTORY holds no action.
"""

import argparse
import contextlib
import json
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
    parser.add_argument("--import-path", type=Path, metavar="DIR", help="take workers from the modules in this directory, too")
    given = parser.parse_args(words)
    try:
        return run_kept(given.directory, given.import_path, Limits(memory=given.memory << 20, seconds=given.timeout))
    except Dsr1Error as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code


def run_kept(kept: Path, import_path: Path | None, limits: Limits) -> int:
    """Run the action of ``kept`` and print what came of it. Raises InvalidInput where there is none."""
    request = _read_request(kept, import_path)
    place = Path(tempfile.mkdtemp(prefix="dsr1build-once-"))
    shutil.copyfile(kept / "fields", place / "fields")
    shutil.copytree(kept / "inputs", place / "inputs")
    for name in ("outputs", "work"):
        (place / name).mkdir()
    with contextlib.closing(ForkServer(place, () if import_path is None else (import_path.absolute(),))) as server:
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


def _read_request(kept: Path, import_path: Path | None) -> dict[str, Any]:
    try:
        with (kept / "request.json").open("rb") as file:
            request = json.loads(file.read(_MOST_REQUEST_BYTES))
        texts = [request["kind"], request["label"], request["worker"], *request["preload"], *request["outputs"]]
        if not all(isinstance(text, str) for text in texts) or not (kept / "fields").is_file() or not (kept / "inputs").is_dir():
            raise ValueError("a part of it is missing")
        for module in (request["worker"].partition(":")[0], *request["preload"]):
            own = import_path is not None and (import_path / f"{module}.py").is_file()
            if not own and not module.startswith("dsr1build."):
                raise ValueError(f"the module {module!r} is no part of dsr1build")
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise InvalidInput(
            f"no action is kept here ({error})", where=str(kept), hint="Name a directory of .dsr1build/failures."
        ) from None
    return dict(request)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
