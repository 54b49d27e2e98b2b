"""The directory in which one action runs: its inputs laid out before, its outputs collected afterwards."""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from dsr1build.cache.scratch import make_scratch
from dsr1build.cache.store import LocalStore
from dsr1build.digest import Fields, blob_refs, encode
from dsr1build.errors import EnvironmentUnfit

_SCRATCH_PREFIX = "dsr1build-work-"


@contextlib.contextmanager
def work_directory() -> Iterator[Path]:
    """A temporary directory for a build's actions that is gone afterwards; those of builders that were killed are removed
    first. Raises EnvironmentUnfit."""
    try:
        scratch, lock = make_scratch(_SCRATCH_PREFIX)
    except OSError as error:
        raise EnvironmentUnfit(
            f"no temporary directory can be made in {tempfile.gettempdir()}: {error.strerror}",
            hint="free some space there, or set TMPDIR to a directory on another disk",
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def prepare(directory: Path, fields: Fields, store: LocalStore, contents: Mapping[str, bytes]) -> None:
    """Make ``directory`` anew with ``fields``, ``inputs/`` (from ``contents`` by digest, else from the store) and the empty
    ``outputs/`` and ``work/``. Raises BlobLost and OSError."""
    if directory.exists():
        shutil.rmtree(directory, ignore_errors=True)
    for made in (directory, directory / "inputs", directory / "outputs", directory / "work"):
        made.mkdir(exist_ok=True)
    (directory / "fields").write_bytes(encode(fields))
    for ref in blob_refs(fields):
        target = directory / "inputs" / ref.sha256
        content = contents.get(ref.sha256)
        if content is None:
            store.materialize(ref, target)
        else:
            target.write_bytes(content)


def collect(outputs: Path, required: tuple[str, ...]) -> tuple[dict[str, Path], str]:
    """The output files by relative path, or why they cannot be taken."""
    files: dict[str, Path] = {}
    for folder, folders, names in os.walk(outputs):
        for name in (*folders, *names):
            path = Path(folder) / name
            mode = path.lstat().st_mode
            if stat.S_ISREG(mode):
                files[path.relative_to(outputs).as_posix()] = path
            elif not stat.S_ISDIR(mode):
                return {}, f"left {path.relative_to(outputs)}, which is not a regular file"
    absent = [name for name in required if name not in files]
    if absent:
        return {}, f"left no output {', '.join(absent)}"
    return files, ""


def folder_name(label: str) -> str:
    """A file name for what belongs to the action of this label."""
    return "".join(c if c.isalnum() or c in "-_.=" else "-" for c in label)[:100]
