"""How weights get into a bundle, and where each of them lies.

A checkpoint's file is hard-linked where the file system allows it: a bundle then takes no second copy of the weights and
stays whole when the checkpoint is moved or deleted. Otherwise it is copied up to ``LARGEST_COPY`` and linked symbolically
beyond. A checkpoint file that is rewritten in place is the bundle's file too: build again after that; the loader refuses a
file of another length.
"""

import errno
import hashlib
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from dsr1build.errors import BuildFailed, InvalidInput
from dsr1build.graph.model import ITEM_BYTES, Model, RandomTensor, RopeTable, StoredTensor, TensorType
from dsr1build.link.binding import Placement, weight_shape
from dsr1build.link.generate import Generated, generated_identity, safetensors_header, write_generated
from dsr1build.link.manifest import WeightFileInfo
from dsr1build.link.program import Program

LARGEST_COPY = 1 << 30
# Why link(2) refuses a file that can still be copied or linked symbolically.
_CANNOT_LINK = (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP, errno.EACCES)


@dataclass(frozen=True, slots=True)
class PlacedWeights:
    """The files of a bundle that hold weights, and the place of each of the program's weights in them."""

    files: tuple[WeightFileInfo, ...]
    placements: Mapping[str, Placement]


def place_weights(
    work: Path, earlier: Mapping[str, WeightFileInfo], earlier_bundle: Path, program: Program, model: Model, context: int
) -> PlacedWeights:
    """Link the checkpoint's files into the bundle directory ``work`` and generate the weights that no file holds.

    ``earlier`` are the weight files of the bundle that stands at ``earlier_bundle``, by path: a generated file of it that
    was made from the same is linked, not generated again. Raises InvalidInput or BuildFailed where a weight cannot be had.
    """
    stored: dict[str, StoredTensor] = {}
    tables: dict[str, tuple[TensorType, RopeTable | RandomTensor]] = {}
    random: dict[str, tuple[TensorType, RopeTable | RandomTensor]] = {}
    for name, type_ in program.weights:
        source = model.sources.get(name)
        if source is None:
            raise BuildFailed("the weight has no source", where=name)
        if isinstance(source, StoredTensor):
            stored[name] = source
        elif isinstance(source, RopeTable):
            tables[name] = (type_, source)
        else:
            random[name] = (type_, source)
    files: list[WeightFileInfo] = []
    placements: dict[str, Placement] = {}
    numbers = {file: number for number, file in enumerate(sorted({tensor.file for tensor in stored.values()}))}
    for file in numbers:
        origin = (Path(model.directory) / file).resolve()
        path = f"checkpoint/{file}"
        link_file(origin, work / path)
        size, digest = origin.stat().st_size, header_digest(origin)
        files.append(WeightFileInfo(path=path, bytes=size, origin="checkpoint", digest=digest, sha256=None))
    for name, tensor in stored.items():
        placements[name] = Placement(numbers[tensor.file], tensor.offset, tensor.length)
    for path, tensors in (("weights/tables.safetensors", tables), ("weights/random.safetensors", random)):
        if not tensors:
            continue
        places, size = _generated_places(tensors, context, len(files))
        identity = generated_identity(tensors, context)
        (work / path).parent.mkdir(parents=True, exist_ok=True)
        before = earlier.get(path)
        sha256 = before.sha256 if before is not None and before.digest == identity else None
        if sha256 is None or not _taken_over(earlier_bundle / path, size, work / path):
            sha256 = write_generated(work / path, tensors, context)
        files.append(WeightFileInfo(path=path, bytes=size, origin="generated", digest=identity, sha256=sha256))
        placements |= places
    return PlacedWeights(tuple(files), placements)


def link_file(origin: Path, path: Path) -> None:
    """Hard-link, copy or symbolically link a checkpoint's file, as the module's text says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if _linked(origin, path):
        return
    if origin.stat().st_size <= LARGEST_COPY:
        shutil.copyfile(origin, path)
    else:
        path.symlink_to(origin)


def _taken_over(before: Path, size: int, path: Path) -> bool:
    return before.is_file() and not before.is_symlink() and before.stat().st_size == size and _linked(before, path)


def _linked(origin: Path, path: Path) -> bool:
    """Hard-link a file; False where the file system refuses hard links to it. Raises OSError for anything else."""
    try:
        os.link(origin, path)
    except OSError as error:
        if error.errno not in _CANNOT_LINK:
            raise
        return False
    return True


def header_digest(path: Path) -> str:
    """SHA-256 of the header of a safetensors file, its length included: names, types and places of all tensors."""
    with path.open("rb") as file:
        length = file.read(8)
        size = struct.unpack("<Q", length)[0] if len(length) == 8 else 0
        if not 0 < size <= path.stat().st_size - 8:
            raise InvalidInput("the file is not a safetensors file", where=str(path), hint="Download the checkpoint again.")
        return hashlib.sha256(length + file.read(size)).hexdigest()


def _generated_places(tensors: Generated, context: int, file: int) -> tuple[dict[str, Placement], int]:
    """The places of generated tensors, which lie back to back in the order of their names, and the size of the file."""
    types = {name: tensors[name][0] for name in sorted(tensors)}
    at = len(safetensors_header(types, context))
    places = {}
    for name, type_ in types.items():
        length = prod(weight_shape(type_, context)) * ITEM_BYTES[type_.dtype]
        places[name] = Placement(file, at, length)
        at += length
    return places, at
