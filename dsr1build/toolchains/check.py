"""What must hold after the pipeline. mlir-opt's passes exit 0 with operations left over, and translating a left-over cast
crashes the process; so every promise of the kernel ABI is checked and a breach is refused by name."""

from mlir import ir

from dsr1build.errors import BuildFailed
from dsr1build.graph.signature import Signature
from dsr1build.toolchains.pipeline import place
from dsr1build.toolchains.rewrite import all_operations
from dsr1build.toolchains.waves import VIEWS

# A kernel may leave these and nothing else to the linker.
ALLOWED_SYMBOLS = frozenset({"memcpy", "memset", "memmove"})

_WHOLE_VIEWS = VIEWS - {"memref.subview"}


def check_copies(module: ir.Module, signature: Signature) -> None:
    """After bufferization: no copy of a whole state or weight. Raises BuildFailed with the argument's name.

    Reading the old value of a state after its update costs such a copy, silently.
    """
    kernel = next(op for op in module.body.operations if op.operation.name == "func.func")
    arguments = list(kernel.entry_block.arguments)
    protected = {arguments[k]: a for k, a in enumerate(signature.arguments) if a.role in ("state", "weight")}
    for op in all_operations(module.operation, ["memref.copy"]):
        source = op.operands[0]
        while not isinstance(source.owner, ir.Block) and source.owner.operation.name in _WHOLE_VIEWS:
            source = source.owner.operation.operands[0]
        if source in protected:
            argument = protected[source]
            raise BuildFailed(
                f"{argument.role} {argument.name!r} is copied as a whole",
                where=place(op.location),
                hint="Read only the updated value after an update.",
            )


def check_lowered(module: ir.Module) -> None:
    """After the last pass: only the llvm dialect, no calls but to the kernel's own functions and ALLOWED_SYMBOLS.
    Raises BuildFailed with the operation and its place in the kernel text."""
    for op in all_operations(module.operation):
        if op.name != "builtin.module" and not op.name.startswith("llvm."):
            raise BuildFailed(
                f"{op.name} is not lowered",
                where=place(op.location),
                hint="Use only the operations that docs/architecture.md lists, or extend the pass group 'lower'.",
            )
    for op in all_operations(module.operation, ["llvm.func"]):
        name = str(op.attributes["sym_name"].value)
        if not op.regions[0].blocks and name not in ALLOWED_SYMBOLS:
            raise BuildFailed(f"the kernel calls {name!r}", where=place(op.location), hint=_allowed())


def check_symbols(undefined: set[str]) -> None:
    """The undefined symbols of an object file. Raises BuildFailed with the surprising ones."""
    surprises = sorted(undefined - ALLOWED_SYMBOLS)
    if surprises:
        raise BuildFailed(f"the object needs {', '.join(map(repr, surprises))}", where="kernel.o", hint=_allowed())


def _allowed() -> str:
    return f"A kernel may call {', '.join(sorted(ALLOWED_SYMBOLS))} and nothing else."
