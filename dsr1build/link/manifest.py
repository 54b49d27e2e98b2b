"""manifest.json: what a bundle is, for people, tools and the loader.

The loader (dsr1build/runtime/session.py) reads it without pydantic; a field that it needs may change only with
``MANIFEST_VERSION``.
"""

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dsr1build.graph.model import ITEM_BYTES
from dsr1build.link.binding import weight_shape
from dsr1build.link.program import KernelStep, ModeProgram, Program, ProgramKernel, Variant

MANIFEST = "manifest.json"
MANIFEST_VERSION = 1
Sha256 = str


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TargetInfo(_Part):
    """What the code was compiled for."""

    name: str = Field(description="Name of the target.")
    triple: str = Field(description="LLVM target triple.")
    cpu: str = Field(description="LLVM CPU name, resolved.")
    features: tuple[str, ...] = Field(description="LLVM features added to or taken from the CPU's own.")
    cpuinfo_flags: tuple[str, ...] = Field(description="Flags that /proc/cpuinfo must list; loading is refused without one.")


class LibraryInfo(_Part):
    """The shared object: kernels, program and C runtime."""

    file: str = Field(description="File name in the bundle, model-<first 16 digits of sha256>.so.")
    bytes: int
    sha256: Sha256


class ArgumentInfo(_Part):
    name: str
    role: Literal["input", "weight", "state", "output"]
    dtype: str
    shape: tuple[int | str, ...]
    layout: str = Field(description="`rows`: [out][in], as a checkpoint stores it.")


class SignatureInfo(_Part):
    arguments: tuple[ArgumentInfo, ...]
    dims: tuple[str, ...] = Field(description="Run-time dimensions, in the order in which the code takes them.")


class PhaseInfo(_Part):
    wave: int = Field(description="Phases of equal wave may run side by side.")
    parallel: bool
    items: str = Field(description="Formula of the number of work items.")


class VariantInfo(_Part):
    specialization: Literal["exact", "padded", "range"]
    tokens: int = Field(description="The number that `specialization` binds; 0 for a range.")
    symbol: str
    signature: SignatureInfo
    phases: tuple[PhaseInfo, ...]
    scratch: str = Field(description="Formula of the bytes of scratch memory of a call.")
    local: str = Field(description="Formula of the bytes of local memory of a thread.")


class KernelInfo(_Part):
    id: str
    kind: str
    instances: Mapping[str, int] = Field(description="Number of partitions that it computes, by mode.")
    signature: SignatureInfo
    variants: tuple[VariantInfo, ...]


class ModeInfo(_Part):
    steps: int
    by_kind: Mapping[str, int] = Field(description="Steps by kind of partition; `dispatch` runs the chosen experts of a layer.")
    rows: int = Field(description="Tokens that the arena has room for, padding included.")
    buffers: int = Field(description="Values that share the arena.")
    buffer_bytes: int = Field(description="Bytes of these values if none shared memory with another.")


class TensorInfo(_Part):
    name: str
    dtype: str
    shape: tuple[int, ...]


class WeightFileInfo(_Part):
    path: str = Field(description="Path in the bundle.")
    bytes: int
    origin: Literal["checkpoint", "generated"]
    digest: Sha256 = Field(
        description="checkpoint: SHA-256 of the safetensors header, with its length. generated: SHA-256 of what it is made from."
    )
    sha256: Sha256 | None = Field(
        description="generated: SHA-256 of the file. checkpoint: none, as a build does not read hundreds of gigabytes of weights."
    )


class WeightsInfo(_Part):
    binding: str = Field(description="The file that says where each tensor lies.")
    binding_sha256: Sha256
    layout: Literal["rows"]
    tensors: int
    files: tuple[WeightFileInfo, ...]


class CountsInfo(_Part):
    parameters: int
    tensors: int
    bytes: int


class Manifest(_Part):
    """A bundle of dsr1build."""

    format: Literal["dsr1build-bundle"] = "dsr1build-bundle"
    version: Literal[1] = 1
    abi: int = Field(description="Version of the interface between kernels and runtime.")
    name: str
    architecture: str
    target: TargetInfo
    library: LibraryInfo
    program: Sha256 = Field(description="Digest of the program; weights.bind carries the same.")
    context: int = Field(description="Most tokens that a session holds.")
    chunk: int = Field(description="Most tokens that prefill processes at once.")
    vocabulary: int
    hidden: int
    bos_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    model: CountsInfo
    modes: Mapping[Literal["prefill", "decode"], ModeInfo]
    arena_bytes: int = Field(description="Bytes of activations; scratch memory of kernels comes to this.")
    state_bytes: int = Field(description="Bytes of the KV cache at full context.")
    states: tuple[TensorInfo, ...]
    kernels: tuple[KernelInfo, ...]
    weights: WeightsInfo
    tokenizer: tuple[str, ...] = Field(description="Files of the checkpoint's tokenizer, copied into tokenizer/.")

    def to_bytes(self) -> bytes:
        """The file's content: the same for equal manifests."""
        return (self.model_dump_json(indent=1) + "\n").encode("utf-8")


MANIFEST_SCHEMA: dict[str, Any] = Manifest.model_json_schema(mode="serialization")


def kernel_infos(program: Program) -> tuple[KernelInfo, ...]:
    modes = {mode.mode: _instances(mode) for mode in (program.prefill, program.decode)}
    return tuple(
        _kernel_info(kernel, {mode: counts[i] for mode, counts in modes.items()}) for i, kernel in enumerate(program.kernels)
    )


def mode_info(mode: ModeProgram) -> ModeInfo:
    kinds = Counter(step.kind if isinstance(step, KernelStep) else "dispatch" for step in mode.steps)
    return ModeInfo(
        steps=len(mode.steps),
        by_kind=dict(sorted(kinds.items())),
        rows=mode.rows,
        buffers=len(mode.buffers),
        buffer_bytes=sum(b.size for b in mode.buffers),
    )


def state_infos(program: Program, context: int) -> tuple[TensorInfo, ...]:
    return tuple(TensorInfo(name=n, dtype=t.dtype, shape=weight_shape(t, context)) for n, t in program.states)


def state_bytes(program: Program, context: int) -> int:
    return sum(prod(weight_shape(t, context)) * ITEM_BYTES[t.dtype] for _, t in program.states)


def _instances(mode: ModeProgram) -> Counter[int]:
    counts: Counter[int] = Counter()
    for step in mode.steps:
        counts.update([step.kernel] if isinstance(step, KernelStep) else [kernel for kernel, _ in step.experts])
    return counts


def _kernel_info(kernel: ProgramKernel, instances: Mapping[str, int]) -> KernelInfo:
    return KernelInfo(
        id=kernel.id,
        kind=kernel.kind,
        instances=instances,
        signature=SignatureInfo.model_validate(kernel.signature.to_json()),
        variants=tuple(_variant_info(variant) for variant in kernel.variants),
    )


def _variant_info(variant: Variant) -> VariantInfo:
    bound = variant.specialization
    return VariantInfo(
        specialization=bound.guard,
        tokens=0 if bound.guard == "range" else bound.tokens,
        symbol=variant.symbol,
        signature=SignatureInfo.model_validate(variant.signature.to_json()),
        phases=tuple(PhaseInfo(wave=p.wave, parallel=p.parallel, items=p.items) for p in variant.phases),
        scratch=variant.scratch,
        local=variant.local,
    )
