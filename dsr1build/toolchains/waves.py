"""Which phases of a kernel may run side by side: waves, from the buffers that each phase reads and writes."""

from collections.abc import Sequence

from mlir import ir

from dsr1build.errors import BuildFailed
from dsr1build.toolchains.rewrite import all_operations

VIEWS = frozenset({"memref.cast", "memref.subview", "memref.expand_shape", "memref.collapse_shape", "memref.reinterpret_cast"})
_READERS = frozenset({"memref.load", "vector.load", "vector.transfer_read"})


def _root(value: ir.Value) -> ir.Value:
    """The kernel's argument or the allocation behind a view. Raises BuildFailed where it is neither: waves, and the
    promise that no two buffers overlap, rest on knowing every buffer."""
    while not isinstance(value.owner, ir.Block) and value.owner.operation.name in VIEWS:
        value = value.owner.operation.operands[0]
    source = value.owner.owner if isinstance(value.owner, ir.Block) else value.owner
    if source.operation.name != ("func.func" if isinstance(value.owner, ir.Block) else "memref.alloc"):
        raise BuildFailed(f"a buffer comes out of {source.operation.name}, not of an argument or an allocation", where="@kernel")
    return value


def phase_waves(groups: Sequence[Sequence[ir.Operation]]) -> list[int]:
    """The earliest wave of each phase: after every earlier phase that shares a buffer with it, unless both only read."""
    seen: list[tuple[set[ir.Value], set[ir.Value], int]] = []
    for members in groups:
        reads: set[ir.Value] = set()
        writes: set[ir.Value] = set()
        for op in (inner for member in members for inner in all_operations(member)):
            buffers = [v for v in op.operands if isinstance(v.type, ir.MemRefType)]
            if not buffers or op.name in VIEWS or op.name == "memref.dim":
                continue
            if op.name.startswith("linalg."):
                outputs = op.attributes["operandSegmentSizes"][1]
                reads |= {_root(v) for v in buffers}
                writes |= {_root(v) for v in list(op.operands)[-outputs:]}
            elif op.name in _READERS:
                reads |= {_root(v) for v in buffers}
            else:
                writes |= {_root(v) for v in buffers}
        wave = max((w + 1 for r, written, w in seen if writes & (r | written) or reads & written), default=0)
        seen.append((reads, writes, wave))
    return [wave for _, _, wave in seen]
