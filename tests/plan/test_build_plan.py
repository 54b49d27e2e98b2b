"""What is in a plan, and what reaches the keys of its actions: every declared option, and nothing else."""

from dataclasses import replace

import pytest

from dsr1build.config.schema import Recipe, Target
from dsr1build.digest import key_of
from dsr1build.errors import InvalidInput
from dsr1build.graph.signature import Specialization
from dsr1build.lower.action import lower_fields
from dsr1build.plan.build_plan import LinkParts, check_pipelines, pipeline_overrides
from dsr1build.toolchains import cpu, tools
from dsr1build.toolchains import target as toolchain


def changed(planner, recipe=None, target=None):
    """Kinds of the kernels whose compile keys differ from those of the sample."""
    before, after = planner.keys(), planner.keys(recipe, target)
    assert before.keys() == after.keys()
    kinds = {kernel.id: kernel.kind for kernel in planner.partitioned.kernels.values()}
    return {kinds[name.split(":")[0]] for name in before if before[name] != after[name]}


def all_kinds(planner):
    return {kernel.kind for kernel in planner.partitioned.kernels.values()}


def edit(model, **changes):
    """A recipe or target with other values, checked again as if read from a file."""
    return type(model).model_validate({**model.model_dump(exclude_defaults=True), **changes})


def with_pipeline(planner, kind, pipeline, target="x86-64-v3"):
    return edit(planner.recipe, pipelines={target: {kind: pipeline}})


def test_a_plan_has_one_lower_and_compile_action_for_each_variant(planner):
    other = edit(planner.target, name="v2", cpu="x86-64-v2")
    plan = planner.plan(targets=[planner.target, other])
    count = sum(map(len, planner.variants.values()))
    kinds = [action.kind for action in plan.actions.values()]
    assert {kind: kinds.count(kind) for kind in kinds} == {"lower": count, "compile": 2 * count, "runtime": 2, "link": 4}
    assert len({v.id for v in plan.variants}) == len(plan.variants) == 2 * count
    seen = set()
    for id, action in plan.actions.items():
        assert action.id == id and set(action.inputs) <= seen
        seen.add(id)
    assert plan.links == {"x86-64-v3": "link:x86-64-v3", "v2": "link:v2"}


def test_ids_and_keys_are_equal_from_plan_to_plan(planner):
    assert planner.keys() == planner.keys()
    assert list(planner.plan().actions) == list(planner.plan().actions)


def test_keys_are_distinct(planner):
    keys = list(planner.keys().values())
    assert len(set(keys)) == len(keys)
    assert all(len(key) == 64 for key in keys)


@pytest.mark.parametrize("group", list(toolchain.PIPELINE))
def test_a_pass_group_reaches_the_kernels_it_is_given_for(planner, group):
    assert changed(planner, target=edit(planner.target, passes={group: "cse"})) == all_kinds(planner)
    assert changed(planner, with_pipeline(planner, "all", {"passes": {group: "cse"}})) == all_kinds(planner)
    assert changed(planner, with_pipeline(planner, "ffn", {"passes": {group: "cse"}})) == {"ffn"}
    assert changed(planner, with_pipeline(planner, "ffn", {"passes": {group: "cse"}}, target="another")) == set()


@pytest.mark.parametrize("option", list(toolchain.SCHEDULES["dot"]))
def test_a_schedule_option_reaches_only_kernels_that_use_the_schedule(planner, option):
    value = 2 * toolchain.SCHEDULES["dot"][option]
    touched = changed(planner, target=edit(planner.target, schedules={"dot": {option: value}}))
    using = {kernel.kind for kernel in planner.partitioned.kernels.values() if uses_dot(planner, kernel.id)}
    assert touched == using
    assert using < all_kinds(planner)
    assert changed(planner, with_pipeline(planner, "ffn", {"schedules": {"dot": {option: value}}})) == {"ffn"}


def uses_dot(planner, kernel):
    texts = [planner.read(r.outputs["kernel.mlir"]) for id, r in planner.lowered.items() if id.split(":")[1] == kernel]
    return any(b"/dot/" in text for text in texts)


