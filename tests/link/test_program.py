"""From partitions and compiled variants to a program, and to its tables."""

import dataclasses
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import toy_model
from toy_model import CHUNK, EXPERTS, HIDDEN, LAYERS, TOP_K

from dsr1build.errors import BuildFailed, InvalidInput
from dsr1build.graph.model import StoredTensor
from dsr1build.graph.signature import Specialization
from dsr1build.link.program import DispatchStep, KernelStep, Program, build_program, variant_from_json
from dsr1build.link.shared_object import EXPORTS, RUNTIME_DIRECTORY, runtime_sources, runtime_target, table_sources
from dsr1build.link.tables import kernel_symbols, program_digest, program_tables
from dsr1build.toolchains.target import TargetSpec


def test_steps_follow_the_partitions_and_experts_become_one_step_a_layer() -> None:
    program = toy_model.toy_program()
    kinds = [step.kind if isinstance(step, KernelStep) else "experts" for step in program.prefill.steps]
    assert kinds == ["embedding", *["attention", "gating", "experts", "combine"] * LAYERS, "head"]
    dispatch = next(step for step in program.prefill.steps if isinstance(step, DispatchStep))
    assert (dispatch.name, dispatch.top_k, dispatch.hidden) == ("layers.0.experts", TOP_K, HIDDEN)
    bound = [[program.weights[w][0] for w in weights] for _, weights in dispatch.experts]
    assert bound == [[f"layers.0.experts.{e}"] for e in range(EXPERTS)]


def test_arguments_are_numbered_weights_states_prefill_decode() -> None:
    program = toy_model.toy_program()
    names = [n for n, _ in program.weights] + [n for n, _ in program.states]
    names += [f"prefill {b.name}" for b in program.prefill.buffers] + [f"decode {b.name}" for b in program.decode.buffers]
    first, attention = program.decode.steps[:2]
    assert isinstance(first, KernelStep) and isinstance(attention, KernelStep)
    assert [names[i] for i in first.arguments] == ["decode ids", "embed", "decode x0"]
    assert [names[i] for i in attention.arguments] == ["decode x0", "bias", "cache0", "decode h0"]
    assert names[program.prefill.logits] == "prefill logits"


def test_the_arena_has_room_for_a_chunk_and_for_the_padding_of_decode() -> None:
    program = toy_model.toy_program()
    # The head has a variant padded to 3 rows.
    assert (program.prefill.rows, program.decode.rows) == (CHUNK, 3)
    assert toy_model.toy_program(chunk=2).prefill.rows == 3
    sizes = {b.name: b.size for b in program.prefill.buffers}
    assert sizes["slots0"] == CHUNK * TOP_K * HIDDEN * 4
    assert program.arena_bytes < sum(sizes.values())


def test_values_that_live_at_the_same_step_lie_apart() -> None:
    for mode in (toy_model.toy_program().prefill, toy_model.toy_program().decode):
        place = {b.name: (b.offset, b.offset + b.size) for b in mode.buffers}
        for layer in range(LAYERS):
            together = [f"h{layer}", f"w{layer}", f"m{layer}", f"slots{layer}", f"sw{layer}"]
            spans = sorted(place[name] for name in together)
            assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_variants_are_tried_from_the_tightest() -> None:
    expert = next(k for k in toy_model.toy_program().kernels if k.id == "expert")
    assert [str(v.specialization) for v in expert.variants] == ["tokens=1", "tokens<=4", "tokens=1.."]


def _build(**changes: list) -> Program:  # type: ignore[type-arg]
    return build_program(toy_model.partitioned_model(), {**toy_model.variants(), **changes}, CHUNK, ())


def test_a_kernel_without_a_fitting_variant_is_refused() -> None:
    exact = [v for v in toy_model.variants()["expert"] if v.specialization.guard != "range"]
    with pytest.raises(BuildFailed) as caught:
        _build(expert=exact)
    assert str(caught.value) == "layers.0.experts: error: kernel expert has no variant for 5 tokens"
    with pytest.raises(BuildFailed, match=r"^kernel expert \(expert\): error: the kernel has no compiled variant$"):
        _build(expert=[])


def test_padding_rows_that_depend_on_each_other_is_refused() -> None:
    (attention,) = toy_model.variants()["attention"]
    padded = dataclasses.replace(attention, specialization=Specialization("padded", 4))
    with pytest.raises(BuildFailed, match=r"a padded variant was made of a kernel whose rows depend on each other$"):
        _build(attention=[attention, padded])


