"""Workers that compile C sources and link shared objects, by zig's bundled clang and lld."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsr1build.digest import Fields
from dsr1build.errors import InvalidInput
from dsr1build.toolchains import tools

# The oldest C library that the objects may need; zig brings its headers.
C_TARGETS = {"x86_64-unknown-linux-gnu": "x86_64-linux-gnu.2.28", "aarch64-unknown-linux-gnu": "aarch64-linux-gnu.2.28"}


def compile_c(fields: Fields, inputs: Path, outputs: Path, cache: Path | None = None) -> None:
    """Compile the C files that ``fields`` (made by ``target.c_fields``) describe: ``a.c`` gives ``a.o`` in ``outputs``.

    The compiler runs in a private directory and sees file names without a path, so no path reaches the bytes. ``cache`` is
    a directory where zig may keep its own cache; without it a private one is used. Raises BuildFailed with clang's words.
    """
    sources: Any = fields["sources"]
    target: Any = fields["target"]
    definitions: Any = fields["definitions"]
    if target["triple"] not in C_TARGETS:
        raise InvalidInput(f"no C target for triple {target['triple']!r}", hint=f"Known: {', '.join(C_TARGETS)}.")
    with tempfile.TemporaryDirectory(prefix="dsr1-c-") as name:
        work = Path(name)
        for file, blob in sources.items():
            shutil.copyfile(inputs / blob.sha256, work / file)
        for file in sorted(sources):
            if not file.endswith(".c"):
                continue
            result = Path(file).with_suffix(".o").name
            command: list[str | Path] = [tools.tool("ziglang", "zig"), "cc", "-c", "-std=c11", "-O2", "-g0", "-fPIC"]
            command += ["-fno-sanitize=all", "-ffp-contract=off", "-ffunction-sections", "-fdata-sections", "-Wall", "-Wextra"]
            command += ["-target", C_TARGETS[target["triple"]], f"-mcpu={zig_cpu(target['cpu'], target['features'])}"]
            tools.run_tool([*command, *definitions, file, "-o", result], where=file, directory=work, home=cache or work / "home")
            shutil.copyfile(work / result, outputs / result)


def zig_cpu(cpu: str, features: Sequence[str]) -> str:
    """``x86-64-v3`` with ``+sse4.1`` in zig's spelling: ``x86_64_v3+sse4_1``."""
    return "".join([cpu, *features]).replace("x86-64", "x86_64").replace("64-v", "64_v").replace(".", "_")


def link_shared(fields: Fields, inputs: Path, outputs: Path) -> None:
    """Link the objects of ``fields`` (made by ``target.link_fields``) into one shared object in ``outputs``.

    Only the exported symbols are visible; sections that none of them reaches are dropped. Raises BuildFailed with lld's words.
    """
    objects: Any = fields["objects"]
    exports: Any = fields["exports"]
    output = str(fields["output"])
    soname = str(fields["soname"])
    with tempfile.TemporaryDirectory(prefix="dsr1-link-") as name:
        work = Path(name)
        files = [f"{number:06}.o" for number in range(len(objects))]
        for file, blob in zip(files, objects, strict=True):
            (work / file).symlink_to((inputs / blob.sha256).resolve())
        (work / "exports.map").write_text("{ global: " + " ".join(f"{e};" for e in exports) + " local: *; };\n", "utf-8")
        # Thousands of objects do not fit a command line.
        (work / "objects.rsp").write_text("\n".join(files) + "\n", "utf-8")
        command: list[str | Path] = [tools.tool("ziglang", "zig"), "ld.lld", "-shared", "--build-id=none", "--gc-sections"]
        command += ["-z", "now", "-s", "--version-script=exports.map", *(["-soname", soname] if soname else [])]
        tools.run_tool([*command, "@objects.rsp", "-o", "out.so"], where=output, directory=work, home=work)
        shutil.copyfile(work / "out.so", outputs / output)
