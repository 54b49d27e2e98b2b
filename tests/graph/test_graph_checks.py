"""Every malformed graph is refused by name; a well-formed one gets the types of all its values."""

from dataclasses import replace

import pytest
from graphs import ATTENTION, FFN, HIDDEN, call, decoder, op, with_function, with_node

from dsr1build.errors import InvalidInput
from dsr1build.graph.model import Function, Graph, TensorType
from dsr1build.graph.validate import check_graph
from dsr1build.ops.registry import OPERATORS

GRAPH = decoder()


def test_values_get_their_types() -> None:
    types = check_graph(GRAPH, OPERATORS)
    assert types["layers.1.gate.mask"] == TensorType("i32", ("tokens", 4))
    assert types["layers.0.attn.keys.next"] == TensorType("f32", ("context", HIDDEN // 2))
    assert types["layers.1.experts.3"] == types["embed"] == TensorType("f32", ("tokens", HIDDEN))
    assert types.numbers["layers.1.experts.3"] == types.numbers["embed"]


def without(graph: Graph, module: str) -> Graph:
    return replace(graph, nodes=tuple(node for node in graph.nodes if node.name != module))


def appended(graph: Graph, *nodes: object) -> Graph:
    return replace(graph, nodes=(*graph.nodes, *nodes))  # type: ignore[arg-type]


CASES = {
    "an undefined value": (
        without(GRAPH, "layers.0.shared"),
        "node 'layers.0.combine': error: the value 'layers.0.shared' is not defined",
    ),
    "a value that is used before it is computed": (
        replace(GRAPH, nodes=(*GRAPH.nodes[1:], GRAPH.nodes[0])),
        "node 'layers.0.norm': error: the value 'embed' is used before it is computed\n"
        "help: Nodes must stand in a topological order.",
    ),
    "a value that is defined twice": (
        appended(GRAPH, op("RMSNorm", "embed norm.weight", "embed", "again", epsilon=1e-6)),
        "node 'again': error: the value 'embed' is defined twice",
    ),
    "a weight that is also a state": (
        replace(GRAPH, weights={**GRAPH.weights, "layers.0.attn.keys": TensorType("f32", (8,))}),
        "prefill graph: error: the weight 'layers.0.attn.keys' is defined twice",
    ),
    "a function that does not exist": (
        with_node(GRAPH, "layers.0.shared", op="mlp"),
        "node 'layers.0.shared': error: the graph has no function 'mlp'",
    ),
    "a call with too few operands": (
        with_node(GRAPH, "layers.0.shared", inputs=("embed", "head.weight")),
        "node 'layers.0.shared': error: function 'ffn' has 4 operands, the call has 2",
    ),
    "a call with attributes": (
        with_node(GRAPH, "layers.0.shared", attributes=(("scale", 1.0),)),
        "node 'layers.0.shared': error: a call of function 'ffn' takes no attributes, 'scale' was given",
    ),
    "an unknown attribute": (
        with_node(GRAPH, "norm", attributes=(("eps", 1e-6), ("epsilon", 1e-6))),
        "node 'norm': error: RMSNorm has no attribute 'eps'",
    ),
    "a missing attribute": (
        with_node(GRAPH, "norm", attributes=()),
        "node 'norm': error: RMSNorm lacks the attribute 'epsilon'",
    ),
    "an operator with too many operands": (
        with_node(GRAPH, "norm", inputs=("embed", "norm.weight", "norm.weight")),
        "node 'norm': error: RMSNorm takes 2 operands, not 3",
    ),
    "an operator with too few operands": (
        with_node(GRAPH, "head", inputs=("norm",)),
        "node 'head': error: Linear takes 2 to 5 operands, not 1",
    ),
    "an absent operand that is needed": (
        with_node(GRAPH, "head", inputs=("norm", "", "head.weight")),
        "node 'head': error: operand 'w' of Linear is absent but not optional",
    ),
    "a wrong number of results": (
        with_node(GRAPH, "norm", outputs=("norm", "rest")),
        "node 'norm': error: RMSNorm has 1 results, not 2",
    ),
    "operands that do not fit": (
        with_node(GRAPH, "head", inputs=("norm", "layers.0.shared.down")),
        "node 'head': error: Linear does not fit its operands (f32[tokens, 8], f32[8, 12]): "
        "w is f32[8, 12], expected a weight of shape [N, 8]",
    ),
    "an output of another type": (
        replace(GRAPH, outputs={"logits": TensorType("f32", ("tokens", 17))}),
        "prefill graph: error: the output 'logits' is declared f32[tokens, 17], its value is f32[tokens, 16]",
    ),
    "an output that is not computed": (
        replace(GRAPH, outputs={"scores": TensorType("f32", ("tokens", 16))}),
        "prefill graph: error: the output 'scores' is the undefined value 'scores'",
    ),
    "a state without an update": (
        replace(GRAPH, state_updates={k: v for k, v in GRAPH.state_updates.items() if k != "layers.1.attn.values"}),
        "prefill graph: error: the state 'layers.1.attn.values' has no update",
    ),
    "a state with an update of another type": (
        replace(GRAPH, state_updates={**GRAPH.state_updates, "layers.1.attn.values": "logits"}),
        "prefill graph: error: the update of state 'layers.1.attn.values' is declared f32[context, 4], "
        "its value is f32[tokens, 16]",
    ),
    "a function that reads an undefined value": (
        with_function(GRAPH, replace(FFN, nodes=FFN.nodes[1:])),
        "function 'ffn': error: the value 'inner' is not defined",
    ),
    "a function that returns its input": (
        with_function(GRAPH, replace(FFN, outputs=("x",))),
        "function 'ffn': error: the result 'x' is one of its inputs; results never alias inputs",
    ),
    "a function that returns one value twice": (
        with_function(GRAPH, replace(ATTENTION, outputs=("y", "k_next", "k_next"))),
        "function 'attention': error: the result 'k_next' is returned twice",
    ),
    "a function that calls itself": (
        with_function(GRAPH, Function("ffn", FFN.inputs, ("y",), (call("ffn", "x w_gate w_up w_down", "y", ""),))),
        "function 'ffn': error: the function calls itself: ffn -> ffn",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_refuses(case: str) -> None:
    graph, message = CASES[case]
    with pytest.raises(InvalidInput) as caught:
        check_graph(graph, OPERATORS)
    assert caught.value.render() == message


@pytest.mark.parametrize(("domain", "shown"), [("dsr1", "dsr1"), ("", "ai.onnx")])
def test_refuses_an_unknown_operator(domain: str, shown: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        check_graph(with_node(GRAPH, "norm", op="LayerNorm", domain=domain), OPERATORS)
    assert caught.value.render().startswith(f"node 'norm': error: unknown operator 'LayerNorm' of domain {shown!r}\nhelp: The ")
    assert "RMSNorm" in caught.value.hint
