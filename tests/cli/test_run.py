"""The run verb: what it prints, and every refusal with its exact message."""

import json
import re
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import toy_model
from tokenizers import Tokenizer, models, pre_tokenizers

from dsr1build.cli.main import main
from dsr1build.cli.run import RUN_SCHEMA

SPEED = re.compile(r"prefill 3 tokens in \d+\.\d{3} s \(\S+ tokens/s\), decode 4 steps in \d+\.\d{3} s \(\S+ tokens/s\)\n")


def greedy(ids: list[int], count: int) -> list[int]:
    values, out = toy_model.weights(), list(ids)
    for _ in range(count):
        out.append(int(np.argmax(toy_model.reference(values, out)[-1])))
    return out[len(ids) :]


def with_tokenizer(bundle: Path, to: Path, chat: bool) -> Path:
    """A copy of the bundle with a tokenizer of one word for each id."""
    shutil.copytree(bundle, to)
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(toy_model.VOCABULARY)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (to / "tokenizer").mkdir()
    tokenizer.save(str(to / "tokenizer" / "tokenizer.json"))
    if chat:
        (to / "tokenizer" / "chat_template.jinja").write_text("w4 {{ messages[0].content }}")
    return to


def test_ids_give_ids_and_the_speed(toy_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(toy_bundle), "--ids", "1, 2,3", "--max-new", "5", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    assert out == ",".join(map(str, greedy([1, 2, 3], 5))) + "\n"
    assert SPEED.fullmatch(err)


def test_a_prompt_is_continued_as_text(toy_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = with_tokenizer(toy_bundle, tmp_path / "bundle", chat=False)
    assert main(["run", str(bundle), "--prompt", "w1 w2 w3", "--max-new", "5", "--ignore-eos"]) == 0
    out, err = capsys.readouterr()
    assert out == " ".join(f"w{i}" for i in [1, 2, 3, *greedy([1, 2, 3], 5)]) + "\n"
    assert SPEED.fullmatch(err)


def test_json_is_one_object(toy_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = with_tokenizer(toy_bundle, tmp_path / "bundle", chat=True)
    assert main(["run", str(bundle), "--chat", "w2 w3", "--max-new", "3", "--ignore-eos", "--json"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert err == ""
    jsonschema.validate(found, RUN_SCHEMA)
    assert found["prompt_ids"] == [4, 2, 3]
    assert found["ids"] == greedy([4, 2, 3], 3)
    assert found["text"].split() == [f"w{i}" for i in found["ids"]]
    assert (found["speed"]["prefill_tokens"], found["speed"]["decode_steps"]) == (3, 2)


def test_sampling_is_repeated_by_its_seed(toy_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outs = []
    for seed in ("1", "1", "2"):
        options = ["--temperature", "50", "--top-k", "9", "--top-p", "0.9", "--seed", seed]
        assert main(["run", str(toy_bundle), "--ids", "1", "--max-new", "20", "--ignore-eos", *options]) == 0
        outs.append(capsys.readouterr().out)
    assert outs[0] == outs[1] != outs[2]


def test_no_more_is_generated_than_the_context_holds(toy_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompt = ["1"] * (toy_model.CONTEXT - 2)
    assert main(["run", str(toy_bundle), "--ids", ",".join(prompt), "--max-new", "9", "--ignore-eos"]) == 0
    assert len(capsys.readouterr().out.split(",")) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ids", "1,x"], "run: error: --ids entry 2 is 'x', expected a token id\nhelp: write them like --ids 1,2,3\n"),
        (["--ids", ""], "run: error: --ids entry 1 is '', expected a token id\nhelp: write them like --ids 1,2,3\n"),
        (["--ids", "1", "--max-new", "0"], "run: error: --max-new is 0, expected at least 1\n"),
        (["--ids", "1", "--temperature", "-1"], "run: error: --temperature is -1.0, expected 0 or more\n"),
        (["--ids", "1", "--temperature", "nan"], "run: error: --temperature is nan, expected 0 or more\n"),
        (["--ids", "1", "--top-p", "0"], "run: error: --top-p is 0.0, expected more than 0 and at most 1\n"),
        (["--ids", "1", "--top-k", "-1"], "run: error: --top-k is -1, expected 0 or more\n"),
        (["--ids", "1", "--seed", "-1"], "run: error: --seed is -1, expected 0 or more\n"),
        (["--ids", "1", "--threads", "0"], "run: error: --threads is 0, expected 1 to 1024\n"),
        (["--ids", "1,19"], "BUNDLE: error: token 1 has the id 19, the vocabulary has the ids 0 to 18\n"),
        (
            ["--ids", ",".join("1" * 48)],
            "BUNDLE: error: the prompt has 48 tokens, the bundle's context has room for 48\n"
            "help: shorten the prompt, or raise `context` in BUILD.yaml and build again (nothing is recompiled)\n",
        ),
        (
            ["--prompt", "hello"],
            "BUNDLE: error: BUNDLE has no tokenizer (tokenizer/tokenizer.json), so text cannot be used; give token ids with "
            "--ids instead, or put the model's tokenizer.json into the checkpoint directory and build again\n",
        ),
    ],
)
def test_refusals(toy_bundle: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(toy_bundle), *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.replace(str(toy_bundle), "BUNDLE")) == ("", message)


def test_a_router_without_numbers_ends_the_run_with_the_layers_name(toy_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(toy_bundle), "--ids", f"1,{toy_model.NAN_TOKEN}"]) == 1
    assert "layers.0" in capsys.readouterr().err


def test_what_is_no_bundle_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tmp_path), "--ids", "1"]) == 2
    assert capsys.readouterr().err == f"{tmp_path}: error: {tmp_path} is not a bundle: it has no manifest.json\n"
