"""The whole runtime under the sanitizers of a C compiler: the C example over the toy model, in one program."""

import dataclasses
import shutil
import subprocess
from pathlib import Path

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


def test_the_runtime_itself_names_missing_cpu_features(toy_bundle: Path, tmp_path: Path) -> None:
    wanting = dataclasses.replace(toy_model.toy_program(), features=("sse2", "sse", "avx1024", "warp_drive"))
    program = compile_program(tmp_path, [], program_tables(wanting))
    run = subprocess.run([program, toy_bundle, "1", "1"], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (
        1,
        "error: this bundle needs CPU features that this machine does not have: avx1024, warp_drive\n",
    )
