"""Cuts one bufferized kernel function into phases with the uniform ABI, and writes its plan function.

In comes ``func.func @kernel`` on memrefs: at its top level stand scf.forall loops (one phase each), other effects (runs of
them are one serial phase) and pure index arithmetic. Out come, for each phase I, ``<symbol>__pI`` and, for all,
``<symbol>__plan`` (docs/architecture.md, "Kernel ABI"). Allocations at the top level live in the scratch area,
allocations inside a phase in the worker's local area.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mlir import ir
from mlir.dialects import arith, builtin, func, linalg, llvm, scf

from dsr1build.errors import BuildFailed
from dsr1build.graph.signature import Signature
from dsr1build.toolchains import sizes
from dsr1build.toolchains.pipeline import place
from dsr1build.toolchains.rewrite import all_operations
from dsr1build.toolchains.sizes import Size
from dsr1build.toolchains.waves import VIEWS, phase_waves

# Buffers are padded to whole cache lines, so that two of them never share one.
BUFFER_ALIGNMENT = 64

_PURE = VIEWS | {"memref.dim", "memref.extract_strided_metadata", "memref.alloc", "affine.apply", "affine.min", "affine.max"}


@dataclass(frozen=True, slots=True)
class Phase:
    """``items`` is the length of the phase's range [lo, hi); ``parallel`` is False for a serial phase (one item)."""

    wave: int
    parallel: bool
    items: Size


@dataclass(frozen=True, slots=True)
class Outlined:
    """``scratch`` and ``local`` in bytes."""

    phases: tuple[Phase, ...]
    scratch: Size
    local: Size


@dataclass(frozen=True, slots=True)
class _Area:
    """Where the buffers of a memory area lie: byte offsets in order of the allocations, and the total."""

    offsets: tuple[Size, ...]
    total: Size


def outline(module: ir.Module, symbol: str, signature: Signature) -> Outlined:
    """Replace ``@kernel`` by its phases and its plan. Raises BuildFailed where a state or output is not written in place,
    or where a size depends on more than the run-time dimensions."""
    kernel = next(op for op in module.body.operations if op.operation.name == "func.func")
    with ir.Location.unknown(module.context):
        _check_in_place(kernel, signature)
        top = [op.operation for op in kernel.entry_block.operations]
        groups = _group(top)
        names = dict(zip(list(kernel.entry_block.arguments)[len(signature.arguments) :], signature.dims, strict=True))
        scratch = _area([op for op in top if op.name == "memref.alloc"], names, "scratch")
        locals_ = [
            _area(all_operations_inside([top[k] for k in members if top[k].name != "memref.alloc"]), names, "local")
            for _, members in groups
        ]
        items = [_items(top[members[0]], names) if parallel else 1 for parallel, members in groups]
        local: Size = 0
        for area in locals_:
            local = sizes.combine("max", local, area.total)
        waves = phase_waves([[top[k] for k in members] for _, members in groups])
        for number, (parallel, members) in enumerate(groups):
            _emit_phase(module, kernel, signature, f"{symbol}__p{number}", parallel, members, scratch, locals_[number])
        _emit_plan(module, symbol, signature, items, scratch.total, local)
        kernel.operation.erase()
    phases = tuple(Phase(w, p, n) for w, (p, _), n in zip(waves, groups, items, strict=True))
    return Outlined(phases, scratch.total, local)


# ---- reading the kernel ----------------------------------------------------------------------------------------------


def _check_in_place(kernel: ir.OpView, signature: Signature) -> None:
    arguments = list(kernel.entry_block.arguments)
    written = [k for k, a in enumerate(signature.arguments) if a.role in ("state", "output")]
    returned = list(list(kernel.entry_block.operations)[-1].operation.operands)
    for value, k in zip(returned, written, strict=True):
        if value != arguments[k]:
            argument = signature.arguments[k]
            raise BuildFailed(
                f"{argument.role} {argument.name!r} is not updated in place",
                where="@kernel",
                hint=f"Compute the result into %{argument.name}, and read only the updated value after it.",
            )


def is_pure(op: ir.Operation) -> bool:
    return op.name in _PURE or op.name.startswith(("arith.", "index.", "math.", "ub."))


