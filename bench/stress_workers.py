"""Toy actions of the benchmarks of caches and farms: their outputs are known in advance, so a wrong artifact shows."""

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsr1build.digest import BlobRef
from dsr1build.plan.action import Action, Results

HERE = Path(__file__).resolve().parent
# Numbers of the actions without inputs, and the bytes of the largest of their outputs.
LEAVES = 48
LARGEST = 48_000


def leaf_content(number: int) -> bytes:
    size = 200 + (number * 7919) % LARGEST
    block = hashlib.sha256(b"leaf %d" % number).digest()
    return (block * (size // 32 + 1))[:size]


def pair_content(left: int, right: int) -> bytes:
    return hashlib.sha256(leaf_content(left) + leaf_content(right)).hexdigest().encode()


def make_leaf(fields: Mapping[str, Any], inputs: Path, outputs: Path) -> None:
    (outputs / "out").write_bytes(leaf_content(fields["number"]))
    (outputs / "about.json").write_bytes(b'{"number": %d}' % fields["number"])


def wait_then_make_leaf(fields: Mapping[str, Any], inputs: Path, outputs: Path) -> None:
    time.sleep(fields["seconds"])
    make_leaf(fields, inputs, outputs)


def make_pair(fields: Mapping[str, Any], inputs: Path, outputs: Path) -> None:
    digest = hashlib.sha256()
    for ref in fields["parts"]:
        digest.update((inputs / ref.sha256).read_bytes())
    (outputs / "out").write_text(digest.hexdigest())


def leaf(number: int) -> Action:
    return Action(
        f"leaf:{number}",
        "lower",
        f"leaf {number}",
        "stress_workers:make_leaf",
        (),
        lambda results: {"toy": "leaf", "number": number},
        ("out", "about.json"),
    )


def pair(left: int, right: int) -> Action:
    sources = (f"leaf:{left}", f"leaf:{right}")

    def fields(results: Results) -> Mapping[str, Any]:
        parts: list[BlobRef] = [results[source].outputs["out"] for source in sources]
        return {"toy": "pair", "parts": parts}

    return Action(
        f"pair:{left}:{right}", "compile", f"pair {left} {right}", "stress_workers:make_pair", sources, fields, ("out",)
    )
