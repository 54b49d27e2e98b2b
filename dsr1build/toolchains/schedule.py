"""Schedules a kernel text: reads the tags of its generics and fuses, tiles and vectorises phase by phase.

A tag is ``p<phase>/<schedule>/<role>`` (docs/architecture.md, "Kernel source"). For each phase small transform-dialect
scripts are generated and interpreted; between them this module looks at the IR, so that every script names its operations
by a mark that is unique at that moment. The marks are discardable attributes: ``fusion_id`` on generics and their fills,
``vector_step`` on what is vectorised.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mlir import ir

from dsr1build.errors import BuildFailed
from dsr1build.toolchains.pipeline import diagnostics, place, run_passes
from dsr1build.toolchains.rewrite import all_operations

TAG = re.compile(r"p(\d+)/(\w+)/(\w+)")
_ANY = "!transform.any_op"

Options = Mapping[str, Mapping[str, int]]


@dataclass(frozen=True, slots=True)
class Fused:
    """One generic of a phase: its mark, its role and the marks of the fills that initialise it."""

    mark: str
    role: str
    fills: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TaggedPhase:
    """The generics of a phase in textual order; the last one is the anchor."""

    number: int
    schedule: str
    generics: tuple[Fused, ...]

    @property
    def name(self) -> str:
        return f"p{self.number}/{self.schedule}"

    @property
    def anchor(self) -> Fused:
        return self.generics[-1]


def schedule_kernel(module: ir.Module, options: Options) -> None:
    """Apply the schedule of every phase of the (canonical) kernel. ``options`` has one entry for each schedule in use.

    Raises BuildFailed with the phase and role where a tag is unknown or a phase cannot be fused.
    """
    for phase in read_phases(module):
        match phase.schedule:
            case "map1" | "map2" | "map3":
                _schedule_map(module, phase, int(phase.schedule[3:]))
            case "dot":
                _schedule_dot(module, phase, options["dot"])
            case "serial":
                pass
            case other:
                raise BuildFailed(f"unknown schedule {other!r}", where=phase.name, hint="Known: map1, map2, map3, dot, serial.")


def read_phases(module: ir.Module) -> list[TaggedPhase]:
    """Group the generics by phase, check that each phase can be one loop nest, and mark them. In order of the phases."""
    groups: dict[tuple[int, str], list[ir.Operation]] = {}
    for op in all_operations(module.operation, ["linalg.generic"]):
        if "tag" not in op.attributes:
            raise BuildFailed("a linalg.generic has no tag", where=place(op.location))
        tag = str(op.attributes["tag"].value)
        parts = TAG.fullmatch(tag)
        if not parts:
            raise BuildFailed(f"{tag!r} is no tag of the form p<phase>/<schedule>/<role>", where=place(op.location))
        groups.setdefault((int(parts[1]), parts[2]), []).append(op.operation)
    numbers = [number for number, _ in groups]
    for number in numbers:
        if numbers.count(number) > 1:
            raise BuildFailed("one phase has two schedules", where=f"p{number}")
    phases = []
    for (number, schedule), ops in sorted(groups.items(), key=lambda item: item[0]):
        if schedule != "serial":
            _check_fusable(ops)
        phases.append(TaggedPhase(number, schedule, tuple(_mark(op, f"p{number}.{k}") for k, op in enumerate(ops))))
    return phases


def _tag(op: ir.Operation) -> str:
    return str(op.attributes["tag"].value)


def _check_fusable(ops: Sequence[ir.Operation]) -> None:
    """Every generic but the last must be read by later ones of the phase, directly, and by nothing else."""
    for k, op in enumerate(ops[:-1]):
        users = [use.owner.operation for use in op.results[0].uses]
        for user in users:
            if user not in ops[k + 1 :]:
                raise BuildFailed(
                    f"the result is used by {user.name} outside its phase, so it cannot be fused",
                    where=_tag(op),
                    hint="Only the last generic of a phase may have users elsewhere, and a view stops fusion.",
                )
        if not users:
            raise BuildFailed("the result is not used by its phase", where=_tag(op))


def _mark(op: ir.Operation, mark: str) -> Fused:
    op.attributes["fusion_id"] = ir.StringAttr.get(mark, op.context)
    fills: list[str] = []
    for operand in op.operands:
        producer = operand.owner
        if not isinstance(producer, ir.Block) and producer.operation.name == "linalg.fill":
            fills.append(f"{mark}.f{len(fills)}")
            producer.operation.attributes["fusion_id"] = ir.StringAttr.get(fills[-1], op.context)
    return Fused(mark, _tag(op).split("/")[2], tuple(fills))


# ---- scripts ---------------------------------------------------------------------------------------------------------


class _Script:
    """Lines of a transform sequence over ``%mod``. A class because handles need fresh names."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._count = 0

    def _name(self) -> str:
        self._count += 1
        return f"%h{self._count}"

    def match(self, attribute: str, within: str = "%mod") -> str:
        name = self._name()
        self.lines.append(f"{name} = transform.structured.match attributes{{{attribute}}} in {within} : ({_ANY}) -> {_ANY}")
        return name

    def match_ops(self, operation: str, within: str = "%mod") -> str:
        name = self._name()
        self.lines.append(f'{name} = transform.structured.match ops{{["{operation}"]}} in {within} : ({_ANY}) -> {_ANY}')
        return name

    def marked(self, mark: str, within: str = "%mod") -> str:
        return self.match(f'fusion_id = "{mark}"', within)

    def tile(self, target: str, tile_sizes: Sequence[int], loop: str) -> str:
        """``loop``: for, forall. Returns the handle of the (outermost) loop; ``for`` makes one for each size but 0."""
        tiled = self._name()
        count = 1 if loop == "forall" else sum(size != 0 for size in tile_sizes)
        nest = [self._name() for _ in range(count)]
        self.lines.append(
            f"{', '.join((tiled, *nest))} = transform.structured.tile_using_{loop} {target} tile_sizes {list(tile_sizes)}"
            f" : ({_ANY}) -> ({', '.join([_ANY] * (1 + count))})"
        )
        return nest[0]

    def fuse(self, producers: Sequence[str], loop: str, cse: bool) -> str:
        """Fuse one producer after the other. Each use gets a clone of its own: where uses branch, cse in the loop must
        merge them again before the next step, or their number grows exponentially. Clones are equal only after their
        dynamic sizes are expressed by arguments, not by the dimensions of what each of them feeds."""
        for producer in producers:
            fused, new_loop = self._name(), self._name()
            self.lines.append(
                f"{fused}, {new_loop} = transform.structured.fuse_into_containing_op {producer} into {loop}"
                f" : ({_ANY}, {_ANY}) -> ({_ANY}, {_ANY})"
            )
            loop = new_loop
            if cse:
                sizes = "transform.apply_patterns.memref.resolve_ranked_shaped_type_result_dims"
                self.lines.append(f"transform.apply_patterns to {loop} {{ {sizes} }} : {_ANY}")
                self.lines.append(f"transform.apply_cse to {loop} : {_ANY}")
        return loop

    def peel(self, loop: str) -> tuple[str, str]:
        typed, main, rest = self._name(), self._name(), self._name()
        self.lines += [
            f'{typed} = transform.cast {loop} : {_ANY} to !transform.op<"scf.for">',
            f'{main}, {rest} = transform.loop.peel {typed} : (!transform.op<"scf.for">) -> ({_ANY}, {_ANY})',
        ]
        return main, rest

    def vectorise(self, targets: str) -> None:
        self.lines.append(f"transform.structured.vectorize {targets} : {_ANY}")

    def patterns(self, *names: str) -> None:
        function = self.match_ops("func.func")
        body = " ".join(f"transform.apply_patterns.{n}" for n in names)
        self.lines.append(f"transform.apply_patterns to {function} {{ {body} }} : {_ANY}")

    def run(self, module: ir.Module, phase: TaggedPhase) -> None:
        """Interpret the script on the module, then fold dead clones away. Raises BuildFailed with the phase's name."""
        text = "\n".join(
            [
                "module attributes {transform.with_named_sequence} {",
                f"transform.named_sequence @__transform_main(%mod: {_ANY} {{transform.readonly}}) {{",
                *self.lines,
                "transform.yield",
                "} }",
            ]
        )
        # The parsed module must stay alive until its sequence is cloned: the bindings free it with its last reference.
        parsed = ir.Module.parse(text, module.context)
        sequence = parsed.body.operations[0].operation.clone()
        attributes = module.operation.attributes
        with module.context:
            attributes["transform.with_named_sequence"] = ir.UnitAttr.get()
        module.body.append(sequence)
        try:
            run_passes(module, "transform-interpreter")
        except ir.MLIRError as error:
            raise BuildFailed(f"the schedule does not fit: {diagnostics(error)}", where=phase.name) from error
        sequence.erase()
        del attributes["transform.with_named_sequence"]
        # No cse here: it would merge equal fills of phases to come, and bufferization pays for that with a copy.
        run_passes(module, "canonicalize")