def _group(top: Sequence[ir.Operation]) -> list[tuple[bool, list[int]]]:
    """(parallel, positions) of each phase: every scf.forall, and every run of other effects."""
    groups: list[tuple[bool, list[int]]] = []
    for k, op in enumerate(top[:-1]):
        if is_pure(op):
            continue
        if op.name == "scf.forall":
            groups.append((True, [k]))
        elif groups and not groups[-1][0]:
            groups[-1][1].append(k)
        else:
            groups.append((False, [k]))
    return groups


def all_operations_inside(roots: Iterable[ir.Operation]) -> list[ir.Operation]:
    """The allocations inside the given operations, in a fixed order."""
    return [op.operation for root in roots for op in all_operations(root, ["memref.alloc"])]


def _area(allocations: Sequence[ir.Operation], names: Mapping[ir.Value, str], label: str) -> _Area:
    """Lay buffers one after the other; each allocation is marked with its number, which survives cloning."""
    offsets: list[Size] = []
    total: Size = 0
    for number, op in enumerate(allocations):
        op.attributes[f"{label}_buffer"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
        offsets.append(total)
        total = sizes.combine("+", total, _byte_size(op, names))
    return _Area(tuple(offsets), total)


def _byte_size(alloc: ir.Operation, names: Mapping[ir.Value, str]) -> Size:
    type_ = ir.MemRefType(alloc.results[0].type)
    size: Size = _item_bytes(type_.element_type)
    dynamic: list[Size] = []
    try:
        dynamic = [sizes.upper_bound(v, names) for v in alloc.operands]
    except sizes.NotOfDims as error:
        raise BuildFailed(
            f"the size of a temporary {type_} depends on {error}, not only on the run-time dimensions",
            where=place(alloc.location),
        ) from error
    for extent in type_.shape:
        if extent != ir.ShapedType.get_dynamic_size():
            size = sizes.combine("*", size, extent)
    for extent in dynamic:
        size = sizes.combine("*", extent, size)
    return sizes.combine("*", sizes.combine("ceildiv", size, BUFFER_ALIGNMENT), BUFFER_ALIGNMENT)


def _item_bytes(type_: ir.Type) -> int:
    width: int = 64 if isinstance(type_, ir.IndexType) else type_.width
    return (width + 7) // 8


def _items(forall: ir.Operation, names: Mapping[ir.Value, str]) -> Size:
    count: Size = 1
    for bound in _bounds(forall):
        try:
            count = sizes.combine("*", count, bound if isinstance(bound, int) else sizes.exact(bound, names))
        except sizes.NotOfDims as error:
            raise BuildFailed(
                f"the number of work items depends on {error}, not only on the run-time dimensions", where=place(forall.location)
            ) from error
    return count


def _bounds(forall: ir.Operation) -> list[int | ir.Value]:
    """The upper bounds of a normalized scf.forall (lower bounds 0, steps 1)."""
    loop = forall.opview
    if any(v != 0 for v in loop.staticLowerBound) or any(v != 1 for v in loop.staticStep):
        raise BuildFailed("a parallel loop does not count from 0 by 1", where=place(forall.location))
    dynamic = iter(loop.dynamicUpperBound)
    return [next(dynamic) if s == ir.ShapedType.get_dynamic_size() else s for s in loop.staticUpperBound]


# ---- writing the phases ----------------------------------------------------------------------------------------------


def _pointer() -> ir.Type:
    return ir.Type.parse("!llvm.ptr")


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _to_index(value: ir.Value) -> ir.Value:
    return arith.index_cast(ir.IndexType.get(), value)


def _to_i64(value: ir.Value) -> ir.Value:
    return arith.index_cast(_i64(), value)


def _load(base: ir.Value, k: int, type_: ir.Type) -> ir.Value:
    """Entry k of a table of 8-byte entries."""
    address = llvm.GEPOp(_pointer(), base, [], ir.DenseI32ArrayAttr.get([k]), _i64(), None)
    return llvm.LoadOp(type_, address.result).result


def _store(base: ir.Value, k: int, value: ir.Value) -> None:
    address = llvm.GEPOp(_pointer(), base, [], ir.DenseI32ArrayAttr.get([k]), _i64(), None)
    llvm.StoreOp(value, address.result)


def _at(base: ir.Value, offset: ir.Value) -> ir.Value:
    """``base`` plus an index of bytes. The constant marks the one dynamic index of the GEP."""
    dynamic = ir.DenseI32ArrayAttr.get([-(2**31)])
    return llvm.GEPOp(_pointer(), base, [_to_i64(offset)], dynamic, ir.IntegerType.get_signless(8), None).result


def _memref(pointer: ir.Value, type_: ir.MemRefType, dynamic: Iterable[ir.Value]) -> ir.Value:
    """A contiguous memref over a raw pointer: the descriptor is built by hand and cast once."""
    rank = type_.rank
    arrays = f", array<{rank} x i64>, array<{rank} x i64>" if rank else ""
    descriptor = llvm.UndefOp(ir.Type.parse(f"!llvm.struct<(ptr, ptr, i64{arrays})>")).result

    def insert(value: ir.Value, *position: int) -> None:
        nonlocal descriptor
        descriptor = llvm.InsertValueOp(descriptor, value, ir.DenseI64ArrayAttr.get(position)).result

    def constant(value: int) -> ir.Value:
        return llvm.ConstantOp(_i64(), ir.IntegerAttr.get(_i64(), value)).result

    insert(pointer, 0)
    insert(pointer, 1)
    insert(constant(0), 2)
    left = iter(dynamic)
    extents = [_to_i64(next(left)) if s == ir.ShapedType.get_dynamic_size() else constant(s) for s in type_.shape]
    stride = constant(1)
    for k in reversed(range(rank)):
        insert(extents[k], 3, k)
        insert(stride, 4, k)
        if k:
            stride = llvm.MulOp(stride, extents[k], ir.Attribute.parse("#llvm.overflow<none>")).result
    return builtin.unrealized_conversion_cast([type_], [descriptor])


def _emit_phase(
    module: ir.Module,
    kernel: ir.OpView,
    signature: Signature,
    name: str,
    parallel: bool,
    members: Sequence[int],
    scratch: _Area,
    local: _Area,
) -> None:
    """Two functions: ``<name>_body``, where every base pointer is a noalias parameter of its own, and the entry point."""
    clone = kernel.operation.clone()
    source = clone.regions[0].blocks[0]
    _keep(source, members)
    arguments = list(source.arguments)
    count = len(signature.arguments)
    used = [k for k in range(count) if list(arguments[k].uses)]
    buffers = [op.operation for op in source.operations if op.operation.name == "memref.alloc"]
    numbers = [int(op.attributes["scratch_buffer"].value) for op in buffers]

    noalias: dict[str, ir.Attribute] = {"llvm.noalias": ir.UnitAttr.get()}
    readonly = {**noalias, "llvm.readonly": ir.UnitAttr.get()}
    attributes = [readonly if signature.arguments[k].role in ("input", "weight") else noalias for k in used]
    temporaries = len(buffers) + len(local.offsets)
    attributes += [noalias] * temporaries + [{}] * (len(signature.dims) + 2)
    types = [_pointer()] * (len(used) + temporaries) + [_i64()] * (len(signature.dims) + 2)
    with ir.InsertionPoint(module.body):
        body = func.FuncOp(f"{name}_body", ir.FunctionType.get(types, []), visibility="private")
    body.attributes["llvm.linkage"] = ir.Attribute.parse("#llvm.linkage<internal>")
    body.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(a) for a in attributes])
    entry = body.add_entry_block()
    parameters = list(entry.arguments)
    pointers, rest = parameters[: len(used)], parameters[len(used) :]
    scratch_pointers, local_pointers = rest[: len(buffers)], rest[len(buffers) : temporaries]
    numbers_in = rest[temporaries:]
    with ir.InsertionPoint(entry):
        dims = {d: _to_index(v) for d, v in zip(signature.dims, numbers_in[:-2], strict=True)}
        lo, hi = _to_index(numbers_in[-2]), _to_index(numbers_in[-1])
        for old, d in zip(arguments[count:], signature.dims, strict=True):
            old.replace_all_uses_with(dims[d])
        for k, pointer in zip(used, pointers, strict=True):
            dynamic = [dims[s] for s in signature.arguments[k].type.shape if isinstance(s, str)]
            arguments[k].replace_all_uses_with(_memref(pointer, ir.MemRefType(arguments[k].type), dynamic))
        if not parallel:
            # A serial phase is a loop of one item too: an empty range must do nothing, for in-place updates do not repeat.
            serial = scf.ForOp(lo, hi, sizes.index(1))
        end = func.ReturnOp([]).operation
    if not parallel:
        with ir.InsertionPoint(serial.body):
            end = scf.YieldOp([]).operation
    for op in list(source.operations):
        op.operation.move_before(end)
    for op, pointer in zip(buffers, scratch_pointers, strict=True):
        _replace_alloc(op, pointer)
    for op in all_operations(body.operation, ["memref.alloc"]):
        _replace_alloc(op, local_pointers[int(op.attributes["local_buffer"].value)])
    if parallel:
        _flatten(next(op.operation for op in entry.operations if op.operation.name == "scf.forall"), lo, hi)
    for op in all_operations(body.operation, ["memref.copy"]):
        with ir.InsertionPoint(op):
            linalg.copy(op.operands[0], outs=[op.operands[1]])
        op.erase()

    with ir.InsertionPoint(module.body):
        wrapper = func.FuncOp(name, ir.FunctionType.get([_pointer()] * 4 + [_i64()] * 2, []))
    with ir.InsertionPoint(wrapper.add_entry_block()):
        bufs, dims_table, scratch_base, local_base, lo, hi = wrapper.arguments
        raw = [_load(dims_table, k, _i64()) for k in range(len(signature.dims))]
        dims = {d: _to_index(v) for d, v in zip(signature.dims, raw, strict=True)}
        operands = [_load(bufs, k, _pointer()) for k in used]
        operands += [_at(scratch_base, sizes.emit(scratch.offsets[n], dims)) for n in numbers]
        operands += [_at(local_base, sizes.emit(offset, dims)) for offset in local.offsets]
        func.CallOp([], f"{name}_body", [*operands, *raw, lo, hi])
        func.ReturnOp([])


