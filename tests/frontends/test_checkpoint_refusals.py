"""Every kind of damaged or misplaced checkpoint has its one message."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from model_sources import expected_tensors, header_of, write_checkpoint_of, write_raw, write_safetensors

from dsr1build.errors import InvalidInput
from dsr1build.frontends.checkpoint.safetensors_index import read_header
from dsr1build.frontends.load import load_model
from dsr1build.graph.model import StoredTensor

Refusal = Callable[[Path], str]
DAMAGED = "help: Download the file again; it is damaged or incomplete."
ONE_REVISION = "help: Download the index and its files from one revision."
FIT = "help: Use config.json and weights of one revision of one model."
NORM = "model.norm.weight"


def test_a_sound_checkpoint(small: Path) -> None:
    model = load_model(checkpoint=small, config=None, seed=None, context=64)
    assert model.directory == str(small.resolve())
    assert model.skipped == model.notes == ()
    tensors = read_header(small / "model.safetensors")
    found = tensors[NORM]
    assert model.sources[NORM] == StoredTensor("model.safetensors", found.offset, 96 * 4)
    assert found.offset + 96 * 4 <= (small / "model.safetensors").stat().st_size


def test_not_there(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    expected = "expected a directory with config.json and *.safetensors files, found"
    hint = "help: Name the checkpoint's directory."
    assert checkpoint_refusal(tmp_path / "no") == f"no: error: {expected} nothing\n{hint}"
    (tmp_path / "file").write_text("")
    assert checkpoint_refusal(tmp_path / "file") == f"file: error: {expected} a file\n{hint}"


def test_no_config(small: Path, checkpoint_refusal: Refusal) -> None:
    (small / "config.json").unlink()
    hint = "help: Name the directory that holds config.json beside the weights."
    assert checkpoint_refusal(small) == f"small: error: the checkpoint has no config.json\n{hint}"


def test_no_weights(small: Path, checkpoint_refusal: Refusal) -> None:
    (small / "model.safetensors").unlink()
    hint = "help: Download the checkpoint's *.safetensors files, or use `config:` with `weights: {random: {seed: 0}}`."
    assert checkpoint_refusal(small) == f"small: error: no *.safetensors file in the checkpoint\n{hint}"


@pytest.mark.parametrize("file", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "consolidated.00.pth", "model.pt"])
def test_pickles(small: Path, checkpoint_refusal: Refusal, file: str) -> None:
    (small / "model.safetensors").rename(small / file)
    assert checkpoint_refusal(small) == (
        f"small: error: {file} is a pickle, which can run code when it is read; only safetensors files are read\n"
        "help: Convert it once, where you trust it:\n"
        '    python -c "import sys; from transformers import AutoModelForCausalLM, AutoTokenizer; '
        "source, target = sys.argv[1:]; "
        "AutoModelForCausalLM.from_pretrained(source, dtype='auto').save_pretrained(target); "
        'AutoTokenizer.from_pretrained(source).save_pretrained(target)" small small-safetensors'
    )


def test_the_conversion_command_survives_a_shell(tmp_path: Path) -> None:
    directory = tmp_path / 'it\'s "a" $HOME `x` \\ dir'
    directory.mkdir()
    (directory / "config.json").write_text((write_checkpoint_of(tmp_path / "s", {}) / "config.json").read_text())
    (directory / "pytorch_model.bin").write_text("")
    with pytest.raises(InvalidInput) as caught:
        load_model(checkpoint=directory, config=None, seed=None, context=None)
    python, option, code, source, target = shlex.split(caught.value.hint.splitlines()[1])
    assert (python, option, source, target) == ("python", "-c", str(directory), f"{directory}-safetensors")
    compile(code, "command", "exec")


def test_gguf(small: Path, checkpoint_refusal: Refusal) -> None:
    (small / "model.safetensors").rename(small / "model.gguf")
    hint = "help: Use the original Hugging Face checkpoint with safetensors files."
    assert checkpoint_refusal(small) == f"small: error: model.gguf is a GGUF file; only safetensors files are read\n{hint}"


# Tensors against the configuration


def fit(count: str, *lines: str) -> str:
    return "\n    ".join((f"bad: error: the weights do not fit config.json ({count}):", *lines))


def refuse_tensors(tmp_path: Path, refusal: Refusal, tensors: dict[str, Any]) -> str:
    return refusal(write_checkpoint_of(tmp_path / "bad", tensors))


def test_missing_tensor(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = expected_tensors("qwen2-mini")
    del tensors[NORM]
    rendered = refuse_tensors(tmp_path, checkpoint_refusal, tensors)
    assert rendered == fit("1 problem", f"{NORM} [96] is missing") + f"\n{FIT}"


def test_missing_head(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = expected_tensors("qwen2-mini")
    del tensors["lm_head.weight"]
    hint = "help: If the head shares the embedding's tensor, set `tie_word_embeddings` to true in config.json."
    rendered = refuse_tensors(tmp_path, checkpoint_refusal, tensors)
    assert rendered == fit("1 problem", "lm_head.weight [263, 96] is missing") + f"\n{hint}"


def test_misnamed_tensor(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = expected_tensors("qwen2-mini")
    tensors["model.norms.weight"] = tensors.pop(NORM)
    rendered = refuse_tensors(tmp_path, checkpoint_refusal, tensors)
    assert rendered == (
        fit(
            "2 problems",
            f"{NORM} [96] is missing (is 'model.norms.weight' meant to be it?)",
            "model.norms.weight is not a tensor of this model",
        )
        + f"\n{FIT}"
    )


def test_wrong_shape_and_dtype(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = expected_tensors("qwen2-mini")
    tensors[NORM] = ("F32", (95,))
    tensors["model.embed_tokens.weight"] = ("F64", (263, 96))
    rendered = refuse_tensors(tmp_path, checkpoint_refusal, tensors)
    assert rendered == (
        fit(
            "2 problems",
            "model.embed_tokens.weight has the dtype F64, expected F32 or BF16 or F16",
            f"{NORM} has the shape [95], expected [96]",
        )
        + f"\n{FIT}"
    )


def test_many_problems_name_the_first_few(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = {f"transformer.{name}": entry for name, entry in expected_tensors("qwen2-mini").items()}
    lines = refuse_tensors(tmp_path, checkpoint_refusal, tensors).splitlines()
    assert lines[0].endswith("(78 problems):")
    assert lines[1] == (
        "    model.embed_tokens.weight [263, 96] is missing (is 'transformer.model.embed_tokens.weight' meant to be it?)"
    )
    assert lines[6:] == ["    and 73 more", FIT]


def test_selection_bias_must_be_f32(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = expected_tensors("r1-mini")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    tensors[bias] = ("BF16", (16,))
    rendered = checkpoint_refusal(write_checkpoint_of(tmp_path / "bad", tensors, "r1-mini"))
    assert rendered == fit("1 problem", f"{bias} has the dtype BF16, expected F32") + f"\n{FIT}"


def test_what_is_known_is_skipped_and_reported(tmp_path: Path) -> None:
    tensors = expected_tensors("r1-mini-tied")
    tensors["lm_head.weight"] = ("BF16", (257, 128))
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (4,))
    tensors |= {f"model.layers.4.{part}.weight": ("BF16", (128,)) for part in ("enorm", "hnorm", "shared_head.norm")}
    model = load_model(
        checkpoint=write_checkpoint_of(tmp_path / "r1", tensors, "r1-mini-tied"), config=None, seed=None, context=None
    )
    assert model.skipped == (
        ("multi-token prediction layers", 3),
        ("RoPE frequency buffers", 1),
        ("stored copy of the tied head", 1),
    )
    assert model.counts.tensors == len(tensors) - 5


def test_a_layer_beyond_the_prediction_layers_is_unknown(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = expected_tensors("r1-mini") | {"model.layers.5.enorm.weight": ("BF16", (128,))}
    rendered = checkpoint_refusal(write_checkpoint_of(tmp_path / "bad", tensors, "r1-mini"))
    assert rendered == fit("1 problem", "model.layers.5.enorm.weight is not a tensor of this model") + f"\n{FIT}"


# Files


def damage(small: Path, header: dict[str, Any] | bytes, data: int, claimed: int | None = None) -> None:
    write_raw(small / "model.safetensors", header if isinstance(header, bytes) else json.dumps(header).encode(), data, claimed)


def entry(begin: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [2] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"{", 0, "the header is not valid JSON"),
        (b"\xff{}", 0, "the header is not valid JSON"),
        (b"[" * 100_000, 0, "the header is not valid JSON"),
        (b"[]", 0, "the header is not a JSON object"),
        (b'{"a": 1, "a": 2}', 0, "'a' is given twice in the header"),
        ({"a": {"dtype": "F32"}}, 0, "tensor 'a' needs dtype, shape and data_offsets"),
        ({"a": entry(0, 8, dtype="F31")}, 8, "tensor 'a' has the unknown dtype 'F31'"),
        ({"a": entry(0, 8, dtype=3)}, 8, "tensor 'a' has the unknown dtype 3"),
        ({"a": entry(0, 8, [-2])}, 8, "tensor 'a' has the impossible shape [-2]"),
        ({"a": entry(0, 8, [True, 2])}, 8, "tensor 'a' has the impossible shape [True, 2]"),
        ({"a": entry(-8, 0)}, 8, "tensor 'a' has the impossible data_offsets [-8, 0]"),
        ({"a": entry(0, 12)}, 12, "tensor 'a' of type F32[2] takes 8 bytes, its data_offsets span 12"),
        ({"a": entry(8, 0)}, 8, "tensor 'a' of type F32[2] takes 8 bytes, its data_offsets span -8"),
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "tensor 'b' overlaps 'a'"),
        ({"a": entry(0, 8), "b": entry(12, 20)}, 20, "tensor 'b' is preceded by a gap"),
        ({"a": entry(0, 8)}, 10, "2 bytes after the last tensor belong to nothing"),
    ],
    ids=str,
)
def test_damaged_header(
    small: Path, checkpoint_refusal: Refusal, header: dict[str, Any] | bytes, data: int, message: str
) -> None:
    damage(small, header, data)
    assert checkpoint_refusal(small) == f"small/model.safetensors: error: {message}\n{DAMAGED}"


def test_truncated_at_every_place_of_the_head(small: Path) -> None:
    path = small / "model.safetensors"
    content = path.read_bytes()
    for length in [*range(64), 1000, len(content) // 2, len(content) - 1]:
        path.write_bytes(content[:length])
        with pytest.raises(InvalidInput, match=r"the file has \d+( bytes)?"):
            load_model(checkpoint=small, config=None, seed=None, context=None)


def test_absurd_header_length(small: Path, checkpoint_refusal: Refusal) -> None:
    damage(small, b"{}", 0, claimed=2**62)
    message = f"the header claims {2**62} bytes, the file has 10"
    assert checkpoint_refusal(small) == f"small/model.safetensors: error: {message}\n{DAMAGED}"


def test_truncated_data(small: Path, checkpoint_refusal: Refusal) -> None:
    damage(small, {"a": entry(0, 8)}, 3)
    size = (small / "model.safetensors").stat().st_size
    message = f"the header describes {size + 5} bytes, the file has {size}"
    assert checkpoint_refusal(small) == f"small/model.safetensors: error: {message}\n{DAMAGED}"


def test_empty_tensors_share_a_place(tmp_path: Path) -> None:
    header, size = header_of({"a": ("F32", (0,)), "b": ("F32", (2,)), "c": ("F32", (0, 3))})
    write_raw(tmp_path / "x.safetensors", json.dumps(header).encode(), size)
    assert [t.length for t in read_header(tmp_path / "x.safetensors").values()] == [0, 8, 0]


def test_symbolic_links(small: Path, checkpoint_refusal: Refusal) -> None:
    path, blob = small / "model.safetensors", small.parent / "blob"
    path.rename(blob)
    path.symlink_to(blob)
    model = load_model(checkpoint=small, config=None, seed=None, context=None)
    source = model.sources[NORM]
    assert isinstance(source, StoredTensor)
    assert source.file == "model.safetensors"
    blob.unlink()
    assert checkpoint_refusal(small) == (
        "small/model.safetensors: error: the file is a symbolic link to a file that does not exist\n"
        "help: Download the checkpoint again; its cache was emptied."
    )


def test_a_directory_in_place_of_a_file(small: Path, checkpoint_refusal: Refusal) -> None:
    (small / "model.safetensors").unlink()
    (small / "model.safetensors").mkdir()
    expected = "small/model.safetensors: error: expected a file\nhelp: Check the checkpoint's directory."
    assert checkpoint_refusal(small) == expected


# Shards


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """qwen2-mini in three files with an index."""
    tensors = expected_tensors("qwen2-mini")
    directory = write_checkpoint_of(tmp_path / "sharded", {})
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for i in range(3):
        part = dict(list(tensors.items())[i::3])
        file = f"model-0000{i + 1}-of-00003.safetensors"
        write_safetensors(directory / file, part)
        weight_map.update(dict.fromkeys(part, file))
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(directory: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return weight_map


def test_shards_with_and_without_index(sharded: Path) -> None:
    with_index = load_model(checkpoint=sharded, config=None, seed=None, context=None)
    assert {s.file for s in with_index.sources.values() if isinstance(s, StoredTensor)} == {
        f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)
    }
    (sharded / "model.safetensors.index.json").unlink()
    assert load_model(checkpoint=sharded, config=None, seed=None, context=None) == with_index


def test_a_missing_shard(sharded: Path, checkpoint_refusal: Refusal) -> None:
    (sharded / "model-00002-of-00003.safetensors").unlink()
    expected = "sharded/model-00002-of-00003.safetensors: error: file not found\nhelp: Download the missing file."
    assert checkpoint_refusal(sharded) == expected
    (sharded / "model.safetensors.index.json").unlink()
    assert checkpoint_refusal(sharded) == (
        "sharded: error: shard model-00002-of-00003.safetensors of 3 is missing\nhelp: Download the missing files."
    )
    (sharded / "model-00001-of-00003.safetensors").unlink()
    assert checkpoint_refusal(sharded) == (
        "sharded: error: shard model-00001-of-00003.safetensors and 1 more of 3 is missing\nhelp: Download the missing files."
    )


def test_a_missing_shard_with_the_names_of_r1(sharded: Path, checkpoint_refusal: Refusal) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    for i in (1, 2, 3):
        (sharded / f"model-0000{i}-of-00003.safetensors").rename(sharded / f"model-0000{i}-of-000004.safetensors")
    assert checkpoint_refusal(sharded) == (
        "sharded: error: shard model-00004-of-000004.safetensors of 4 is missing\nhelp: Download the missing files."
    )


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "model.bin",
        3,
        "\ud800.safetensors",
        "ü" * 122 + ".safetensors",
    ],
)
def test_an_index_that_leads_elsewhere(sharded: Path, checkpoint_refusal: Refusal, file: Any) -> None:
    write_index(sharded, {**read_index(sharded), NORM: file})
    assert checkpoint_refusal(sharded) == (
        f"sharded/model.safetensors.index.json: error: the index places tensor {NORM!r} in {file!r}, "
        "which is not a safetensors file of the directory\nhelp: Download the index again; do not use one from elsewhere."
    )


def test_a_file_name_that_is_not_utf8(small: Path, checkpoint_refusal: Refusal) -> None:
    (small / "model.safetensors").rename(small / "\udcff.safetensors")
    assert checkpoint_refusal(small) == (
        "small: error: the file name '\\udcff.safetensors' is not UTF-8\nhelp: Rename the file, for example to model.safetensors."
    )


def test_names_of_tensors_cannot_speak_to_the_terminal(tmp_path: Path, checkpoint_refusal: Refusal) -> None:
    tensors = expected_tensors("qwen2-mini")
    directory = write_checkpoint_of(tmp_path / "small", {**tensors, "\x1b]0;title\a\x9b31m": tensors[NORM]})
    assert r"\x1b]0;title\x07\x9b31m is not a tensor of this model" in checkpoint_refusal(directory)


def test_an_index_without_a_map(sharded: Path, checkpoint_refusal: Refusal) -> None:
    write_index(sharded, {})
    expected = "sharded/model.safetensors.index.json: error: the index has no weight_map\nhelp: Download the index again."
    assert checkpoint_refusal(sharded) == expected


def test_an_index_that_disagrees_with_its_files(sharded: Path, checkpoint_refusal: Refusal) -> None:
    weight_map = read_index(sharded)
    path = "sharded/model.safetensors.index.json"
    one, three = "model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"
    other = three if weight_map[NORM] == one else one
    write_index(sharded, {**weight_map, NORM: other})
    assert checkpoint_refusal(sharded) == (
        f"{path}: error: the index says that tensor {NORM!r} lies in {other}, but it lies in {weight_map[NORM]}\n{ONE_REVISION}"
    )
    write_index(sharded, {**weight_map, "more": one})
    assert checkpoint_refusal(sharded) == (
        f"{path}: error: the index says that tensor 'more' lies in {one}, but no file of the checkpoint holds it\n{ONE_REVISION}"
    )
    write_index(sharded, {name: file for name, file in weight_map.items() if name != NORM})
    assert (
        checkpoint_refusal(sharded) == f"{path}: error: tensor {NORM!r} of {weight_map[NORM]} is not in the index\n{ONE_REVISION}"
    )


def test_a_tensor_in_two_files(small: Path, checkpoint_refusal: Refusal) -> None:
    write_safetensors(small / "other.safetensors", {NORM: ("F32", (96,))})
    assert checkpoint_refusal(small) == (
        f"small: error: tensor {NORM!r} lies in model.safetensors and in other.safetensors\n"
        "help: Keep the files of one checkpoint only."
    )


def test_files_outside_of_the_index_are_noted(sharded: Path) -> None:
    write_safetensors(sharded / "adapter.safetensors", {"lora": ("F32", (1,))})
    model = load_model(checkpoint=sharded, config=None, seed=None, context=None)
    assert model.notes == ("Files that model.safetensors.index.json does not name were not read: adapter.safetensors.",)


# Token ids


def test_generation_config_comes_first(small: Path) -> None:
    (small / "generation_config.json").write_text('{"eos_token_id": [7, 9], "do_sample": true}')
    model = load_model(checkpoint=small, config=None, seed=None, context=None)
    assert (model.bos_token_ids, model.eos_token_ids) == ((0,), (7, 9))


def test_bad_generation_config(small: Path, checkpoint_refusal: Refusal) -> None:
    (small / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    message = 'eos_token_id must be a token id or a list of token ids, not "</s>"'
    rendered = checkpoint_refusal(small)
    assert rendered.startswith(f"small/generation_config.json:1:2: error: {message}\n")
