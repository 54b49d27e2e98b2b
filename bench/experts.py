"""Which token buckets of the expert kernel are worth compiling: each against the range variant, interleaved.

    python bench/experts.py [--quick] [--json FILE]

The kernel has R1's true shapes (hidden 7168, intermediate 2048) with bf16 weights; --quick takes a quarter of each.
A bucket pays when its ratio is well below 1. One thread; each repetition reads another copy of the weights, so that they
come from memory as they do in a model of 256 experts.
"""

import ctypes
import shutil
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from rows import Row, arguments, median, report

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from dsr1build.graph.model import Node, TensorType
from dsr1build.graph.signature import Argument, Signature, Specialization
from dsr1build.lower.kernel_source import lower_kernel
from kernel_runner import LoadedKernel, compile_text

WEIGHT_COPIES = 4


def expert(hidden: int, width: int, specialization: Specialization, work: Path) -> LoadedKernel:
    """SwiGLU and the projection back, compiled for one specialization."""
    arguments = (
        Argument("x", "input", TensorType("f32", ("tokens", hidden))),
        Argument("gate", "weight", TensorType("bf16", (width, hidden))),
        Argument("up", "weight", TensorType("bf16", (width, hidden))),
        Argument("down", "weight", TensorType("bf16", (hidden, width))),
        Argument("y", "output", TensorType("f32", ("tokens", hidden))),
    )
    nodes = (Node("SwiGLU", ("x", "gate", "up"), ("h",)), Node("Linear", ("h", "down"), ("o",)))
    source = lower_kernel(nodes, Signature(arguments, ("tokens",)), ("o",), specialization)
    return compile_text(source.text, source.signature, work / str(specialization).replace("<=", "le"))


class Caller:
    """A kernel with its buffers, called phase by phase without checks so that only the kernel is timed."""

    def __init__(self, kernel: LoadedKernel, rows: int, tokens: int, hidden: int, weights: list[list[np.ndarray]]) -> None:
        self.kernel = kernel
        self.dims = (ctypes.c_int64 * 1)(tokens)
        self.items, scratch, local = kernel.plan({"tokens": tokens})
        self.x = np.ones((rows, hidden), np.float32)
        self.y = np.zeros((rows, hidden), np.float32)
        self.areas = np.zeros(scratch + local + 128, np.uint8)
        start = self.areas.ctypes.data + (-self.areas.ctypes.data) % 64
        self.scratch, self.local = ctypes.c_void_p(start), ctypes.c_void_p(start + (scratch + 63) // 64 * 64)
        self.buffers = [
            (ctypes.c_void_p * 5)(self.x.ctypes.data, *(w.ctypes.data for w in ws), self.y.ctypes.data) for ws in weights
        ]
        self.phases = [getattr(kernel.library, f"{kernel.symbol}__p{p}") for p in range(len(self.items))]

    def seconds(self, copy: int) -> float:
        started = time.perf_counter()
        for phase, count in zip(self.phases, self.items, strict=True):
            phase(self.buffers[copy], self.dims, self.scratch, self.local, ctypes.c_int64(0), ctypes.c_int64(count))
        return time.perf_counter() - started


def main() -> int:
    options = arguments("Token buckets of the expert kernel against its range variant.")
    scale = 4 if options.quick else 1
    hidden, width = 7168 // scale, 2048 // scale
    work = Path(tempfile.mkdtemp(prefix="dsr1build-bench-"))
    generator = np.random.default_rng(0)
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    weights = [
        [(generator.standard_normal(s, np.float32) / 64).view(np.uint32).__rshift__(16).astype(np.uint16) for s in shapes]
        for _ in range(WEIGHT_COPIES)
    ]
    try:
        rows: list[Row] = []
        anything = expert(hidden, width, Specialization("range"), work)
        buckets = [(1, 1), (2, 2), (4, 4), (8, 8), (16, 16), (5, 8), (12, 16)]
        compiled = {n: expert(hidden, width, Specialization("padded", n), work) for n in sorted({b for _, b in buckets})}
        for tokens, bucket in buckets:
            fixed = Caller(compiled[bucket], bucket, tokens, hidden, weights)
            free = Caller(anything, tokens, tokens, hidden, weights)
            repetitions = 5 if options.quick else 15
            pairs = [(fixed.seconds(k % WEIGHT_COPIES), free.seconds((k + 1) % WEIGHT_COPIES)) for k in range(repetitions)]
            ratio = median([a / b for a, b in pairs])
            ours, theirs = (median([pair[k] for pair in pairs]) * 1e3 for k in (0, 1))
            times = f"{ours:.2f} ms to {theirs:.2f} ms of the range variant"
            rows.append(Row(f"{tokens} tokens in the bucket of {bucket}", ratio, "of the range variant's time", times))
        return report(rows, options.json)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
