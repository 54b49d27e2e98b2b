"""Cutting a model: partitions, kernels, the order, and what is refused."""

from collections import Counter
from dataclasses import replace

import pytest
from graphs import (
    ATTENTION,
    FFN,
    GATE,
    HIDDEN,
    RULES,
    TOP_K,
    both_modes,
    decoder,
    model,
    op,
    recipe,
    rule,
    with_function,
    with_node,
)

from dsr1build.errors import InvalidInput
from dsr1build.graph.canonical import Leaf, canonical_form
from dsr1build.graph.inline import inline_calls
from dsr1build.graph.model import Graph, TensorType
from dsr1build.graph.validate import check_graph
from dsr1build.ops.registry import OPERATORS
from dsr1build.partition.cut import partition_model
from dsr1build.partition.explain import explain_difference, look_alikes
from dsr1build.partition.model import Kernel, PartitionedModel


def cut(graph: Graph, rules: tuple[object, ...] = RULES) -> PartitionedModel:
    return partition_model(model({"prefill": graph}), recipe(rules))  # type: ignore[arg-type]


def kernels_of(partitioned: PartitionedModel, kind: str) -> list[Kernel]:
    return [kernel for kernel in partitioned.kernels.values() if kernel.kind == kind]


def test_equal_partitions_of_all_layers_and_both_modes_are_one_kernel() -> None:
    partitioned = partition_model(both_modes(layers=3), recipe())
    kinds = {"embedding": 1, "attention": 3, "gating": 3, "expert": 15, "combine": 3, "head": 1}
    for partitions in partitioned.partitions.values():
        assert Counter(p.kind for p in partitions) == kinds
    assert [kernel.kind for kernel in partitioned.kernels.values()] == list(kinds)
    assert partitioned.notes == ()


def test_kernels_do_not_depend_on_the_number_of_layers() -> None:
    assert cut(decoder(layers=1)).kernels == cut(decoder(layers=7)).kernels


def test_a_kernel_says_what_it_takes() -> None:
    (attention,) = kernels_of(cut(decoder()), "attention")
    roles = Counter(argument.role for argument in attention.signature.arguments)
    assert roles == {"input": 1, "weight": 5, "state": 2, "output": 1}
    assert attention.signature.dims == ("tokens", "past", "context")
    assert attention.nodes[0] == op("RMSNorm", "a0 a1", "v0", epsilon=1e-6)
    # The residual is the value that the norm reads too: one argument.
    assert attention.nodes[-1].inputs[3] == "a0"
    assert len(attention.results) == 3
    assert not attention.row_independent
    assert all(kernel.row_independent for kernel in cut(decoder()).kernels.values() if kernel.kind != "attention")
    assert attention.id == attention.digest[:16]


def test_partitions_name_the_values_of_the_graph() -> None:
    partitioned = cut(decoder())
    by_name = {p.name: p for p in partitioned.partitions["prefill"]}
    expert = by_name["layers.1.experts.2"]
    matrices = tuple(f"layers.1.experts.2.{w}" for w in ("gate", "up", "down"))
    assert expert.arguments == ("layers.1.post", *matrices, "layers.1.experts.2")
    attention = by_name["layers.1.attn"]
    assert attention.modules == ("layers.1.norm", "layers.1.attn")
    assert attention.arguments[0] == "layers.0.combine"
    assert attention.arguments[-3:] == ("layers.1.attn.keys", "layers.1.attn.values", "layers.1.attn")
    # The mask is read by the dispatch alone; the gating returns it all the same.
    assert by_name["layers.0.gate"].arguments[-3:] == ("layers.0.post", "layers.0.gate.weights", "layers.0.gate.mask")


def test_partitions_come_in_a_topological_order() -> None:
    partitioned = cut(decoder(layers=3))
    dispatches = {d.combine: d for d in partitioned.dispatches["prefill"]}
    position = {p.name: i for i, p in enumerate(partitioned.partitions["prefill"])}
    ready = {"ids", "logits", *decoder(layers=3).weights, *decoder(layers=3).states}
    for partition in partitioned.partitions["prefill"]:
        kernel = partitioned.kernels[partition.kernel]
        for argument, value in zip(kernel.signature.arguments, partition.arguments, strict=True):
            if argument.role == "input" and not value.endswith((".slots", ".slot_weights")):
                assert value in ready
        ready.update(partition.arguments)
        if partition.name in dispatches:
            assert all(position[e] < position[partition.name] for e in dispatches[partition.name].experts)
    assert len(ready) > 20


