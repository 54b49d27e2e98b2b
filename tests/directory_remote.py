"""A shared cache in a directory, which counts the calls and can be told to fail: a second implementation of `Remote`."""

import hashlib
import shutil
import threading
from collections import Counter
from pathlib import Path

from dsr1build.cache.remote import RemoteUnavailable


class DirectoryRemote:
    """``faults[method]`` is called before the method with its first argument; it may raise, wait, or change files."""

    def __init__(self, root: Path, name: str = "dir://shared") -> None:
        self.root = root
        self._name = name
        self.calls: Counter[str] = Counter()
        self.asked: list[list[str]] = []
        self.stored: list[str] = []
        self.faults = {}
        self.closed = False
        self._lock = threading.Lock()
        for part in ("records", "blobs"):
            (root / part).mkdir(parents=True, exist_ok=True)

    @property
    def name(self):
        return self._name

    def _call(self, method, argument):
        with self._lock:
            self.calls[method] += 1
            fault = self.faults.get(method)
        if fault is not None:
            fault(argument)

    def find_records(self, actions):
        self._call("find_records", actions)
        self.asked.append([action.key for action in actions])
        paths = {action.key: self.root / "records" / action.key for action in actions}
        return {key: path.read_bytes() for key, path in paths.items() if path.exists()}

    def fetch_blobs(self, blobs, directory):
        self._call("fetch_blobs", blobs)
        arrived = set()
        for ref, size in blobs.items():
            path = self.root / "blobs" / ref.sha256
            if path.exists():
                data = path.read_bytes()
                if len(data) == size and hashlib.sha256(data).hexdigest() == ref.sha256:
                    (directory / ref.sha256).write_bytes(data)
                    arrived.add(ref)
        return frozenset(arrived)

    def missing_blobs(self, blobs):
        self._call("missing_blobs", blobs)
        return frozenset(ref for ref in blobs if not (self.root / "blobs" / ref.sha256).exists())

    def store_blobs(self, blobs):
        self._call("store_blobs", blobs)
        for ref, path in blobs.items():
            if hashlib.sha256(path.read_bytes()).hexdigest() != ref.sha256:
                raise RemoteUnavailable("a file has changed")
            shutil.copyfile(path, self.root / "blobs" / ref.sha256)

    def store_record(self, action, record, outputs):
        self._call("store_record", action)
        assert all((self.root / "blobs" / ref.sha256).stat().st_size == size for ref, size in outputs.values())
        assert (self.root / "blobs" / action.key).stat().st_size == action.size
        (self.root / "records" / action.key).write_bytes(record)
        self.stored.append(action.key)

    def close(self):
        self.closed = True
