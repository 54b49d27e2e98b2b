"""Whether a machine may run an action for a builder elsewhere: the same package, the same tools, the CPU that is asked for.

The builder sends ``expectation``, the machine asks ``unfit`` before it runs the action. Both are plain fields, so that they
travel in ``dsr1build.digest``'s encoding.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dsr1build.digest import Fields, FieldValue
from dsr1build.errors import EnvironmentUnfit
from dsr1build.toolchains import tools
from dsr1build.toolchains.cpu import host_features

_PACKAGE = Path(__file__).resolve().parents[1]


def expectation(features: Iterable[str] = ()) -> Fields:
    """What this builder expects of a machine. ``features`` are those that its CPU must have, in LLVM's names: what a target
    ``native`` was resolved to, so that what is built can run where it was built."""
    return {"sources": package_digest(), "features": sorted(set(features))}


def unfit(expected: Fields, fields: Fields, remembered: Path | None = None) -> str:
    """Why this machine may not run an action with ``fields`` for a builder with ``expected``; "" where it may.

    ``remembered`` is the file that remembers digests of tools (see ``dsr1build.toolchains.tools.identity``). Never raises
    for what a stranger sent.
    """
    sources = package_digest()
    if expected.get("sources") != sources:
        return f"its dsr1build has the sources {sources[:12]}, the builder's has {str(expected.get('sources'))[:12]}"
    features = expected.get("features")
    if not isinstance(features, Sequence) or isinstance(features, str | bytes):
        return "the builder does not say which CPU it expects"
    if features:
        lacking = sorted({str(name) for name in features} - host_features())
        if lacking:
            return f"its CPU lacks {', '.join(lacking)}"
    wanted = fields.get("tools")
    return _differing_tool(wanted, remembered) if isinstance(wanted, Mapping) else ""


def package_digest() -> str:
    """One digest of all Python sources of this package, read from the disk each time."""
    sha = hashlib.sha256()
    for path in sorted(_PACKAGE.rglob("*.py")):
        data = path.read_bytes()
        sha.update(f"{path.relative_to(_PACKAGE).as_posix()} {len(data)}\n".encode())
        sha.update(data)
    return sha.hexdigest()


def _differing_tool(wanted: Mapping[str, FieldValue], remembered: Path | None) -> str:
    """What of the tools that the key names is another one here, or missing."""
    job: tools.Job = "c" if "ziglang/lib" in wanted else "link" if "ziglang/zig" in wanted else "kernel"
    try:
        found = tools.identity(job, remembered)
    except EnvironmentUnfit as error:
        return f"its toolchain is not complete: {error.message}"
    for name in sorted({*wanted, *found}):
        if name not in found:
            return f"its toolchain has no {name}"
        if wanted.get(name) != found[name]:
            return f"its tool {name} is {found[name][:12]}, the builder's is {str(wanted.get(name, 'missing'))[:12]}"
    return ""
