"""Keys of a real plan: the kernels of the scaled-down R1, lowered once."""

import tempfile
from pathlib import Path

import pytest

from dsr1build.config.load import load_build
from dsr1build.digest import BlobRef, key_of, sha256_hex
from dsr1build.frontends.load import load_model
from dsr1build.lower.action import lower_worker
from dsr1build.partition.cut import partition_model
from dsr1build.partition.specializations import kernel_variants
from dsr1build.plan.action import ActionResult
from dsr1build.plan.build_plan import LinkParts, build_plan

ROOT = Path(__file__).resolve().parents[2]


class Planner:
    """Plans the scaled-down R1 with any recipe and targets, and tells the keys of lower and compile actions."""

    def __init__(self):
        self.config = load_build(ROOT / "BUILD.yaml")
        self.recipe = self.config.recipe
        (self.target,) = self.config.targets
        model = load_model(checkpoint=None, config=self.config.model.config, seed=0, context=512)
        self.partitioned = partition_model(model, self.recipe)
        self.variants = kernel_variants(self.partitioned, self.recipe)
        self.blobs = {}
        self.remembered = Path(tempfile.mkdtemp()) / "tools.json"
        self.lowered = {}
        for action in self.plan().actions.values():
            if action.kind == "lower":
                self.lowered[action.id] = self.run(action)

    def plan(self, recipe=None, targets=None, parts=None):
        parts = parts or LinkParts(
            lambda target, compiled: {"tables.c": b""}, {"a.c": b"", "a.h": b""}, lambda target: target, ()
        )
        return build_plan(
            self.partitioned, self.variants, recipe or self.recipe, targets or [self.target], parts, self.read, self.remembered
        )

    def read(self, ref):
        return self.blobs[ref.sha256]

    def run(self, action):
        fields = action.fields({})
        with tempfile.TemporaryDirectory() as outputs:
            lower_worker(fields, Path(), Path(outputs))
            files = {path.name: path.read_bytes() for path in Path(outputs).iterdir()}
        self.blobs |= {sha256_hex(data): data for data in files.values()}
        return ActionResult(key_of(fields), {name: BlobRef(sha256_hex(data)) for name, data in files.items()})

    def keys(self, recipe=None, target=None):
        """Compile keys by action id without the target's name."""
        plan = self.plan(recipe, [target or self.target])
        compiles = [a for a in plan.actions.values() if a.kind == "compile"]
        return {a.id.split(":", 2)[2]: key_of(a.fields(self.lowered)) for a in compiles}

    def fields(self):
        plan = self.plan()
        return {a.id: a.fields(self.lowered) for a in plan.actions.values() if a.kind == "compile"}


@pytest.fixture(scope="session")
def planner():
    return Planner()
