"""The local store: what an action left, found again by the action's key.

Layout of the directory (version 1)::

    v1/blobs/aa/<sha256>      output files, and the encoded fields of each action (their digest is its key)
    v1/manifests/aa/<sha256>  one manifest for each publication: a record (dsr1build.cache.record)
    v1/index/                 key -> manifest, sizes, cost, last use (dsr1build.cache.index)
    v1/leases/, v1/evict.lock what running builds hold (dsr1build.cache.leases)
    v1/tmp/, v1/broken/       files being written; files that were not what their name says

A manifest binds all files of an action. It is written after the files that it names, and the index after it, so a writer
that is killed at any moment leaves nothing that could be mistaken for a result. Each look-up verifies the manifest and
every file behind it. What this process found or published is held until the store is closed: nobody evicts it meanwhile.

A store that cannot be read or written costs one warning; the results of this process are then kept in a temporary
directory, and the build goes on.
"""

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dsr1build.cache.blobs import BlobLost, BlobTree, Staged, discard
from dsr1build.cache.eviction import SLACK, Eviction, Limits, StoreFiles, evict
from dsr1build.cache.leases import Leases
from dsr1build.cache.record import LARGEST_RECORD, LONGEST_LABEL, Record, check_output_path, parse_record, render_record
from dsr1build.cache.scratch import make_scratch
from dsr1build.cache.signing import Trust, refusal
from dsr1build.cache.statistics import Counters, parse_counters, render_counters
from dsr1build.digest import BlobRef, Fields, encode, sha256_hex
from dsr1build.errors import EnvironmentUnfit
from dsr1build.plan.action import ActionResult

if TYPE_CHECKING:
    from dsr1build.cache.index import Entry, Index

# A build that finds the store this much over its limits evicts at once, not only when it ends.
_TOLERANCE = 1.1
# Last uses are kept to the hour, so that most builds only read.
_TOUCH_SECONDS = 3600.0
_HANDLES = (errno.EMFILE, errno.ENFILE)

_T = TypeVar("_T")


