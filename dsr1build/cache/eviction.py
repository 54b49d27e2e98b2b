"""Which entries of a store go when it has grown over its limits, and what else in it is of no use.

An entry's worth is what it cost to make, per share of the limits that it takes, halved for each week since its last use::

    worth = max(seconds, 0.001) / (bytes / max_bytes + files / max_files) * 2 ** (-age / 7 days)

The entries of least worth go first. So a small object that took a minute to compile outlives a large table that takes a
moment to write, and whatever is not used any more goes in the end. Nothing goes that a running build holds
(``dsr1build.cache.leases``), and a file goes only when no manifest names it.

Without regard to the limits there also go: manifests that a later one of the same key has replaced, files that no manifest
names (left by a writer that was killed), damaged files a week after they were set aside.
"""

import contextlib
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dsr1build.cache.blobs import BlobLost, BlobTree
from dsr1build.cache.leases import Leases
from dsr1build.cache.record import LARGEST_RECORD, Record, parse_record
from dsr1build.digest import BlobRef

if TYPE_CHECKING:
    from dsr1build.cache.index import Entry, Index

_HALF_LIFE_SECONDS = 7 * 24 * 3600.0
_LEAST_SECONDS = 0.001
# A writer that could not get a lease has this long from a file to the manifest that names it.
_UNNAMED_SECONDS = 3600.0
_BROKEN_SECONDS = 7 * 24 * 3600.0
# An eviction that a build starts goes down to this part of the limits, so that not every build evicts.
SLACK = 0.9


@dataclass(frozen=True, slots=True)
class Limits:
    """The most bytes and files that a store may have. Files count because file systems and quotas limit their number."""

    max_bytes: int = 20_000_000_000
    max_files: int = 1_000_000

    def exceeded_by(self, size: int, files: int) -> float:
        """How often the tighter of the two limits is used up: 1.0 is full."""
        return max(size / max(1, self.max_bytes), files / max(1, self.max_files))


