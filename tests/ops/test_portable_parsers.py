"""Every lowering's text is read by each MLIR that a toolchain may bring: 22 (the toolchain's own), 24 (torch-mlir) and 19
(ascendnpu-ir, a program). The last two are large and optional; where one is not installed its test says so."""

import importlib
import importlib.util
import subprocess
from pathlib import Path

import pytest
from operator_cases import CASES, PAST, TensorType, cached, kernel_of, rows, tensor
from operator_runs import kernel

from dsr1build.lower.allow_list import check_portable
from dsr1build.ops.operator import Attributes
from dsr1build.ops.registry import OPERATORS

LATENT = {"heads": 3, "nope": 6, "rope": 4, "value": 5, "scale": 0.5}
LATENT_TYPES = (rows(30), cached(16), tensor("bf16", 33, 12), PAST)
ROUTE = {
    "scoring": "sigmoid",
    "top_k": 4,
    "groups": 4,
    "top_groups": 2,
    "group_score": "top2",
    "normalize": 1,
    "routed_scale": 2.5,
}
MORE: tuple[tuple[str, tuple[TensorType | None, ...], Attributes], ...] = (
    ("LatentAttentionExpanded", LATENT_TYPES, LATENT),
    ("LatentAttentionAbsorbed", LATENT_TYPES, LATENT),
    (
        "LatentRows",
        (rows(16), tensor("bf16", 12), cached(2), cached(2), PAST),
        {"latent": 12, "epsilon": 1e-6, "interleaved": 1},
    ),
    ("Route", (rows(16), tensor("f32", 16)), ROUTE),
    ("Route", (rows(16), None), {**ROUTE, "scoring": "softmax", "group_score": "max"}),
)


def texts() -> dict[str, str]:
    made = {}
    for tokens in (1, None):
        for case in CASES:
            made[f"{case.name}, tokens {tokens}"] = kernel_of(case, tokens).text
        for number, (op, types, attributes) in enumerate(MORE):
            made[f"{op} {number}, tokens {tokens}"] = kernel(OPERATORS[op], types, attributes, tokens)[0]
    return made


def test_all_operators_with_a_kernel_are_here() -> None:
    assert {c.op for c in CASES} | {op for op, _, _ in MORE} == set(OPERATORS) - {"CombineExperts"}


def test_all_lie_in_the_portable_subset() -> None:
    for text in texts().values():
        check_portable(text)


@pytest.mark.slow
def test_llvm_22_reads_them() -> None:
    from mlir import ir

    with ir.Context():
        for name, text in texts().items():
            assert ir.Module.parse(text).operation.verify(), name


@pytest.mark.slow
def test_llvm_24_reads_them() -> None:
    ir = pytest.importorskip("torch_mlir.ir", reason="torch-mlir is not installed")
    for dialect in ("func", "linalg", "tensor", "arith", "math"):
        importlib.import_module(f"torch_mlir.dialects.{dialect}")
    with ir.Context():
        for name, text in texts().items():
            assert ir.Module.parse(text).operation.verify(), name


@pytest.mark.slow
def test_llvm_19_reads_them(tmp_path: Path) -> None:
    found = importlib.util.find_spec("ascendnpuir")
    if found is None or not found.submodule_search_locations:
        pytest.skip("ascendnpu-ir is not installed")
    program = Path(next(iter(found.submodule_search_locations))) / "bin" / "bishengir-opt"
    # One file, one module a section: the program starts once.
    together = tmp_path / "all.mlir"
    together.write_text("\n// -----\n".join(texts().values()))
    done = subprocess.run(
        [program, "--split-input-file", together, "-o", "/dev/null"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[:2000]
