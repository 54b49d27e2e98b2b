"""The answer of a build that has nothing to do, without planning: everything it would read is what it was, and so is what
it made.

``.dsr1build/unchanged/<digest of the question>.json`` beside BUILD.yaml::

    {"format": 1, "question": [..], "files": {path: fingerprint}, "package": digest, "cache": directory, "text": str,
     "summary": {..}}

The question is what was asked for, where, and by which program; ``files`` are all that the build read, all files of its
bundles, the tools, and the directories in which another file would have been found; ``cache`` still has to be there. A record
is written only where every file was last changed well before the build began, so that it cannot vouch for what the build has
not seen. Whatever is wrong with a record, or merely doubtful, is answered by the full build. This module imports nothing
heavy.
"""

import argparse
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from dsr1build import __version__
from dsr1build.plan.fingerprint import SETTLED_NS, Fingerprint, How, first_change, take_fingerprint

if TYPE_CHECKING:
    from dsr1build.config.load import BuildConfig
    from dsr1build.execute.events import Summary

_FORMAT = 1
_DIRECTORY = Path(".dsr1build") / "unchanged"
_MOST_BYTES = 8 << 20
_KEPT = 8
# Options that change nothing where there is nothing to do. With any other one the build is made in full.
_WITHOUT_EFFECT = frozenset({"jobs", "keep_going", "json", "quiet", "retry_failed"})
_PART_OF_THE_QUESTION = frozenset({"file", "target", "context", "output", "cache"})
# Files of a checkpoint above this size that are no safetensors are not read again.
_READ_BYTES = 16 << 20
_PACKAGE = Path(__file__).resolve().parents[1]


class Beginning(NamedTuple):
    """The moment before a build reads its first file: seconds of ``time.monotonic()``, ``time.time_ns()``, and a digest for
    the stamps of the program's own files."""

    seconds: float
    time_ns: int
    package: str


def begin() -> Beginning:
    return Beginning(time.monotonic(), time.time_ns(), _package_digest())


def answer(arguments: argparse.Namespace, began: Beginning) -> bool:
    """Print what the build prints that has nothing to do, where it is known that it has nothing to do; tells whether it is."""
    question = _question(arguments)
    if question is None:
        return False
    place = _place(arguments.file, question)
    try:
        with place.open("rb") as file:
            record = json.loads(file.read(_MOST_BYTES))
        if record["format"] != _FORMAT or record["question"] != question or record["package"] != began.package:
            return False
        table = {path: _fingerprint(entry) for path, entry in record["files"].items()}
        text, summary = str(record["text"]), dict(record["summary"])
        if not Path(record["cache"]).is_dir():
            return False
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False
    refreshed: dict[str, Fingerprint] = {}
    if not table or first_change(table, refreshed) is not None:
        return False
    if refreshed:
        _write(place, {**record, "files": {**table, **refreshed}})
    if arguments.json:
        print(json.dumps({**summary, "seconds": round(time.monotonic() - began.seconds, 3)}))
    elif not arguments.quiet:
        print(text)
    return True


def remember(arguments: argparse.Namespace, config: "BuildConfig", summary: "Summary", began: Beginning) -> None:
    """Note what the same question will be answered with as long as nothing changes. Nothing is noted where something may have
    changed since the build began."""
    from dataclasses import replace

    from dsr1build.execute.events import to_json
    from dsr1build.execute.progress import render_summary

    question = _question(arguments)
    if question is None or config.profile.remotes or summary.failed or summary.skipped or not summary.artifacts:
        return
    cached = summary.executed + sum(summary.hits.values())
    idle = replace(summary, compiled=0, executed=0, hits={"local": cached, "remote": 0}, seconds=0.0)
    table: dict[str, Fingerprint] = {}
    try:
        for path, how in _inputs(config):
            table[str(path)] = take_fingerprint(str(path), how)
            if max(table[str(path)].stamp[3:]) >= began.time_ns - _margin(table[str(path)]):
                return
        for path in _outputs(summary.artifacts):
            table[str(path)] = take_fingerprint(str(path), "stamp")
    except (OSError, ValueError):
        return
    record = {
        "format": _FORMAT,
        "question": question,
        "files": table,
        "package": began.package,
        "cache": str(config.cache_directory),
        "text": render_summary(idle),
        "summary": to_json(idle),
    }
    _write(_place(arguments.file, question), record)


