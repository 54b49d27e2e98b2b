"""A graph as an ``onnx.ModelProto``: the main graph calls model-local functions, down to plain standard operators.

Heavy: imports onnx. Nothing that builds a bundle imports this module; it is how a graph's meaning is checked.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import onnx
from onnx import TensorProto, helper

from dsr1build.digest import encode
from dsr1build.graph.model import Attribute, Graph, Node, TensorType
from dsr1build.graph.validate import OperatorTypes, check_graph, infer_node

Op = TypeVar("Op", bound=OperatorTypes)
# (operator, operand types, attributes, overload) to its function: ``dsr1build.ops.reference.function_proto``.
FunctionOf = Callable[[Op, Sequence[TensorType | None], Mapping[str, Attribute], str], onnx.FunctionProto]

OPSET = 21
IR_VERSION = 10
DTYPES: Mapping[str, int] = {
    "f32": TensorProto.FLOAT,
    "bf16": TensorProto.BFLOAT16,
    "f16": TensorProto.FLOAT16,
    "f8e4m3fn": TensorProto.FLOAT8E4M3FN,
    "i64": TensorProto.INT64,
    "i32": TensorProto.INT32,
    "i8": TensorProto.INT8,
}


def to_onnx(
    graph: Graph,
    operators: Mapping[str, Op],
    function_of: FunctionOf[Op],
    initializers: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    """The graph as a model of opset 21.

    Inputs are the graph's inputs, its states, and the weights that no initializer of their name is given for; outputs are
    the graph's outputs, then the updated states in the order of the states. Run-time dimensions are symbolic. A function
    of the graph, and an operator, is one ONNX function for each combination of operand types and attributes that occurs,
    told apart by ``overload``. Raises InvalidInput where the graph is malformed.
    """
    types = check_graph(graph, operators)
    writer = _Writer(graph, operators, function_of)
    nodes = [writer.call(node, [types[name] if name else None for name in node.inputs])[0] for node in graph.nodes]
    given = {tensor.name for tensor in initializers}
    inputs = {**graph.inputs, **graph.states, **{name: t for name, t in graph.weights.items() if name not in given}}
    outputs = [*graph.outputs, *(graph.state_updates[state] for state in graph.states)]
    main = helper.make_graph(
        nodes,
        graph.mode,
        [_value_info(name, type_) for name, type_ in inputs.items()],
        [_value_info(name, types[name]) for name in outputs],
        list(initializers),
    )
    return helper.make_model(main, ir_version=IR_VERSION, opset_imports=_opsets(), functions=list(writer.functions))


@dataclass(slots=True)
class _Writer(Generic[Op]):
    """Writes calls, and for each call that is new the function behind it. ``functions`` stand callees first."""

    graph: Graph
    operators: Mapping[str, Op]
    function_of: FunctionOf[Op]
    functions: list[onnx.FunctionProto] = field(default_factory=list)
    overloads: dict[tuple[str, str], int] = field(default_factory=dict)
    known: dict[tuple[object, ...], tuple[str, tuple[TensorType, ...]]] = field(default_factory=dict)

    def call(self, node: Node, types: Sequence[TensorType | None]) -> tuple[onnx.NodeProto, tuple[TensorType, ...]]:
        """The call as ONNX, and the types of its results."""
        key = (node.domain, node.op, tuple(types), encode([[name, value] for name, value in node.attributes]))
        if key not in self.known:
            number = self.overloads[node.domain, node.op] = self.overloads.get((node.domain, node.op), 0) + 1
            overload = "" if number == 1 else str(number)
            body = self._module if node.domain == "module" else self._operator
            self.known[key] = (overload, body(node, types, overload))
        overload, results = self.known[key]
        proto = helper.make_node(
            node.op, list(node.inputs), list(node.outputs), name=node.name, domain=node.domain, overload=overload
        )
        return proto, results

    def _operator(self, node: Node, types: Sequence[TensorType | None], overload: str) -> tuple[TensorType, ...]:
        results = infer_node(node, types, self.operators, f"node {node.name or node.op!r}")
        self.functions.append(self.function_of(self.operators[node.op], types, dict(node.attributes), overload))
        return results

    def _module(self, node: Node, types: Sequence[TensorType | None], overload: str) -> tuple[TensorType, ...]:
        function = self.graph.functions[node.op]
        scope: dict[str, TensorType | None] = dict(zip(function.inputs, types, strict=True))
        nodes = []
        for inner in function.nodes:
            proto, results = self.call(inner, [scope[name] if name else None for name in inner.inputs])
            nodes.append(proto)
            scope.update(zip(inner.outputs, results, strict=True))
        self.functions.append(
            helper.make_function(
                "module",
                function.name,
                list(function.inputs),
                list(function.outputs),
                nodes,
                _opsets(),
                overload=overload,
            )
        )
        made = {name: type_ for name, type_ in scope.items() if type_ is not None}
        return tuple(made[name] for name in function.outputs)


def _opsets() -> list[onnx.OperatorSetIdProto]:
    return [helper.make_opsetid("", OPSET), helper.make_opsetid("dsr1", 1), helper.make_opsetid("module", 1)]


def _value_info(name: str, type_: TensorType) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, DTYPES[type_.dtype], list(type_.shape))
