"""What every shared cache can do, whatever it speaks.

A remote keeps two things: blobs by their SHA-256, and one *record* for each action. The record is the signed manifest of
the action (``dsr1build.cache.record``) and the only thing that is believed, after its signature has been checked: what a
server says about an action on its own account is transport. Adapters are in ``dsr1build/cache/remotes/``, one file for
each protocol, imported when a profile names one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dsr1build.digest import BlobRef


@dataclass(frozen=True, slots=True)
class ActionName:
    """An action's key and the length in bytes of the encoded fields whose SHA-256 the key is (REAPI names both)."""

    key: str
    size: int


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds. ``request`` bounds a whole request, so a server that drips bytes cannot hold a build."""

    connect: float = 2.0
    request: float = 10.0


class RemoteUnavailable(Exception):
    """The remote did not answer, answered with an error of its own, or broke off. The build goes on without it."""


class RemoteBusy(RemoteUnavailable):
    """The remote asks for fewer requests. ``retry_after`` is in seconds, 0 where it did not say."""

    def __init__(self, message: str, retry_after: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RemoteDenied(RemoteUnavailable):
    """The remote refuses this client (401, 403, PERMISSION_DENIED, read-only)."""


class Remote(Protocol):
    """One shared cache. Methods may be called from several threads. All raise RemoteUnavailable or a subclass."""

    @property
    def name(self) -> str:
        """Its address as shown to users, without credentials."""
        ...

    def find_records(self, actions: Sequence[ActionName]) -> Mapping[str, bytes]:
        """The records of those actions that the remote has, by key. In as few round trips as the protocol allows."""
        ...

    def fetch_blobs(self, blobs: Mapping[BlobRef, int], directory: Path) -> frozenset[BlobRef]:
        """Write each blob (with its expected length) to ``directory/<sha256>`` and return those that arrived whole and with
        the right digest. A blob that the remote lacks, or that is wrong, is left out and leaves no file."""
        ...

    def missing_blobs(self, blobs: Mapping[BlobRef, int]) -> frozenset[BlobRef]:
        """Those of ``blobs`` that have to be uploaded."""
        ...

    def store_blobs(self, blobs: Mapping[BlobRef, Path]) -> None:
        """Upload blobs from files. The files are read once; a file that no longer has its digest is not stored and raises
        RemoteUnavailable. The encoded fields of an action are not among them: a REAPI server takes the blob at an action's
        digest for an ``Action`` message."""
        ...

    def store_record(self, action: ActionName, record: bytes, outputs: Mapping[str, tuple[BlobRef, int]]) -> None:
        """Publish the record of an action whose blobs have all been stored. ``outputs`` is what the record names, for
        protocols that list the outputs themselves."""
        ...

    def close(self) -> None: ...
