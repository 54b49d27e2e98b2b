"""`dsr1build inspect` tells from the manifest alone that a bundle does not fit this machine: its code is never loaded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import toy_model

# Says which files below the bundle the process opens or loads, by Python's own audit events.
AUDITED = """
import sys
bundle = sys.argv[1]
seen = set()
def hook(event, arguments):
    if event in ("open", "ctypes.dlopen", "mmap.__new__") and arguments and str(arguments[0]).startswith(bundle):
        seen.add((event, str(arguments[0])[len(bundle) + 1:]))
sys.addaudithook(hook)
from dsr1build.cli.main import main
code = main(["inspect", bundle, *sys.argv[2:]])
print(sorted(seen), file=sys.stderr)
sys.exit(code)
"""


@pytest.fixture
def foreign(toy_library: Path, tmp_path: Path) -> Path:
    """A bundle for features that no machine has, whose shared object is no shared object at all."""
    bundle = toy_model.build_toy_bundle(tmp_path, toy_library)
    manifest = json.loads((bundle / "manifest.json").read_text())
    manifest["target"]["cpuinfo_flags"] = ["sse2", "avx1024", "warp_drive"]
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    (library,) = bundle.glob("model-*.so")
    library.write_bytes(os.urandom(library.stat().st_size))
    return bundle


def inspect(bundle: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", AUDITED, str(bundle), *arguments], capture_output=True, text=True)


def test_what_is_missing_is_named_and_nothing_is_loaded(foreign: Path) -> None:
    done = inspect(foreign)
    assert done.returncode == 0
    assert done.stdout.endswith("  CPU needs   sse2 avx1024 warp_drive\n              this machine lacks: avx1024, warp_drive\n")
    assert done.stderr == "[('open', 'manifest.json')]\n"
    done = inspect(foreign, "--json")
    assert json.loads(done.stdout)["missing_features"] == ["avx1024", "warp_drive"]
    assert done.stderr == "[('open', 'manifest.json')]\n"


def test_the_manifest_alone_is_enough(foreign: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copyfile(foreign / "manifest.json", alone / "manifest.json")
    done = inspect(alone, "--json")
    found = json.loads(done.stdout)
    assert found["missing_features"] == ["avx1024", "warp_drive"]
    assert len(found["wrong_files"]) == len(found["manifest"]["weights"]["files"]) + 1