def test_sparse_dispatch_is_recorded_and_the_combine_reads_slots() -> None:
    partitioned = cut(decoder())
    first, second = partitioned.dispatches["prefill"]
    assert second.experts == tuple(f"layers.1.experts.{e}" for e in range(4))
    assert (second.input, second.weights, second.mask) == ("layers.1.post", "layers.1.gate.weights", "layers.1.gate.mask")
    assert second.top_k == TOP_K
    combine = next(p for p in partitioned.partitions["prefill"] if p.name == second.combine)
    assert combine.arguments == ("layers.1.attn", "layers.1.shared", second.slots, second.slot_weights, "layers.1.combine")
    kernel = partitioned.kernels[combine.kernel]
    assert [node.op for node in kernel.nodes] == ["CombineSlots"]
    assert [str(a.type) for a in kernel.signature.arguments[2:4]] == [f"f32[tokens, {TOP_K}, {HIDDEN}]", f"f32[tokens, {TOP_K}]"]
    assert first.slots != second.slots


def test_the_combine_may_stand_in_a_function() -> None:
    from graphs import call

    from dsr1build.graph.model import Function

    graph = decoder()
    names = ("residual", "shared", "weights", *(f"e{i}" for i in range(4)))
    wrapped = Function("mix", names, ("y",), (op("CombineExperts", " ".join(names), "y"),))
    nodes = [call("mix", " ".join(n.inputs), " ".join(n.outputs), n.name) if n.op == "CombineExperts" else n for n in graph.nodes]
    within = cut(with_function(replace(graph, nodes=tuple(nodes)), wrapped))
    assert within.kernels == cut(graph).kernels
    assert within.dispatches == cut(graph).dispatches


def test_every_partition_has_the_canonical_form_of_its_kernel() -> None:
    """The key that finds equal partitions without canonicalising each one must agree with canonicalising each one."""
    graph = decoder(layers=3)
    graph = with_node(graph, "layers.1.norm", attributes=(("epsilon", 1e-5),))
    shared = ("layers.2.post", "layers.2.shared.up", "layers.2.shared.up", "layers.2.shared.down")
    graph = with_node(graph, "layers.2.shared", inputs=shared)
    partitioned = cut(graph)
    types = check_graph(graph, OPERATORS)
    nodes = {name: [n for n in graph.nodes if n.name == name] for name in {n.name for n in graph.nodes}}
    seen = set()
    for partition in partitioned.partitions["prefill"]:
        if partition.kind == "combine":
            continue
        kernel = partitioned.kernels[partition.kernel]
        members = [node for name in partition.modules for node in nodes[name]]
        made = [value for node in members for value in node.outputs]
        leaves = {}
        for value in (v for node in members for v in node.inputs if v and v not in made):
            role = "weight" if value in graph.weights else "state" if value in graph.states else "input"
            leaves[value] = Leaf("dimension" if value == "past" else role, types[value])  # type: ignore[arg-type]
        outputs = [(v, types[v]) for v in made if v in partition.arguments]
        updates = [(s, v) for s, v in graph.state_updates.items() if v in made]
        form, arguments = canonical_form(inline_calls(members, graph.functions), leaves, outputs, updates)
        assert (form.encoding, arguments) == (kernel.form, partition.arguments)
        seen.add(kernel.id)
    assert len(seen) == len(partitioned.kernels) - 1 == 7


def test_another_attribute_makes_another_kernel_and_the_difference_is_told() -> None:
    partitioned = cut(with_node(decoder(), "layers.1.norm", attributes=(("epsilon", 1e-5),)))
    first, second = kernels_of(partitioned, "attention")
    assert explain_difference(first, second) == (
        "operator 1, RMSNorm: the attribute epsilon is 1e-06 in the one and 1e-05 in the other"
    )
    assert look_alikes(list(partitioned.kernels.values())) == [(first, second, explain_difference(first, second))]
    assert explain_difference(first, first) == ""


def test_another_dtype_makes_another_kernel() -> None:
    graph = decoder()
    weights = {**graph.weights, "layers.1.attn.q": TensorType("bf16", (HIDDEN, HIDDEN))}
    first, second = kernels_of(cut(replace(graph, weights=weights)), "attention")
    assert explain_difference(first, second) == (
        "operator 2, Linear: the operand w is weight f32[8, 8] in the one and weight bf16[8, 8] in the other"
    )


def test_a_weight_used_twice_makes_another_kernel() -> None:
    graph = decoder()
    name = "layers.1.shared"
    inputs = ("layers.1.post", f"{name}.gate", f"{name}.gate", f"{name}.down")
    first, second = kernels_of(cut(with_node(graph, name, inputs=inputs)), "expert")
    assert explain_difference(first, second) == (
        "operator 1, SwiGLU: the operand w_up is a value of its own in the one and "
        "what operator 1, SwiGLU, reads as w_gate in the other"
    )


