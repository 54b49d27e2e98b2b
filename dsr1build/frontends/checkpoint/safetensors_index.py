"""The tensors of a checkpoint directory, from the headers of its safetensors files alone.

A file is: the length of the header as u64 little-endian, the header as a JSON object
``{name: {"dtype", "shape", "data_offsets": [begin, end]}, "__metadata__"?: {text: text}}``, then the data, without gaps.
Offsets count from the end of the header (https://huggingface.co/docs/safetensors). Nothing in a file is trusted: every
length and offset is checked against the file before it is used.
"""

import itertools
import json
import re
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from dsr1build.errors import InvalidInput
from dsr1build.frontends.checkpoint.config_fields import read_json_object

# The limit of the safetensors library itself.
LARGEST_HEADER = 100_000_000
LONGEST_NAME = 255  # bytes, of a file name on Linux
INDEX_NAME = "model.safetensors.index.json"
# Item sizes by safetensors dtype.
ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip
# R1's own files count with five digits out of six: model-00001-of-000163.safetensors.
_SHARD = re.compile(r"(.*)-(\d{5,6})-of-(\d{5,6})\.safetensors")
_INCOMPLETE = "Download the file again; it is damaged or incomplete."


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a file: safetensors dtype, shape, file name in the directory, byte address and length."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


def read_checkpoint_tensors(directory: Path) -> tuple[dict[str, FileTensor], tuple[str, ...]]:
    """All tensors of the checkpoint by name, and notes for the user.

    Reads ``model.safetensors.index.json`` where there is one, else every ``*.safetensors``. Raises InvalidInput for a
    checkpoint in another format, a missing, damaged or dangling file, and an index that disagrees with its files.
    """
    index = directory / INDEX_NAME
    present = sorted(path.name for path in directory.glob("*.safetensors"))
    if not index.exists() and not index.is_symlink():
        if not present:
            _refuse_other_formats(directory)
        for name in present:
            if not _is_file_name(name):
                message = f"the file name {name!r} is not UTF-8"
                raise InvalidInput(message, where=str(directory), hint="Rename the file, for example to model.safetensors.")
        _check_shards_complete(directory, present)
        return _merge(directory, present), ()

    assigned = _read_index(index)
    files = sorted(set(assigned.values()))
    tensors = _merge(directory, files)
    for name, file in assigned.items():
        if name not in tensors or tensors[name].file != file:
            found = f"it lies in {tensors[name].file}" if name in tensors else "no file of the checkpoint holds it"
            message = f"the index says that tensor {name!r} lies in {file}, but {found}"
            raise InvalidInput(message, where=str(index), hint="Download the index and its files from one revision.")
    for name, tensor in tensors.items():
        if name not in assigned:
            message = f"tensor {name!r} of {tensor.file} is not in the index"
            raise InvalidInput(message, where=str(index), hint="Download the index and its files from one revision.")
    others = [name for name in present if name not in files]
    notes = (f"Files that {INDEX_NAME} does not name were not read: {', '.join(others)}.",) if others else ()
    return tensors, notes


def _refuse_other_formats(directory: Path) -> NoReturn:
    for pattern in ("pytorch_model*.bin", "*.pth", "*.pt", "*.bin"):
        found = sorted(path.name for path in directory.glob(pattern))
        if found:
            message = f"{found[0]} is a pickle, which can run code when it is read; only safetensors files are read"
            hint = f"Convert it once, where you trust it:\n{conversion(directory)}"
            raise InvalidInput(message, where=str(directory), hint=hint)
    gguf = sorted(path.name for path in directory.glob("*.gguf"))
    if gguf:
        hint = "Use the original Hugging Face checkpoint with safetensors files."
        raise InvalidInput(f"{gguf[0]} is a GGUF file; only safetensors files are read", where=str(directory), hint=hint)
    hint = "Download the checkpoint's *.safetensors files, or use `config:` with `weights: {random: {seed: 0}}`."
    raise InvalidInput("no *.safetensors file in the checkpoint", where=str(directory), hint=hint)


def conversion(directory: Path) -> str:
    """The command that converts a pickled checkpoint; it needs torch and transformers."""
    target = directory.with_name(directory.name + "-safetensors")
    code = (
        "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; source, target = sys.argv[1:]; "
        "AutoModelForCausalLM.from_pretrained(source, dtype='auto').save_pretrained(target); "
        "AutoTokenizer.from_pretrained(source).save_pretrained(target)"
    )
    return f'    python -c "{code}" {shlex.quote(str(directory))} {shlex.quote(str(target))}'


