"""For which numbers of tokens kernels are compiled."""

from collections.abc import Iterable, Mapping

import pytest
from graphs import both_modes, decoder, model, recipe

from dsr1build.partition.cut import partition_model
from dsr1build.partition.specializations import kernel_variants, variants


def shown(specializations: Mapping[str, object] | None, uses: Iterable[str], kind: str = "ffn", chunk: int = 64) -> list[str]:
    given = recipe(chunk=chunk, **({"specializations": specializations} if specializations else {}))
    kernel = next(k for k in partition_model(both_modes(), given).kernels.values() if k.kind == kind)
    return [str(s) for s in variants(kernel, given, uses)]


@pytest.mark.parametrize(
    ("uses", "expected"),
    [
        (["decode"], ["tokens=1"]),
        (["prefill"], ["tokens=64", "tokens=1.."]),
        (["prefill", "decode"], ["tokens=1", "tokens=64", "tokens=1.."]),
        (["expert"], ["tokens=1", "tokens=1.."]),
        (["expert", "prefill", "decode"], ["tokens=1", "tokens=64", "tokens=1.."]),
    ],
)
def test_each_use_brings_its_own(uses: list[str], expected: list[str]) -> None:
    assert shown(None, uses, "expert") == expected


def test_a_head_in_prefill_is_also_compiled_for_the_last_row() -> None:
    assert shown(None, ["prefill"], "head") == ["tokens=1", "tokens=64", "tokens=1.."]


def test_a_decode_kernel_without_a_variant_for_one_token_gets_the_range() -> None:
    assert shown({"decode": ({"tokens": 4},)}, ["decode"], "expert") == ["tokens=4", "tokens=1.."]


def test_padding_is_for_kernels_with_independent_rows_alone() -> None:
    padded = {"prefill": ({"tokens": "chunk", "pad": True}, {"tokens": 8})}
    assert shown(padded, ["prefill"], "expert") == ["tokens=8", "tokens<=64", "tokens=1.."]
    assert shown(padded, ["prefill"], "attention") == ["tokens=8", "tokens=64", "tokens=1.."]


def test_a_padded_variant_serves_its_own_size_too() -> None:
    both = {"prefill": ({"tokens": 8, "pad": True},), "decode": ({"tokens": 8}, {"tokens": 1, "pad": True})}
    assert shown(both, ["prefill", "decode"], "expert") == ["tokens=1", "tokens<=8", "tokens=1.."]


def test_a_chunk_of_one_is_one_variant() -> None:
    assert shown(None, ["prefill", "decode"], "expert", chunk=1) == ["tokens=1", "tokens=1.."]


def test_the_expert_list_is_for_routed_experts() -> None:
    given = recipe(specializations={"expert": ({"tokens": 1}, {"tokens": 16})})
    partitioned = partition_model(model({"prefill": decoder(), "decode": decoder(mode="decode")}), given)
    by_kind = {partitioned.kernels[id].kind: [str(s) for s in found] for id, found in kernel_variants(partitioned, given).items()}
    # The shared expert is the same kernel as the routed ones, so it brings the modes' own.
    assert by_kind["expert"] == ["tokens=1", "tokens=16", "tokens=64", "tokens=1.."]
    assert by_kind["attention"] == ["tokens=1", "tokens=64", "tokens=1.."]
