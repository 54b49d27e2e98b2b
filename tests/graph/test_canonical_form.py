"""The canonical form of a piece: what it forgets, what it keeps, and which pieces it refuses."""

import itertools
from dataclasses import replace

import pytest
from graphs import op

from dsr1build.errors import InvalidInput
from dsr1build.graph.canonical import CanonicalForm, Leaf, LeafRole, canonical_form, structural_digest
from dsr1build.graph.model import Node, TensorType

ROWS = TensorType("f32", ("tokens", 8))
SQUARE = TensorType("f32", (8, 8))
CACHE = TensorType("f32", ("context", 8))
PAST = TensorType("i64", ())


def form(
    nodes: list[Node],
    outputs: str = "y",
    updates: tuple[tuple[str, str], ...] = (),
    types: dict[str, TensorType] | None = None,
) -> tuple[CanonicalForm, tuple[str, ...]]:
    """Names say what a leaf is: ``w..`` a weight, ``s..`` a state, ``past`` a dimension, anything else an input."""
    made = {name for node in nodes for name in node.outputs}
    leaves = {}
    for name in dict.fromkeys(name for node in nodes for name in node.inputs if name and name not in made):
        role: LeafRole = {"w": "weight", "s": "state", "p": "dimension"}.get(name[0], "input")  # type: ignore[assignment]
        default = {"weight": SQUARE, "state": CACHE, "dimension": PAST, "input": ROWS}[role]
        leaves[name] = Leaf(role, (types or {}).get(name, default))
    return canonical_form(nodes, leaves, [(name, ROWS) for name in outputs.split()], updates)


FFN = [op("SwiGLU", "x w1 w2", "inner"), op("Linear", "inner w3 - x", "y")]


def test_arguments_stand_by_role_and_values_in_the_order_of_the_walk() -> None:
    found, arguments = form(FFN)
    assert found.nodes == (op("SwiGLU", "a0 a1 a2", "v0"), op("Linear", "v0 a3 - a0", "v1"))
    assert arguments == ("x", "w1", "w2", "w3", "y")
    assert [a.role for a in found.signature.arguments] == ["input", "weight", "weight", "weight", "output"]
    assert found.signature.dims == ("tokens",)
    assert found.results == ("v1",)


def test_states_stand_before_outputs_and_past_is_a_dimension() -> None:
    nodes = [
        op("Linear", "x w1", "k"),
        op("CacheInsert", "s1 k past", "s1_next"),
        op("GroupedAttention", "x s1_next s1_next past", "y", heads=1, kv_heads=1, scale=1.0),
    ]
    found, arguments = form(nodes, updates=(("s1", "s1_next"),))
    assert arguments == ("x", "w1", "s1", "y")
    assert found.signature.dims == ("tokens", "past", "context")
    assert found.nodes[1] == op("CacheInsert", "a2 v0 past", "v1")
    assert found.results == ("v1", "v2")


def test_names_of_values_and_of_nodes_do_not_count() -> None:
    other = [op("SwiGLU", "in wa wb", "hidden", "layers.7"), op("Linear", "hidden wc - in", "out", "layers.7")]
    assert form(FFN)[0].encoding == form(other, "out")[0].encoding


def test_the_order_of_independent_nodes_does_not_count() -> None:
    first, second, third = op("Linear", "x w1", "q"), op("Linear", "x w2", "k"), op("SwiGLU", "q k w3", "y")
    assert form([first, second, third])[0] == form([second, first, third])[0]


def test_nodes_that_no_root_needs_are_left_out() -> None:
    found, arguments = form([*FFN, op("Linear", "x w9", "unused")])
    assert found == form(FFN)[0]
    assert "w9" not in arguments


def test_operands_left_out_at_the_end_are_absent_operands() -> None:
    padded = [FFN[0], replace(FFN[1], inputs=(*FFN[1].inputs, ""))]
    assert form(FFN)[0] == form(padded)[0]


