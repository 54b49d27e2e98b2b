"""Real actions under planted differences of the environment: equal keys and equal bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, sys
from pathlib import Path
from dsr1build.cache.store import LocalStore
from dsr1build.cli.planning import plan_build
from dsr1build.config.load import load_build
from dsr1build.execute.engine import run_actions
from dsr1build.execute.options import Options
config = load_build(sys.argv[1])
with LocalStore(Path(sys.argv[2]), print) as store:
    plan = plan_build(config, store).plan
    wanted = {v.compile for v in plan.variants if v.specialization.tokens == 1 and " norm " not in v.id}
    kinds = ("combine", "embedding")
    chosen = [a for a in plan.actions.values() if a.kind == "runtime" or (a.id in wanted and a.label.startswith(kinds))]
    needed = {source for a in chosen for source in a.inputs}
    actions = {id: a for id, a in plan.actions.items() if id in needed or a in chosen}
    events = []
    outcome = run_actions(actions, store, Options(2), events.append, plan.contents)
print(json.dumps({id: [r.key, {n: b.sha256 for n, b in r.outputs.items()}] for id, r in sorted(outcome.results.items())}))
print(json.dumps(sorted(outcome.executed)))
"""


def run(directory, store, umask=0o022, **environment):
    directory.mkdir(parents=True, exist_ok=True)
    base = {"PATH": "/usr/bin:/bin", "HOME": str(directory), "TMPDIR": str(directory)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(ROOT / "BUILD.yaml"), str(store)],
        cwd=directory,
        env={**base, **environment},
        capture_output=True,
        text=True,
        umask=umask,
    )
    assert done.returncode == 0, done.stderr
    results, executed = map(json.loads, done.stdout.splitlines())
    return results, executed


def test_surroundings_change_neither_keys_nor_bytes(tmp_path):
    plain, executed = run(tmp_path / "plain", tmp_path / "store", PYTHONHASHSEED="1")
    assert len(executed) == len(plain) >= 5
    other, executed = run(
        tmp_path / "with spaces, ümlauts and a 'quote'",
        tmp_path / "another store",
        umask=0o077,
        PATH="/nowhere",
        USER="somebody",
        LOGNAME="somebody",
        LANG="de_DE.UTF-8",
        LC_ALL="tr_TR.UTF-8",
        TZ="Asia/Kathmandu",
        SOURCE_DATE_EPOCH="1",
        PYTHONHASHSEED="2",
        CFLAGS="-O0",
        CC="false",
        ZIG_GLOBAL_CACHE_DIR="/nowhere",
        LLVM_PROFILE_FILE="x",
        OMP_NUM_THREADS="7",
        DSR1_UNKNOWN="1",
    )
    assert len(executed) == len(plain)
    assert other == plain
    again, executed = run(tmp_path / "third", tmp_path / "store", TZ="UTC", HOME="/nonexistent")
    assert executed == []
    assert again == plain
    assert os.environ.get("DSR1_UNKNOWN") is None
