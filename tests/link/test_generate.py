"""Generated weights: RoPE tables and reproducible random tensors, in safetensors files."""

import math
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from dsr1build.errors import InvalidInput
from dsr1build.graph.model import DType, RandomTensor, RopeTable, TensorType
from dsr1build.link import generate
from dsr1build.link.generate import generated_identity, random_pieces, rope_table, write_generated

CODES: dict[DType, type] = {"f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}


def random_array(name: str, source: RandomTensor, shape: tuple[int, ...], dtype: DType = "f32") -> np.ndarray:
    data = b"".join(random_pieces(name, TensorType(dtype, shape), source, 1))
    return np.frombuffer(data, dtype=CODES[dtype]).reshape(shape)


def test_a_rope_table_is_rounded_once_from_float64() -> None:
    frequencies = (1.0, 0.1, 1e-4)
    table = rope_table(RopeTable("sin", frequencies, 1.5), 1000)
    assert table.shape == (1000, 3) and table.dtype == np.float32
    for position in (0, 1, 17, 999):
        for j, frequency in enumerate(frequencies):
            exact = 1.5 * math.sin(position * frequency)
            assert abs(float(table[position, j]) - exact) <= np.spacing(np.float32(abs(exact))) / 2 * 1.0001
    assert (rope_table(RopeTable("cos", frequencies, 2.0), 3)[0] == 2.0).all()


def test_a_random_tensor_depends_on_seed_name_and_type_alone() -> None:
    source = RandomTensor(3, 0.0, 0.02)
    first = random_array("a.weight", source, (64, 32))
    assert (random_array("a.weight", source, (64, 32)) == first).all()
    assert (random_array("b.weight", source, (64, 32)) != first).any()
    assert (random_array("a.weight", RandomTensor(4, 0.0, 0.02), (64, 32)) != first).any()
    # The first values, so that another version of the generator shows.
    np.testing.assert_array_equal(
        first[0, :3], np.array([-0.03482455015182495, 0.03636631742119789, 0.027187028899788857], dtype=np.float32)
    )


def test_mean_and_deviation() -> None:
    values = random_array("w", RandomTensor(0, 1.0, 0.25), (1000, 100)).astype(np.float64)
    assert abs(values.mean() - 1.0) < 0.005
    assert abs(values.std() - 0.25) < 0.005


def test_pieces_are_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = random_array("w", RandomTensor(0, 0.0, 1.0), (1000,))
    monkeypatch.setattr(generate, "PIECE_ELEMENTS", 64)
    assert (random_array("w", RandomTensor(0, 0.0, 1.0), (1000,)) == whole).all()


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_rounding_is_to_nearest_even(dtype: DType) -> None:
    source = RandomTensor(0, 0.0, 1.0)
    exact = random_array("w", source, (50000,))
    rounded = random_array("w", source, (50000,), dtype)
    np.testing.assert_array_equal(rounded.view(np.uint16), exact.astype(CODES[dtype]).view(np.uint16))


def test_the_file_is_read_by_safetensors(tmp_path: Path) -> None:
    rope, noise = RopeTable("cos", (1.0, 0.5), 1.0), RandomTensor(1, 0.0, 1.0)
    tensors = {
        "z.rope": (TensorType("f32", ("context", 2)), rope),
        "a.weight": (TensorType("bf16", (3, 5)), noise),
        "m.bias": (TensorType("f32", (7,)), noise),
    }
    path = tmp_path / "generated.safetensors"
    write_generated(path, tensors, 12)
    with safe_open(path, framework="pt") as file:
        assert sorted(file.keys()) == ["a.weight", "m.bias", "z.rope"]
        np.testing.assert_array_equal(file.get_tensor("z.rope").numpy(), rope_table(rope, 12))
        np.testing.assert_array_equal(file.get_tensor("m.bias").numpy(), random_array("m.bias", noise, (7,)))
        assert str(file.get_tensor("a.weight").dtype) == "torch.bfloat16"
    content = path.read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0


def test_the_identity_follows_what_the_content_depends_on() -> None:
    def identity(context: int = 8, seed: int = 0, scale: float = 1.0) -> tuple[str, str]:
        rope = {"r": (TensorType("f32", ("context", 1)), RopeTable("cos", (1.0,), scale))}
        return generated_identity(rope, context), generated_identity(
            {"w": (TensorType("f32", (4,)), RandomTensor(seed, 0, 1.0))}, context
        )

    base = identity()
    assert identity() == base
    assert identity(context=9)[0] != base[0] and identity(context=9)[1] == base[1]
    assert identity(scale=2.0)[0] != base[0]
    assert identity(seed=1)[1] != base[1]


def test_a_type_that_cannot_be_generated_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput) as caught:
        write_generated(tmp_path / "x", {"w": (TensorType("f8e4m3fn", (4,)), RandomTensor(0, 0.0, 1.0))}, 1)
    assert str(caught.value) == (
        "w: error: random weights of type f8e4m3fn cannot be generated\n"
        "help: Set torch_dtype of the configuration to float32, bfloat16 or float16."
    )
    assert not (tmp_path / "x").exists()
