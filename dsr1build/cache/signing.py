"""Who vouches for a record: Ed25519 signatures, and the policy that says which of them count.

What is signed is ``b"dsr1build cache record 1\\0"`` and the canonical encoding (``dsr1build.digest``) of the record's key,
kind, label, outputs and cost. There is no time in it, so no clock plays a role; a key is withdrawn by taking it out of the
profile.

A private key is a PEM file (PKCS #8, as ``openssl genpkey -algorithm ed25519`` writes it) that only its owner may read. It
is named by the profile or by the environment variable ``DSR1_CACHE_KEY_FILE``. ``cryptography`` is imported when something
is signed or a signature is checked.
"""

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from dsr1build.cache.record import Record, Signature
from dsr1build.digest import encode
from dsr1build.errors import EnvironmentUnfit, InvalidInput

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

KEY_FILE_VARIABLE = "DSR1_CACHE_KEY_FILE"
_DOMAIN = b"dsr1build cache record 1\0"
# The PEM form of an Ed25519 key has about 120 bytes; whatever is much larger is another file.
_LARGEST_KEY_FILE = 4096

Refusal: TypeAlias = Literal["unsigned", "unknown signer", "wrong signature"]


@dataclass(frozen=True, slots=True)
class Trust:
    """``keys``: trusted public keys. Without any, a signature has only to be right; ``accept_unsigned`` says whether a
    record without one counts."""

    keys: frozenset[str] = frozenset()
    accept_unsigned: bool = True


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key, held in memory; it has no text form, so that it reaches no log."""

    _private: "Ed25519PrivateKey"
    public: str

    def __repr__(self) -> str:
        return f"SigningKey({self.public})"


def statement(record: Record) -> bytes:
    """What a signature of ``record`` signs: everything but the signature."""
    return _DOMAIN + encode(
        {
            "key": record.key,
            "kind": record.kind,
            "label": record.label,
            "outputs": {name: [ref, size] for name, (ref, size) in record.outputs.items()},
            "seconds": None if record.seconds is None else float(record.seconds),
            **({"peak": record.peak} if record.peak else {}),
        }
    )


def sign_record(record: Record, key: SigningKey) -> Record:
    """``record`` with a signature of ``key`` in place of any other."""
    return replace(record, signature=Signature(key.public, key._private.sign(statement(record)).hex()))


def refusal(record: Record, trust: Trust) -> Refusal | None:
    """Why ``record`` may not be used, or None where it may."""
    signature = record.signature
    if signature is None:
        return None if trust.accept_unsigned else "unsigned"
    if trust.keys and signature.key not in trust.keys:
        return "unknown signer"
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key.removeprefix("ed25519:")))
        public.verify(bytes.fromhex(signature.value), statement(record))
    except (InvalidSignature, ValueError):
        return "wrong signature"
    return None


def load_signing_key(named: Path | None, environ: Mapping[str, str]) -> SigningKey | None:
    """The key in the file that the environment variable names, or else in ``named``; None where neither names one.

    Raises EnvironmentUnfit where the file is missing, unreadable, or open to other users, and InvalidInput where it lies in
    a cache or holds no Ed25519 private key. No message repeats what the file holds.
    """
    path = Path(environ[KEY_FILE_VARIABLE]) if environ.get(KEY_FILE_VARIABLE) else named
    if path is None:
        return None
    where = str(path)
    _refuse_in_store(path)
    try:
        # Without O_NONBLOCK a named pipe in this place would hang the build.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise InvalidInput("the signing key is not a file", where=where, hint="Name the file of a private key.")
            if status.st_mode & 0o077 or status.st_uid not in (os.geteuid(), 0):
                raise EnvironmentUnfit(
                    "other users can read or replace the signing key",
                    where=where,
                    hint=f"Run `chmod 600 {path}` as its owner; if others may have read it, make a new key.",
                )
            data = file.read(_LARGEST_KEY_FILE + 1)
    except OSError as error:
        raise EnvironmentUnfit(
            f"the signing key cannot be read: {error.strerror}",
            where=where,
            hint=f"Make one with `dsr1build cache key new --output FILE`, or correct the profile or {KEY_FILE_VARIABLE}.",
        ) from None
    private = _private_key(data) if len(data) <= _LARGEST_KEY_FILE else None
    if private is None:
        raise InvalidInput(
            "the signing key is not an Ed25519 private key in PEM form without a password",
            where=where,
            hint="Make one with `dsr1build cache key new --output FILE`.",
        )
    return SigningKey(private, _public_text(private))


def new_key_pair(path: Path) -> str:
    """Write a new private key to ``path``, which must not exist yet, for its owner alone (0600); gives the public key.

    Raises InvalidInput where ``path`` exists or lies in a workspace or a cache, and EnvironmentUnfit where it cannot be written.
    """
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    workspace = _workspace_of(path)
    if workspace is not None:
        raise InvalidInput(
            f"a private key would lie in the workspace {workspace}",
            where=str(path),
            hint="Write it to a directory that is neither shared nor under version control, for example below ~/.config.",
        )
    _refuse_in_store(path)
    private = Ed25519PrivateKey.generate()
    text = private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            # The umask can take permissions away, but some file systems add others.
            os.fchmod(descriptor, 0o600)
            file.write(text)
    except FileExistsError:
        raise InvalidInput("the file exists", where=str(path), hint="Name a new file; a key is never overwritten.") from None
    except OSError as error:
        raise EnvironmentUnfit(
            f"the private key cannot be written: {error.strerror}",
            where=str(path),
            hint="Name a file in a directory that exists and that you may write.",
        ) from None
    return _public_text(private)


def _refuse_in_store(path: Path) -> None:
    store = _store_of(path)
    if store is not None:
        raise InvalidInput(
            f"a private key does not belong in the cache {store}",
            where=str(path),
            hint="Keep it in a directory that nobody shares, for example below ~/.config.",
        )


def _private_key(data: bytes) -> "Ed25519PrivateKey | None":
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        private = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return private if isinstance(private, Ed25519PrivateKey) else None


def _public_text(private: "Ed25519PrivateKey") -> str:
    return f"ed25519:{private.public_key().public_bytes_raw().hex()}"


def _workspace_of(path: Path) -> Path | None:
    """The directory at or above ``path``'s own that holds a BUILD.yaml or is under version control."""
    return _around(path, ("BUILD.yaml", ".git", ".hg", ".svn", ".jj"))


def _store_of(path: Path) -> Path | None:
    """The cache in which ``path`` lies: its directory is what CI services keep and hand to other builds."""
    return _around(path, ("v1/manifests",))


def _around(path: Path, marks: Sequence[str]) -> Path | None:
    for directory in path.absolute().resolve().parents:
        if any((directory / mark).exists() for mark in marks):
            return directory
    return None
