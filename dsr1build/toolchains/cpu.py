"""x86-64 processors in LLVM's words: levels, features, what the running machine offers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dsr1build.errors import EnvironmentUnfit, InvalidInput

# The one platform that kernels are compiled, checked and run for.
TRIPLES = ("x86_64-unknown-linux-gnu",)

# LLVM feature name -> the flag in /proc/cpuinfo.
CPUINFO_FLAG: Mapping[str, str] = {
    "sse2": "sse2",
    "sse3": "pni",
    "ssse3": "ssse3",
    "sse4.1": "sse4_1",
    "sse4.2": "sse4_2",
    "popcnt": "popcnt",
    "cx16": "cx16",
    "sahf": "lahf_lm",
    "avx": "avx",
    "avx2": "avx2",
    "bmi": "bmi1",
    "bmi2": "bmi2",
    "f16c": "f16c",
    "fma": "fma",
    "lzcnt": "abm",
    "movbe": "movbe",
    "xsave": "xsave",
    "avx512f": "avx512f",
    "avx512bw": "avx512bw",
    "avx512cd": "avx512cd",
    "avx512dq": "avx512dq",
    "avx512vl": "avx512vl",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avx512vnni": "avx512_vnni",
    "avxvnni": "avx_vnni",
    "amx-bf16": "amx_bf16",
    "amx-int8": "amx_int8",
    "amx-tile": "amx_tile",
}

# The x86-64 psABI's micro-architecture levels; each contains the one before it.
_V1 = ("sse2",)
_V2 = (*_V1, "sse3", "ssse3", "sse4.1", "sse4.2", "popcnt", "cx16", "sahf")
_V3 = (*_V2, "avx", "avx2", "bmi", "bmi2", "f16c", "fma", "lzcnt", "movbe", "xsave")
_V4 = (*_V3, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
LEVELS: Mapping[str, tuple[str, ...]] = {"x86-64": _V1, "x86-64-v2": _V2, "x86-64-v3": _V3, "x86-64-v4": _V4}


def host_features(cpuinfo: str | None = None) -> frozenset[str]:
    """LLVM names of the features that this machine offers, from /proc/cpuinfo. Raises EnvironmentUnfit where it has none."""
    text = Path("/proc/cpuinfo").read_text("utf-8") if cpuinfo is None else cpuinfo
    for line in text.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            flags = set(value.split())
            return frozenset(name for name, flag in CPUINFO_FLAG.items() if flag in flags)
    raise EnvironmentUnfit("/proc/cpuinfo lists no x86-64 features", hint="Name the CPU in the target instead of 'native'.")


def resolve(cpu: str, features: Sequence[str] = (), cpuinfo: str | None = None) -> tuple[str, tuple[str, ...]]:
    """The LLVM CPU name and the sorted feature list that a target means.

    ``native`` becomes the highest level that the machine has and the further features that it offers: what the code may
    use is then said in full, and equal machines give equal keys. Raises InvalidInput for an unknown CPU or feature.
    """
    for feature in features:
        if feature[:1] not in "+-" or feature[1:] not in CPUINFO_FLAG:
            raise InvalidInput(
                f"unknown CPU feature {feature!r}", hint="Write +name or -name with a name of: " + ", ".join(CPUINFO_FLAG) + "."
            )
    if cpu == "native":
        offered = host_features(cpuinfo)
        level = [name for name, needed in LEVELS.items() if offered.issuperset(needed)][-1]
        extra = {f"+{name}" for name in offered.difference(LEVELS[level])}
        removed = {f[1:] for f in features if f[0] == "-"}
        return level, tuple(sorted({f for f in extra if f[1:] not in removed}.union(features)))
    if cpu not in LEVELS:
        raise InvalidInput(f"unknown CPU {cpu!r}", hint=f"Known: {', '.join(LEVELS)}, native.")
    return cpu, tuple(sorted(set(features)))


def required_features(cpu: str, features: Sequence[str]) -> tuple[str, ...]:
    """The features that code for a resolved target may use, sorted, in LLVM's names."""
    needed = set(LEVELS[cpu]).union(f[1:] for f in features if f[0] == "+")
    return tuple(sorted(needed.difference(f[1:] for f in features if f[0] == "-")))


def has_fma(target: Any) -> bool:
    """Whether the target (the field of a compile's fields) has fused multiply-add."""
    return "fma" in required_features(target["cpu"], target["features"])