def _check_shards_complete(directory: Path, present: list[str]) -> None:
    """Without an index the names of the shards say how many there are."""
    there = set(present)
    for name in present:
        match = _SHARD.fullmatch(name)
        if not match:
            continue
        stem, number, total = match.groups()
        expected = (f"{stem}-{i:0{len(number)}d}-of-{total}.safetensors" for i in range(1, int(total) + 1))
        missing = [shard for shard in expected if shard not in there]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            message = f"shard {missing[0]}{more} of {int(total)} is missing"
            raise InvalidInput(message, where=str(directory), hint="Download the missing files.")


def _read_index(index: Path) -> dict[str, str]:
    _, content = read_json_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidInput("the index has no weight_map", where=str(index), hint="Download the index again.")
    for name, file in weight_map.items():
        if not _is_file_name(file):
            message = f"the index places tensor {name!r} in {file!r}, which is not a safetensors file of the directory"
            raise InvalidInput(message, where=str(index), hint="Download the index again; do not use one from elsewhere.")
    return weight_map


def _is_file_name(name: object) -> TypeGuard[str]:
    """Whether ``name`` can be a safetensors file of the directory, which a bundle names in UTF-8."""
    if not isinstance(name, str) or not re.fullmatch(r"[^/\\\0]+\.safetensors", name):
        return False
    try:
        return len(name.encode("utf-8")) <= LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _merge(directory: Path, files: list[str]) -> dict[str, FileTensor]:
    tensors: dict[str, FileTensor] = {}
    for file in files:
        for name, tensor in read_header(directory / file).items():
            if name in tensors:
                message = f"tensor {name!r} lies in {tensors[name].file} and in {file}"
                raise InvalidInput(message, where=str(directory), hint="Keep the files of one checkpoint only.")
            tensors[name] = tensor
    return tensors


def read_header(path: Path) -> dict[str, FileTensor]:
    """The tensors of one file, in the order of its header. Raises InvalidInput for whatever is not a sound file."""
    size, text = _read_header_bytes(path)
    content = _parse_header(path, text)
    start = 8 + len(text)
    tensors = {name: _tensor(path, name, entry, start) for name, entry in content.items() if name != "__metadata__"}
    end, previous = start, ""
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].length)):
        if tensor.offset != end:
            what = f"overlaps {previous!r}" if tensor.offset < end else "is preceded by a gap"
            _damaged(path, f"tensor {name!r} {what}")
        end, previous = tensor.offset + tensor.length, name
    if end > size:
        _damaged(path, f"the header describes {end} bytes, the file has {size}")
    if end < size:
        _damaged(path, f"{size - end} bytes after the last tensor belong to nothing")
    return tensors


def _damaged(path: Path, message: str) -> NoReturn:
    raise InvalidInput(message, where=str(path), hint=_INCOMPLETE)


def _read_header_bytes(path: Path) -> tuple[int, bytes]:
    if path.is_symlink() and not path.exists():
        message = "the file is a symbolic link to a file that does not exist"
        raise InvalidInput(message, where=str(path), hint="Download the checkpoint again; its cache was emptied.")
    try:
        information = path.stat()
        if not stat.S_ISREG(information.st_mode):
            raise InvalidInput("expected a file", where=str(path), hint="Check the checkpoint's directory.")
        with path.open("rb") as file:
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            if len(prefix) < 8:
                _damaged(path, f"the file has {information.st_size} bytes; a safetensors file has at least 8")
            if length > LARGEST_HEADER or length > information.st_size - 8:
                _damaged(path, f"the header claims {length} bytes, the file has {information.st_size}")
            return information.st_size, file.read(length)
    except FileNotFoundError:
        raise InvalidInput("file not found", where=str(path), hint="Download the missing file.") from None
    except OSError as error:
        raise InvalidInput(f"cannot read the file: {error.strerror}", where=str(path), hint="Check its permissions.") from None


def _parse_header(path: Path, text: bytes) -> dict[str, Any]:
    duplicates: list[str] = []

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            names = sorted(name for name, _ in pairs)
            duplicates.extend(a for a, b in itertools.pairwise(names) if a == b)
        return members

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError):
        _damaged(path, "the header is not valid JSON")
    if duplicates:
        _damaged(path, f"{duplicates[0]!r} is given twice in the header")
    if not isinstance(content, dict):
        _damaged(path, "the header is not a JSON object")
    return content


def _tensor(path: Path, name: str, entry: Any, start: int) -> FileTensor:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        _damaged(path, f"tensor {name!r} needs dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        _damaged(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < 2**48 for d in shape):
        _damaged(path, f"tensor {name!r} has the impossible shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(o) is int and 0 <= o < 2**62 for o in offsets):
        _damaged(path, f"tensor {name!r} has the impossible data_offsets {offsets!r}")
    begin, end = offsets
    length = ITEM_BYTES[dtype]
    for dim in shape:
        length *= dim
    if end - begin != length:
        _damaged(path, f"tensor {name!r} of type {dtype}{shape} takes {length} bytes, its data_offsets span {end - begin}")
    return FileTensor(dtype, tuple(shape), path.name, start + begin, length)
