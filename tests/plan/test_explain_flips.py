"""Every declared input of an action, changed one at a time: the key changes, and the explanation names that very field."""

from dataclasses import replace

import pytest

from dsr1build.config.schema import Target
from dsr1build.digest import BlobRef, encode, key_of
from dsr1build.graph.signature import Specialization
from dsr1build.lower import action as lower_action
from dsr1build.lower.action import lower_fields
from dsr1build.plan.explain import Known, explain_miss
from dsr1build.toolchains import target as toolchain
from dsr1build.toolchains import tools
from dsr1build.toolchains.target import c_fields, link_fields


def explain(before, after):
    """The field that the explanation names, after checking that the action misses."""
    assert key_of(before) != key_of(after)
    earlier = Known.from_encoded(encode(before), "last build", "id", "label")
    found = explain_miss(Known.from_encoded(encode(after), "this build", "id", "label"), [earlier], list)
    assert found.reason == "changed" and found.others == ()
    return found.difference.path


def edited(target: Target, **changes):
    return Target.model_validate({**target.model_dump(exclude_defaults=True), **changes})


@pytest.fixture(scope="module")
def compile_action(planner):
    """(fields of the compile of an action that uses the schedule "dot", for any target and recipe)."""

    def fields(recipe=None, target=None):
        plan = planner.plan(recipe, [target or planner.target])
        found = next(a for a in plan.actions.values() if a.kind == "compile" and a.label.startswith("ffn") and "1.." in a.label)
        return dict(found.fields(planner.lowered))

    return fields


TARGET_FLIPS = [
    ({"cpu": "x86-64-v2"}, "target.cpu"),
    ({"features": ("+avx512f",)}, "target.features"),
    *(({"passes": {group: "cse"}}, f"pipeline.{group}") for group in toolchain.PIPELINE),
    *(({"schedules": {"dot": {o: 2 * v}}}, f"schedules.dot.{o}") for o, v in toolchain.SCHEDULES["dot"].items()),
]


@pytest.mark.parametrize(("changes", "field"), TARGET_FLIPS, ids=[field for _, field in TARGET_FLIPS])
def test_an_option_of_the_target(planner, compile_action, changes, field):
    assert explain(compile_action(), compile_action(target=edited(planner.target, **changes))) == field


@pytest.mark.parametrize("feature", ["+avx512f", "+avx512vl", "+avxvnni", "-fma", "-avx2"])
def test_a_single_cpu_feature(planner, compile_action, feature):
    base = edited(planner.target, features=("+amx-tile",))
    both = edited(planner.target, features=("+amx-tile", feature))
    assert explain(compile_action(target=base), compile_action(target=both)).startswith("target.features")


@pytest.mark.parametrize(("constant", "field"), [("ABI_VERSION", "abi"), ("KERNEL_SCHEMA_VERSION", "schema")])
def test_a_version(compile_action, monkeypatch, constant, field):
    before = compile_action()
    monkeypatch.setattr(toolchain, constant, 1000)
    assert explain(before, compile_action()) == field


def test_every_single_tool_file(planner, compile_action):
    before = compile_action()
    assert len(before["tools"]) > 50
    for name, digest in before["tools"].items():
        # Upgrade, downgrade or another build of the same version: content is all that counts, by the name of the file.
        after = {**before, "tools": {**before["tools"], name: digest[:-1] + ("0" if digest[-1] != "0" else "1")}}
        assert explain(before, after) == f"tools.{name}"
    removed = dict(before["tools"])
    name = next(iter(removed))
    del removed[name]
    assert explain(before, {**before, "tools": removed}) == f"tools.{name}"


def test_our_own_sources(compile_action, planner, monkeypatch):
    before = compile_action()
    monkeypatch.setattr(tools, "adapter_digest", lambda: "0" * 64)
    assert explain(before, compile_action()) == "adapter"
    lowering = kernel_fields(planner)
    monkeypatch.setattr(lower_action, "sources_digest", lambda rooms: "0" * 64)
    assert explain(lowering, kernel_fields(planner)) == "sources"


@pytest.mark.parametrize("field", ["text", "signature"])
def test_a_file_that_the_compile_reads(compile_action, field):
    before = compile_action()
    assert explain(before, {**before, field: BlobRef("0" * 64)}) == field


def test_no_field_of_a_compile_is_without_its_flip(compile_action):
    flipped = {field.split(".")[0] for _, field in TARGET_FLIPS} | {"abi", "schema", "tools", "adapter", "text", "signature"}
    assert set(compile_action()) == flipped


def test_the_triple(compile_action):
    before = compile_action()
    assert explain(before, {**before, "target": {**before["target"], "triple": "x86_64-unknown-linux-musl"}}) == "target.triple"
    assert set(before["target"]) == {"cpu", "features", "triple"}