@pytest.mark.parametrize(
    "changes",
    [{"cpu": "x86-64-v4"}, {"features": ("+avx512f",)}, {"features": ("-fma",)}, {"triple": "x86_64-unknown-linux-musl"}],
    ids=str,
)
def test_the_machine_reaches_every_kernel(planner, monkeypatch, changes):
    monkeypatch.setattr(cpu, "TRIPLES", (*cpu.TRIPLES, "x86_64-unknown-linux-musl"))
    assert changed(planner, target=edit(planner.target, **changes)) == all_kinds(planner)


def test_names_reach_no_key(planner):
    assert changed(planner, target=edit(planner.target, name="another")) == set()
    assert changed(planner, edit(planner.recipe, name="another", context=99)) == set()


def test_spelling_out_a_default_changes_no_key(planner):
    spelled = edit(
        planner.target,
        passes=dict(toolchain.PIPELINE),
        schedules={name: dict(options) for name, options in toolchain.SCHEDULES.items() if options},
    )
    assert changed(planner, target=spelled) == set()


@pytest.mark.parametrize("constant", ["ABI_VERSION", "KERNEL_SCHEMA_VERSION"])
def test_versions_reach_every_kernel(planner, monkeypatch, constant):
    before = planner.keys()
    monkeypatch.setattr(toolchain, constant, 1000)
    after = planner.keys()
    assert all(before[name] != after[name] for name in before)


