"""What a compile depends on, as data: the target, the pass pipeline, the schedule options, and the fields of its key.

Nothing here imports the toolchain: planning a build must be cheap.
"""

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from dsr1build.digest import BlobRef, Fields, FieldValue, encode, sha256_hex
from dsr1build.errors import InvalidInput
from dsr1build.toolchains import tools

ABI_VERSION = 1
KERNEL_SCHEMA_VERSION = 1

# Named groups of passes, in order; a target or a recipe can replace them one by one. Between them stand our own steps: the
# schedule before "bufferize", outlining and the arithmetic rewrites after it, the checks after "lower". "optimize" and
# "codegen" are the options of opt and llc.
PIPELINE: Mapping[str, str] = MappingProxyType(
    {
        # No cse before scheduling: it would merge equal fills, which the schedule fuses one by one.
        "parse": "canonicalize",
        "bufferize": (
            "eliminate-empty-tensors,empty-tensor-to-alloc-tensor,"
            "one-shot-bufferize{bufferize-function-boundaries=1 function-boundary-type-conversion=identity-layout-map},"
            "canonicalize,cse,canonicalize"
        ),
        "lower": (
            "convert-linalg-to-loops,func.func(lower-vector-multi-reduction{lowering-strategy=inner-parallel}),"
            "convert-vector-to-scf{full-unroll=1},expand-strided-metadata,lower-affine,convert-scf-to-cf,"
            "convert-vector-to-llvm,arith-expand{include-bf16=true},convert-math-to-llvm,finalize-memref-to-llvm,"
            "convert-func-to-llvm,convert-arith-to-llvm,convert-index-to-llvm,convert-ub-to-llvm,convert-cf-to-llvm,"
            "reconcile-unrealized-casts,canonicalize,cse"
        ),
        "optimize": "-O3",
        "codegen": "-O3",
    }
)

# Options of each schedule. dot: weight rows of one work item, and tokens of one block. Their product is the number of
# accumulators; 8 of them with 4 + 2 operands fit the 16 vector registers of AVX2, 16 spill and run at a quarter.
SCHEDULES: Mapping[str, Mapping[str, int]] = MappingProxyType(
    {"map1": {}, "map2": {}, "map3": {}, "serial": {}, "dot": MappingProxyType({"rows": 4, "tokens": 2})}
)

_TAG = re.compile(r'tag = "p\d+/(\w+)/\w+"')


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """``cpu`` and ``features`` in LLVM's words (``x86-64-v3``, ``+avx2``), already resolved: never ``native``.

    ``pipeline`` replaces pass groups of PIPELINE, ``schedules`` replaces options of SCHEDULES.
    """

    triple: str = "x86_64-unknown-linux-gnu"
    cpu: str = "x86-64-v3"
    features: tuple[str, ...] = ()
    pipeline: Mapping[str, str] = field(default_factory=dict)
    schedules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Overrides:
    """What a recipe says for one target; it wins over the target's own choice."""

    pipeline: Mapping[str, str] = field(default_factory=dict)
    schedules: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


def resolve_pipeline(*overrides: Mapping[str, str]) -> list[tuple[str, str]]:
    """The pass groups in order, later overrides winning. Raises InvalidInput for an unknown group."""
    result = dict(PIPELINE)
    for override in overrides:
        for name, passes in override.items():
            if name not in result:
                raise _unknown("pass group", name, list(result))
            result[name] = passes
    return list(result.items())


def resolve_schedules(used: Sequence[str], *overrides: Mapping[str, Mapping[str, int]]) -> dict[str, dict[str, int]]:
    """The options of the schedules in ``used``, later overrides winning. Raises InvalidInput for an unknown schedule or
    option, and for a value that is no power of two from 1 to 64."""
    result = {name: dict(options) for name, options in SCHEDULES.items()}
    for override in overrides:
        for name, options in override.items():
            if name not in result:
                raise _unknown("schedule", name, list(result))
            for option, value in options.items():
                if option not in result[name]:
                    raise _unknown(f"option of schedule {name!r}", option, list(result[name]))
                if value not in (1, 2, 4, 8, 16, 32, 64):
                    raise InvalidInput(f"schedule {name!r}: {option} is {value}, expected a power of two from 1 to 64")
                result[name][option] = value
    return {name: result[name] for name in sorted(set(used)) if name in result}


def _unknown(what: str, name: str, known: Sequence[str]) -> InvalidInput:
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]!r}?" if near else f"Known: {', '.join(known)}." if known else "It has none."
    return InvalidInput(f"unknown {what} {name!r}", hint=hint)


def compile_fields(
    text: BlobRef,
    text_content: str,
    signature: BlobRef,
    target: TargetSpec,
    overrides: Overrides | None = None,
    remembered: Path | None = None,
) -> Fields:
    """Everything that compiling one kernel depends on; the worker is ``dsr1build.toolchains.compile:compile_kernel``.

    Of the schedule options only those of schedules that the text names are in it, so that an option touches only the
    kernels that use it. ``remembered`` is the file that remembers digests of tools (see ``tools.identity``).
    """
    over = overrides or Overrides()
    used = _TAG.findall(text_content)
    return {
        "abi": ABI_VERSION,
        "schema": KERNEL_SCHEMA_VERSION,
        "text": text,
        "signature": signature,
        "target": _target_fields(target),
        "pipeline": [list(group) for group in resolve_pipeline(target.pipeline, over.pipeline)],
        "schedules": resolve_schedules(used, target.schedules, over.schedules),
        "tools": tools.identity("kernel", remembered),
        "adapter": tools.adapter_digest(),
    }


def kernel_symbol(fields: Fields) -> str:
    """The prefix of a kernel's functions: different for each text, signature, target, pipeline and schedule, and equal
    where only the identity of the tools differs, so that equal code stays equal bytes."""
    code: dict[str, FieldValue] = {name: fields[name] for name in ("abi", "text", "signature", "target", "pipeline", "schedules")}
    return "k" + sha256_hex(encode(code))[:16]


def c_fields(
    sources: Mapping[str, BlobRef], target: TargetSpec, definitions: Sequence[str] = (), remembered: Path | None = None
) -> Fields:
    """Everything that compiling C files depends on; the worker is ``dsr1build.toolchains.c_code:compile_c``.

    ``sources`` maps file names to contents; each ``.c`` gives a ``.o``, other files are headers beside them.
    ``definitions`` are options ``-DNAME=value``.
    """
    return {
        "sources": dict(sources),
        "target": _target_fields(target),
        "definitions": list(definitions),
        "tools": tools.identity("c", remembered),
        "adapter": tools.adapter_digest(),
    }


def link_fields(
    objects: Sequence[BlobRef], exports: Sequence[str], output: str, soname: str = "", remembered: Path | None = None
) -> Fields:
    """Everything that linking depends on; the worker is ``dsr1build.toolchains.c_code:link_shared``.

    ``objects`` in link order, ``exports`` the symbols that stay visible (the rest is dropped where unused), ``output`` the
    file name of the shared object.
    """
    return {
        "objects": list(objects),
        "exports": sorted(exports),
        "output": output,
        "soname": soname,
        "tools": tools.identity("link", remembered),
        "adapter": tools.adapter_digest(),
    }


def _target_fields(target: TargetSpec) -> dict[str, FieldValue]:
    return {"triple": target.triple, "cpu": target.cpu, "features": sorted(target.features)}