def _producers(generics: Sequence[Fused]) -> list[str]:
    """Marks in the order of fusion: the anchor's fills, then nearest first each generic and its fills."""
    *others, anchor = generics
    return [*anchor.fills, *(mark for g in reversed(others) for mark in (g.mark, *g.fills))]


def _schedule_map(module: ir.Module, phase: TaggedPhase, loops: int) -> None:
    anchor = _find(module, phase.anchor.mark)
    kinds = [str(kind) for kind in anchor.attributes["iterator_types"]]
    if len(kinds) < loops or any("parallel" not in kind for kind in kinds[:loops]):
        raise BuildFailed(f"the first {loops} loops are not parallel", where=_tag(anchor))
    script = _Script()
    target = script.marked(phase.anchor.mark)
    producers = [script.marked(mark) for mark in _producers(phase.generics)]
    script.fuse(producers, script.tile(target, [1] * loops, "forall"), cse=True)
    script.run(module, phase)


def _find(module: ir.Module, mark: str) -> ir.Operation:
    for op in all_operations(module.operation, ["linalg.generic"]):
        if "fusion_id" in op.attributes and op.attributes["fusion_id"].value == mark:
            return op.operation
    raise BuildFailed("a generic vanished while scheduling", where=mark)


def largest_divisor(extent: int, limit: int) -> int:
    return max(d for d in range(1, limit + 1) if extent % d == 0)


