"""Cuts a model into partitions and finds the kernels behind them."""

from collections.abc import Callable, Mapping, Sequence

from dsr1build.config.schema import Recipe
from dsr1build.digest import encode
from dsr1build.errors import InvalidInput
from dsr1build.graph.canonical import Leaf, LeafRole, canonical_form, structural_digest
from dsr1build.graph.inline import inline_calls
from dsr1build.graph.model import RUNTIME_DIMS, Graph, Mode, Model, Node
from dsr1build.graph.validate import GraphTypes, check_graph
from dsr1build.ops.registry import OPERATORS
from dsr1build.partition.dispatch import SparseGraph, expert_dispatch, sparse_graph, values_read
from dsr1build.partition.kernels import KernelTable, kernel_of
from dsr1build.partition.model import ExpertDispatch, Partition, PartitionedModel
from dsr1build.partition.order import ordered_pieces
from dsr1build.partition.rules import Piece, apply_rules

ROLES: tuple[LeafRole, ...] = ("input", "weight", "state", "dimension")


def partition_model(model: Model, recipe: Recipe, digest: Callable[[bytes], str] = structural_digest) -> PartitionedModel:
    """Cut both graphs of the model by the recipe's rules and give equal partitions one kernel.

    Raises InvalidInput where a graph is malformed, a partition is not convex, a state is not updated in place, or the
    routed experts do not allow sparse dispatch. ``digest`` names canonical forms; equality of kernels
    does not rest on it.
    """
    table = KernelTable(digest)
    partitions: dict[Mode, tuple[Partition, ...]] = {}
    dispatches: dict[Mode, tuple[ExpertDispatch, ...]] = {}
    idle: set[int] = set(range(len(recipe.partitions)))
    for mode, graph in model.graphs.items():
        form = sparse_graph(graph, check_graph(graph, OPERATORS))
        pieces, unused = apply_rules([node.name for node in form.nodes], recipe.partitions)
        idle.intersection_update(unused)
        partitions[mode], dispatches[mode] = _cut(graph, form, pieces, table)
    return PartitionedModel(model, partitions, table.kernels, dispatches, tuple(_notes(recipe, sorted(idle), partitions, table)))


def _notes(recipe: Recipe, idle: Sequence[int], partitions: Mapping[Mode, Sequence[Partition]], table: KernelTable) -> list[str]:
    notes = [f"The recipe's rule {number + 1} ({_rule_text(recipe, number)}) matches no module." for number in idle]
    for mode, cut in partitions.items():
        others = [partition.name for partition in cut if partition.kind == "other"]
        if others:
            more = f" and {len(others) - 1} more" if len(others) > 1 else ""
            notes.append(f"No rule of the recipe takes {others[0]!r}{more} ({mode}): each became a partition of kind 'other'.")
    kinds = dict.fromkeys((p.kernel, p.kind) for cut in partitions.values() for p in cut)
    for id_, kind in kinds:
        compiled_as = table.kernels[id_].kind
        if kind != compiled_as:
            notes.append(f"Kernel {id_} serves partitions of kind {kind!r} too; it is compiled as {compiled_as!r}.")
    return notes


def _rule_text(recipe: Recipe, number: int) -> str:
    rule = recipe.partitions[number]
    return f"{rule.kind}: {', '.join(rule.modules)}"


def _cut(
    graph: Graph, form: SparseGraph, pieces: Sequence[Piece], table: KernelTable
) -> tuple[tuple[Partition, ...], tuple[ExpertDispatch, ...]]:
    nodes = form.nodes
    order = ordered_pieces(nodes, pieces, {place: routing.reads for place, routing in form.routings.items()})
    exported = _exported(graph, form, pieces)
    state_of = {value: state for state, value in graph.state_updates.items()}
    roles: dict[str, LeafRole] = {
        **dict.fromkeys(graph.weights, "weight"),
        **dict.fromkeys(graph.states, "state"),
        **{name: "dimension" for name in graph.inputs if name in RUNTIME_DIMS},
    }
    # Type and role of a value as one number: a small integer costs the collector nothing.
    role_codes = {name: ROLES.index(role) for name, role in roles.items()}
    codes = {name: number * len(ROLES) + role_codes.get(name, 0) for name, number in form.types.numbers.items()}
    codes[""] = -1
    # The canonical form is a function of the key, so equal keys need no second proof: see _local_key.
    known: dict[tuple[object, ...], tuple[str, tuple[int, ...]]] = {}
    taken: dict[str, int] = {}
    out: list[Partition] = []
    source: dict[str, Partition] = {}
    for number in order:
        piece = pieces[number]
        members = [nodes[place] for place in piece.nodes]
        key, local = _local_key(members, codes, exported, state_of)
        found = known.get(key)
        if found is None:
            found = known[key] = _kernel(members, local, piece, graph, form.types, roles, exported, state_of, table)
        kernel, arguments = found
        values = list(local)
        name = _unique(members[-1].name or members[-1].op, taken)
        partition = Partition(
            name,
            piece.kind,
            graph.mode,
            kernel,
            tuple([values[i] for i in arguments]),
            tuple([node.name for node in members]),
        )
        out.append(partition)
        for node in members:
            for value in node.outputs:
                source[value] = partition
    read = values_read(nodes) if form.routings else set()
    dispatches = [
        expert_dispatch(routing, source[nodes[place].outputs[0]], source, table.kernels, read)
        for place, routing in form.routings.items()
    ]
    return tuple(out), tuple(dispatches)


