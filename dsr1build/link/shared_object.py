"""What the shared object of a bundle is made of, beside the compiled kernels: the C runtime and the program's tables.

``sources`` for ``dsr1build.toolchains.target.c_fields``, and the exported names for ``link_fields``.
"""

from dataclasses import replace
from pathlib import Path

from dsr1build.link.program import Program
from dsr1build.link.tables import program_tables
from dsr1build.toolchains.target import TargetSpec

RUNTIME_DIRECTORY = Path(__file__).parent.parent / "runtime" / "c"

# The functions of dsr1.h, the one interface of a bundle's shared object.
EXPORTS = (
    "dsr1_close",
    "dsr1_context",
    "dsr1_decode",
    "dsr1_error",
    "dsr1_logits",
    "dsr1_open",
    "dsr1_position",
    "dsr1_prefill",
    "dsr1_reset",
    "dsr1_threads",
    "dsr1_vocabulary",
)


def runtime_sources() -> dict[str, bytes]:
    """The C runtime: file name to content. Each ``.c`` becomes one object of the shared object."""
    return {path.name: path.read_bytes() for path in sorted(RUNTIME_DIRECTORY.iterdir()) if path.suffix in (".c", ".h")}


def table_sources(program: Program) -> dict[str, bytes]:
    """The program's tables, ``tables.c``, and the header that it includes."""
    header = RUNTIME_DIRECTORY / "program.h"
    return {"tables.c": program_tables(program).encode("utf-8"), header.name: header.read_bytes()}


def runtime_target(target: TargetSpec) -> TargetSpec:
    """What runtime and tables are compiled for: the plain architecture, so that the check of the CPU's features, which
    comes before the first kernel, can run on every CPU of it."""
    plain = {"x86_64": "x86-64", "aarch64": "generic"}
    return replace(target, cpu=plain.get(target.triple.partition("-")[0], target.cpu), features=(), pipeline={}, schedules={})