def test_one_argument_more_does_not_hide_where_the_difference_is() -> None:
    # The second reads one input more, late; every weight's number shifts, but the first operators are the same.
    twin = replace(FFN, name="twin", nodes=(FFN.nodes[0], op("Linear", "inner w_down - x", "y")))
    graph = with_node(with_function(decoder(), twin), "layers.1.shared", op="twin")
    first, second = kernels_of(cut(graph), "expert")
    assert explain_difference(first, second) == "operator 2, Linear: it has 2 operands in the one and 4 in the other"


def test_other_results_make_another_kernel() -> None:
    graph = decoder()
    logits = replace(graph, outputs={**graph.outputs, "layers.1.norm": TensorType("f32", ("tokens", HIDDEN))})
    first, second = kernels_of(cut(logits), "attention")
    assert explain_difference(first, second).startswith("the one returns result 1 of operator 4, CacheInsert and ")
    assert explain_difference(first, second).endswith("result 1 of operator 1, RMSNorm and result 1 of operator 8, Linear")


def test_another_operator_makes_another_kernel() -> None:
    twin = replace(FFN, name="twin", nodes=(op("Linear", "x w_gate", "inner"), op("Linear", "inner w_down", "y")))
    graph = with_node(with_function(decoder(), twin), "layers.1.shared", op="twin")
    first, second = kernels_of(cut(graph), "expert")
    assert explain_difference(first, second) == "operator 1 is SwiGLU in the one and Linear in the other"


def test_functions_of_other_names_and_equal_bodies_are_one_kernel() -> None:
    graph = with_node(with_function(decoder(), replace(FFN, name="twin")), "layers.1.shared", op="twin")
    assert cut(graph).kernels == cut(decoder()).kernels


def test_equal_digests_do_not_make_two_forms_one_kernel() -> None:
    partitioned = partition_model(both_modes(), recipe(), digest=lambda form: "c" * 64)
    honest = partition_model(both_modes(), recipe())
    assert [k.form for k in partitioned.kernels.values()] == [k.form for k in honest.kernels.values()]
    assert list(partitioned.kernels) == ["c" * 16, *("c" * 16 + f"_{i}" for i in range(2, 7))]
    assert [p.arguments for p in partitioned.partitions["decode"]] == [p.arguments for p in honest.partitions["decode"]]


def test_leftovers_become_other_and_idle_rules_are_told() -> None:
    partitioned = cut(decoder(), (*RULES[:-1], rule("ffn", "layers.{n}.mlp")))
    assert [p.name for p in partitioned.partitions["prefill"] if p.kind == "other"] == ["norm", "head"]
    assert partitioned.notes == (
        "The recipe's rule 7 (ffn: layers.{n}.mlp) matches no module.",
        "No rule of the recipe takes 'norm' and 1 more (prefill): each became a partition of kind 'other'.",
    )


def test_a_kernel_of_two_kinds_is_told() -> None:
    partitioned = cut(decoder(), (rule("ffn", "layers.{n}.shared"), *RULES))
    (note,) = partitioned.notes[1:]
    (expert,) = kernels_of(partitioned, "expert")
    assert partitioned.notes[0] == "The recipe's rule 6 (expert: layers.{n}.shared) matches no module."
    assert note == f"Kernel {expert.id} serves partitions of kind 'ffn' too; it is compiled as 'expert'."


def test_a_partition_that_is_not_convex_is_refused_with_the_path() -> None:
    rules = (rule("attention", "layers.{n}.attn", "layers.{n}.combine"), *RULES)
    with pytest.raises(InvalidInput) as caught:
        cut(decoder(), rules)
    assert caught.value.render() == (
        "recipe, rule 1 of `partitions`: error: the attention partition of 'layers.0.attn', 'layers.0.combine' is not convex: "
        "the path layers.0.attn -> layers.0.post -> layers.0.gate -> layers.0.combine leaves it and enters it again\n"
        "help: Add 'layers.0.post' to the same rule, or give the modules before and after it rules of their own."
    )


def test_partitions_that_need_each_other_are_refused() -> None:
    graph = decoder(layers=1)
    # a -> b and c -> d, cut into {a, d} and {b, c}: both are convex, neither can go first.
    extra = [op("RMSNorm", "embed norm.weight", name, name, epsilon=1e-6) for name in ("a", "c")]
    extra += [op("RMSNorm", f"{source} norm.weight", name, name, epsilon=1e-6) for source, name in (("a", "b"), ("c", "d"))]
    nodes = (*graph.nodes, *extra)
    ends = {name: TensorType("f32", ("tokens", HIDDEN)) for name in ("b", "d")}
    graph = replace(graph, nodes=nodes, outputs={**graph.outputs, **ends})
    with pytest.raises(InvalidInput) as caught:
        cut(graph, (rule("ffn", "a", "d"), rule("other", "b", "c"), *RULES))
    assert caught.value.render() == (
        "recipe, rule 1 of `partitions`: error: partitions need each other's results: the ffn partition of 'a', 'd' needs the "
        "other partition of 'c', 'b' needs the ffn partition of 'a', 'd'\n"
        "help: Give the modules of one of them rules of their own."
    )