def _keep(block: ir.Block, members: Sequence[int]) -> None:
    """Erase the terminator, every effect that is not a member, and then every pure operation without a use."""
    ops = [op.operation for op in block.operations]
    ops[-1].erase()
    for k in reversed(range(len(ops) - 1)):
        if not is_pure(ops[k]):
            if k not in members:
                ops[k].erase()
        elif not any(list(result.uses) for result in ops[k].results):
            ops[k].erase()


def _replace_alloc(op: ir.Operation, pointer: ir.Value) -> None:
    with ir.InsertionPoint(op):
        op.results[0].replace_all_uses_with(_memref(pointer, ir.MemRefType(op.results[0].type), op.operands))
    op.erase()


def _flatten(forall: ir.Operation, lo: ir.Value, hi: ir.Value) -> None:
    """``scf.forall (i, j) in (n, m)`` becomes one loop from lo to hi, with i and j in row-major order."""
    bounds = _bounds(forall)
    with ir.InsertionPoint(forall):
        upper = [sizes.index(b) if isinstance(b, int) else b for b in bounds]
        loop = scf.ForOp(lo, hi, sizes.index(1))
    source = forall.regions[0].blocks[0]
    with ir.InsertionPoint(loop.body):
        item = loop.induction_variable
        counters: list[ir.Value] = []
        for extent in reversed(upper[1:]):
            counters.append(arith.remui(item, extent))
            item = arith.divui(item, extent)
        counters.append(item)
        end = scf.YieldOp([]).operation
    for old, new in zip(list(source.arguments), reversed(counters), strict=True):
        old.replace_all_uses_with(new)
    for op in list(source.operations):
        if op.operation.name != "scf.forall.in_parallel":
            op.operation.move_before(end)
    forall.erase()


def _emit_plan(module: ir.Module, symbol: str, signature: Signature, items: Sequence[Size], scratch: Size, local: Size) -> None:
    with ir.InsertionPoint(module.body):
        plan = func.FuncOp(f"{symbol}__plan", ir.FunctionType.get([_pointer()] * 3, []))
    with ir.InsertionPoint(plan.add_entry_block()):
        dims_table, items_table, bytes_table = plan.arguments
        dims = {d: _to_index(_load(dims_table, k, _i64())) for k, d in enumerate(signature.dims)}
        for k, size in enumerate(items):
            _store(items_table, k, _to_i64(sizes.emit(size, dims)))
        for k, size in enumerate((scratch, local)):
            _store(bytes_table, k, _to_i64(sizes.emit(size, dims)))
        func.ReturnOp([])
