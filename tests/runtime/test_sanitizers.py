"""The whole runtime under the sanitizers of a C compiler: the C example over the toy model, in one program."""

import dataclasses
import shutil
import struct
import subprocess
from math import prod
from pathlib import Path
from random import Random

import pytest
import toy_model

from dsr1build.link.shared_object import RUNTIME_DIRECTORY
from dsr1build.link.tables import program_tables
from dsr1build.runtime.session import load

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "c" / "generate.c"
COMPILER = next((c for c in ("gcc", "clang", "cc") if shutil.which(c)), None)
SANITIZERS = {"memory": ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "threads": ["-fsanitize=thread"]}


def compile_program(directory: Path, options: list[str], tables: str) -> Path:
    """The example, the runtime, the toy's kernels and tables as one program; skips where that cannot be made or run."""
    if COMPILER is None:
        pytest.skip("no C compiler on this machine")
    (directory / "probe.c").write_text("int main(void) { return 0; }\n")
    (directory / "tables.c").write_text(tables)
    command = [COMPILER, "-std=c11", "-O1", "-g", *options, "-I", str(RUNTIME_DIRECTORY)]
    made = subprocess.run([*command, directory / "probe.c", "-o", directory / "probe"], capture_output=True, check=False)
    if made.returncode or subprocess.run([directory / "probe"], capture_output=True, check=False).returncode:
        pytest.skip(f"{COMPILER} cannot make programs with {' '.join(options)}")
    sources = [EXAMPLE, toy_model.SOURCE, directory / "tables.c", *sorted(RUNTIME_DIRECTORY.glob("*.c"))]
    subprocess.run([*command, *sources, "-lpthread", "-o", directory / "program"], check=True)
    return directory / "program"


@pytest.mark.parametrize("sanitizer", list(SANITIZERS))
def test_a_generation_is_clean(toy_bundle: Path, tmp_path: Path, sanitizer: str) -> None:
    program = compile_program(tmp_path, SANITIZERS[sanitizer], program_tables(toy_model.toy_program()))
    with load(toy_bundle, threads=1) as session:
        expected = session.generate([1, 2, 3, 4, 5, 6, 7, 8, 9], 30, stop_at_eos=False)
    run = subprocess.run([program, toy_bundle, "30", *"123456789"], capture_output=True, text=True, check=False)
    assert (run.stderr, run.returncode) == ("", 0)
    assert [int(line) for line in run.stdout.splitlines()] == expected
    for arguments in ([toy_bundle, "1", "18"], [tmp_path, "1", "1"], [toy_bundle, "1", *["1"] * 49]):
        bad = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
        assert bad.returncode == 1
        assert bad.stderr.startswith("error: ") and len(bad.stderr.splitlines()) == 1


def test_a_binding_with_any_damage_is_refused_or_harmless(toy_bundle: Path, tmp_path: Path) -> None:
    """Numbers of the tables are replaced by extreme ones, every context among them with shapes and lengths that agree."""
    program = compile_program(tmp_path, SANITIZERS["memory"], program_tables(toy_model.toy_program()))
    bundle = tmp_path / "bundle"
    shutil.copytree(toy_bundle, bundle)
    sound = (bundle / "weights.bind").read_bytes()
    tables = 72 + 16 * struct.unpack_from("<I", sound, 12)[0]
    count = struct.unpack_from("<I", sound, 16)[0]
    random = Random(0)
    damaged = [with_context(sound, tables, count, context) for context in (1, 1 << 31, 1 << 40, *(1 << n for n in range(57, 63)))]
    for _ in range(120):
        data = bytearray(sound)
        at = random.randrange(tables + 64 * count)
        size, number = random.choice([("<I", 1 << 32), ("<Q", 1 << 64)])
        at -= at % struct.calcsize(size)
        struct.pack_into(
            size, data, at, random.choice([0, 1, 3, len(sound), number - 1, number // 2 - 1, number // 2, number // 4])
        )
        damaged.append(bytes(data))
    for data in damaged:
        (bundle / "weights.bind").write_bytes(data)
        run = subprocess.run([program, bundle, "1", "1"], capture_output=True, text=True, check=False)
        assert (run.returncode, run.stderr) == (0, "") or (run.returncode, len(run.stderr.splitlines())) == (1, 1), run.stderr
        assert run.returncode == 0 or run.stderr.startswith("error: ")


def with_context(binding: bytes, tables: int, count: int, context: int) -> bytes:
    """The binding with another context, and lengths (modulo 2**64, as C multiplies) and shapes that fit it."""
    data = bytearray(binding)
    struct.pack_into("<q", data, 24, context)
    for at in range(tables, tables + 64 * count, 64):
        rank = struct.unpack_from("<I", data, at + 12)[0]
        shape = [context if d == toy_model.CONTEXT else d for d in struct.unpack_from(f"<{rank}q", data, at + 32)]
        struct.pack_into("<Q", data, at + 24, 4 * prod(shape) % (1 << 64))
        struct.pack_into(f"<{rank}q", data, at + 32, *shape)
    return bytes(data)


def test_the_runtime_itself_names_missing_cpu_features(toy_bundle: Path, tmp_path: Path) -> None:
    wanting = dataclasses.replace(toy_model.toy_program(), features=("sse2", "sse", "avx1024", "warp_drive"))
    program = compile_program(tmp_path, [], program_tables(wanting))
    run = subprocess.run([program, toy_bundle, "1", "1"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (
        1,
        "error: this bundle needs CPU features that this machine does not have: avx1024, warp_drive\n",
    )
