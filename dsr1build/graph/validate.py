"""Structural checks of a graph, and the types of its values.

A function's inputs have no types of their own, so types are inferred once for each function and operand types; 15,000
calls of one expert cost 15,000 look-ups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn, Protocol

from dsr1build.digest import encode
from dsr1build.errors import InvalidInput
from dsr1build.graph.model import Attribute, Dim, Function, Graph, Node, TensorType


class OperatorTypes(Protocol):
    """What the checks need to know of an operator; ``dsr1build.ops.operator.Operator`` is one."""

    @property
    def inputs(self) -> tuple[str, ...]: ...
    @property
    def outputs(self) -> tuple[str, ...]: ...
    @property
    def attributes(self) -> tuple[str, ...]: ...
    @property
    def infer(self) -> Callable[[Sequence[TensorType | None], Mapping[str, Attribute]], tuple[TensorType, ...]]: ...


@dataclass(frozen=True, slots=True)
class GraphTypes:
    """The type of every value of a main graph, as an index into ``types``: equal numbers are equal types."""

    types: tuple[TensorType, ...]
    numbers: Mapping[str, int]

    def __getitem__(self, value: str) -> TensorType:
        return self.types[self.numbers[value]]

    def extended(self, values: Mapping[str, TensorType]) -> "GraphTypes":
        """With further values."""
        types = list(self.types)
        places = {type_: number for number, type_ in enumerate(types)}
        numbers = dict(self.numbers)
        for name, type_ in values.items():
            if type_ not in places:
                places[type_] = len(types)
                types.append(type_)
            numbers[name] = places[type_]
        return GraphTypes(tuple(types), numbers)


def check_graph(graph: Graph, operators: Mapping[str, OperatorTypes]) -> GraphTypes:
    """Check the graph and infer the types of its values.

    Raises InvalidInput that names the node for: an undefined value, a value defined twice, a value used before it is
    computed (which is how a cycle shows), an unknown operator or function, a wrong number of operands or results, a
    missing or unknown attribute, operand types that do not fit, a graph output or state of another type than declared.
    """
    known = _Types()
    numbers: dict[str, int] = {}
    for group, values in (("input", graph.inputs), ("state", graph.states), ("weight", graph.weights)):
        for name, type_ in values.items():
            if name in numbers:
                _fail(f"{graph.mode} graph", f"the {group} {name!r} is defined twice")
            numbers[name] = known.number(type_)
    for function in graph.functions.values():
        _check_scope(f"function {function.name!r}", function.inputs, function.nodes)
        _check_results(function)
    _check_acyclic_calls(graph.functions)

    memo: dict[tuple[object, ...], tuple[int, ...]] = {}
    for place, node in enumerate(graph.nodes):
        try:
            operands = tuple([numbers[name] if name else -1 for name in node.inputs])
        except KeyError as unknown:
            _undefined(_where(node), unknown.args[0], graph.nodes[place:])
        results = _infer(node, operands, graph.functions, operators, known, memo)
        for name, number in zip(node.outputs, results, strict=True):
            if name in numbers:
                _fail(_where(node), f"the value {name!r} is defined twice")
            numbers[name] = number

    for name, type_ in graph.outputs.items():
        _check_declared(f"{graph.mode} graph", "output", name, name, type_, numbers, known)
    if set(graph.state_updates) != set(graph.states):
        odd = sorted(set(graph.state_updates) ^ set(graph.states))[0]
        _fail(f"{graph.mode} graph", f"the state {odd!r} has no update" if odd in graph.states else f"{odd!r} is not a state")
    for state, value in graph.state_updates.items():
        _check_declared(f"{graph.mode} graph", f"update of state {state!r}", state, value, graph.states[state], numbers, known)
    return GraphTypes(tuple(known.types), numbers)


def operand_count(operator: OperatorTypes) -> tuple[int, int | None]:
    """The least and the greatest number of operands: ``name?`` is optional, a last ``name*`` takes any number."""
    least = max((i + 1 for i, name in enumerate(operator.inputs) if name[-1] not in "?*"), default=0)
    return least, None if operator.inputs and operator.inputs[-1].endswith("*") else len(operator.inputs)


def infer_node(
    node: Node, types: Sequence[TensorType | None], operators: Mapping[str, OperatorTypes], where: str
) -> tuple[TensorType, ...]:
    """Result types of one operator call; trailing optional operands may be left out.

    Raises InvalidInput for an unknown operator, a wrong number of operands or results, attributes or types that do not fit.
    """
    operator = operators.get(node.op) if node.domain == "dsr1" else None
    if operator is None:
        domain = node.domain or "ai.onnx"
        known = ", ".join(sorted(operators))
        _fail(where, f"unknown operator {node.op!r} of domain {domain!r}", hint=f"The operators of domain 'dsr1' are {known}.")
    least, greatest = operand_count(operator)
    if len(types) < least or (greatest is not None and len(types) > greatest):
        expected = f"{least}" if least == greatest else f"{least} or more" if greatest is None else f"{least} to {greatest}"
        _fail(where, f"{node.op} takes {expected} operands, not {len(types)}")
    for name, type_ in zip(operator.inputs, types, strict=False):
        if type_ is None and name[-1] not in "?*":
            _fail(where, f"operand {name!r} of {node.op} is absent but not optional")
    if len(node.outputs) != len(operator.outputs):
        _fail(where, f"{node.op} has {len(operator.outputs)} results, not {len(node.outputs)}")
    given = tuple(name for name, _ in node.attributes)
    if sorted(given) != sorted(operator.attributes):
        odd = sorted(set(given) ^ set(operator.attributes)) or sorted(given)
        _fail(where, f"{node.op} has no attribute {odd[0]!r}" if odd[0] in given else f"{node.op} lacks the attribute {odd[0]!r}")
    absent = [None] * max(0, len([n for n in operator.inputs if not n.endswith("*")]) - len(types))
    try:
        return operator.infer([*types, *absent], dict(node.attributes))
    except ValueError as error:
        shown = ", ".join("absent" if t is None else str(t) for t in types)
        _fail(where, f"{node.op} does not fit its operands ({shown}): {error}")


class _Types:
    """Numbers for types, in order of first use."""

    def __init__(self) -> None:
        self.types: list[TensorType] = []
        # Tuples hash several times faster than the dataclass, and R1 has 90,000 typed weights and scales.
        self._numbers: dict[tuple[str, tuple[Dim, ...]], int] = {}

    def number(self, type_: TensorType) -> int:
        key = (type_.dtype, type_.shape)
        found = self._numbers.get(key)
        if found is None:
            found = self._numbers[key] = len(self.types)
            self.types.append(type_)
        return found


def _infer(
    node: Node,
    operands: tuple[int, ...],
    functions: Mapping[str, Function],
    operators: Mapping[str, OperatorTypes],
    known: _Types,
    memo: dict[tuple[object, ...], tuple[int, ...]],
) -> tuple[int, ...]:
    """Type numbers of a node's results; -1 stands for an absent operand.

    The memo's key is all that the result depends on: which operator or function, exact attributes, operand types and the
    number of results asked for.
    """
    attributes = encode([[name, value] for name, value in node.attributes]) if node.attributes else b""
    key = (node.domain, node.op, attributes, operands, len(node.outputs))
    found = memo.get(key)
    if found is not None:
        return found
    where = _where(node)
    if node.domain != "module":
        types = [known.types[n] if n >= 0 else None for n in operands]
        results = tuple(known.number(t) for t in infer_node(node, types, operators, where))
    else:
        function = functions.get(node.op)
        if function is None:
            _fail(where, f"the graph has no function {node.op!r}")
        if node.attributes:
            _fail(where, f"a call of function {node.op!r} takes no attributes, {node.attributes[0][0]!r} was given")
        for what, given, formal in (("operands", node.inputs, function.inputs), ("results", node.outputs, function.outputs)):
            if len(given) != len(formal):
                _fail(where, f"function {node.op!r} has {len(formal)} {what}, the call has {len(given)}")
        numbers = dict(zip(function.inputs, operands, strict=True))
        for inner in function.nodes:
            inner_operands = tuple(numbers[name] if name else -1 for name in inner.inputs)
            inner_results = _infer(inner, inner_operands, functions, operators, known, memo)
            numbers.update(zip(inner.outputs, inner_results, strict=True))
        results = tuple(numbers[name] for name in function.outputs)
    memo[key] = results
    return results


def _check_scope(where: str, inputs: Sequence[str], nodes: Sequence[Node]) -> None:
    defined: set[str] = set()
    for name in inputs:
        if name in defined:
            _fail(where, f"the value {name!r} is defined twice")
        defined.add(name)
    for place, node in enumerate(nodes):
        for name in node.inputs:
            if name and name not in defined:
                _undefined(where, name, nodes[place:])
        for name in node.outputs:
            if name in defined:
                _fail(where, f"the value {name!r} is defined twice")
            defined.add(name)


def _check_results(function: Function) -> None:
    made = {name for node in function.nodes for name in node.outputs}
    for place, name in enumerate(function.outputs):
        if name not in made:
            what = (
                "one of its inputs; results never alias inputs" if name in function.inputs else "not computed by any of its nodes"
            )
            _fail(f"function {function.name!r}", f"the result {name!r} is {what}")
        if name in function.outputs[:place]:
            _fail(f"function {function.name!r}", f"the result {name!r} is returned twice")


def _check_acyclic_calls(functions: Mapping[str, Function]) -> None:
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            _fail(f"function {name!r}", f"the function calls itself: {' -> '.join([*path[path.index(name) :], name])}")
        if name in done or name not in functions:
            return
        for node in functions[name].nodes:
            if node.domain == "module":
                visit(node.op, (*path, name))
        done.add(name)

    for name in functions:
        visit(name, ())


def _check_declared(
    where: str, what: str, name: str, value: str, type_: TensorType, numbers: Mapping[str, int], known: _Types
) -> None:
    label = what if "'" in what else f"{what} {name!r}"
    if value not in numbers:
        _fail(where, f"the {label} is the undefined value {value!r}")
    found = known.types[numbers[value]]
    if found != type_:
        _fail(where, f"the {label} is declared {type_}, its value is {found}")


def _undefined(where: str, name: str, later: Sequence[Node]) -> NoReturn:
    if any(name in node.outputs for node in later):
        _fail(where, f"the value {name!r} is used before it is computed", hint="Nodes must stand in a topological order.")
    _fail(where, f"the value {name!r} is not defined")


def _where(node: Node) -> str:
    return f"node {node.name or node.op!r}"


def _fail(where: str, message: str, hint: str = "") -> NoReturn:
    raise InvalidInput(message, where=where, hint=hint)