@pytest.mark.parametrize(
    "other",
    [
        pytest.param([FFN[0], op("Linear", "inner w3", "y")], id="an operand"),
        pytest.param([FFN[0], op("Linear", "inner w2 - x", "y")], id="an alias of a weight"),
        pytest.param([op("SwiGLU", "x w2 w1", "inner"), op("Linear", "inner w3 - w1", "y")], id="a role"),
        pytest.param([op("SwiGLU", "x w1 w2", "inner", scale=0.0), FFN[1]], id="an attribute"),
    ],
)
def test_every_other_difference_counts(other: list[Node]) -> None:
    assert form(FFN)[0].encoding != form(other)[0].encoding


def test_the_same_weight_twice_is_one_argument() -> None:
    twice, arguments = form([op("SwiGLU", "x w1 w1", "y")])
    assert arguments == ("x", "w1", "y")
    apart, arguments = form([op("SwiGLU", "x w1 w2", "y")])
    assert arguments == ("x", "w1", "w2", "y")
    assert twice.encoding != apart.encoding


def test_two_inputs_of_one_value_are_not_two_values() -> None:
    assert form([op("SwiGLU", "x x w1", "y")])[0].encoding != form([op("SwiGLU", "x z w1", "y")])[0].encoding


@pytest.mark.parametrize(("a", "b"), [(0.0, -0.0), (1e-6, 1.0000001e-6), (1, 1.0), ((1,), 1), ("1", 1)])
def test_attributes_count_by_type_and_by_bits(a: object, b: object) -> None:
    forms = [form([op("RMSNorm", "x w1", "y", epsilon=value)])[0].encoding for value in (a, b)]  # type: ignore[arg-type]
    assert forms[0] != forms[1]


@pytest.mark.parametrize("changed", [TensorType("bf16", (8, 8)), TensorType("f32", (8, 9))])
def test_types_of_arguments_count(changed: TensorType) -> None:
    assert form(FFN)[0].encoding != form(FFN, types={"w3": changed})[0].encoding


def test_which_results_are_returned_and_in_which_order_counts() -> None:
    forms = {form(FFN, outputs)[0].encoding for outputs in ("y", "inner", "inner y", "y inner")}
    assert len(forms) == 4


def test_deep_pieces_do_not_overflow_the_stack() -> None:
    names = ["x", *(f"v{i}" for i in range(5000)), "y"]
    nodes = [op("Linear", f"{a} w", b) for a, b in itertools.pairwise(names)]
    assert len(form(nodes)[0].nodes) == 5001


def test_the_digest_is_stable() -> None:
    # Kernel ids are in manifests and caches: a change of this number rebuilds everything, and should be meant.
    assert structural_digest(form(FFN)[0].encoding) == "140d2048a93e58da695d2a0e4f84b3ed880e16ad67286e843549cf7bae6ca522"


INSERT = op("CacheInsert", "s1 x past", "s1_next", "layers.0.attn")


@pytest.mark.parametrize(
    ("nodes", "outputs", "updates", "message"),
    [
        pytest.param(
            [INSERT, op("Linear", "s1 w1", "y", "layers.0.attn")],
            "y",
            (("s1", "s1_next"),),
            "node 'layers.0.attn': error: the old value of state 's1' is read 2 times; only the node that updates it may read"
            " it, once",
            id="the old value is read",
        ),
        pytest.param(
            [INSERT, op("Linear", "s1_next w1", "y")],
            "y",
            (("s1", "y"),),
            "node 'layers.0.attn': error: the state 's1' is not updated in place: its update 'y' must be the result of the node"
            " that reads it as its first operand",
            id="the update is another value",
        ),
        pytest.param(
            [INSERT],
            "s1_next",
            (),
            "node 'layers.0.attn': error: the state 's1' is read here, but its update is computed elsewhere",
            id="the update is elsewhere",
        ),
        pytest.param(
            [INSERT],
            "s1_next",
            (("s1", "s1_next"),),
            "node 'layers.0.attn': error: the updated state 's1' is read by another partition",
            id="the update is returned",
        ),
        pytest.param(
            [op("Linear", "x w1", "y")],
            "y",
            (("s1", "y"),),
            "state 's1': error: the update 'y' of state 's1' does not read the state",
            id="the update ignores the state",
        ),
    ],
)
def test_states_must_be_updated_in_place(
    nodes: list[Node], outputs: str, updates: tuple[tuple[str, str], ...], message: str
) -> None:
    with pytest.raises(InvalidInput) as caught:
        form(nodes, outputs, updates)
    assert caught.value.render() == message
