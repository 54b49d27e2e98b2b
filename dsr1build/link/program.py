"""The program of a bundle: what the runtime does for each mode, step by step.

A program depends on the partitioned model, its compiled variants and the recipe's chunk, and on nothing else: not on the
context length, and not on where the weights lie. ``dsr1build.link.tables`` writes it as C.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from dsr1build.errors import BuildFailed, InvalidInput
from dsr1build.graph.model import ITEM_BYTES, Kind, Mode, TensorType
from dsr1build.graph.signature import Signature, Specialization
from dsr1build.link.arena import Lifetime, plan_arena
from dsr1build.partition.model import ExpertDispatch, Kernel, Partition, PartitionedModel

ABI = 1
MODES: tuple[Mode, ...] = ("prefill", "decode")
# The limits of dsr1build/runtime/c/program.h.
MOST_ARGUMENTS = 48
MOST_PHASES = 64
MOST_RANK = 4


@dataclass(frozen=True, slots=True)
class Phase:
    """``items`` is the formula of the number of items as text; the object's ``<symbol>__plan`` is the authority."""

    wave: int
    parallel: bool
    items: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One compiled kernel. ``signature`` is the specialized one; ``scratch`` and ``local`` are formulas of bytes."""

    specialization: Specialization
    symbol: str
    signature: Signature
    phases: tuple[Phase, ...]
    scratch: str
    local: str


@dataclass(frozen=True, slots=True)
class ProgramKernel:
    """A kernel with its variants, from the tightest guard to the loosest."""

    id: str
    kind: Kind
    signature: Signature
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Buffer:
    """A value in the arena. ``row_bytes`` is what one token takes, 0 if the size does not depend on the tokens."""

    name: str
    row_bytes: int
    size: int
    offset: int


@dataclass(frozen=True, slots=True)
class KernelStep:
    """Call kernel number ``kernel`` on tensors by number (see Program)."""

    name: str
    kind: Kind
    kernel: int
    arguments: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DispatchStep:
    """Run the chosen experts of one layer. ``experts``: (kernel number, numbers of its weights) in expert order."""

    name: str
    input: int
    weights: int
    mask: int
    slots: int
    slot_weights: int
    top_k: int
    hidden: int
    experts: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ModeProgram:
    """``rows`` is the number of tokens that the arena has room for, padding included. The last step writes the logits."""

    mode: Mode
    rows: int
    buffers: tuple[Buffer, ...]
    steps: tuple[KernelStep | DispatchStep, ...]
    ids: int
    logits: int


@dataclass(frozen=True, slots=True)
class Program:
    """Tensors are numbered: weights, then states, then the buffers of prefill, then the buffers of decode.

    ``features`` are the CPU features that the code needs, as /proc/cpuinfo spells them. ``weights`` and ``states`` are
    (name, type) in the order of the model's definition.
    """

    kernels: tuple[ProgramKernel, ...]
    weights: tuple[tuple[str, TensorType], ...]
    states: tuple[tuple[str, TensorType], ...]
    prefill: ModeProgram
    decode: ModeProgram
    chunk: int
    vocabulary: int
    arena_bytes: int
    features: tuple[str, ...]


def variant_from_json(specialization: Specialization, data: Mapping[str, Any]) -> Variant:
    """A variant from the ``kernel.json`` of its compile action."""
    return Variant(
        specialization,
        data["symbol"],
        Signature.from_json(data["signature"]),
        tuple(Phase(int(p["wave"]), bool(p["parallel"]), str(p["items"])) for p in data["phases"]),
        str(data["scratch"]),
        str(data["local"]),
    )


def build_program(
    partitioned: PartitionedModel, variants: Mapping[str, Sequence[Variant]], chunk: int, features: Sequence[str]
) -> Program:
    """Put the partitions, expert dispatches and compiled variants of a model together.

    ``variants`` holds the compiled variants of each kernel that a partition uses, by kernel id. Raises BuildFailed where
    the parts do not fit together (a kernel without a variant for some number of tokens, a value without a producer) and
    InvalidInput where the model cannot be run in chunks (a head that mixes rows).
    """
    used = {p.kernel for mode in MODES for p in partitioned.partitions[mode]}
    kernels = tuple(
        _program_kernel(kernel, variants.get(kernel.id, ())) for kernel in partitioned.kernels.values() if kernel.id in used
    )
    number = {kernel.id: i for i, kernel in enumerate(kernels)}
    weights: dict[str, TensorType] = {}
    states: dict[str, TensorType] = {}
    for mode in MODES:
        weights |= partitioned.model.graphs[mode].weights
        states |= partitioned.model.graphs[mode].states
    read = {name for mode in MODES for p in partitioned.partitions[mode] for name in p.arguments}
    weights = {name: type_ for name, type_ in weights.items() if name in read}
    for name, type_ in [*weights.items(), *states.items()]:
        if len(type_.shape) > MOST_RANK:
            raise InvalidInput(f"the tensor has the type {type_}, the runtime takes at most {MOST_RANK} dimensions", where=name)
    tensors = {name: i for i, name in enumerate([*weights, *states])}
    prefill = _mode_program(partitioned, "prefill", chunk, kernels, number, tensors, len(tensors))
    decode = _mode_program(partitioned, "decode", 1, kernels, number, tensors, len(tensors) + len(prefill.buffers))
    return Program(
        kernels,
        tuple(weights.items()),
        tuple(states.items()),
        prefill,
        decode,
        chunk,
        partitioned.model.vocabulary,
        max(b.offset + b.size for mode in (prefill, decode) for b in mode.buffers),
        tuple(features),
    )


def _program_kernel(kernel: Kernel, variants: Sequence[Variant]) -> ProgramKernel:
    where = f"kernel {kernel.id} ({kernel.kind})"
    # The tightest first: equality, then the least padding, then the range.
    guards = {"exact": 0, "padded": 1, "range": 2}
    order = sorted(variants, key=lambda v: (guards[v.specialization.guard], v.specialization.tokens))
    if not order:
        raise BuildFailed("the kernel has no compiled variant", where=where)
    if any(v.specialization.guard == "padded" for v in order) and not kernel.row_independent:
        raise BuildFailed("a padded variant was made of a kernel whose rows depend on each other", where=where)
    count = len(kernel.signature.arguments)
    if count > MOST_ARGUMENTS:
        raise InvalidInput(f"the kernel has {count} arguments, the runtime takes at most {MOST_ARGUMENTS}", where=where)
    for variant in order:
        if len(variant.phases) > MOST_PHASES:
            raise InvalidInput(
                f"variant {variant.specialization} has {len(variant.phases)} phases, the runtime takes at most {MOST_PHASES}",
                where=where,
            )
    return ProgramKernel(kernel.id, kernel.kind, kernel.signature, tuple(order))


def _row_bytes(type_: TensorType, where: str) -> tuple[int, int]:
    """(bytes of one token, bytes that do not depend on the tokens) of a value; one of them is 0."""
    shape = type_.shape
    by_token = bool(shape) and shape[0] == "tokens"
    extents = [d for d in (shape[1:] if by_token else shape) if isinstance(d, int)]
    if len(extents) != len(shape) - by_token:
        raise BuildFailed(f"a value of type {type_} cannot lie in the arena", where=where)
    size = prod(extents) * ITEM_BYTES[type_.dtype]
    return (size, 0) if by_token else (0, size)


@dataclass(slots=True)
class _Values:
    """The values of a mode that live in the arena, numbered from ``first`` in the order in which steps write them.

    ``lives`` has the first and the last step that touches a value; ``outside`` the numbers of weights and states.
    """

    first: int
    outside: Mapping[str, int]
    numbers: dict[str, int]
    types: dict[str, TensorType]
    lives: dict[str, tuple[int, int]]

    def write(self, name: str, type_: TensorType, step: int, where: str) -> int:
        if name in self.numbers:
            raise BuildFailed(f"the value {name!r} is written twice", where=where)
        self.numbers[name] = self.first + len(self.numbers)
        self.types[name] = type_
        self.lives[name] = (step, step)
        return self.numbers[name]

    def read(self, name: str, step: int, where: str) -> int:
        if name not in self.numbers:
            raise BuildFailed(f"the value {name!r} is read before any step writes it", where=where)
        self.lives[name] = (self.lives[name][0], step)
        return self.numbers[name]


def _mode_program(
    partitioned: PartitionedModel,
    mode: Mode,
    tokens: int,
    kernels: Sequence[ProgramKernel],
    number: Mapping[str, int],
    tensors: Mapping[str, int],
    first: int,
) -> ModeProgram:
    graph = partitioned.model.graphs[mode]
    partitions = {p.name: p for p in partitioned.partitions[mode]}
    dispatches = {d.combine: d for d in partitioned.dispatches.get(mode, ())}
    routed = {name for d in dispatches.values() for name in d.experts}
    values = _Values(first, tensors, {}, {}, {})
    ids = values.write("ids", graph.inputs["ids"], 0, f"mode {mode}")
    steps: list[KernelStep | DispatchStep] = []
    for partition in partitions.values():
        if partition.name in routed:
            continue
        dispatch = dispatches.get(partition.name)
        if dispatch:
            experts = [partitions[name] for name in dispatch.experts]
            steps.append(_dispatch_step(dispatch, experts, len(steps), kernels, number, values))
        steps.append(_kernel_step(partition, len(steps), kernels, number, values))
    (logits,) = graph.outputs
    head = steps[-1] if steps else None
    if not isinstance(head, KernelStep) or values.lives.get(logits, (-1, -1))[0] != len(steps) - 1:
        raise BuildFailed(f"the last partition does not write {logits!r}", where=f"mode {mode}")
    if not partitioned.kernels[kernels[head.kernel].id].row_independent:
        raise InvalidInput("the partition that writes the logits mixes rows", where=head.name)
    _check_variants(steps, kernels, tokens)
    rows = max([tokens, *_padded_rows(steps, kernels, tokens)])
    sizes = [_row_bytes(type_, name) for name, type_ in values.types.items()]
    lifetimes = [
        Lifetime(row * rows + fixed, begin, end) for (row, fixed), (begin, end) in zip(sizes, values.lives.values(), strict=True)
    ]
    plan = plan_arena(lifetimes)
    buffers = tuple(
        Buffer(name, row, life.size, offset)
        for name, (row, _), life, offset in zip(values.types, sizes, lifetimes, plan.offsets, strict=True)
    )
    return ModeProgram(mode, rows, buffers, tuple(steps), ids, values.numbers[logits])


def _padded_rows(steps: Sequence[KernelStep | DispatchStep], kernels: Sequence[ProgramKernel], tokens: int) -> list[int]:
    """The rows that steps over at most ``tokens`` tokens may compute with a padded variant."""
    out = []
    for step in steps:
        if isinstance(step, KernelStep):
            padded = [v.specialization.tokens for v in kernels[step.kernel].variants if v.specialization.guard == "padded"]
            # Of the variants that hold for `tokens` rows the smallest is taken; smaller ones hold for fewer rows.
            out += [n for n in padded if n <= tokens] + sorted(n for n in padded if n > tokens)[:1]
    return out


def _check_variants(steps: Sequence[KernelStep | DispatchStep], kernels: Sequence[ProgramKernel], tokens: int) -> None:
    """Every kernel that a step runs must have a variant for each number of tokens up to ``tokens``."""
    users: dict[int, str] = {}
    for step in steps:
        for kernel in [step.kernel] if isinstance(step, KernelStep) else [kernel for kernel, _ in step.experts]:
            users.setdefault(kernel, step.name)
    for kernel, name in users.items():
        bound = [v.specialization for v in kernels[kernel].variants]
        for n in range(1, tokens + 1):
            if not any(s.guard == "range" or s.tokens == n or (s.guard == "padded" and s.tokens >= n) for s in bound):
                raise BuildFailed(f"kernel {kernels[kernel].id} has no variant for {n} tokens", where=name)


def _kernel_step(
    partition: Partition, step: int, kernels: Sequence[ProgramKernel], number: Mapping[str, int], values: _Values
) -> KernelStep:
    kernel = kernels[number[partition.kernel]]
    arguments = []
    for argument, name in zip(kernel.signature.arguments, partition.arguments, strict=True):
        if argument.role in ("weight", "state"):
            arguments.append(values.outside[name])
        elif argument.role == "input":
            arguments.append(values.read(name, step, partition.name))
        else:
            arguments.append(values.write(name, argument.type, step, partition.name))
    return KernelStep(partition.name, partition.kind, number[partition.kernel], tuple(arguments))


def _dispatch_step(
    dispatch: ExpertDispatch,
    experts: Sequence[Partition],
    step: int,
    kernels: Sequence[ProgramKernel],
    number: Mapping[str, int],
    values: _Values,
) -> DispatchStep:
    bound = []
    for expert in experts:
        kernel = kernels[number[expert.kernel]]
        roles = [a.role for a in kernel.signature.arguments]
        if roles[0] != "input" or roles[-1] != "output" or any(r != "weight" for r in roles[1:-1]):
            raise BuildFailed("an expert's kernel takes one input, weights and one output", where=expert.name)
        bound.append((number[expert.kernel], tuple(values.outside[name] for name in expert.arguments[1:-1])))
    hidden = values.types[dispatch.input].shape[1]
    if not isinstance(hidden, int):
        raise BuildFailed(f"the experts' input has the type {values.types[dispatch.input]}", where=dispatch.name)
    tokens = values.types[dispatch.input].shape[0]
    return DispatchStep(
        dispatch.name,
        values.read(dispatch.input, step, dispatch.name),
        values.read(dispatch.weights, step, dispatch.name),
        values.read(dispatch.mask, step, dispatch.name),
        values.write(dispatch.slots, TensorType("f32", (tokens, dispatch.top_k, hidden)), step, dispatch.name),
        values.write(dispatch.slot_weights, TensorType("f32", (tokens, dispatch.top_k)), step, dispatch.name),
        dispatch.top_k,
        hidden,
        tuple(bound),
    )