def ffn(planner):
    return next(k for k in planner.partitioned.kernels.values() if k.kind == "ffn")


def kernel_fields(planner, specialization=None, **changes):
    kernel = replace(ffn(planner), **changes)
    return dict(lower_fields(kernel.nodes, kernel.signature, kernel.results, specialization or Specialization("range")))


def test_every_attribute_operand_and_operator_of_a_kernel(planner):
    before = kernel_fields(planner)
    nodes = ffn(planner).nodes
    flips = 0
    for index, node in enumerate(nodes):

        def explained(index=index, **changes):
            changed = (*nodes[:index], replace(nodes[index], **changes), *nodes[index + 1 :])
            return explain(before, kernel_fields(planner, nodes=changed))

        assert explained(op="Other") == f"nodes[{index}].op"
        for place in range(len(node.inputs)):
            inputs = (*node.inputs[:place], "elsewhere", *node.inputs[place + 1 :])
            assert explained(inputs=inputs) == f"nodes[{index}].inputs[{place}]"
            flips += 1
        for place, (name, value) in enumerate(node.attributes):
            other = value + 1 if isinstance(value, int | float) else f"{value}x"
            attributes = (*node.attributes[:place], (name, other), *node.attributes[place + 1 :])
            assert explained(attributes=attributes) == f"nodes[{index}].attributes.{name}"
            flips += 1
    assert flips >= 6


def test_every_shape_type_role_and_layout_of_a_signature(planner):
    before = kernel_fields(planner)
    signature = ffn(planner).signature
    for index, argument in enumerate(signature.arguments):

        def explained(index=index, **changes):
            changed = replace(signature.arguments[index], **changes)
            arguments = (*signature.arguments[:index], changed, *signature.arguments[index + 1 :])
            return explain(before, kernel_fields(planner, signature=replace(signature, arguments=arguments)))

        head = f"signature.arguments[{index}]"
        assert explained(type=replace(argument.type, dtype="f16")) == f"{head}.dtype"
        for place, size in enumerate(argument.type.shape):
            other = size + 1 if isinstance(size, int) else "past"
            shape = (*argument.type.shape[:place], other, *argument.type.shape[place + 1 :])
            assert explained(type=replace(argument.type, shape=shape)) == f"{head}.shape[{place}]"
        assert explained(role="state") == f"{head}.role"
        assert explained(layout="packed") == f"{head}.layout"


@pytest.mark.parametrize(
    ("specialization", "field"),
    [(Specialization("exact", 1), "specialization.guard"), (Specialization("padded", 2), "specialization.guard")],
)
def test_a_specialization(planner, specialization, field):
    assert explain(kernel_fields(planner), kernel_fields(planner, specialization)) == field


def test_a_number_of_tokens(planner):
    one, two = (kernel_fields(planner, Specialization("exact", tokens)) for tokens in (1, 2))
    assert explain(one, two) == "specialization.tokens"


def test_every_input_of_c_code_and_of_the_link(planner):
    spec = toolchain.TargetSpec()
    refs = {"a.c": BlobRef("a" * 64), "a.h": BlobRef("b" * 64)}
    before = dict(c_fields(refs, spec, ["-DX=1"], planner.remembered))
    assert explain(before, c_fields({**refs, "a.h": BlobRef("c" * 64)}, spec, ["-DX=1"], planner.remembered)) == "sources.a.h"
    assert explain(before, c_fields(refs, spec, ["-DX=2"], planner.remembered)) == "definitions[0]"
    other = replace(spec, cpu="x86-64-v2")
    assert explain(before, c_fields(refs, other, ["-DX=1"], planner.remembered)) == "target.cpu"
    for name in before["tools"]:
        assert explain(before, {**before, "tools": {**before["tools"], name: "0" * 64}}) == f"tools.{name}"
    objects = [BlobRef("a" * 64), BlobRef("b" * 64)]
    before = dict(link_fields(objects, ["f", "g"], "model.so", "soname", planner.remembered))
    swapped = link_fields(list(reversed(objects)), ["f", "g"], "model.so", "soname", planner.remembered)
    assert explain(before, swapped) == "objects[0]"
    assert explain(before, link_fields(objects, ["f", "h"], "model.so", "soname", planner.remembered)) == "exports[1]"
    assert explain(before, link_fields(objects, ["f", "g"], "other.so", "soname", planner.remembered)) == "output"
    assert explain(before, link_fields(objects, ["f", "g"], "model.so", "other", planner.remembered)) == "soname"
    assert explain(before, {**before, "adapter": "0" * 64}) == "adapter"
