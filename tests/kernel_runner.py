"""Compile a kernel text and call it, for tests of any room.

    kernel = compile_text(text, signature, tmp_path)
    result = kernel.call({"a0": x, "a1": w, "y": np.zeros(...)}, {"tokens": 3}, splits=3)

Every call poisons the scratch and local areas with NaNs, surrounds them and every output and state with red zones, and
puts weights at an odd address: what a kernel may not do shows at once.
"""

import ctypes
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dsr1build.digest import BlobRef, sha256_hex
from dsr1build.graph.signature import Signature
from dsr1build.toolchains.c_code import link_shared
from dsr1build.toolchains.compile import compile_kernel
from dsr1build.toolchains.target import TargetSpec, compile_fields, link_fields

RED_ZONE = 256


@dataclass(frozen=True)
class LoadedKernel:
    """A compiled kernel. ``description`` is its kernel.json; ``temps`` holds the IR after every step and the assembly."""

    library: ctypes.CDLL
    symbol: str
    signature: Signature
    description: dict[str, Any]
    object_file: Path
    temps: Path

    def plan(self, dims: Mapping[str, int]) -> tuple[list[int], int, int]:
        """(items of each phase, scratch bytes, local bytes)"""
        items = (ctypes.c_int64 * max(1, len(self.description["phases"])))()
        sizes = (ctypes.c_int64 * 2)()
        self._function("__plan")(self._dims(dims), items, sizes)
        return list(items)[: len(self.description["phases"])], sizes[0], sizes[1]

    def call(self, arrays: Mapping[str, np.ndarray], dims: Mapping[str, int], splits: int = 1) -> dict[str, np.ndarray]:
        """Run all phases, each over ``splits`` ranges. ``arrays`` has one array for each argument (bf16 as uint16 or
        ml_dtypes); outputs and states are copied in and the results are returned by name. The arrays given are not changed."""
        zones = {
            a.name: _place(np.ascontiguousarray(arrays[a.name]), 1 if a.role == "weight" else 0) for a in self.signature.arguments
        }
        pointers = (ctypes.c_void_p * len(zones))(*[zones[a.name].address for a in self.signature.arguments])
        items, scratch_bytes, local_bytes = self.plan(dims)
        scratch, local = _Zone(scratch_bytes), _Zone(local_bytes)
        for phase, count in enumerate(items):
            function = self._function(f"__p{phase}")
            cuts = [count * k // splits for k in range(splits + 1)]
            for lo, hi in [*itertools.pairwise(cuts), (0, 0), (count, count)]:
                local.poison()
                function(
                    pointers,
                    self._dims(dims),
                    ctypes.c_void_p(scratch.address),
                    ctypes.c_void_p(local.address),
                    ctypes.c_int64(lo),
                    ctypes.c_int64(hi),
                )
        for name, zone in {**zones, "scratch": scratch, "local": local}.items():
            assert zone.intact(), f"the kernel wrote outside {name!r}"
        for a in self.signature.arguments:
            if a.role in ("input", "weight"):
                assert zones[a.name].bytes().tobytes() == np.ascontiguousarray(arrays[a.name]).tobytes(), (
                    f"the kernel changed {a.name!r}"
                )
        return {
            a.name: zones[a.name].bytes().copy().view(arrays[a.name].dtype).reshape(arrays[a.name].shape)
            for a in self.signature.arguments
            if a.role in ("state", "output")
        }

    def _dims(self, dims: Mapping[str, int]) -> "ctypes.Array[ctypes.c_int64]":
        return (ctypes.c_int64 * max(1, len(self.signature.dims)))(*[dims[d] for d in self.signature.dims])

    def _function(self, suffix: str) -> Any:
        function = getattr(self.library, self.symbol + suffix)
        function.restype = None
        return function


@dataclass
class _Zone:
    """Bytes between two red zones; the first byte is 64-byte aligned, plus ``offset``."""

    size: int
    offset: int = 0
    memory: np.ndarray = field(init=False)
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.memory = np.full(self.size + 2 * RED_ZONE + 64, 0x5A, np.uint8)
        self.start = RED_ZONE + (-(self.memory.ctypes.data + RED_ZONE)) % 64 + self.offset
        self.poison()

    @property
    def address(self) -> int:
        return self.memory.ctypes.data + self.start

    def bytes(self) -> np.ndarray:
        return self.memory[self.start : self.start + self.size]

    def poison(self) -> None:
        self.bytes()[:] = 0xFF

    def intact(self) -> bool:
        return bool((self.memory[: self.start] == 0x5A).all() and (self.memory[self.start + self.size :] == 0x5A).all())


def _place(array: np.ndarray, offset: int) -> _Zone:
    zone = _Zone(array.nbytes, offset)
    zone.bytes()[:] = array.reshape(-1).view(np.uint8)
    return zone


def compile_text(
    text: str,
    signature: Signature,
    workdir: Path,
    schedules: Mapping[str, Mapping[str, int]] | None = None,
    target: TargetSpec | None = None,
) -> LoadedKernel:
    """Compile in this process, link and load. ``schedules`` replaces schedule options, as a target file can."""
    workdir.mkdir(parents=True, exist_ok=True)
    text_blob = _store(workdir, text.encode())
    signature_blob = _store(workdir, json.dumps(signature.to_json(), sort_keys=True).encode())
    spec = target or TargetSpec(schedules=schedules or {})
    fields = compile_fields(text_blob, text, signature_blob, spec, remembered=_remembered(workdir))
    temps = workdir / "temps"
    compile_kernel(fields, workdir, workdir, temps)
    description = json.loads((workdir / "kernel.json").read_text())
    symbol = description["symbol"]
    functions = [f"{symbol}__p{k}" for k in range(len(description["phases"]))]
    code = _store(workdir, (workdir / "kernel.o").read_bytes())
    # dlopen caches by path: the file is named by the symbol, which is different for different code.
    link_shared(
        link_fields([code], [*functions, f"{symbol}__plan"], f"{symbol}.so", remembered=_remembered(workdir)), workdir, workdir
    )
    library = ctypes.CDLL(str(workdir / f"{symbol}.so"))
    return LoadedKernel(library, symbol, signature, description, workdir / "kernel.o", temps)


def _store(directory: Path, data: bytes) -> BlobRef:
    blob = BlobRef(sha256_hex(data))
    (directory / blob.sha256).write_bytes(data)
    return blob


def _remembered(workdir: Path) -> Path:
    """Digests of the tools, shared by all tests of a run (and by the next run, where pytest keeps its directories)."""
    return workdir.resolve().parents[1] / "tool-digests.json"
