"""Sparse dispatch: only the chosen experts of a layer run.

A graph writes a routed layer densely: every expert computes every row, and ``CombineExperts`` adds the weighted results.
Here the combine reads what the runtime gathers (``CombineSlots``), and the layer's experts, which must
be one kernel over one input, become one step that the mask of the gating drives.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from dsr1build.errors import InvalidInput
from dsr1build.graph.inline import inline_calls
from dsr1build.graph.model import Function, Graph, Node, TensorType
from dsr1build.graph.validate import GraphTypes, infer_node
from dsr1build.ops.registry import OPERATORS
from dsr1build.partition.model import ExpertDispatch, Kernel, Partition


@dataclass(frozen=True, slots=True)
class Routing:
    """One rewritten combine: the value names that its ``ExpertDispatch`` is made of. ``name`` is the combine's module."""

    name: str
    weights: str
    mask: str
    experts: tuple[str, ...]
    slots: str
    slot_weights: str
    top_k: int

    @property
    def reads(self) -> tuple[str, ...]:
        """What has to be computed before the combine, beside the combine's own operands."""
        return (self.weights, self.mask, *self.experts)


@dataclass(frozen=True, slots=True)
class SparseGraph:
    """A graph's nodes with each combine in its sparse form; ``routings`` by the place of the ``CombineSlots`` node."""

    nodes: tuple[Node, ...]
    types: GraphTypes
    routings: Mapping[int, Routing]


def sparse_graph(graph: Graph, types: GraphTypes) -> SparseGraph:
    """Rewrite every ``CombineExperts`` of the graph, also where it stands in a function.

    Raises InvalidInput where the routing weights do not come from a ``Route`` whose mask is a value of the main graph.
    """
    combining = _functions_with("CombineExperts", graph.functions)
    producer = {name: node for node in graph.nodes for name in node.outputs}
    nodes: list[Node] = []
    routings: dict[int, Routing] = {}
    added: dict[str, TensorType] = {}
    for node in graph.nodes:
        if node.op not in (combining if node.domain == "module" else {"CombineExperts"}):
            nodes.append(node)
            continue
        for inner in inline_calls([node], graph.functions, scope=f"{node.name}/"):
            if inner.op == "CombineExperts":
                residual, shared, weights, *experts = inner.inputs
                mask, top_k = _route_of(node, weights, producer, graph.functions)
                slots, slot_weights = f"{node.name}.slots", f"{node.name}.slot_weights"
                residual_type = added.get(residual) or types[residual]
                rows, hidden = residual_type.shape
                added[slots] = TensorType("f32", (rows, top_k, hidden))
                added[slot_weights] = TensorType("f32", (rows, top_k))
                routings[len(nodes)] = Routing(node.name, weights, mask, tuple(experts), slots, slot_weights, top_k)
                inner = replace(inner, op="CombineSlots", inputs=(residual, shared, slots, slot_weights))
            operands = [(added.get(name) or types[name]) if name else None for name in inner.inputs]
            added.update(zip(inner.outputs, infer_node(inner, operands, OPERATORS, f"node {node.name!r}"), strict=True))
            nodes.append(inner)
    return SparseGraph(tuple(nodes), types.extended(added), routings)


def expert_dispatch(
    routing: Routing,
    combine: Partition,
    source: Mapping[str, Partition],
    kernels: Mapping[str, Kernel],
    read: set[str],
) -> ExpertDispatch:
    """The dispatch of one rewritten combine. ``source`` gives the partition that computes a value, ``read``
    holds the values that some node reads.

    Raises InvalidInput where a routed expert is not a partition of its own, the experts are different kernels, read
    different inputs, or are read by anything but the combine.
    """
    where = f"node {routing.name!r}"
    experts: dict[str, Partition] = {}
    for number, value in enumerate(routing.experts):
        expert = source.get(value)
        if expert is None or expert.name in experts:
            _refuse(where, f"expert {number} ({value!r}) is not a partition of its own")
        experts[expert.name] = expert
        if value in read:
            _refuse(where, f"the result of expert partition {expert.name!r} is also read outside of the combine")
    if not experts:
        _refuse(where, "the combine reads no experts")
    first = next(iter(experts.values()))
    roles = {id_: Counter(argument.role for argument in kernel.signature.arguments) for id_, kernel in kernels.items()}
    for expert in experts.values():
        has = roles[expert.kernel]
        if has["input"] != 1 or has["output"] != 1 or has["state"]:
            _refuse(
                where,
                f"the expert partition {expert.name!r} has {has['input']} inputs, {has['state']} states and {has['output']}"
                f" outputs; a routed expert has one input and one output",
            )
        if expert.kernel != first.kernel:
            _refuse(where, f"the experts {first.name!r} and {expert.name!r} are different kernels")
        if expert.arguments[0] != first.arguments[0]:
            _refuse(where, f"the experts {first.name!r} and {expert.name!r} read different inputs")
    return ExpertDispatch(
        routing.name,
        first.arguments[0],
        routing.weights,
        routing.mask,
        tuple(experts),
        combine.name,
        routing.slots,
        routing.slot_weights,
        routing.top_k,
    )


def _route_of(combine: Node, weights: str, producer: Mapping[str, Node], functions: Mapping[str, Function]) -> tuple[str, int]:
    """The mask and ``top_k`` of the ``Route`` that computes ``weights``."""
    where = f"node {combine.name!r}"
    source = producer.get(weights)
    for inner in inline_calls([source], functions) if source else ():
        if inner.op == "Route" and inner.outputs[0] == weights and source is not None:
            if inner.outputs[1] not in source.outputs:
                _refuse(where, f"the module {source.name!r} returns the routing weights but not the mask")
            top_k = inner.attribute("top_k")
            if isinstance(top_k, int):
                return inner.outputs[1], top_k
    _refuse(where, f"the routing weights {weights!r} are not the result of a Route")


def _functions_with(op: str, functions: Mapping[str, Function]) -> set[str]:
    """Names of the functions in which the operator stands, directly or through calls."""
    found = {name for name, function in functions.items() if any(n.op == op and n.domain == "dsr1" for n in function.nodes)}
    while True:
        callers = {
            name
            for name, function in functions.items()
            if name not in found and any(n.op in found and n.domain == "module" for n in function.nodes)
        }
        if not callers:
            return found
        found |= callers


def _refuse(where: str, message: str) -> NoReturn:
    raise InvalidInput(
        f"sparse dispatch does not fit this cut: {message}",
        where=where,
        hint="Let the recipe make each routed expert, the router and the combine a partition of its own.",
    )


def values_read(nodes: Sequence[Node]) -> set[str]:
    return {name for node in nodes for name in node.inputs}
