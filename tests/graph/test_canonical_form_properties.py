"""On random pieces: the canonical form forgets names and the order of independent nodes, and nothing else."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from dsr1build.graph.canonical import CanonicalForm, Leaf, canonical_form
from dsr1build.graph.model import Node, TensorType

TYPES = (TensorType("f32", ("tokens", 8)), TensorType("bf16", (8, 8)), TensorType("f32", (8,)))
Piece = tuple[list[Node], dict[str, Leaf], list[str]]


@st.composite
def pieces(draw: st.DrawFn) -> Piece:
    leaves = {f"in{i}": Leaf("input", draw(st.sampled_from(TYPES))) for i in range(draw(st.integers(1, 3)))}
    leaves |= {f"w{i}": Leaf("weight", draw(st.sampled_from(TYPES))) for i in range(draw(st.integers(0, 4)))}
    names = [*leaves]
    nodes = []
    for number in range(draw(st.integers(1, 8))):
        inputs = tuple(draw(st.lists(st.sampled_from([*names, ""]), min_size=1, max_size=4)))
        outputs = tuple(f"v{number}.{i}" for i in range(draw(st.integers(1, 2))))
        scale = draw(st.sampled_from([(), (("scale", 0.5),), (("scale", -0.0),), (("scale", 0.0),), (("scale", 1),)]))
        nodes.append(Node(draw(st.sampled_from(["Linear", "SwiGLU", "Route"])), inputs, outputs, scale))
        names += outputs
    made = [name for node in nodes for name in node.outputs]
    roots = draw(st.lists(st.sampled_from(made), min_size=1, max_size=3, unique=True))
    return nodes, leaves, roots


def form(piece: Piece) -> tuple[CanonicalForm, tuple[str, ...]]:
    nodes, leaves, roots = piece
    return canonical_form(nodes, leaves, [(name, TYPES[0]) for name in roots], [])


def renamed(piece: Piece, names: dict[str, str]) -> Piece:
    nodes, leaves, roots = piece
    return (
        [
            replace(n, inputs=tuple(names[i] for i in n.inputs), outputs=tuple(names[o] for o in n.outputs), name=f"layers.{k}")
            for k, n in enumerate(nodes)
        ],
        {names[name]: leaf for name, leaf in leaves.items()},
        [names[name] for name in roots],
    )


@given(pieces(), st.randoms(use_true_random=False))
@settings(max_examples=150, deadline=None)
def test_forgets_names_and_the_order_of_independent_nodes(piece: Piece, random: object) -> None:
    nodes, leaves, roots = piece
    values = [*leaves, *(name for node in nodes for name in node.outputs)]
    fresh = [f"x{i}" for i in range(len(values))]
    random.shuffle(fresh)  # type: ignore[attr-defined]
    names = {"": "", **dict(zip(values, fresh, strict=True))}
    # Any topological order: take a random one of the nodes whose operands are there.
    waiting, ready, order = list(nodes), set(leaves) | {""}, []
    while waiting:
        node = random.choice([n for n in waiting if set(n.inputs) <= ready])  # type: ignore[attr-defined]
        waiting.remove(node)
        ready.update(node.outputs)
        order.append(node)
    plain, arguments = form(piece)
    other, others = form(renamed((order, leaves, roots), names))
    assert plain == other
    assert others == tuple(names[name] for name in arguments)


@given(pieces(), st.data())
@settings(max_examples=150, deadline=None)
def test_keeps_operators_attributes_wiring_and_types(piece: Piece, data: st.DataObject) -> None:
    nodes, leaves, roots = piece
    plain, arguments = form(piece)
    needed = {name for name in arguments if name in leaves}
    reached = len(plain.nodes)
    # Change one node that the roots need: the last one always is, once everything after the roots is cut off.
    place = data.draw(st.integers(0, len(nodes) - 1))
    changed = replace(nodes[place], op="RMSNorm")
    other, _ = form(([*nodes[:place], changed, *nodes[place + 1 :]], leaves, roots))
    ops = [node.op for node in other.nodes]
    assert (plain.encoding != other.encoding) == ("RMSNorm" in ops)
    assert len(other.nodes) == reached
    if needed:
        name = data.draw(st.sampled_from(sorted(needed)))
        retyped, _ = form((nodes, {**leaves, name: replace(leaves[name], type=TensorType("f16", (3,)))}, roots))
        assert retyped.encoding != plain.encoding


@given(pieces(), pieces())
@settings(max_examples=150, deadline=None)
def test_equal_encodings_are_equal_forms(first: Piece, second: Piece) -> None:
    a, b = form(first)[0], form(second)[0]
    if a.encoding == b.encoding:
        assert (a.nodes, a.signature, a.results) == (b.nodes, b.signature, b.results)
    else:
        # Dataclasses call 0.0 and -0.0, 1 and 1.0 equal; printed forms do not.
        assert repr((a.nodes, a.signature, a.results)) != repr((b.nodes, b.signature, b.results))
