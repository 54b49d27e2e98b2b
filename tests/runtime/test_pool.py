"""The thread pool under the thread sanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parent.parent.parent / "dsr1build" / "runtime" / "c"
COMPILER = next((c for c in ("gcc", "clang", "cc") if shutil.which(c)), None)


@pytest.fixture(scope="module")
def stress(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if COMPILER is None:
        pytest.skip("no C compiler on this machine")
    directory = tmp_path_factory.mktemp("pool")
    probe = directory / "probe.c"
    probe.write_text("int main(void) { return 0; }\n")
    sanitize = [COMPILER, "-std=c11", "-O1", "-g", "-fsanitize=thread", "-Wall", "-Wextra", "-Werror"]
    if subprocess.run([*sanitize, probe, "-o", directory / "probe"], capture_output=True, check=False).returncode:
        pytest.skip("the C compiler has no thread sanitizer")
    program = directory / "stress"
    sources = [Path(__file__).with_name("pool_stress.c"), *sorted(RUNTIME.glob("*.c"))]
    subprocess.run([*sanitize, "-I", RUNTIME, *sources, "-lpthread", "-o", program], check=True)
    if "FATAL: ThreadSanitizer" in subprocess.run([program, "1", "1"], capture_output=True, text=True, check=False).stderr:
        pytest.skip("the thread sanitizer does not run on this kernel")
    return program


@pytest.mark.parametrize(("threads", "lists"), [(1, 2000), (2, 20000), (5, 10000)])
def test_every_item_runs_once_and_without_a_race(stress: Path, threads: int, lists: int) -> None:
    run = subprocess.run([stress, str(threads), str(lists)], capture_output=True, text=True, check=False, timeout=120)
    assert (run.stdout, run.stderr, run.returncode) == ("ok\n", "", 0)