def test_every_tool_file_and_our_own_sources_reach_every_kernel(planner, monkeypatch):
    before = planner.keys()
    identity = dict(tools.identity("kernel", planner.remembered))
    assert any("libLLVM" in name or name.endswith("/opt") for name in identity)
    for name in list(identity)[:: max(1, len(identity) // 5)]:
        with monkeypatch.context() as patch:
            patch.setattr(tools, "identity", lambda job, remembered, name=name: {**identity, name: "0" * 64})
            after = planner.keys()
        assert all(before[key] != after[key] for key in before)
    monkeypatch.setattr(tools, "adapter_digest", lambda: "0" * 64)
    after = planner.keys()
    assert all(before[key] != after[key] for key in before)


def test_every_part_of_a_kernel_reaches_its_lower_key(planner):
    kernel = next(k for k in planner.partitioned.kernels.values() if k.kind == "ffn")
    base = (kernel.nodes, kernel.signature, kernel.results, Specialization("range"))
    keys = {key_of(lower_fields(*base))}
    node = kernel.nodes[-1]
    argument = kernel.signature.arguments[0]

    def signature(changed):
        return replace(kernel.signature, arguments=(changed, *kernel.signature.arguments[1:]))

    variations = [
        ((*kernel.nodes[:-1], replace(node, op="Other")), *base[1:]),
        ((*kernel.nodes[:-1], replace(node, inputs=tuple(reversed(node.inputs)))), *base[1:]),
        ((*kernel.nodes[:-1], replace(node, outputs=("other",))), *base[1:]),
        ((*kernel.nodes[:-1], replace(node, attributes=(*node.attributes, ("z", 1)))), *base[1:]),
        ((*kernel.nodes[:-1], replace(node, attributes=(*node.attributes, ("z", 1.0)))), *base[1:]),
        (kernel.nodes, signature(replace(argument, type=replace(argument.type, dtype="f16"))), *base[2:]),
        (kernel.nodes, signature(replace(argument, type=replace(argument.type, shape=("tokens", 7)))), *base[2:]),
        (kernel.nodes, signature(replace(argument, role="state")), *base[2:]),
        (kernel.nodes, signature(replace(argument, layout="packed")), *base[2:]),
        (kernel.nodes, replace(kernel.signature, dims=("tokens", "past")), *base[2:]),
        (*base[:2], ("other",), base[3]),
        (*base[:3], Specialization("exact", 1)),
        (*base[:3], Specialization("exact", 2)),
        (*base[:3], Specialization("padded", 2)),
    ]
    for variation in variations:
        keys.add(key_of(lower_fields(*variation)))
    assert len(keys) == len(variations) + 1


def test_names_of_nodes_reach_no_lower_key(planner):
    kernel = next(k for k in planner.partitioned.kernels.values() if k.kind == "ffn")
    named = tuple(replace(node, name="model.layers.3") for node in kernel.nodes)
    rest = (kernel.signature, kernel.results, Specialization("range"))
    assert key_of(lower_fields(named, *rest)) == key_of(lower_fields(kernel.nodes, *rest))


def test_a_kind_goes_before_all_and_both_before_the_target(planner):
    recipe = edit(
        planner.recipe,
        pipelines={
            "x86-64-v3": {
                "all": {"passes": {"lower": "a", "parse": "b"}, "schedules": {"dot": {"rows": 8, "tokens": 8}}},
                "ffn": {"passes": {"lower": "c"}, "schedules": {"dot": {"rows": 16}}},
            }
        },
    )
    over = pipeline_overrides(recipe, "x86-64-v3", "ffn")
    assert over.pipeline == {"lower": "c", "parse": "b"}
    assert over.schedules == {"dot": {"rows": 16, "tokens": 8}}
    assert pipeline_overrides(recipe, "x86-64-v3", "head").pipeline == {"lower": "a", "parse": "b"}
    assert pipeline_overrides(recipe, "other", "ffn").pipeline == {}
    assert toolchain.resolve_pipeline({"lower": "t"}, over.pipeline)[2] == ("lower", "c")


def test_an_unknown_cpu_names_its_target(planner):
    with pytest.raises(InvalidInput) as error:
        planner.plan(targets=[edit(planner.target, cpu="x86-64-v9")])
    assert error.value.render() == (
        "target x86-64-v3: error: unknown CPU 'x86-64-v9'\nhelp: Known: x86-64, x86-64-v2, x86-64-v3, x86-64-v4, native."
    )


def test_an_unknown_triple_names_its_target(planner):
    with pytest.raises(InvalidInput) as error:
        planner.plan(targets=[edit(planner.target, triple="aarch64-unknown-linux-gnu")])
    assert error.value.render() == (
        "target x86-64-v3: error: the triple 'aarch64-unknown-linux-gnu' is not supported\n"
        "help: Supported: x86_64-unknown-linux-gnu."
    )


def test_a_schedule_that_the_toolchain_refuses_names_its_place(planner):
    recipe = planner.recipe.model_copy(update={"pipelines": edit(Recipe.model_validate(planner.recipe.model_dump()), pipelines={
        "x86-64-v3": {"ffn": {"schedules": {"dot": {"rows": 4}}}}}).pipelines})  # fmt: skip
    check_pipelines(recipe, planner.target)
    pipeline = recipe.pipelines["x86-64-v3"]["ffn"].model_copy(update={"schedules": {"dot": {"rows": 3}}})
    wrong = recipe.model_copy(update={"pipelines": {"x86-64-v3": {"ffn": pipeline}}})
    with pytest.raises(InvalidInput) as error:
        check_pipelines(wrong, planner.target)
    assert error.value.render() == (
        "recipe deepseek_v3, pipelines.x86-64-v3.ffn: error: schedule 'dot': rows is 3, expected a power of two from 1 to 64"
    )
    assert isinstance(planner.target, Target)


def test_link_actions_hold_what_the_object_is_made_of(planner):
    def keys(tables=b"t", runtime=b"r", exports=("f",)):
        parts = LinkParts(
            lambda name, compiled: {"tables.c": tables}, {"a.c": runtime, "a.h": b""}, lambda target: target, exports
        )
        plan = planner.plan(parts=parts)
        fake = {id: replace(result) for id, result in planner.lowered.items()}
        ref = next(iter(fake.values())).outputs["signature.json"]
        done = {id: type(next(iter(fake.values())))("0" * 64, {"kernel.o": ref, "kernel.json": ref}) for id in plan.actions}
        done["runtime:x86-64-v3"] = replace(done["runtime:x86-64-v3"], outputs={"a.o": ref})
        done["tables:x86-64-v3"] = replace(done["tables:x86-64-v3"], outputs={"tables.o": ref})
        out = {id: key_of(plan.actions[id].fields(done)) for id in ("runtime:x86-64-v3", "tables:x86-64-v3", "link:x86-64-v3")}
        assert {tables, runtime} <= set(plan.contents.values())
        return out

    base = keys()

    def differing(**changes):
        return {id.split(":")[0] for id, key in keys(**changes).items() if key != base[id]}

    assert differing() == set()
    assert differing(tables=b"u") == {"tables"}
    assert differing(runtime=b"s") == {"runtime"}
    assert differing(exports=("g",)) == {"link"}
