"""The worker that compiles one kernel: portable text and signature in, object code and its description out."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mlir import ir
from mlir.dialects import llvm

from dsr1build.digest import BlobRef, Fields
from dsr1build.errors import BuildFailed
from dsr1build.graph.signature import Signature
from dsr1build.toolchains import check, cpu, sizes, tools
from dsr1build.toolchains.outline import Outlined, outline
from dsr1build.toolchains.pass_groups import enter_group
from dsr1build.toolchains.pipeline import diagnostics, run_passes
from dsr1build.toolchains.rewrite import all_operations, expand_exp, loads_at_any_address, use_fma
from dsr1build.toolchains.schedule import schedule_kernel
from dsr1build.toolchains.target import KERNEL_SCHEMA_VERSION, kernel_symbol

Keep = Callable[[str, str], None]


def compile_kernel(fields: Fields, inputs: Path, outputs: Path, temps: Path | None = None) -> None:
    """Compile the kernel that ``fields`` (made by ``target.compile_fields``) describe.

    ``inputs`` holds the text and the signature as files named by their digests; ``kernel.o`` and ``kernel.json`` are left
    in ``outputs``. With ``temps`` the IR after every step is kept there, which changes no output. Raises BuildFailed.
    """
    text = _blob(fields, "text", inputs).decode("utf-8")
    signature_json = json.loads(_blob(fields, "signature", inputs))
    signature = Signature.from_json(signature_json)
    symbol = kernel_symbol(fields)
    names: list[str] = []

    def keep(name: str, content: str) -> None:
        if temps is not None:
            temps.mkdir(parents=True, exist_ok=True)
            suffix = "ll" if name == "translate" else "mlir"
            (temps / f"{len(names):02}-{name}.{suffix}").write_text(content, "utf-8")
            names.append(name)

    ir_text, outlined = lower_to_llvm(text, signature, symbol, fields, keep)
    _generate(ir_text, fields, outputs, temps)
    (outputs / "kernel.json").write_text(
        json.dumps(_describe(symbol, signature_json, outlined), indent=1, sort_keys=True) + "\n", "utf-8"
    )


def lower_to_llvm(text: str, signature: Signature, symbol: str, fields: Fields, keep: Keep) -> tuple[str, Outlined]:
    """From kernel text to LLVM IR; ``keep(step, ir)`` is called after every step. Raises BuildFailed."""
    groups = _pipeline(fields)
    options: Any = fields["schedules"]
    fma = cpu.has_fma(fields["target"])
    context = ir.Context()
    # Worker processes are the unit of parallelism, and a forked process must not hold a thread pool.
    context.enable_multithreading(False)
    with context:
        try:
            module = ir.Module.parse(text)
        except ir.MLIRError as error:
            raise BuildFailed(f"the kernel text does not parse: {diagnostics(error)}", where="kernel.mlir") from error

        def run_group(name: str, ir_bytes: int = 0) -> None:
            enter_group(name, ir_bytes)
            try:
                run_passes(module, groups[name])
            except ir.MLIRError as error:
                raise BuildFailed(f"the pass group {name!r} failed: {diagnostics(error)}", where="@kernel") from error
            except ValueError as error:
                hint = "The passes are those of the target or of the recipe's `pipelines`."
                raise BuildFailed(f"the pass group {name!r} cannot be read: {error}", where=groups[name], hint=hint) from error
            keep(name, str(module))

        run_group("parse", len(text))
        enter_group("schedule")
        schedule_kernel(module, options)
        _bind_dims(module, signature)
        keep("schedule", str(module))
        run_group("bufferize")
        enter_group("outline")
        check.check_copies(module, signature)
        outlined = outline(module, symbol, signature)
        expand_exp(module, fma)
        if fma:
            use_fma(module)
        if not module.operation.verify():
            raise BuildFailed("the outlined module is not valid", where="@kernel")
        keep("outline", str(module))
        run_group("lower")
        loads_at_any_address(module)
        check.check_lowered(module)
        enter_group("translate")
        ir_text = llvm.translate_module_to_llvmir(module.operation)
        keep("translate", ir_text)
    return ir_text, outlined


def _pipeline(fields: Fields) -> dict[str, str]:
    groups: Any = fields["pipeline"]
    return dict(groups)


def _blob(fields: Fields, name: str, inputs: Path) -> bytes:
    reference = fields[name]
    if not isinstance(reference, BlobRef):
        raise TypeError(f"field {name!r} is no blob reference")
    return (inputs / reference.sha256).read_bytes()


def _bind_dims(module: ir.Module, signature: Signature) -> None:
    """Every ``tensor.dim`` becomes the run-time dimension that the signature names: first one of an argument, then that."""
    run_passes(module, "resolve-ranked-shaped-type-result-dims")
    kernel = next(op for op in module.body.operations if op.operation.name == "func.func")
    arguments = list(kernel.entry_block.arguments)
    position = {argument: k for k, argument in enumerate(arguments[: len(signature.arguments)])}
    for op in all_operations(module.operation, ["tensor.dim"]):
        k = position.get(op.operands[0])
        axis = op.operands[1].owner
        if k is None or isinstance(axis, ir.Block) or axis.operation.name != "arith.constant":
            continue
        dim = signature.arguments[k].type.shape[axis.operation.attributes["value"].value]
        if isinstance(dim, str):
            op.results[0].replace_all_uses_with(arguments[len(signature.arguments) + signature.dims.index(dim)])
            op.erase()
    run_passes(module, "canonicalize")


def _generate(ir_text: str, fields: Fields, outputs: Path, temps: Path | None) -> None:
    """LLVM IR to ``kernel.o`` by opt and llc, with the undefined symbols checked."""
    target: Any = fields["target"]
    options = _pipeline(fields)
    machine = [f"-mtriple={target['triple']}", f"-mcpu={target['cpu']}"]
    if target["features"]:
        machine.append(f"-mattr={','.join(target['features'])}")
    with tempfile.TemporaryDirectory(prefix="dsr1-kernel-") as name:
        work = Path(name)

        def run(tool: str, arguments: list[str], data: bytes | None = None) -> bytes:
            return tools.run_tool(
                [tools.tool("llvm", f"bin/{tool}"), *arguments], where="kernel.mlir", data=data, directory=work, home=work
            )

        enter_group("optimize", len(ir_text))
        bitcode = run("opt", [*options["optimize"].split(), *machine, "-", "-o", "-"], ir_text.encode("utf-8"))
        llc = [*options["codegen"].split(), *machine, "-relocation-model=pic", "-"]
        enter_group("codegen", len(bitcode))
        code = run("llc", [*llc, "-filetype=obj", "-o", "-"], bitcode)
        (work / "kernel.o").write_bytes(code)
        undefined = run("llvm-nm", ["--undefined-only", "--format=just-symbols", "kernel.o"]).decode().split()
        check.check_symbols(set(undefined))
        if temps is not None:
            (temps / "assembly.s").write_bytes(run("llc", [*llc, "-filetype=asm", "-o", "-"], bitcode))
        (outputs / "kernel.o").write_bytes(code)
        enter_group("")


def _describe(symbol: str, signature: dict[str, Any], outlined: Outlined) -> dict[str, Any]:
    return {
        "schema": KERNEL_SCHEMA_VERSION,
        "symbol": symbol,
        "signature": signature,
        "phases": [{"wave": p.wave, "parallel": p.parallel, "items": sizes.show(p.items)} for p in outlined.phases],
        "scratch": sizes.show(outlined.scratch),
        "local": sizes.show(outlined.local),
    }