@dataclass(frozen=True, slots=True)
class Eviction:
    """What went and what is left. ``entries`` counts results; ``held`` those that would have gone but are in use."""

    entries: int
    bytes: int
    files: int
    left_bytes: int
    left_files: int
    held: int


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """The two trees of a store and the directory that they are in."""

    root: Path
    blobs: BlobTree
    manifests: BlobTree

    def record(self, manifest: BlobRef) -> Record | None:
        """What a manifest says; None where it is missing or damaged. Raises OSError where no file handle is left."""
        try:
            return parse_record(self.manifests.read(manifest, LARGEST_RECORD))
        except (BlobLost, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class _Found:
    """A manifest of ``size`` bytes and the files that it names, among them the fields of its action."""

    key: str
    names: frozenset[str]
    size: int


def worth(entry: "Entry", limits: Limits, now: float) -> float:
    """How much an entry is worth to be kept; the formula stands at the head of this module."""
    share = entry.bytes / max(1, limits.max_bytes) + entry.files / max(1, limits.max_files)
    age = max(0.0, now - entry.used)
    return float(max(entry.seconds, _LEAST_SECONDS) / max(share, 1e-30) * 2.0 ** (-age / _HALF_LIFE_SECONDS))


def evict(files: StoreFiles, index: "Index", leases: Leases, limits: Limits, now: float, dry_run: bool = False) -> Eviction:
    """Delete what is of no use, then the entries of least worth until the store is within ``limits``.

    Any number of builders may work on the store meanwhile. With ``dry_run`` nothing is deleted. Raises OSError where the
    store cannot be written, and IndexUnusable.
    """
    # The long part, reading every manifest, is done without a lock.
    known: dict[str, _Found | None] = {}
    _read_new(files, known)
    sizes = _sizes(files.blobs, now)
    with leases.exclusive() as held:
        # What was published since; whoever publishes now holds what it writes.
        _read_new(files, known)
        entries = index.entries()
        current = {entry.manifest.sha256: key for key, entry in entries.items()}
        users = Counter(name for found in known.values() if found is not None for name in found.names)
        unnamed = [b for b, (size, fresh) in sizes.items() if b not in users and b not in held and not fresh]
        total_bytes = sum(s for s, _ in sizes.values()) + sum(f.size for f in known.values() if f is not None)
        total_files = len(sizes) + len(known)
        gone_blobs = set(unnamed)
        gone_manifests: list[str] = []
        gone_bytes = sum(sizes[b][0] for b in unnamed)

        def take(manifest: str, found: _Found | None) -> None:
            nonlocal gone_bytes
            gone_manifests.append(manifest)
            if found is None:
                return
            gone_bytes += found.size
            for name in found.names:
                users[name] -= 1
                if users[name] == 0 and name in sizes and name not in held:
                    gone_blobs.add(name)
                    gone_bytes += sizes[name][0]

        in_order: list[tuple[float, str, _Found]] = []
        for manifest, found in sorted(known.items()):
            if manifest in held:
                continue
            if found is None or current.get(manifest) != found.key:
                take(manifest, found)
            else:
                in_order.append((worth(entries[found.key], limits, now), manifest, found))
        evicted: dict[str, BlobRef] = {}
        for _, manifest, found in sorted(in_order, key=lambda item: item[:2]):
            left = total_bytes - gone_bytes, total_files - len(gone_blobs) - len(gone_manifests)
            if limits.exceeded_by(*left) <= 1.0:
                break
            take(manifest, found)
            evicted[found.key] = BlobRef(manifest)
        left_bytes, left_files = total_bytes - gone_bytes, total_files - len(gone_blobs) - len(gone_manifests)
        over = limits.exceeded_by(left_bytes, left_files) > 1.0
        in_use = sum(1 for manifest in known if manifest in held) if over else 0
        if not dry_run:
            # The index first: an entry that lost its row is a miss, and the next eviction takes the rest of it.
            index.remove(evicted)
            for manifest in gone_manifests:
                files.manifests.remove(BlobRef(manifest))
            for blob in gone_blobs:
                files.blobs.remove(BlobRef(blob))
            index.set_totals(left_bytes, left_files)
    if not dry_run:
        leases.sweep(files.blobs.temporary)
        _sweep_broken(files.blobs.broken, now)
    return Eviction(len(evicted), gone_bytes, len(gone_blobs) + len(gone_manifests), left_bytes, left_files, in_use)


def _read_new(files: StoreFiles, known: dict[str, _Found | None]) -> None:
    """Add the manifests that are not in ``known`` yet; one that cannot be understood is None."""
    for ref in list(files.manifests.entries()):
        if ref.sha256 in known:
            continue
        record = files.record(ref)
        if record is None:
            known[ref.sha256] = None
            continue
        names = frozenset({record.key, *(blob.sha256 for blob, _ in record.outputs.values())})
        known[ref.sha256] = _Found(record.key, names, _size(files.manifests.path(ref)))


def _sizes(blobs: BlobTree, now: float) -> dict[str, tuple[int, bool]]:
    """The length of each blob, and whether it is so new that a writer without a lease may still be about to name it."""
    found: dict[str, tuple[int, bool]] = {}
    for ref in blobs.entries():
        with contextlib.suppress(OSError):
            status = blobs.path(ref).stat()
            found[ref.sha256] = status.st_size, now - status.st_mtime < _UNNAMED_SECONDS
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _sweep_broken(broken: Path, now: float) -> None:
    with contextlib.suppress(OSError):
        for file in list(broken.iterdir()):
            with contextlib.suppress(OSError):
                if now - file.lstat().st_mtime <= _BROKEN_SECONDS:
                    continue
                if file.is_dir() and not file.is_symlink():
                    shutil.rmtree(file)
                else:
                    file.unlink()