def test_a_result_that_nothing_reads_is_refused() -> None:
    graph = decoder()
    graph = replace(graph, nodes=(*graph.nodes, op("RMSNorm", "embed norm.weight", "spare", "spare", epsilon=1e-6)))
    with pytest.raises(InvalidInput) as caught:
        cut(graph)
    assert caught.value.render() == "node 'spare': error: nothing reads the results of this module"


SPARSE_HINT = "\nhelp: Let the recipe make each routed expert, the router and the combine a partition of its own."


@pytest.mark.parametrize(
    ("graph", "rules", "message"),
    [
        pytest.param(
            decoder(),
            (rule("expert", "layers.{n}.experts.0", "layers.{n}.experts.1"), *RULES),
            "expert 1 ('layers.0.experts.1') is not a partition of its own",
            id="experts of one partition",
        ),
        pytest.param(
            decoder(),
            (rule("expert", "layers.{n}.experts.3", "layers.{n}.shared"), *RULES),
            "the expert partition 'layers.0.shared' has 1 inputs, 0 states and 2 outputs; a routed expert has one input and one"
            " output",
            id="an expert with more results",
        ),
        pytest.param(
            with_node(decoder(), "layers.0.shared", inputs=("layers.0.experts.0", *decoder().nodes[9].inputs[1:])),
            RULES,
            "the result of expert partition 'layers.0.experts.0' is also read outside of the combine",
            id="an expert that others read",
        ),
        pytest.param(
            with_node(decoder(), "layers.0.experts.1", inputs=("layers.0.attn", *decoder().nodes[6].inputs[1:])),
            RULES,
            "the experts 'layers.0.experts.0' and 'layers.0.experts.1' read different inputs",
            id="experts of different inputs",
        ),
        pytest.param(
            with_node(
                with_function(
                    decoder(), replace(FFN, name="twin", nodes=(op("Linear", "x w_gate", "t"), op("Linear", "t w_down", "y")))
                ),
                "layers.0.experts.1",
                op="twin",
            ),
            RULES,
            "the experts 'layers.0.experts.0' and 'layers.0.experts.1' are different kernels",
            id="experts of different kernels",
        ),
        pytest.param(
            with_function(decoder(), replace(GATE, outputs=("logits", "mask"))),
            RULES,
            "the routing weights 'layers.0.gate.weights' are not the result of a Route",
            id="weights that are no routing",
        ),
        pytest.param(
            with_function(
                with_node(
                    with_node(decoder(), "layers.0.gate", outputs=("layers.0.gate.weights",)),
                    "layers.1.gate",
                    outputs=("layers.1.gate.weights",),
                ),
                replace(GATE, outputs=("weights",)),
            ),
            RULES,
            "the module 'layers.0.gate' returns the routing weights but not the mask",
            id="no mask",
        ),
    ],
)
def test_sparse_dispatch_refuses(graph: Graph, rules: tuple[object, ...], message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        cut(graph, rules)
    assert (
        caught.value.render() == f"node 'layers.0.combine': error: sparse dispatch does not fit this cut: {message}{SPARSE_HINT}"
    )


def test_a_state_that_another_partition_reads_is_refused() -> None:
    graph = decoder(layers=1)
    read = op(
        "GroupedAttention",
        "embed layers.0.attn.keys.next layers.0.attn.values.next past",
        "peek",
        "peek",
        heads=2,
        kv_heads=1,
        scale=1.0,
    )
    graph = replace(graph, nodes=(*graph.nodes, read), outputs={**graph.outputs, "peek": TensorType("f32", ("tokens", HIDDEN))})
    with pytest.raises(InvalidInput) as caught:
        cut(graph)
    assert caught.value.render() == (
        "node 'layers.0.attn': error: the updated state 'layers.0.attn.keys' is read by another partition"
    )


def test_attention_reads_the_updated_cache_alone() -> None:
    stale = replace(
        ATTENTION,
        nodes=tuple(
            replace(n, inputs=("q", "k_cache", "v_next", "past")) if n.op == "GroupedAttention" else n for n in ATTENTION.nodes
        ),
    )
    with pytest.raises(InvalidInput) as caught:
        cut(with_function(decoder(), stale))
    assert caught.value.message == (
        "the old value of state 'layers.0.attn.keys' is read 2 times; only the node that updates it may read it, once"
    )
