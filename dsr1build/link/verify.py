"""Which files of a bundle are not what its manifest says."""

import hashlib
from pathlib import Path

from pydantic import ValidationError

from dsr1build.errors import InvalidInput
from dsr1build.link.manifest import MANIFEST, Manifest, WeightFileInfo
from dsr1build.link.weights import header_digest


def changed_files(bundle: Path) -> tuple[str, ...]:
    """Paths in ``bundle`` of the files that are missing or have another content, in the manifest's order.

    Every file that the build made is read and hashed. Of a checkpoint's files the length and the header are compared (names,
    types and places of all tensors), as in every build. Nothing is wrong with a bundle that is not there; a manifest that
    cannot be read is the one file named.
    """
    try:
        manifest = Manifest.model_validate_json((bundle / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except (OSError, ValidationError):
        return (MANIFEST,)
    made = {manifest.library.file: manifest.library.sha256, manifest.weights.binding: manifest.weights.binding_sha256}
    wrong = [name for name, sha256 in made.items() if _sha256(bundle / name) != sha256]
    return (*wrong, *(file.path for file in manifest.weights.files if not _agrees(bundle / file.path, file)))


def _agrees(path: Path, file: WeightFileInfo) -> bool:
    if not path.is_file() or path.stat().st_size != file.bytes:
        return False
    if file.origin == "generated":
        return _sha256(path) == file.sha256
    try:
        return header_digest(path) == file.digest
    except (InvalidInput, OSError):
        return False


def _sha256(path: Path) -> str:
    """The SHA-256 of a regular file; "" where there is none that can be read."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return ""
