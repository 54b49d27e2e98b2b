"""What ``dsr1build inspect`` tells about a bundle."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dsr1build.errors import InvalidInput
from dsr1build.link.manifest import MANIFEST, KernelInfo, Manifest


class Inspection(BaseModel):
    """A bundle's manifest, and what of it this machine lacks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    manifest: Manifest
    missing_features: tuple[str, ...] = Field(description="Required CPU features that this machine does not have.")
    wrong_files: tuple[str, ...] = Field(description="Files that are missing or of another length than the manifest says.")


INSPECT_SCHEMA: dict[str, Any] = Inspection.model_json_schema(mode="serialization")


def inspect_bundle(directory: Path, missing_features: Callable[[dict[str, Any]], list[str]]) -> Inspection:
    """Read a bundle's manifest and look at its files; ``missing_features`` is that of ``dsr1build.runtime.session``.

    Raises InvalidInput where the directory has no manifest, or one that this version cannot read.
    """
    path = directory / MANIFEST
    try:
        manifest = Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise InvalidInput(
            f"not a bundle: it has no {MANIFEST}", where=str(directory), hint="Give a directory that `dsr1build build` printed."
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise InvalidInput(
            f"the manifest cannot be read: {field}: {first['msg']}", where=str(path), hint="Build the bundle again."
        ) from None
    sizes = {manifest.library.file: manifest.library.bytes} | {file.path: file.bytes for file in manifest.weights.files}
    wrong = [name for name, size in sizes.items() if not _has_size(directory / name, size)]
    return Inspection(
        manifest=manifest, missing_features=tuple(missing_features(manifest.model_dump())), wrong_files=tuple(wrong)
    )


def render_inspection(found: Inspection) -> str:
    """The inspection as text."""
    m = found.manifest
    extra = " ".join(m.target.features)
    lines = [
        f"{m.name}: {m.architecture} for {m.target.name} ({m.target.triple}, {m.target.cpu}{' ' + extra if extra else ''})",
        f"  model       {m.model.parameters:,} parameters in {m.model.tensors:,} tensors, {_bytes(m.model.bytes)}",
        f"  context     {m.context:,} tokens, prefill in chunks of {m.chunk}; vocabulary {m.vocabulary:,}",
        f"  code        {m.library.file}, {_bytes(m.library.bytes)}, ABI {m.abi}",
        f"  memory      arena {_bytes(m.arena_bytes)} (values alone {_bytes(max(i.buffer_bytes for i in m.modes.values()))}), "
        f"KV cache {_bytes(m.state_bytes)}",
        f"  tokenizer   {', '.join(m.tokenizer) or 'none: use token ids'}",
    ]
    for mode, info in m.modes.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in info.by_kind.items())
        lines.append(f"  {mode:<12}{info.steps} steps: {kinds}")
    lines.append(f"  weights     {m.weights.tensors:,} tensors, layout {m.weights.layout}")
    lines += [f"    {_bytes(file.bytes):>10}  {file.origin:<10}  {file.path}" for file in m.weights.files]
    lines.append(f"  kernels     {len(m.kernels)}")
    lines += [f"    {_kernel_line(kernel)}" for kernel in m.kernels]
    missing = ", ".join(found.missing_features)
    lines.append(f"  CPU needs   {' '.join(m.target.cpuinfo_flags) or 'nothing special'}")
    lines.append(f"              {f'this machine lacks: {missing}' if missing else 'this machine has them all'}")
    lines += [f"  wrong file  {name} is missing or has another length; build the bundle again" for name in found.wrong_files]
    return "\n".join(lines)


def _kernel_line(kernel: KernelInfo) -> str:
    counts = ", ".join(f"{count} in {mode}" for mode, count in kernel.instances.items() if count)
    bounds = [v.specialization if v.specialization == "range" else f"{v.specialization} {v.tokens}" for v in kernel.variants]
    return f"{kernel.id}  {kernel.kind:<10} {counts}; variants: {', '.join(bounds)}"


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _bytes(count: int) -> str:
    """A number of bytes for people: three digits and a binary unit."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} TiB"