def _exported(graph: Graph, form: SparseGraph, pieces: Sequence[Piece]) -> set[str]:
    """Values that another partition, a dispatch or the caller of the graph reads."""
    owner = {place: number for number, piece in enumerate(pieces) for place in piece.nodes}
    made_by: dict[str, int] = {}
    out: set[str] = set(graph.outputs)
    for place, node in enumerate(form.nodes):
        number = owner[place]
        for name in node.inputs:
            if made_by.get(name, number) != number:
                out.add(name)
        for name in node.outputs:
            made_by[name] = number
    for routing in form.routings.values():
        out.update(routing.reads)
    return out


def _local_key(
    members: Sequence[Node], codes: Mapping[str, int], exported: set[str], state_of: Mapping[str, str]
) -> tuple[tuple[object, ...], dict[str, int]]:
    """A key within one graph that determines the canonical form of a partition, and its values numbered by first use.

    Complete, because it holds everything that ``canonical_form`` reads, names replaced by numbers: for each node the
    operator or the function (a name that stands for one body within this graph) with exact attributes and the wiring as
    value numbers (so aliases, and which values are made inside); for each value its type and role; for each result whether
    it is exported and the update of which state. Equal keys therefore have equal forms up to the renaming of values;
    unequal keys may still have equal forms, which comparing forms decides.
    """
    local: dict[str, int] = {}
    number = local.setdefault
    nodes: list[object] = []
    for node in members:
        nodes.append((node.domain, node.op, len(node.inputs), len(node.outputs)))
        nodes += [number(name, len(local)) for name in node.inputs]
        nodes += [number(name, len(local)) for name in node.outputs]
        if node.attributes:
            nodes.append(encode([[name, value] for name, value in node.attributes]))
        for name in node.outputs:
            nodes.append(name in exported)
            if name in state_of:
                # An update that is computed apart from its state has no number for it; the canonical form refuses it.
                nodes.append(("updates", local.get(state_of[name])))
    return (*nodes, *[codes[name] for name in local]), local


def _kernel(
    members: Sequence[Node],
    local: Mapping[str, int],
    piece: Piece,
    graph: Graph,
    types: GraphTypes,
    roles: Mapping[str, LeafRole],
    exported: set[str],
    state_of: Mapping[str, str],
    table: KernelTable,
) -> tuple[str, tuple[int, ...]]:
    """The kernel's id, and for each of its arguments the local number of the value."""
    made = [name for node in members for name in node.outputs]
    outputs = [(name, types[name]) for name in made if name in exported]
    updates = [(state_of[name], name) for name in made if name in state_of]
    if not outputs and not updates:
        raise InvalidInput("nothing reads the results of this module", where=f"node {members[0].name!r}")
    inside = set(made)
    leaves = {name: Leaf(roles.get(name, "input"), types[name]) for name in local if name and name not in inside}
    form, arguments = canonical_form(inline_calls(members, graph.functions), leaves, outputs, updates)
    kernel = kernel_of(table, form, piece.kind)
    return kernel.id, tuple(local[name] for name in arguments)


def _unique(name: str, taken: dict[str, int]) -> str:
    """``name``, or ``name#2`` and so on where a partition of this graph has it already."""
    count = taken[name] = taken.get(name, 0) + 1
    return name if count == 1 else f"{name}#{count}"