def _question(arguments: argparse.Namespace) -> list[Any] | None:
    """What is asked for, and by which program; None where only a full build can answer."""
    given = vars(arguments)
    others = set(given) - _WITHOUT_EFFECT - _PART_OF_THE_QUESTION
    if any(given[name] not in (None, False) for name in others) or (arguments.jobs is not None and arguments.jobs < 1):
        return None
    if os.environ.get("GITHUB_ACTIONS") or os.environ.get("GITHUB_STEP_SUMMARY"):
        return None
    try:
        where = [str(Path(arguments.file).absolute()), str(Path.cwd())]
        cpu = _cpu_flags()
    except OSError:
        return None
    asked = [arguments.target, arguments.context, arguments.output, arguments.cache, str(arguments.file)]
    program = [__version__, sys.version, sys.executable, sys.prefix, cpu]
    return [where, asked, program, [os.environ.get(name) for name in ("XDG_CACHE_HOME", "HOME")]]


def _cpu_flags() -> str:
    """What a target ``native`` stands for follows from this line."""
    with Path("/proc/cpuinfo").open("rb") as file:
        return hashlib.sha256(next((line for line in file if line.startswith((b"flags", b"Features"))), b"")).hexdigest()


def _place(file: str, question: list[Any]) -> Path:
    digest = hashlib.sha256(json.dumps(question).encode("utf-8", "surrogateescape")).hexdigest()
    return Path(file).parent / _DIRECTORY / f"{digest[:16]}.json"


def _inputs(config: "BuildConfig") -> Iterator[tuple[Path, How]]:
    """Every file that a build of this configuration reads, and how much of it counts. An absent file counts as absent."""
    from dsr1build.config.load import CheckpointSource
    from dsr1build.link.bundle import TOKENIZER_FILES
    from dsr1build.toolchains.tools import package_root, tool_files

    for path in config.files:
        yield path, "whole"
    if isinstance(config.model, CheckpointSource):
        directory = config.model.directory
        yield directory, "whole"
        # Nothing below is read; the builds of a BUILD.yaml that lies there write into such a directory each time.
        for path in sorted(path for path in directory.iterdir() if not path.is_dir()):
            large = path.is_file() and path.stat().st_size > _READ_BYTES
            yield path, "header" if path.suffix == ".safetensors" else "stamp" if large else "whole"
    else:
        yield config.model.config, "whole"
        for name in TOKENIZER_FILES:
            yield config.model.config.parent / name, "whole"
    tools = tool_files()
    yield from ((path, "stamp") for path in tools)
    yield from ((path, "stamp") for path in sorted({path.parent for path in tools}))
    # The checksums that stand for the files of zig's library.
    yield from ((path, "stamp") for path in sorted(package_root("ziglang").parent.glob("ziglang-*.dist-info/RECORD")))


def _outputs(artifacts: Iterable[str]) -> Iterator[Path]:
    for artifact in artifacts:
        for folder, _, names in os.walk(artifact):
            yield Path(folder)
            yield from (Path(folder) / name for name in names)


def _margin(entry: Fingerprint) -> int:
    """How long before the build a file must have been changed. Stamps with fractions of a millisecond come from a file system
    whose clock is that fine."""
    fine = any(time_ns % 1_000_000 for time_ns in entry.stamp[3:])
    return SETTLED_NS // 20 if fine else SETTLED_NS


def _package_digest() -> str:
    """One digest for the stamps of all files of this package and of what ships with it."""
    sha = hashlib.sha256()
    roots = [str(_PACKAGE), *(str(_PACKAGE.parent / shelf) for shelf in ("recipes", "targets", "cache"))]
    while roots:
        with contextlib.suppress(FileNotFoundError), os.scandir(roots.pop()) as found:
            for entry in sorted(found, key=lambda entry: entry.name):
                if not entry.is_dir():
                    now = entry.stat()
                    line = f"{entry.path} {now.st_size} {now.st_mtime_ns} {now.st_ctime_ns} {now.st_ino}\n"
                    sha.update(line.encode("utf-8", "surrogateescape"))
                elif entry.name != "__pycache__":
                    roots.append(entry.path)
    return sha.hexdigest()


def _fingerprint(entry: list[Any]) -> Fingerprint:
    kind, how, stamp, content, settled = entry
    return Fingerprint(kind, how, tuple(stamp), content, settled)


def _write(place: Path, record: Mapping[str, Any]) -> None:
    """A directory that cannot be written costs the next build its short cut, and nothing else."""
    half = place.with_name(f"{place.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            half.write_text(json.dumps(record), "utf-8")
            half.replace(place)
        finally:
            half.unlink(missing_ok=True)
        others = sorted(place.parent.iterdir(), key=lambda path: path.stat().st_mtime_ns)
        for old in others[:-_KEPT]:
            old.unlink()
