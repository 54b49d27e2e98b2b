"""Fused maps, states, waves, the plan function and the promises of the kernel ABI."""

from pathlib import Path

import kernel_texts
import numpy as np
import pytest
from mlir import ir

from dsr1build.errors import BuildFailed
from dsr1build.graph.model import Dim, TensorType
from dsr1build.graph.signature import Argument, Signature
from dsr1build.ops.emitter import Emitter
from dsr1build.toolchains.outline import outline
from kernel_runner import LoadedKernel, compile_text


def formula(text: str, **dims: int) -> int:
    names = {"ceildiv": lambda a, b: -(-a // b), "floordiv": lambda a, b: a // b, "max": max, "min": min, **dims}
    return int(eval(text, {"__builtins__": {}}, names))


@pytest.mark.parametrize("tokens", [1, 5, "tokens"])
def test_a_chain_is_one_loop_over_rows(tokens: Dim, tmp_path: Path) -> None:
    kernel = compile_text(*kernel_texts.softmax(tokens, 33), tmp_path)
    rows = 5 if tokens == "tokens" else int(tokens)
    x = np.random.default_rng(0).standard_normal((rows, 33)).astype(np.float32) * 20
    x[0, :4] = -np.inf
    e = np.exp(x.astype(np.float64) - x.max(1, keepdims=True))
    results = [kernel.call({"x": x, "y": np.full_like(x, np.nan)}, {"tokens": rows}, splits)["y"] for splits in (1, 3)]
    assert np.abs(results[0] - e / e.sum(1, keepdims=True)).max() < 3e-7
    assert results[0].tobytes() == results[1].tobytes()
    assert (results[0][0, :4] == 0).all()
    assert len(kernel.description["phases"]) == 1


@pytest.mark.parametrize("tokens", [1, "tokens"])
def test_a_state_is_updated_in_place_and_read_after_it(tokens: Dim, tmp_path: Path) -> None:
    kernel = compile_text(*kernel_texts.insert(tokens, 6), tmp_path)
    rows = 3 if tokens == "tokens" else 1
    cache = np.random.default_rng(1).standard_normal((12, 6)).astype(np.float32)
    given = {"rows": np.ones((rows, 6), np.float32), "cache": cache, "y": np.zeros(12, np.float32)}
    for past in (0, 4, 12 - rows):
        expected = cache.copy()
        expected[past : past + rows] = 2
        got = kernel.call(given, {"tokens": rows, "past": past, "context": 12}, splits=2)
        assert (got["cache"] == expected).all()
        assert np.allclose(got["y"][: past + rows], expected[: past + rows].sum(1), atol=1e-6)
        assert (got["y"][past + rows :] == 0).all()
    assert [p["wave"] for p in kernel.description["phases"]] == [0, 1]


def test_exp_is_exact_to_three_in_ten_million_and_right_at_the_ends(tmp_path: Path) -> None:
    e, v = kernel_texts.begin(1, *(kernel_texts.argument(n, r, "f32", 1, 8192) for n, r in (("x", "input"), ("y", "output"))))
    e.phase("map1")
    y = e.generic("exp", "t, n", [(v["x"], "t, n")], (v["y"], "t, n"), "pp", lambda b, x, _: b.exp(x))
    kernel = compile_text(e.finish([y]), e.signature, tmp_path)
    x = np.linspace(-87.3, 88.7, 8192, dtype=np.float32)
    x[:6] = [-np.inf, np.inf, np.nan, -200, 200, 0]
    got = kernel.call({"x": x[None], "y": np.zeros((1, 8192), np.float32)}, {})["y"][0]
    exact = np.exp(x[6:].astype(np.float64))
    assert np.abs(got[6:] / exact - 1).max() < 3e-7
    assert got[[0, 1, 3, 4, 5]].tolist() == [0, np.inf, 0, np.inf, 1]
    assert np.isnan(got[2])


def two_halves() -> tuple[str, Signature]:
    """Two independent phases into temporaries, and one that needs both."""
    e, v = kernel_texts.begin(
        "tokens",
        kernel_texts.argument("x", "input", "f32", "tokens", 10),
        kernel_texts.argument("y", "output", "f32", "tokens", 10),
    )
    shape = TensorType("f32", ("tokens", 10))
    parts = []
    for factor in (2.0, 3.0):
        e.phase("map1")
        parts.append(
            e.generic(
                "scale", "t, n", [(v["x"], "t, n")], (e.empty(shape), "t, n"), "pp",
                lambda b, x, _, f=factor: b.mul(x, b.constant(f)),
            )
        )  # fmt: skip
    e.phase("map2")
    y = e.generic("add", "t, n", [(p, "t, n") for p in parts], (v["y"], "t, n"), "pp", lambda b, a, c, _: b.add(a, c))
    return e.finish([y]), e.signature


def test_independent_phases_share_a_wave_and_temporaries_lie_in_scratch(tmp_path: Path) -> None:
    kernel = compile_text(*two_halves(), tmp_path)
    phases = kernel.description["phases"]
    assert [p["wave"] for p in phases] == [0, 0, 1]
    assert [p["items"] for p in phases] == ["tokens", "tokens", "(tokens * 10)"]
    assert kernel.plan({"tokens": 3}) == ([3, 3, 30], 256, 0)
    x = np.arange(30, dtype=np.float32).reshape(3, 10)
    assert (kernel.call({"x": x, "y": np.zeros_like(x)}, {"tokens": 3}, splits=4)["y"] == 5 * x).all()


@pytest.mark.parametrize("build", [two_halves, lambda: kernel_texts.swiglu("tokens", 28, 257, "bf16")])
def test_the_formulas_of_the_description_are_what_the_plan_computes(build, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    kernel = compile_text(*build(), tmp_path)
    before = (0, 0)
    for tokens in (1, 2, 3, 7, 64):
        items, scratch, local = kernel.plan({"tokens": tokens})
        assert items == [formula(p["items"], tokens=tokens) for p in kernel.description["phases"]]
        assert scratch == formula(kernel.description["scratch"], tokens=tokens)
        assert local == formula(kernel.description["local"], tokens=tokens)
        assert scratch >= before[0] and local >= before[1]
        before = (scratch, local)


def failing(emitter: Emitter, results, tmp_path: Path) -> str:  # type: ignore[no-untyped-def]
    with pytest.raises(BuildFailed) as caught:
        compile_text(emitter.finish(results), emitter.signature, tmp_path)
    return str(caught.value)


def test_a_state_that_is_not_updated_in_place_is_refused_by_name(tmp_path: Path) -> None:
    e, v = kernel_texts.begin(
        1, kernel_texts.argument("rows", "input", "f32", 4, 6), kernel_texts.argument("cache", "state", "f32", 4, 6)
    )
    e.phase("map1")
    new = e.generic("copy", "t, n", [(v["rows"], "t, n")], (e.empty(v["rows"].type), "t, n"), "pp", lambda b, a, _: b.add(a, a))
    assert failing(e, [new], tmp_path) == (
        "@kernel: error: state 'cache' is not updated in place\n"
        "help: Compute the result into %cache, and read only the updated value after it."
    )


def test_reading_the_old_state_after_its_update_is_refused_by_name(tmp_path: Path) -> None:
    e, v = kernel_texts.begin(
        1,
        kernel_texts.argument("rows", "input", "f32", 1, 6),
        kernel_texts.argument("cache", "state", "f32", 4, 6),
        kernel_texts.argument("y", "output", "f32", 4, 6),
    )
    cache = e.insert(v["rows"], v["cache"], [2, 0], [1, 6])
    e.phase("map1")
    y = e.generic("old", "t, n", [(v["cache"], "t, n"), (cache, "t, n")], (v["y"], "t, n"), "pp", lambda b, a, c, _: b.add(a, c))
    message = failing(e, [cache, y], tmp_path)
    assert "state 'cache' is copied as a whole" in message or "state 'cache' is not updated in place" in message


def edited(kernel: tuple[str, Signature], old: str, new: str, tmp_path: Path) -> str:
    text, signature = kernel
    assert old in text
    with pytest.raises(BuildFailed) as caught:
        compile_text(text.replace(old, new), signature, tmp_path)
    return str(caught.value)


def test_a_buffer_of_unknown_origin_is_refused_by_name() -> None:
    """Which phases may run side by side rests on knowing the buffers that each one touches."""
    with ir.Context():
        module = ir.Module.parse("""
            func.func @kernel(%x: memref<4xf32>, %y: memref<4xf32>, %o: memref<4xf32>) -> memref<4xf32> {
              %c = arith.constant true
              %either = arith.select %c, %x, %y : memref<4xf32>
              memref.copy %either, %o : memref<4xf32> to memref<4xf32>
              return %o : memref<4xf32>
            }""")
        type_ = TensorType("f32", (4,))
        signature = Signature((Argument("x", "input", type_), Argument("y", "input", type_), Argument("o", "output", type_)), ())
        with pytest.raises(BuildFailed) as error:
            outline(module, "k", signature)
    assert error.value.render() == ("@kernel: error: a buffer comes out of arith.select, not of an argument or an allocation")


def test_an_operation_that_no_pass_lowers_is_refused_by_name_and_place(tmp_path: Path) -> None:
    assert edited(kernel_texts.softmax(5, 33), "math.exp", "math.erf", tmp_path) == (
        "kernel.mlir:19:14: error: math.erf is not lowered\n"
        "help: Use only the operations that docs/architecture.md lists, or extend the pass group 'lower'."
    )


def test_a_call_into_libm_is_refused_by_name(tmp_path: Path) -> None:
    assert edited(kernel_texts.softmax(5, 33), "math.exp", "math.sin", tmp_path) == (
        "kernel.o: error: the object needs 'sinf'\nhelp: A kernel may call memcpy, memmove, memset and nothing else."
    )


def test_a_text_that_does_not_parse_is_refused_with_its_place(tmp_path: Path) -> None:
    message = edited(kernel_texts.softmax(5, 33), "arith.subf", "arith.subtract", tmp_path)
    assert message.startswith("kernel.mlir: error: the kernel text does not parse: kernel.mlir:18:14: custom op")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "p0/map1/max",
            "p0/map4/max",
            "p0: error: one phase has two schedules",
        ),
        ("p0/map1/", "p0/map4/", "p0/map4: error: unknown schedule 'map4'\nhelp: Known: map1, map2, map3, dot, serial."),
        ("p0/map1/max", "max", "kernel.mlir:6:9: error: 'max' is no tag of the form p<phase>/<schedule>/<role>"),
        ("p0/map1/quotient", "p1/map1/quotient", "p0/map1/exp: error: the result is used by linalg.generic outside its phase"),
        ("p0/map1/", "p0/map3/", "p0/map3/quotient: error: the first 3 loops are not parallel"),
    ],
)
def test_tags_that_make_no_phase_are_refused(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert edited(kernel_texts.softmax(5, 33), old, new, tmp_path).startswith(message)


def test_the_intermediate_code_is_kept_after_every_step_on_request(tmp_path: Path) -> None:
    kernel: LoadedKernel = compile_text(*kernel_texts.linear("tokens", 28, 64, "bf16"), tmp_path)
    assert sorted(p.name for p in kernel.temps.iterdir()) == [
        "00-parse.mlir",
        "01-schedule.mlir",
        "02-bufferize.mlir",
        "03-outline.mlir",
        "04-lower.mlir",
        "05-translate.ll",
        "assembly.s",
    ]
    scheduled = (kernel.temps / "01-schedule.mlir").read_text()
    assert scheduled.count("scf.forall (") == 1
    assert "vector<2x4x8xf32>" in scheduled and "linalg.generic" not in scheduled
    bufferized = (kernel.temps / "02-bufferize.mlir").read_text()
    assert "memref.alloc" not in bufferized
    outlined = (kernel.temps / "03-outline.mlir").read_text()
    assert f"func.func @{kernel.symbol}__p0(" in outlined and f"func.func @{kernel.symbol}__plan(" in outlined
    assert "math.fma" in outlined and "arith.mulf" not in outlined
    final = (kernel.temps / "05-translate.ll").read_text()
    assert "load <8 x bfloat>" in final and ", align 1" in final
