"""Builds of the scaled-down R1: cold, unchanged, and after one change of each kind; and the plan of the true R1.

    python bench/builds.py [--quick] [--json FILE]

Counts are exact and have goals; seconds are of this machine and are printed beside them.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rows import Row, arguments, median, report

ROOT = Path(__file__).resolve().parents[1]


def dsr1build(*words: str, cache: Path) -> tuple[str, float]:
    """Run the command line; returns its output and the seconds it took. Raises CalledProcessError."""
    started = time.perf_counter()
    child = subprocess.run(
        [sys.executable, "-m", "dsr1build", *words],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return child.stdout, time.perf_counter() - started


def build(file: Path, cache: Path, *options: str) -> tuple[dict[str, Any], float]:
    output, seconds = dsr1build("build", str(file), "--json", *options, cache=cache)
    return json.loads(output.splitlines()[-1]), seconds


def project(directory: Path, layers: int = 4, recipe: str = "deepseek_v3", seed: int = 0) -> Path:
    """A BUILD.yaml for the scaled-down R1 with another number of layers, recipe or weights."""
    config = json.loads((ROOT / "models" / "r1-mini" / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = layers
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    file = directory / "BUILD.yaml"
    file.write_text(
        f"version: 1\nname: bench\nmodel:\n  config: config.json\n  weights: {{random: {{seed: {seed}}}}}\n"
        f"recipe: {recipe}\ntargets: [x86-64-v3]\ncontext: 512\n",
        encoding="utf-8",
    )
    return file


def expert_recipe(directory: Path) -> str:
    """The shipped recipe with one schedule option of the expert kernel changed."""
    directory.mkdir()
    text = (ROOT / "recipes" / "deepseek_v3.yaml").read_text(encoding="utf-8")
    text += "\npipelines:\n  x86-64-v3:\n    expert: {schedules: {dot: {rows: 2}}}\n"
    (directory / "recipe.yaml").write_text(text, encoding="utf-8")
    return "recipe.yaml"


def main() -> int:
    options = arguments("Cold, unchanged and incremental builds of the scaled-down R1.")
    work = Path(tempfile.mkdtemp(prefix="dsr1build-bench-"))
    cache = work / "cache"
    try:
        rows: list[Row] = []
        base = project(work / "base")
        cold, seconds = build(base, cache)
        rows.append(Row("cold build: wall", seconds, "s"))
        rows.append(Row("cold build: variants compiled", cold["compiled"], "variants"))

        unchanged = [build(base, cache) for _ in range(3 if options.quick else 7)]
        rows.append(Row("unchanged build: wall, median", median([s for _, s in unchanged]), "s"))
        rows.append(Row("unchanged build: actions run", max(e["executed"] for e, _ in unchanged), "actions", goal=0))

        changes = (
            ("other weights", project(work / "weights", seed=1), (), 0),
            ("other context", base, ("--context", "300"), 0),
            ("40 layers instead of 4", project(work / "layers", layers=40), (), 0),
            ("one schedule option of the expert kernel", project(work / "option", recipe=expert_recipe(work / "option")), (), 3),
        )
        for what, file, words, goal in changes:
            summary, seconds = build(file, cache, *words)
            rows.append(Row(f"{what}: variants compiled", summary["compiled"], "variants", f"{seconds:.2f} s", goal))

        (work / "r1").mkdir()
        r1 = work / "r1" / "BUILD.yaml"
        r1.write_text(
            f"version: 1\nname: r1\nmodel:\n  config: {ROOT / 'models' / 'deepseek-r1' / 'config.json'}\n"
            "  weights: {random: {seed: 0}}\nrecipe: deepseek_v3\ntargets: [x86-64-v3]\n",
            encoding="utf-8",
        )
        plans = [dsr1build("plan", str(r1), "--json", cache=cache) for _ in range(1 if options.quick else 3)]
        plan = json.loads(plans[0][0])
        rows.append(Row("plan of R1: wall, median", median([s for _, s in plans]), "s"))
        rows.append(Row("plan of R1: partitions of a mode", plan["partitions"]["total"], "partitions"))
        rows.append(Row("plan of R1: kernels of both modes", len(plan["kernels"]), "kernels", goal=10))
        return report(rows, options.json)
    finally:
        shutil.rmtree(work)


if __name__ == "__main__":
    sys.exit(main())
