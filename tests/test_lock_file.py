"""requirements.lock holds what pyproject.toml asks for, each with its hashes, so that the README's command installs it."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAKE_AGAIN = "uv pip compile pyproject.toml --generate-hashes --no-header --python-version 3.11 -o requirements.lock"


def locked(text: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each package of a lock file."""
    entries = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)
    found = {}
    for entry in entries:
        match = re.match(r"([a-z0-9._-]+)==(\S+)", entry)
        if match:
            found[match[1]] = (match[2], entry.count("--hash=sha256:"))
    return found


def test_every_dependency_is_locked_at_its_version_with_hashes() -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    found = locked((ROOT / "requirements.lock").read_text(encoding="utf-8"))
    pins = dict(entry.split("==") for entry in wanted)
    assert {name: found.get(name, ("absent", 0))[0] for name in pins} == pins, MAKE_AGAIN
    assert [name for name, (_, hashes) in found.items() if not hashes] == []
