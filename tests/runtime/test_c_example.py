"""examples/c/generate.c, compiled by whatever C compiler is here, runs a bundle without Python."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dsr1build.runtime.session import load

SOURCE = Path(__file__).parent.parent.parent / "examples" / "c" / "generate.c"
COMPILER = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)


def test_it_is_short() -> None:
    assert len(SOURCE.read_text("utf-8").splitlines()) < 100


@pytest.mark.skipif(COMPILER is None, reason="no C compiler on this machine")
def test_it_generates_what_the_python_session_generates(toy_bundle: Path, tmp_path: Path) -> None:
    program = tmp_path / "generate"
    library = next(toy_bundle.glob("model-*.so")).name
    warnings = ["-std=c11", "-Wall", "-Wextra", "-Werror"]
    subprocess.run(
        [
            COMPILER,
            *warnings,
            "-I",
            toy_bundle / "include",
            SOURCE,
            "-L",
            toy_bundle,
            f"-l:{library}",
            f"-Wl,-rpath,{toy_bundle}",
            "-lpthread",
            "-o",
            program,
        ],
        check=True,
    )
    with load(toy_bundle, threads=1) as session:
        expected = session.generate([1, 2, 3, 4, 5, 6, 7, 8, 9], 10, stop_at_eos=False)
    run = subprocess.run([program, toy_bundle, "10", *"123456789"], capture_output=True, text=True, check=True)
    assert [int(line) for line in run.stdout.splitlines()] == expected
    bad = subprocess.run([program, toy_bundle, "10", "19"], capture_output=True, text=True, check=False)
    assert (bad.returncode, bad.stderr) == (1, "error: token 0 has the id 19, the vocabulary has the ids 0 to 18\n")
    lost = subprocess.run([program, tmp_path, "10", "1"], capture_output=True, text=True, check=False)
    assert (lost.returncode, lost.stderr) == (1, f"error: cannot open {tmp_path}/weights.bind: No such file or directory\n")


def test_the_header_of_the_bundle_is_the_runtimes(toy_bundle: Path) -> None:
    source = SOURCE.parent.parent.parent / "dsr1build" / "runtime" / "c" / "dsr1.h"
    assert (toy_bundle / "include" / "dsr1.h").read_bytes() == source.read_bytes()