def largest_power_of_two(extent: int, limit: int) -> int:
    """The largest power of two that divides ``extent`` and is at most ``limit``."""
    size = 1
    while size * 2 <= limit and extent % (size * 2) == 0:
        size *= 2
    return size


def _schedule_dot(module: ir.Module, phase: TaggedPhase, options: Mapping[str, int]) -> None:
    """Products with weights in rows: a parallel loop over blocks of weight rows, in it a loop over blocks of tokens, in it
    for each product a loop over k with all accumulators in registers, vectorised along the lanes.

    A row of the result gets the same additions in the same order whatever the block it is in.
    """
    dynamic = ir.ShapedType.get_dynamic_size()
    tokens, rows = ir.RankedTensorType(_find(module, phase.anchor.mark).results[0].type).shape
    script = _Script()
    target = script.marked(phase.anchor.mark)
    producers = [script.marked(mark) for mark in _producers(phase.generics)]
    block = largest_power_of_two(rows, options["rows"])
    script.fuse(producers, script.tile(target, [0, block], "forall"), cse=False)
    script.run(module, phase)
    token_block = options["tokens"] if tokens == dynamic else largest_divisor(tokens, options["tokens"])
    if tokens == dynamic or tokens > token_block:
        _block_tokens(module, phase, token_block, peel=tokens == dynamic and token_block > 1)
    _vectorise_dots(module, phase)


def _block_tokens(module: ir.Module, phase: TaggedPhase, block: int, peel: bool) -> None:
    generics = _inside_token_loop(module, phase)
    script = _Script()
    target = script.marked(phase.anchor.mark)
    producers = [script.marked(mark) for mark in generics]
    loop = script.fuse(producers, script.tile(target, [block], "for"), cse=False)
    if peel:
        _, rest = script.peel(loop)
        script.patterns("canonicalization")
        target = script.marked(phase.anchor.mark, rest)
        producers = [script.marked(mark, rest) for mark in generics]
        script.fuse(producers, script.tile(target, [1], "for"), cse=False)
    script.run(module, phase)


def _inside_token_loop(module: ir.Module, phase: TaggedPhase) -> list[str]:
    """What is fused into the token loop: all but the chain that initialises the anchor, which is the loop's initial value,
    and the scales of the weight rows, which are the same for all tokens."""
    outside = set(phase.anchor.fills).union(g.mark for g in phase.generics if g.role.startswith("scale"))
    operand = _find(module, phase.anchor.mark).operands[-1]
    while not isinstance(operand.owner, ir.Block) and "fusion_id" in operand.owner.operation.attributes:
        producer = operand.owner.operation
        outside.add(str(producer.attributes["fusion_id"].value))
        operand = producer.operands[-1]
    return [mark for mark in _producers(phase.generics) if mark not in outside]


def _vectorise_dots(module: ir.Module, phase: TaggedPhase) -> None:
    """Step through k by one lane group, vectorise, and keep the accumulators in registers. Where the columns come in blocks
    with a scale each, k is two loops: over the blocks, then over the lane groups of one.

    The tail of fewer than 8 columns stays a scalar loop in every variant, so that its bits do not depend on the variant.
    """
    scalar = {mark for g in phase.generics if g.role.startswith(("tail", "scale")) for mark in (g.mark, *g.fills)}
    dots = {g.mark for g in phase.generics if g.role.startswith("dot")}
    steps: set[str] = set()
    with module.context:
        for op in all_operations(module.operation, ["linalg.generic", "linalg.fill"]):
            mark = str(op.attributes["fusion_id"].value) if "fusion_id" in op.attributes else ""
            if not mark.startswith(f"p{phase.number}.") or mark in scalar or not _is_static(op):
                continue
            what = "whole"
            if mark in dots:
                what = "blocks" if len(op.attributes["iterator_types"]) == 5 else "dot"
            op.attributes["vector_step"] = ir.StringAttr.get(what)
            steps.add(what)
    script = _Script()
    for what, tile_sizes in (("blocks", [0, 0, 1, 1, 0]), ("dot", [0, 0, 1, 0])):
        if what in steps:
            script.tile(script.match(f'vector_step = "{what}"'), tile_sizes, "for")
            script.vectorise(script.match(f'vector_step = "{what}"'))
    script.vectorise(script.match('vector_step = "whole"'))
    script.patterns(
        "canonicalization",
        "vector.cast_away_vector_leading_one_dim",
        "tensor.fold_tensor_subset_ops_into_vector_transfers",
    )
    script.lines.append(f"transform.loop.hoist_loop_invariant_subsets {script.match_ops('scf.for')} : {_ANY}")
    script.run(module, phase)


def _is_static(op: ir.Operation) -> bool:
    return all(not isinstance(v.type, ir.RankedTensorType) or v.type.has_static_shape for v in op.operands)