class LocalStore:
    """A store in ``directory``, made at the first publication. ``warn`` takes one line of text for the user.

    With ``read_only`` nothing is written; results of this process are kept in a temporary directory.
    """

    def __init__(
        self, directory: Path, warn: Callable[[str], None], limits: Limits | None = None, *, read_only: bool = False
    ) -> None:
        self._directory = directory
        self._warn = warn
        self._limits = Limits() if limits is None else limits
        root = directory / "v1"
        self._root = root
        self._leases = Leases(root, warn)
        self._blobs = BlobTree(root / "blobs", root / "tmp", root / "broken")
        self._manifests = BlobTree(root / "manifests", root / "tmp", root / "broken")
        self._index: Index | None = None
        self._walked: dict[str, Entry] | None = None
        self._writable = not read_only
        self._private: tuple[Path, int] | None = None
        self._counters = Counters()
        self._stale_uses: set[str] = set()
        self._published = False
        self._evict_above = _TOLERANCE
        self._short_of_handles = False

    @property
    def directory(self) -> Path:
        return self._directory

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def files(self) -> StoreFiles:
        """The trees of the store, for those who look after it."""
        return StoreFiles(self._root, self._blobs, self._manifests)

    def lookup(self, key: str, *, peek: bool = False) -> ActionResult | None:
        """The verified result of ``key``, or None. Never raises for anything that is wrong with the store.

        With ``peek`` the look-up is not counted, and what it finds is not held.
        """
        record = self.record(key, peek=peek)
        return None if record is None else ActionResult(key, {name: ref for name, (ref, _) in record.outputs.items()})

    def record(self, key: str, *, peek: bool = False, counted: bool = True) -> Record | None:
        """The record behind ``key`` after it and all its files have been verified; otherwise as ``lookup``.

        What is not ``counted`` is held all the same.
        """
        try:
            found = self._with_handles(lambda: self._find(key, peek))
        except OSError:
            found = "unreadable"
        if counted and not peek:
            self._count(found)
        if isinstance(found, str):
            return None
        record, entry = found
        if counted and not peek and time.time() - entry.used > _TOUCH_SECONDS:
            self._stale_uses.add(key)
        return record

    def _find(self, key: str, peek: bool) -> "tuple[Record, Entry] | str":
        """The verified record with its entry, or why there is none."""
        entry = self._entry(key)
        if entry is None:
            return "absent"
        try:
            record = parse_record(self._manifests.read(entry.manifest, LARGEST_RECORD), key)
            if not peek and self._writable:
                names = (ref.sha256 for ref, _ in record.outputs.values())
                self._leases.hold((entry.manifest.sha256, key, *names))
            for ref, size in record.outputs.values():
                self._blobs.verify(ref, size)
        except BlobLost as lost:
            return lost.reason
        except ValueError:
            return "damaged"
        if record.signature is not None and (why := refusal(record, Trust())) is not None:
            self._warn(f"security: the result of {key} in the cache at {self._directory} is not used: {why}")
            return "untrusted"
        return record, entry

    def _count(self, found: "tuple[Record, Entry] | str") -> None:
        self._counters.builds = 1
        if isinstance(found, str):
            self._counters.misses[found] = self._counters.misses.get(found, 0) + 1
            return
        record, _ = found
        self._counters.hits += 1
        self._counters.seconds_saved += record.seconds or 0.0
        self._counters.bytes_served += sum(size for _, size in record.outputs.values())

    def publish(
        self,
        key: str,
        fields: Fields,
        files: Mapping[str, Path],
        seconds: float = 0.0,
        kind: str = "",
        label: str = "",
        peak: int = 0,
    ) -> ActionResult:
        """Keep ``files`` (relative path -> file) as the result of ``key``; ``seconds`` and ``peak`` (bytes of memory) are what
        it cost to make them, ``kind`` and ``label`` tell people which action it was.

        Raises ValueError where ``key`` is not the key of ``fields`` or a path leaves the outputs, and OSError where the
        files can be kept neither in the store nor in a temporary directory.
        """
        encoded = encode(fields)
        if sha256_hex(encoded) != key:
            raise ValueError(f"{key} is not the key of the given fields")
        for name in files:
            check_output_path(name)
        if self._writable:
            record = Record(key, {}, seconds, None, kind, _one_line(label), peak)
            try:
                written = self._with_handles(lambda: self._publish(record, encoded, files))
                return ActionResult(key, {name: ref for name, (ref, _) in written.outputs.items()})
            except OSError as error:
                self._give_up(error.strerror or str(error))
        tree = self._private_tree()
        return ActionResult(key, {name: _store_file(tree, path) for name, path in sorted(files.items())})

    def _publish(self, record: Record, encoded: bytes, files: Mapping[str, Path]) -> Record:
        tree = replace(self._blobs, owner=self._leases.begin())
        staged: list[Staged] = []
        try:
            outputs: dict[str, tuple[BlobRef, int]] = {}
            for name, path in sorted(files.items()):
                staged.append(tree.stage_file(path))
                outputs[name] = staged[-1].ref, staged[-1].size
            staged.append(tree.stage(iter((encoded,))))
            record = replace(record, outputs=outputs)
            self._commit(staged, record, render_record(record))
        finally:
            # Those that got their names are no longer there.
            for file in staged:
                discard(file.path)
        return record

    def adopt(self, data: bytes, blobs: Mapping[BlobRef, Path]) -> ActionResult:
        """Keep a record as it is, with the files that it names and the fields of its action; ``blobs`` says where each is.
        A file that the store has already may be missing there.

        The record's signature is the caller's business. Raises ValueError where the record or one of the files is not what
        it should be, or is missing, and OSError where the store cannot be written.
        """
        record = parse_record(data)
        if not self._writable:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(self._directory))
        self._with_handles(lambda: self._adopt(record, data, blobs))
        return ActionResult(record.key, {name: ref for name, (ref, _) in record.outputs.items()})

    def _adopt(self, record: Record, data: bytes, blobs: Mapping[BlobRef, Path]) -> None:
        tree = replace(self._blobs, owner=self._leases.begin())
        sizes: dict[BlobRef, int | None] = {BlobRef(record.key): None, **dict(record.outputs.values())}
        staged: list[Staged] = []
        try:
            for ref, size in sizes.items():
                if ref in blobs:
                    staged.append(tree.stage_file(blobs[ref]))
                    if staged[-1].ref != ref or (size is not None and staged[-1].size != size):
                        raise ValueError(f"the file {ref.sha256} of {record.key} has other bytes")
            self._leases.hold(ref.sha256 for ref in sizes)
            for ref, size in sizes.items():
                # A record may come without its fields: they serve explanations only.
                if ref not in blobs and size is not None:
                    try:
                        self._blobs.verify(ref, size)
                    except BlobLost:
                        raise ValueError(f"the file {ref.sha256} of {record.key} is missing") from None
            self._commit(staged, record, data)
        finally:
            for file in staged:
                discard(file.path)

    def _commit(self, staged: list[Staged], record: Record, data: bytes) -> None:
        """Give the files their names, then the manifest, then tell the index. Raises OSError."""
        from dsr1build.cache.index import Entry, IndexUnusable

        index = self._open_index()
        manifest = replace(self._manifests, owner=self._leases.begin()).stage(iter((data,)))
        staged.append(manifest)
        self._leases.hold((record.key, manifest.ref.sha256, *(ref.sha256 for ref, _ in record.outputs.values())))
        for file in staged[:-1]:
            self._blobs.commit(file)
        self._manifests.commit(manifest)
        size = sum(file.size for file in staged)
        entry = Entry(
            manifest.ref,
            size,
            len(record.outputs) + 2,
            record.seconds or 0.0,
            time.time(),
            record.kind,
            record.label,
            record.peak,
        )
        if index is None:
            return
        try:
            totals = index.put(record.key, entry)
        except IndexUnusable as error:
            # The files are there and usable by this build; a later build finds them when the index is rebuilt.
            self._give_up(str(error))
            return
        self._published = True
        if self._limits.exceeded_by(*totals) > self._evict_above:
            self._evict_above = _TOLERANCE * max(1.0, self._evict_to(SLACK))

    def record_bytes(self, key: str) -> bytes | None:
        """The record of ``key`` as it is kept, signature and all; None where it is missing or damaged. Not held."""
        entry = self._entry(key)
        try:
            data = None if entry is None else self._manifests.read(entry.manifest, LARGEST_RECORD)
            return data if data is not None and parse_record(data, key) else None
        except (BlobLost, OSError, ValueError):
            return None

    def read_blob(self, ref: BlobRef) -> bytes:
        """The verified content of a file. Raises BlobLost."""
        try:
            return self._with_handles(lambda: self._blobs.read(ref))
        except BlobLost:
            if self._private is None:
                raise
            return self._private_tree().read(ref)
        except OSError:
            raise BlobLost(ref, "unreadable") from None

    def materialize(self, ref: BlobRef, path: Path) -> None:
        """Write the verified content of a blob to ``path``. Raises BlobLost, and OSError where ``path`` cannot be written."""
        try:
            self._with_handles(lambda: self._blobs.copy_to(ref, path))
        except BlobLost:
            if self._private is None:
                raise
            self._private_tree().copy_to(ref, path)

    def entries(self) -> "dict[str, Entry]":
        """What the index knows, by key; from the manifests where there is no index. Nothing is verified."""
        if not self._manifests.root.is_dir():
            return {}
        index = self._open_index()
        return index.entries() if index is not None else dict(self._walk())

    def counters(self) -> Counters:
        """The sums of all builds on this store that have ended."""
        if not self._manifests.root.is_dir():
            return Counters()
        index = self._open_index()
        return Counters() if index is None else parse_counters(index.counters())

    def evict(self, limits: Limits, dry_run: bool = False) -> Eviction:
        """Delete what is of no use, then what is worth least until the store is within ``limits``.

        Raises EnvironmentUnfit where the store cannot be written.
        """
        from dsr1build.cache.index import IndexUnusable

        if not self._manifests.root.is_dir():
            return Eviction(0, 0, 0, 0, 0, 0)
        index = self._open_index()
        try:
            if index is None:
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return evict(self.files, index, self._leases, limits, time.time(), dry_run)
        except (OSError, IndexUnusable) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise EnvironmentUnfit(
                f"the cache cannot be changed: {reason}",
                where=str(self._directory),
                hint="Run it as a user who may write there.",
            ) from None

    def rebuild_index(self) -> int:
        """Write the index anew from the manifests; gives the number of entries. Raises EnvironmentUnfit as ``evict``."""
        from dsr1build.cache.index import IndexUnusable

        index = self._open_index()
        try:
            if index is None:
                raise IndexUnusable(os.strerror(errno.EROFS))
            index.rebuild(self._walk)
        except IndexUnusable as error:
            raise EnvironmentUnfit(
                f"the index cannot be written: {error}",
                where=str(self._directory),
                hint="Run it as a user who may write there.",
            ) from None
        return len(index.entries())

    def close(self) -> None:
        """Write what was counted, evict where the store has grown over its limits, and hold nothing any more."""
        index = self._index
        if index is not None:
            if self._stale_uses:
                index.touch(self._stale_uses, time.time())
            if self._counters.builds:
                index.count(self._add_counters)
            self._leases.close()
            if self._published and self._limits.exceeded_by(*index.totals()) > 1.0:
                self._evict_to(SLACK)
            index.close()
            self._index = None
        self._stale_uses.clear()
        self._counters = Counters()
        self._leases.close()
        if self._private is not None:
            directory, lock = self._private
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
            self._private = None

    def __enter__(self) -> "LocalStore":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _add_counters(self, row: bytes) -> bytes:
        total = parse_counters(row)
        total.add(self._counters)
        return render_counters(total)

    def _evict_to(self, part: float) -> float:
        """Evict down to this part of the limits; gives how full the store is then. What goes wrong costs room alone."""
        limits = Limits(int(self._limits.max_bytes * part), int(self._limits.max_files * part))
        try:
            done = self.evict(limits)
        except EnvironmentUnfit as error:
            self._give_up(error.message)
            return 1.0
        return self._limits.exceeded_by(done.left_bytes, done.left_files)

    def _entry(self, key: str) -> "Entry | None":
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
                self._index = Index(self._root / "index", self._walk)
            except (IndexUnusable, OSError) as error:
                self._give_up(str(error))
                return None
            self._leases.sweep(self._blobs.temporary)
        return self._index

    def _walk(self) -> "Iterator[tuple[str, Entry]]":
        """The entry of each manifest of the tree, older ones first: of two of one key the later counts."""
        from dsr1build.cache.index import Entry

        found: list[tuple[float, BlobRef]] = []
        for ref in self._manifests.entries():
            with contextlib.suppress(OSError):
                found.append((self._manifests.path(ref).stat().st_mtime, ref))
        for written, ref in sorted(found, key=lambda item: (item[0], item[1].sha256)):
            record = self.files.record(ref)
            if record is None:
                continue
            size = sum(size for _, size in record.outputs.values()) + len(render_record(record))
            with contextlib.suppress(OSError):
                size += self._blobs.path(BlobRef(record.key)).stat().st_size
            yield (
                record.key,
                Entry(ref, size, len(record.outputs) + 2, record.seconds or 0.0, written, record.kind, record.label, record.peak),
            )

    def _with_handles(self, attempt: Callable[[], _T]) -> _T:
        """The result of ``attempt``; where file handles run out, once more after giving back those that this store has."""
        try:
            return attempt()
        except OSError as error:
            if error.errno not in _HANDLES:
                raise
        if not self._short_of_handles:
            self._short_of_handles = True
            self._warn("file handles have run out (`ulimit -n`); the cache is used with fewer, which is slower")
        if self._index is not None:
            self._index.close()
            self._index = None
        self._leases.close()
        return attempt()

    def _private_tree(self) -> BlobTree:
        if self._private is None:
            self._private = make_scratch("dsr1build-results-")
        directory, _ = self._private
        return BlobTree(directory / "blobs", directory / "tmp", directory / "broken")

    def _give_up(self, reason: str) -> None:
        """Stop writing to the store, and say so once."""
        if self._writable:
            self._writable = False
            self._warn(f"the cache at {self._directory} cannot be written ({reason}); the results of this build are not kept")


def _store_file(tree: BlobTree, source: Path) -> BlobRef:
    staged = tree.stage_file(source)
    tree.commit(staged)
    return staged.ref


def _one_line(label: str) -> str:
    """A label as a record takes it."""
    return "".join(c if c.isprintable() else " " for c in label)[:LONGEST_LABEL]
