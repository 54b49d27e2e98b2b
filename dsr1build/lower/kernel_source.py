"""A kernel as portable MLIR text: drives the emitter over the kernel's operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsr1build.graph.model import Attribute, Node, TensorType
from dsr1build.graph.signature import Signature, Specialization, specialize
from dsr1build.lower.allow_list import check_portable
from dsr1build.ops.copy import copy
from dsr1build.ops.emitter import Emitter, Value
from dsr1build.ops.operator import Operator
from dsr1build.ops.registry import OPERATORS

# The number of rows in the KV cache: an input of graphs, a run-time dimension of kernels.
PAST = "past"


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The function ``@kernel`` as MLIR text, and its signature after specialization."""

    text: str
    signature: Signature


def lower_kernel(
    nodes: Sequence[Node], signature: Signature, results: Sequence[str], specialization: Specialization
) -> KernelSource:
    """Lower a kernel.

    ``nodes`` are operators of domain ``dsr1`` in a topological order; they name arguments by ``Argument.name`` and the
    scalar ``past`` by that name. ``results`` names, for each state and then each output argument in the order of
    ``signature`` (not specialized), the value that it holds after the call.

    Raises ValueError where the kernel is malformed: an unknown operator or value, operands that do not fit, a result of
    another type than its argument.
    """
    signature = specialize(signature, specialization)
    bound = None if specialization.guard == "range" else specialization.tokens
    emitter = Emitter(signature, bound)
    arguments = {a.name: Value(f"%{a.name}", a.type) for a in signature.arguments}
    targets = [a for role in ("state", "output") for a in signature.arguments if a.role == role]
    if len(targets) != len(results):
        raise ValueError(f"{len(results)} results for {len(targets)} state and output arguments")
    # A value that two arguments hold is computed into the first of them and copied to the others.
    destinations: dict[str, Value] = {}
    for argument, result in zip(targets, results, strict=True):
        if argument.role == "output":
            destinations.setdefault(result, arguments[argument.name])
    values = {name: value for name, value in arguments.items() if value not in destinations.values()}
    settled: dict[str, Value] = {}
    if PAST not in signature.dims and any(PAST in node.inputs for node in nodes):
        raise ValueError(f"an operator reads {PAST!r}, which is not a dimension of the signature")
    for node in nodes:
        _lower_node(node, emitter, values, destinations, settled)
    returned = []
    for argument, result in zip(targets, results, strict=True):
        value = _lookup(values, result, "result")
        if value.type != argument.type:
            raise ValueError(f"result {result} is {value.type}, its argument {argument.name} is {argument.type}")
        if argument.role == "output" and settled.get(result) != arguments[argument.name]:
            value = copy(emitter, value, arguments[argument.name])
        returned.append(value)
    text = emitter.finish(returned)
    check_portable(text)
    return KernelSource(text, signature)


def _lower_node(
    node: Node, emitter: Emitter, values: dict[str, Value], destinations: Mapping[str, Value], settled: dict[str, Value]
) -> None:
    """Lower one operator, add its results to ``values``, and to ``settled`` those computed into an output argument."""
    if node.domain != "dsr1" or node.op not in OPERATORS:
        raise ValueError(f"no operator {node.op!r} in domain {node.domain!r}")
    operator = OPERATORS[node.op]
    attributes = dict(node.attributes)
    scalar = TensorType("i64", ())
    types = [None if not n else scalar if n == PAST else _lookup(values, n, node.op).type for n in node.inputs]
    inferred = _infer(operator, node, types, attributes)
    operands = [None if not n else _lookup(values, n, node.op) for n in node.inputs if n != PAST]
    wanted = [destinations.get(n) for n in node.outputs]
    for name, type_, given in zip(node.outputs, inferred, wanted, strict=True):
        if given is not None and given.type != type_:
            raise ValueError(f"result {name} is {type_}, its argument {given.name[1:]} is {given.type}")
    emitter.set_destinations(wanted)
    lowered = operator.lower(emitter, operands, attributes)
    left = emitter.untaken_destinations()
    for name, value, type_, given, free in zip(node.outputs, lowered, inferred, wanted, left, strict=True):
        if value.type != type_:
            raise ValueError(f"{node.op} was lowered to {value.type} where {type_} was inferred")
        values[name] = value
        if given is not None and free is None:
            settled[name] = given


def _infer(
    operator: Operator, node: Node, types: Sequence[TensorType | None], attributes: Mapping[str, Attribute]
) -> tuple[TensorType, ...]:
    try:
        inferred = operator.infer(types, attributes)
    except ValueError as error:
        raise ValueError(f"{node.name or node.op}: {error}") from error
    if len(inferred) != len(node.outputs):
        raise ValueError(f"{node.name or node.op} names {len(node.outputs)} of {len(inferred)} results")
    return inferred


def _lookup(values: Mapping[str, Value], name: str, user: str) -> Value:
    if name not in values:
        raise ValueError(f"{user} reads {name!r}, which is not defined before it")
    return values[name]