def test_a_head_that_mixes_rows_is_refused() -> None:
    model = toy_model.partitioned_model()
    kernels = {**model.kernels, "head": dataclasses.replace(model.kernels["head"], row_independent=False)}
    variants = {**toy_model.variants(), "head": toy_model.variants()["head"][:1]}
    with pytest.raises(InvalidInput, match=r"^head: error: the partition that writes the logits mixes rows$"):
        build_program(dataclasses.replace(model, kernels=kernels), variants, CHUNK, ())


def test_a_value_without_a_producer_is_refused() -> None:
    model = toy_model.partitioned_model()
    cut = tuple(p for p in model.partitions["decode"] if p.name != "embed")
    with pytest.raises(BuildFailed) as caught:
        build_program(dataclasses.replace(model, partitions={**model.partitions, "decode": cut}), toy_model.variants(), CHUNK, ())
    assert str(caught.value) == "layers.0.attention: error: the value 'x0' is read before any step writes it"


def test_kernel_json_becomes_a_variant() -> None:
    signature = toy_model.SIGNATURES["gating"]
    description = {
        "symbol": "k1",
        "signature": signature.to_json(),
        "phases": [{"wave": 0, "parallel": True, "items": "tokens"}, {"wave": 1, "parallel": False, "items": 1}],
        "scratch": "tokens * 4",
        "local": 0,
    }
    variant = variant_from_json(Specialization("range"), description)
    assert variant.signature == signature
    assert [(p.wave, p.parallel, p.items) for p in variant.phases] == [(0, True, "tokens"), (1, False, "1")]
    assert (variant.scratch, variant.local) == ("tokens * 4", "0")


def test_tables_are_the_same_in_every_process() -> None:
    text = program_tables(toy_model.toy_program())
    code = "import toy_model; from dsr1build.link.tables import program_tables as t; print(t(toy_model.toy_program()), end='')"
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PYTHONHASHSEED": "77"}
    other = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout == text


def test_tables_know_nothing_of_the_context_and_of_where_the_weights_lie() -> None:
    partitioned = toy_model.partitioned_model(Path("/elsewhere"), {"embed": StoredTensor("x.safetensors", 1, 2)})
    longer = dataclasses.replace(partitioned, model=dataclasses.replace(partitioned.model, max_context=4096))
    program = build_program(longer, toy_model.variants(), CHUNK, ("sse2",))
    assert program_tables(program) == program_tables(toy_model.toy_program())


def test_the_digest_names_the_program() -> None:
    program = toy_model.toy_program()
    digest = program_digest(program)
    assert len(digest) == 32 and digest == program_digest(toy_model.toy_program())
    assert ", ".join(map(str, digest)) in program_tables(program)
    assert program_digest(toy_model.toy_program(chunk=8)) != digest


def test_every_kernel_symbol_is_declared_once() -> None:
    program = toy_model.toy_program()
    text = program_tables(program)
    assert len(set(kernel_symbols(program))) == len(kernel_symbols(program)) == 10
    for symbol in kernel_symbols(program):
        assert text.count(f"void {symbol}__plan(") == 1


def test_experts_share_the_lists_of_weights_between_modes() -> None:
    text = program_tables(toy_model.toy_program())
    prefill = text.split("experts_prefill_3[] = {")[1].split("};")[0]
    assert prefill == text.split("experts_decode_3[] = {")[1].split("};")[0]


def test_the_link_gets_the_runtime_and_the_tables() -> None:
    sources = runtime_sources()
    assert {"dsr1.h", "program.h", "internal.h", "pool.c", "execute.c", "experts.c", "weights.c", "session.c"} == set(sources)
    assert set(table_sources(toy_model.toy_program())) == {"tables.c", "program.h"}
    assert runtime_target(TargetSpec(cpu="x86-64-v3", features=("+avx512f",))) == TargetSpec(cpu="x86-64")


def test_the_exports_are_the_functions_of_the_header() -> None:
    header = (RUNTIME_DIRECTORY / "dsr1.h").read_text("utf-8")
    code = "\n".join(line for line in header.splitlines() if not line.startswith((" ", "/")))
    declared = {word.split("(")[0].lstrip("*") for word in code.split() if word.lstrip("*").startswith("dsr1_") and "(" in word}
    assert declared == set(EXPORTS)


def test_the_limits_are_the_headers() -> None:
    from dsr1build.link import program, tables

    text = Path(RUNTIME_DIRECTORY / "program.h").read_text("utf-8")
    assert f"#define DSR1_ABI {program.ABI}\n" in text
    limits = {"ARGUMENTS": program.MOST_ARGUMENTS, "PHASES": program.MOST_PHASES, "RANK": program.MOST_RANK}
    assert ", ".join(f"DSR1_MAX_{name} = {value}" for name, value in limits.items()) in text
    assert f"#define DSR1_CONTEXT_EXTENT ({tables.CONTEXT_EXTENT})\n" in text
