"""A real trained model: the greedy text of our bundle is the text of the package it came from."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from dsr1build.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "glassllm"
PROMPTS = {"en": "Alice was beginning to", "pt": "Capitu olhou para"}


@pytest.mark.slow
@pytest.mark.parametrize("language", sorted(PROMPTS))
def test_greedy_text(language: str, tmp_path: Path, cache_home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    glassllm = pytest.importorskip("glassllm") if importlib.util.find_spec("glassllm") else pytest.fail("install the test extra")
    checkpoint = tmp_path / "checkpoint"
    subprocess.run([sys.executable, EXAMPLE / "convert.py", "--language", language, "--output", checkpoint], check=True)
    build_file = tmp_path / "BUILD.yaml"
    build_file.write_text((EXAMPLE / "BUILD.yaml").read_text(encoding="utf-8").replace("../../dist", "dist"), encoding="utf-8")
    assert main(["build", str(build_file), "--quiet"]) == 0
    bundle = tmp_path / "dist" / "glassllm-en" / "x86-64-v3"
    capfd.readouterr()
    assert main(["run", str(bundle), "--prompt", PROMPTS[language], "--max-new", "60", "--json"]) == 0
    ours = json.loads(capfd.readouterr().out)

    model, tokenizer = glassllm.load_pretrained(language)
    ids = tokenizer.encode(PROMPTS[language])
    theirs = [step.token for step in model.generate(ids, 60, greedy=True)]
    assert ours["prompt_ids"] == ids
    assert ours["ids"] == theirs
    assert PROMPTS[language] + ours["text"] == tokenizer.decode(ids + theirs)
