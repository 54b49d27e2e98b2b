"""Runs pass lists over a module."""

from mlir import ir, passmanager


def run_passes(module: ir.Module, passes: str) -> None:
    """Run a pass list over the module. Raises mlir.ir.MLIRError with the diagnostics of the failing pass."""
    passmanager.PassManager.parse(f"builtin.module({passes})", module.context).run(module.operation)
