"""A program as C source: the constant tables of dsr1build/runtime/c/program.h.

The text is a function of the program alone: equal programs give equal bytes, and neither the weights' location nor the
context length is in it.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence

from dsr1build.graph.model import ITEM_BYTES, RUNTIME_DIMS, Dim, DType, TensorType
from dsr1build.link.program import ABI, MOST_RANK, DispatchStep, ModeProgram, Program, ProgramKernel

# The numbers of element types in weights.bind and in the tables.
DTYPE_NUMBERS: dict[DType, int] = {"f32": 0, "bf16": 1, "f16": 2, "f8e4m3fn": 3, "i64": 4, "i32": 5, "i8": 6}
CONTEXT_EXTENT = -1
_GUARDS = {"exact": "DSR1_GUARD_EXACT", "padded": "DSR1_GUARD_PADDED", "range": "DSR1_GUARD_RANGE"}


def program_digest(program: Program) -> bytes:
    """SHA-256 (32 bytes) of the tables: weights.bind carries it, so that a binding meets only its own program."""
    return hashlib.sha256(_tables(program).encode()).digest()


def program_tables(program: Program) -> str:
    """The C source that defines ``dsr1_the_program``. Compile it with dsr1build/runtime/c as an include directory."""
    body = _tables(program)
    digest = ", ".join(map(str, hashlib.sha256(body.encode()).digest()))
    return body.replace("@DIGEST@", digest)


def kernel_symbols(program: Program) -> tuple[str, ...]:
    """The symbol of every compiled variant that the tables refer to, each once, in order."""
    return tuple(dict.fromkeys(v.symbol for kernel in program.kernels for v in kernel.variants))


def _tables(program: Program) -> str:
    arguments = _Pool([])
    types = _Pool([])
    lines = ["/* Written by dsr1build: a compiled model as data. */", '#include "program.h"', ""]
    for symbol in kernel_symbols(program):
        phases = next(len(v.phases) for kernel in program.kernels for v in kernel.variants if v.symbol == symbol)
        lines += [
            f"void {symbol}__p{i}(void *const *, const int64_t *, void *, void *, int64_t, int64_t);" for i in range(phases)
        ]
        lines.append(f"void {symbol}__plan(const int64_t *, int64_t *, int64_t *);")
    lines.append("")
    for number, kernel in enumerate(program.kernels):
        lines += _kernel_lines(number, kernel)
    lines += _array("static const dsr1_kernel kernels[]", [_kernel_entry(i, k) for i, k in enumerate(program.kernels)])
    for name, mode in (("prefill", program.prefill), ("decode", program.decode)):
        lines += _mode_lines(name, mode, arguments)
    lines += _array(
        "static const int32_t weight_types[]", [str(types.place([_type_entry(type_)])) for _, type_ in program.weights] or ["0"]
    )
    lines += _array(
        "static const int32_t state_types[]", [str(types.place([_type_entry(type_)])) for _, type_ in program.states] or ["0"]
    )
    lines += _array("static const dsr1_tensor_type types[]", types.entries or ["{0}"])
    lines += _array("static const int32_t arguments[]", arguments.entries)
    fields = [
        ("abi", str(ABI)),
        ("digest", "{@DIGEST@}"),
        ("features", json.dumps(" ".join(program.features))),
        ("chunk", str(program.chunk)),
        ("vocabulary", str(program.vocabulary)),
        ("arena_bytes", str(program.arena_bytes)),
        ("kernels", "kernels"),
        ("types", "types"),
        ("weight_types", "weight_types"),
        ("state_types", "state_types"),
        ("arguments", "arguments"),
        ("kernel_count", str(len(program.kernels))),
        ("weight_count", str(len(program.weights))),
        ("state_count", str(len(program.states))),
        ("modes", f"{{{_mode_entry('prefill', program.prefill)}, {_mode_entry('decode', program.decode)}}}"),
    ]
    lines += ["const dsr1_program dsr1_the_program = {", *(f"    .{name} = {value}," for name, value in fields), "};", ""]
    return "\n".join(lines)


class _Pool:
    """A flat array in which equal runs of entries are stored once."""

    def __init__(self, entries: list[str]) -> None:
        self.entries = entries
        self.known: dict[tuple[str, ...], int] = {}

    def place(self, run: Iterable[str]) -> int:
        """The index at which the run starts."""
        key = tuple(run)
        if key not in self.known:
            self.known[key] = len(self.entries)
            self.entries += key
        return self.known[key]


def _array(declaration: str, entries: Sequence[str]) -> list[str]:
    """An array with as many entries on a line as fit into 118 columns."""
    lines = [f"{declaration} = {{"]
    line = "   "
    for entry in entries:
        if len(line) + len(entry) + 2 > 118 and line.strip():
            lines.append(line)
            line = "   "
        line += f" {entry},"
    return [*lines, line, "};"]


def _kernel_lines(number: int, kernel: ProgramKernel) -> list[str]:
    lines = []
    for v, variant in enumerate(kernel.variants):
        symbol = variant.symbol
        lines += _array(f"static const dsr1_phase phases_{number}_{v}[]", [f"{symbol}__p{i}" for i in range(len(variant.phases))])
        lines += _array(f"static const int8_t waves_{number}_{v}[]", [str(phase.wave) for phase in variant.phases])
    entries = []
    for v, variant in enumerate(kernel.variants):
        dims = ", ".join(str(RUNTIME_DIMS.index(d)) for d in variant.signature.dims) or "0"
        tokens = variant.specialization.tokens if variant.specialization.guard != "range" else 0
        entries.append(
            f"{{phases_{number}_{v}, waves_{number}_{v}, {variant.symbol}__plan, {tokens}, {len(variant.phases)}, "
            f"{_GUARDS[variant.specialization.guard]}, {len(variant.signature.dims)}, {{{dims}}}}}"
        )
    return [*lines, *_array(f"static const dsr1_variant variants_{number}[]", entries)]


def _kernel_entry(number: int, kernel: ProgramKernel) -> str:
    arguments = kernel.signature.arguments
    inputs = sum(a.role == "input" for a in arguments)
    return f"{{{json.dumps(kernel.id)}, variants_{number}, {len(kernel.variants)}, {len(arguments)}, {inputs}}}"


def _mode_lines(name: str, mode: ModeProgram, arguments: _Pool) -> list[str]:
    lines = _array(f"static const dsr1_buffer {name}_buffers[]", [f"{{{b.offset}, {b.row_bytes}}}" for b in mode.buffers])
    steps = []
    for number, step in enumerate(mode.steps):
        label = json.dumps(step.name)
        if isinstance(step, DispatchStep):
            lines += _dispatch_lines(f"{name}_{number}", step, arguments)
            steps.append(f"{{{label}, -1, 0, &dispatch_{name}_{number}}}")
        else:
            steps.append(f"{{{label}, {step.kernel}, {arguments.place(map(str, step.arguments))}, 0}}")
    return [*lines, *_array(f"static const dsr1_step {name}_steps[]", steps)]


def _dispatch_lines(label: str, step: DispatchStep, arguments: _Pool) -> list[str]:
    experts = [f"{{{kernel}, {arguments.place(map(str, weights))}}}" for kernel, weights in step.experts]
    return [
        *_array(f"static const dsr1_expert experts_{label}[]", experts),
        f"static const dsr1_dispatch dispatch_{label} = {{{step.input}, {step.weights}, {step.mask}, {step.slots}, "
        f"{step.slot_weights}, {len(experts)}, {step.top_k}, {step.hidden}, experts_{label}}};",
    ]


def _mode_entry(name: str, mode: ModeProgram) -> str:
    counts = f"{len(mode.buffers)}, {len(mode.steps)}"
    return f"{{{mode.rows}, {name}_buffers, {name}_steps, {counts}, {mode.ids}, {mode.logits}}}"


def _type_entry(type_: TensorType) -> str:
    extents = [_extent(d) for d in type_.shape] + ["0"] * (MOST_RANK - len(type_.shape))
    return f"{{{DTYPE_NUMBERS[type_.dtype]}, {ITEM_BYTES[type_.dtype]}, {len(type_.shape)}, {{{', '.join(extents)}}}}}"


def _extent(dim: Dim) -> str:
    if dim == "context":
        return str(CONTEXT_EXTENT)
    if isinstance(dim, int):
        return str(dim)
    raise ValueError(f"a weight or state cannot have the extent {dim!r}")
