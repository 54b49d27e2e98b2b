"""Runs pass lists over a module, and says where an operation stands in the kernel text."""

import re

from mlir import ir, passmanager

_IN_TEXT = re.compile(r'loc\("-":(\d+):(\d+)\)|"-":(\d+):(\d+)')


def run_passes(module: ir.Module, passes: str) -> None:
    """Run a pass list over the module. Raises mlir.ir.MLIRError with the diagnostics of the failing pass."""
    passmanager.PassManager.parse(f"builtin.module({passes})", module.context).run(module.operation)


def place(location: object) -> str:
    """A location in the kernel text as ``kernel.mlir:12:8``; other text stays as it is."""
    return _IN_TEXT.sub(lambda m: f"kernel.mlir:{m[1] or m[3]}:{m[2] or m[4]}", str(location))


def diagnostics(error: ir.MLIRError) -> str:
    """What MLIR said, in one line."""
    found = "; ".join(f"{place(d.location)}: {d.message}" for d in error.error_diagnostics)
    return found or place(str(error).strip())
