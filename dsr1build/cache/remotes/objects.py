"""Object stores: Amazon S3 and what speaks like it, Google Cloud Storage, Azure, directories. By ``obstore``.

Objects are ``ac/<key>``, the record itself, and ``cas/<sha256>``. Blobs are created only where they are not (If-None-Match)
if the store can do that; records are replaced, or else the first one written, by whomever, would stay for ever. Nothing is
listed. On S3 the right to list the bucket is needed all the same: without it S3 answers 403 for whatever is not there.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    NotSupportedError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from obstore.store import ObjectStore, from_url

from dsr1build.cache.remote import ActionName, Remote, RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.transfer import CHUNK, LONGEST_RECORD, blob_chunks, file_size, in_parallel, receive_blob
from dsr1build.digest import BlobRef
from dsr1build.errors import InvalidInput

SCHEMES = ("s3", "gs", "az", "file", "memory")

_CONNECTIONS = 8
# Larger blobs go up in parts, which needs less memory and cannot be conditional.
_LARGEST_SINGLE_PUT = 16 << 20
# Options of the HTTP client, which obstore takes apart from those of the store.
_CLIENT_OPTIONS = frozenset({"allow_http", "proxy_url", "proxy_ca_certificate", "proxy_excludes", "root_certificate"})
_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}


def open_objects(url: str, *, timeouts: Timeouts | None = None, options: Mapping[str, str] | None = None) -> Remote:
    """The cache at ``s3://bucket/prefix``, ``gs://bucket/prefix``, ``az://account/container/prefix``, ``file:///directory``
    or ``memory:///``. Nothing is sent yet.

    ``options`` are those of obstore for this kind of store (``endpoint``, ``region``, ``access_key_id``, ..) and
    ``allow_http``, ``proxy_url``, ``proxy_excludes``, ``proxy_ca_certificate``, ``root_certificate``. Credentials that they
    do not give, and other options, come from where the provider's own tools take them (``AWS_..``, ``GOOGLE_..`` or
    ``AZURE_..`` in the environment, instance metadata). Raises InvalidInput for
    other URLs and options.
    """
    parts = urlsplit(url)
    name = parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/")
    options = options or {}
    if parts.scheme not in SCHEMES or parts.query or parts.fragment or "@" in parts.netloc:
        raise InvalidInput(
            f"{name} is not the address of an object store",
            hint="expected s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix or file:///directory",
        )
    return _ObjectRemote(name, _open_store(url, name, timeouts or Timeouts(), options))


def _open_store(url: str, name: str, timeouts: Timeouts, options: Mapping[str, str]) -> ObjectStore:
    # A whole request is bounded by ``timeouts.request``: what fails at once is repeated within the first tenth of it, and
    # the last attempt has the rest.
    retrying = timedelta(seconds=timeouts.request / 10)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=timeouts.connect),
        "timeout": timedelta(seconds=timeouts.request) - retrying,
        "user_agent": "dsr1build",
    }
    # obstore reads these variables only where it is given no options for its client.
    prefix = _VARIABLES.get(urlsplit(url).scheme, "")
    client |= {key: os.environ[f"{prefix}{key.upper()}"] for key in _CLIENT_OPTIONS if f"{prefix}{key.upper()}" in os.environ}
    client |= {key: value for key, value in options.items() if key in _CLIENT_OPTIONS}
    retry: Any = {
        "max_retries": 2,
        "retry_timeout": retrying,
        "backoff": {"init_backoff": retrying / 20, "max_backoff": retrying / 4, "base": 2},
    }
    config: Any = {key: value for key, value in options.items() if key not in _CLIENT_OPTIONS}
    try:
        match urlsplit(url).scheme:
            case "memory":
                return from_url(url)
            case "file":
                return from_url(url, mkdir=True)
            case _:
                return from_url(url, config=config, client_options=client, retry_config=retry)  # type: ignore[no-any-return, call-overload]
    except (BaseError, ValueError) as error:
        # Only the first line, which has no values of options: below it stands the whole configuration.
        reason = str(error).partition("\n")[0]
        raise InvalidInput(f"the object store {name} cannot be used: {reason}", hint="see the options of obstore") from error


class _ObjectRemote:
    """See ``dsr1build.cache.remote.Remote``."""

    def __init__(self, name: str, store: ObjectStore) -> None:
        self._name = name
        self._store = store
        self._executor = ThreadPoolExecutor(_CONNECTIONS, thread_name_prefix="object-cache")
        # Blobs that the store has, but wrong: they count as missing and are replaced.
        self._wrong: set[BlobRef] = set()
        self._conditional = True

    @property
    def name(self) -> str:
        return self._name

    def find_records(self, actions: Sequence[ActionName]) -> Mapping[str, bytes]:
        records = in_parallel(self._executor, self._find_record, [action.key for action in actions])
        return {action.key: record for action, record in zip(actions, records, strict=True) if record is not None}

    def fetch_blobs(self, blobs: Mapping[BlobRef, int], directory: Path) -> frozenset[BlobRef]:
        def fetch(item: tuple[BlobRef, int]) -> bool:
            return self._fetch_blob(*item, directory)

        arrived = in_parallel(self._executor, fetch, list(blobs.items()))
        return frozenset(blob for blob, whole in zip(blobs, arrived, strict=True) if whole)

    def missing_blobs(self, blobs: Mapping[BlobRef, int]) -> frozenset[BlobRef]:
        def is_missing(item: tuple[BlobRef, int]) -> bool:
            return item[0] in self._wrong or self._size(item[0]) != item[1]

        missing = in_parallel(self._executor, is_missing, list(blobs.items()))
        return frozenset(blob for blob, flag in zip(blobs, missing, strict=True) if flag)

    def store_blobs(self, blobs: Mapping[BlobRef, Path]) -> None:
        def store(item: tuple[BlobRef, Path]) -> None:
            blob, path = item
            size = file_size(path)
            self._put_blob(blob, size, blob_chunks(path, blob, size))
            self._wrong.discard(blob)

        in_parallel(self._executor, store, list(blobs.items()))

    def store_record(self, action: ActionName, record: bytes, outputs: Mapping[str, tuple[BlobRef, int]]) -> None:
        with self._errors("PUT", path := f"ac/{action.key}"):
            obstore.put(self._store, path, record, use_multipart=False)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _find_record(self, key: str) -> bytes | None:
        with self._errors("GET", path := f"ac/{key}"):
            try:
                result = obstore.get(self._store, path)
            except FileNotFoundError:
                return None
            size: int = result.meta["size"]
            return bytes(result.bytes()) if size <= LONGEST_RECORD else None

    def _fetch_blob(self, blob: BlobRef, size: int, directory: Path) -> bool:
        with self._errors("GET", path := f"cas/{blob.sha256}"):
            try:
                result = obstore.get(self._store, path)
            except FileNotFoundError:
                return False
            whole = result.meta["size"] == size and receive_blob(result.stream(CHUNK), blob, size, directory)
        if not whole:
            self._wrong.add(blob)
        return whole

    def _size(self, blob: BlobRef) -> int | None:
        with self._errors("HEAD", path := f"cas/{blob.sha256}"):
            try:
                size: int = obstore.head(self._store, path)["size"]
            except FileNotFoundError:
                return None
            return size

    def _put_blob(self, blob: BlobRef, size: int, chunks: Iterator[bytes]) -> None:
        with self._errors("PUT", path := f"cas/{blob.sha256}"):
            if size > _LARGEST_SINGLE_PUT:
                obstore.put(self._store, path, chunks, use_multipart=True)
                return
            content = b"".join(chunks)
            if not (self._conditional and blob not in self._wrong and self._create(path, content, size)):
                obstore.put(self._store, path, content, use_multipart=False)

    def _create(self, path: str, content: bytes, size: int) -> bool:
        """Put ``content`` where nothing is. False if it has to be put in another way: the store cannot do this, or has
        something of another length there."""
        try:
            obstore.put(self._store, path, content, mode="create", use_multipart=False)
        except AlreadyExistsError:
            return bool(obstore.head(self._store, path)["size"] == size)
        except BaseError as error:
            if not isinstance(error, NotSupportedError) and _status(error) != 501:
                raise
            self._conditional = False
            return False
        return True

    @contextmanager
    def _errors(self, method: str, path: str) -> Iterator[None]:
        """The texts of obstore are not passed on: they hold URLs, which may be signed, and configuration."""
        request = f"{method} {path}"
        try:
            yield
        except (PermissionDeniedError, UnauthenticatedError, PermissionError) as error:
            raise RemoteDenied(f"{self._name} refuses {request}") from error
        except FileNotFoundError as error:
            raise RemoteUnavailable(f"{self._name} does not exist") from error
        except (BaseError, OSError) as error:
            status = _status(error)
            if status == 405:
                raise RemoteDenied(f"{self._name} answered {status} to {request}") from error
            if status in (429, 503):
                raise RemoteBusy(f"{self._name} answered {status} to {request}") from error
            if status is not None:
                raise RemoteUnavailable(f"{self._name} answered {status} to {request}") from error
            raise RemoteUnavailable(f"{self._name} {_failure(str(error))} {request}") from error


def _status(error: BaseException) -> int | None:
    """The HTTP status, which obstore tells in the text alone."""
    found = re.search(r"status code: (\d{3})", str(error).partition("\n")[0])
    return int(found[1]) if found else None


def _failure(text: str) -> str:
    if "TimedOut" in text or "timed out" in text:
        return "was too slow for"
    return "cannot be reached for" if "Connect" in text else "broke off"
