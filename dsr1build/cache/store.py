"""The local store: what an action left, found again by the action's key.

Layout of the directory (version 1)::

    v1/blobs/aa/bb/<sha256>      output files, and the encoded fields of each action (their digest is its key)
    v1/manifests/aa/bb/<sha256>  one manifest for each publication
    v1/index/                    key -> manifest (dsr1build.cache.index)
    v1/tmp/, v1/broken/          files being written; files that were not what their name says

A manifest is canonical JSON (sorted keys, no blanks) and binds all files of an action::

    {"key": <sha256>, "outputs": {<relative path>: {"sha256": .., "size": ..}, ..}, "version": 1}

It is written after the files that it names, and the index after it, so a writer that is killed at any moment leaves
nothing that could be mistaken for a result. Each look-up verifies the manifest and every file behind it.

A store that cannot be read or written costs one warning; the results of this process are then kept in a temporary
directory, and the build goes on.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from dsr1build.cache.blobs import BlobLost, BlobTree
from dsr1build.digest import BlobRef, Fields, encode, sha256_hex
from dsr1build.plan.action import ActionResult

if TYPE_CHECKING:
    from dsr1build.cache.index import Index, Record

_HEX = frozenset("0123456789abcdef")


class LocalStore:
    """A store in ``directory``, made at the first publication. ``warn`` takes one line of text for the user."""

    def __init__(self, directory: Path, warn: Callable[[str], None]) -> None:
        self._directory = directory
        self._warn = warn
        root = directory / "v1"
        self._root = root
        self._blobs = BlobTree(root / "blobs", root / "tmp", root / "broken")
        self._manifests = BlobTree(root / "manifests", root / "tmp", root / "broken")
        self._index: Index | None = None
        self._walked: dict[str, Record] | None = None
        self._writable = True
        self._private: Path | None = None

    def lookup(self, key: str) -> ActionResult | None:
        """The verified result of ``key``, or None. Never raises for anything that is wrong with the store."""
        record = self._record(key)
        if record is None:
            return None
        try:
            outputs = parse_manifest(self._manifests.read(record.manifest), key)
        except (BlobLost, ValueError):
            return None
        if not all(self._blobs.holds(ref, size) for ref, size in outputs.values()):
            return None
        return ActionResult(key, {name: ref for name, (ref, _) in outputs.items()})

    def publish(self, key: str, fields: Fields, files: Mapping[str, Path], seconds: float = 0.0) -> ActionResult:
        """Keep ``files`` (relative path -> file) as the result of ``key``; ``seconds`` is what it cost to make them.

        Raises ValueError where ``key`` is not the key of ``fields`` or a path leaves the outputs, and OSError where the
        files can be kept neither in the store nor in a temporary directory.
        """
        encoded = encode(fields)
        if sha256_hex(encoded) != key:
            raise ValueError(f"{key} is not the key of the given fields")
        for name in files:
            check_output_path(name)
        if self._writable:
            try:
                return self._publish(key, encoded, files, seconds)
            except OSError as error:
                self._give_up(error.strerror or str(error))
        tree = self._private_tree()
        return ActionResult(key, {name: tree.write_file(path)[0] for name, path in sorted(files.items())})

    def _publish(self, key: str, encoded: bytes, files: Mapping[str, Path], seconds: float) -> ActionResult:
        from dsr1build.cache.index import IndexUnusable, Record

        self._blobs.write(encoded)
        outputs = {name: self._blobs.write_file(path) for name, path in sorted(files.items())}
        manifest = self._manifests.write(render_manifest(key, outputs))
        index = self._open_index()
        if index is not None:
            try:
                index.put(key, Record(manifest, sum(size for _, size in outputs.values()), seconds))
            except IndexUnusable as error:
                # The files are there and usable by this build; a later build finds them when the index is rebuilt.
                self._give_up(str(error))
        return ActionResult(key, {name: ref for name, (ref, _) in outputs.items()})

    def read_blob(self, ref: BlobRef) -> bytes:
        """The verified content of a file. Raises BlobLost."""
        try:
            return self._blobs.read(ref)
        except BlobLost:
            if self._private is None:
                raise
            return self._private_tree().read(ref)

    def materialize(self, ref: BlobRef, path: Path) -> None:
        """Write the verified content of a blob to ``path``. Raises BlobLost, and OSError where ``path`` cannot be written."""
        try:
            self._blobs.copy_to(ref, path)
        except BlobLost:
            if self._private is None:
                raise
            self._private_tree().copy_to(ref, path)

    def close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _record(self, key: str) -> "Record | None":
        if self._index is None and self._walked is None and not self._manifests.root.is_dir():
            return None
        index = self._open_index()
        if index is not None:
            return index.get(key)
        if self._walked is None:
            self._walked = dict(self._walk())
        return self._walked.get(key)

    def _open_index(self) -> "Index | None":
        """The index, or None where it cannot be written: look-ups then walk the manifests once."""
        if self._index is None and self._writable:
            if self._root.is_dir() and not os.access(self._root, os.W_OK | os.X_OK):
                self._give_up("it is read-only")
                return None
            from dsr1build.cache.index import Index, IndexUnusable

            try:
                self._root.mkdir(parents=True, exist_ok=True)
                self._index = Index(self._root / "index", self._walk())
            except (IndexUnusable, OSError) as error:
                self._give_up(str(error))
                return None
            self._blobs.sweep()
        return self._index

    def _walk(self) -> Iterator[tuple[str, "Record"]]:
        """Every key that the manifests of the tree name; of two manifests of one key the last is kept."""
        from dsr1build.cache.index import Record

        for ref in self._manifests.entries():
            try:
                data = self._manifests.read(ref)
                key = str(json.loads(data)["key"])
                outputs = parse_manifest(data, key)
            except (BlobLost, ValueError, KeyError, TypeError):
                continue
            yield key, Record(ref, sum(size for _, size in outputs.values()), 0.0)

    def _private_tree(self) -> BlobTree:
        if self._private is None:
            self._private = Path(tempfile.mkdtemp(prefix="dsr1build-results-"))
        return BlobTree(self._private / "blobs", self._private / "tmp", self._private / "broken")

    def _give_up(self, reason: str) -> None:
        """Stop writing to the store, and say so once."""
        if self._writable:
            self._writable = False
            self._warn(f"the cache at {self._directory} cannot be written ({reason}); the results of this build are not kept")


def render_manifest(key: str, outputs: Mapping[str, tuple[BlobRef, int]]) -> bytes:
    files = {name: {"sha256": ref.sha256, "size": size} for name, (ref, size) in outputs.items()}
    manifest = {"key": key, "outputs": files, "version": 1}
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")


def parse_manifest(data: bytes, key: str) -> dict[str, tuple[BlobRef, int]]:
    """The outputs that a manifest of ``key`` names. Raises ValueError for anything that ``render_manifest`` would not write."""
    manifest: Any = json.loads(data)
    if not isinstance(manifest, dict) or manifest.get("key") != key or not _is_sha256(key):
        raise ValueError("the manifest belongs to another key")
    files = manifest.get("outputs")
    if not isinstance(files, dict):
        raise ValueError("the manifest names no outputs")
    outputs: dict[str, tuple[BlobRef, int]] = {}
    for name, entry in files.items():
        check_output_path(name)
        if not isinstance(entry, dict) or not _is_sha256(entry.get("sha256")) or type(entry.get("size")) is not int:
            raise ValueError(f"the manifest's entry for {name!r} is not a file")
        outputs[name] = (BlobRef(entry["sha256"]), entry["size"])
    if render_manifest(key, outputs) != data:
        raise ValueError("the manifest is not in canonical form")
    return outputs


def check_output_path(name: str) -> None:
    """Raises ValueError unless ``name`` is a plain relative path."""
    path = PurePosixPath(name)
    if not name or path.is_absolute() or ".." in path.parts or str(path) != name or "\0" in name or name == ".":
        raise ValueError(f"{name!r} is not a relative path inside the outputs")


def _is_sha256(text: object) -> bool:
    return isinstance(text, str) and len(text) == 64 and set(text) <= _HEX
