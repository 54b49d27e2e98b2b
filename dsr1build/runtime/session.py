"""Run a bundle from Python: ``load(bundle)`` gives a ``Session`` over the bundle's shared object.

Needs NumPy and this package's ``runtime`` folder, nothing else: it can be deployed without the build.
"""

import ctypes
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np

from dsr1build.runtime.sampling import Sampling, choose

ABI = 1
MANIFEST_VERSION = 1
Array: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"
# Return codes of dsr1.h.
_ERROR_ARGUMENT, _ERROR_TOKEN, _ERROR_CONTEXT, _ERROR_CPU, _ERROR_SYSTEM = 1, 2, 3, 6, 7
_MESSAGE_BYTES = 512
MOST_THREADS = 1024  # MAX_THREADS of session.c
BINDING = "weights.bind"

# The fields of a manifest that loading reads, and their types; a list stands for a list of items of that type.
_FORM: dict[str, Any] = {
    "target": {"cpuinfo_flags": [str]},
    "library": {"file": str, "bytes": int, "sha256": str},
    "weights": {"binding_sha256": str, "files": [{"path": str, "bytes": int}]},
    "vocabulary": int,
    "eos_token_ids": [int],
}


class BundleError(RuntimeError):
    """A bundle cannot be loaded or run. ``environment`` is True where not the bundle but this machine is unfit."""

    def __init__(self, message: str, environment: bool = False) -> None:
        super().__init__(message)
        self.environment = environment


class SessionClosed(BundleError):
    """A session was used after ``close``."""


class ContextFull(ValueError):
    """The tokens do not fit behind the session's position."""


def load(bundle: str | os.PathLike[str], threads: int | None = None) -> "Session":
    """Open a bundle directory for generation. ``threads`` None uses every CPU that the process may run on.

    Raises BundleError where the bundle is of another version, incomplete or damaged, or needs a CPU feature that this
    machine lacks (which is named), and ValueError for a number of threads that is not between 1 and ``MOST_THREADS``.
    """
    if threads is not None and not (isinstance(threads, int) and 1 <= threads <= MOST_THREADS):
        raise ValueError(f"threads is {threads}, expected 1 to {MOST_THREADS}, or None for all CPUs")
    directory = Path(bundle).absolute()
    manifest = read_manifest(directory)
    missing = missing_features(manifest)
    if missing:
        raise BundleError(
            f"{directory.name} needs CPU features that this machine does not have: {', '.join(missing)}; "
            "build for a target that this machine supports",
            environment=True,
        )
    check_files(directory, manifest)
    library = _open_library(directory / manifest["library"]["file"])
    handle = ctypes.c_void_p()
    message = ctypes.create_string_buffer(_MESSAGE_BYTES)
    code = library.dsr1_open(os.fsencode(directory), threads or 0, ctypes.byref(handle), message, len(message))
    if code:
        raise BundleError(message.value.decode("utf-8", "replace"), environment=code in (_ERROR_CPU, _ERROR_SYSTEM))
    # Logits are written into arrays of this width, so a wrong one would write past their end.
    vocabulary = int(library.dsr1_vocabulary(handle))
    if vocabulary != manifest["vocabulary"]:
        library.dsr1_close(handle)
        raise BundleError(
            f"{directory / 'manifest.json'} has a vocabulary of {manifest['vocabulary']}, the shared object one of {vocabulary}; "
            "build the bundle again"
        )
    return Session(library, handle, manifest)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a bundle. Raises BundleError where there is none, it is of another version or ABI, or it lacks a field
    that loading needs."""
    path = directory / "manifest.json"
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(f"{directory} is not a bundle: it has no manifest.json") from None
    except OSError as error:
        raise BundleError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{path} is not JSON: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != "dsr1build-bundle":
        raise BundleError(f"{path} is not the manifest of a dsr1build bundle")
    for field, expected in (("version", MANIFEST_VERSION), ("abi", ABI)):
        if manifest.get(field) != expected:
            raise BundleError(
                f"{path} has {field} {manifest.get(field)}, this runtime reads {field} {expected}; build the bundle again"
            )
    if wrong := _misfit(manifest, _FORM, ""):
        raise BundleError(f"{path} is damaged: {wrong} is missing or of another type; build the bundle again")
    return manifest


def _misfit(value: Any, form: Any, name: str) -> str:
    """The name of the first part of ``value`` that is missing or not of the type that ``form`` says; "" if all are."""
    parts: Iterator[tuple[Any, Any, str]]
    if isinstance(form, dict):
        if not isinstance(value, dict):
            return name
        parts = ((value.get(key), part, f"{name}.{key}" if name else key) for key, part in form.items())
    elif isinstance(form, list):
        if not isinstance(value, list):
            return name
        parts = ((item, form[0], f"{name}[{index}]") for index, item in enumerate(value))
    else:
        return "" if type(value) is form else name
    return next(filter(None, (_misfit(*part) for part in parts)), "")


def missing_features(manifest: dict[str, Any], cpuinfo: Path = Path("/proc/cpuinfo")) -> list[str]:
    """The CPU features that the bundle needs and /proc/cpuinfo does not list, in the manifest's order."""
    required: list[str] = manifest["target"]["cpuinfo_flags"]
    if not required:
        return []
    for line in cpuinfo.read_text("utf-8", "replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            offered = set(value.split())
            return [flag for flag in required if flag not in offered]
    return list(required)


def check_files(directory: Path, manifest: dict[str, Any]) -> None:
    """Check that every file is there with its length, and the content of the shared object and the binding. Raises
    BundleError."""
    library, weights = manifest["library"], manifest["weights"]
    for path, size in [(library["file"], library["bytes"])] + [(f["path"], f["bytes"]) for f in weights["files"]]:
        try:
            actual = (directory / path).stat().st_size
        except OSError as error:
            raise BundleError(f"{directory / path}: {error.strerror}; build the bundle again") from None
        except ValueError as error:
            raise BundleError(f"{directory / 'manifest.json'} is damaged: {path!r}: {error}; build the bundle again") from None
        if actual != size:
            raise BundleError(f"{directory / path} has {actual} bytes, the manifest says {size}; build the bundle again")
    for path, expected in ((library["file"], library["sha256"]), (BINDING, weights["binding_sha256"])):
        try:
            content = (directory / path).read_bytes()
        except OSError as error:
            raise BundleError(f"{directory / path}: {error.strerror}; build the bundle again") from None
        if hashlib.sha256(content).hexdigest() != expected:
            raise BundleError(f"{directory / path} is damaged: its SHA-256 is not the manifest's; build the bundle again")


def _open_library(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BundleError(f"{path} cannot be loaded: {error}") from None
    floats = ctypes.POINTER(ctypes.c_float)
    ids = ctypes.POINTER(ctypes.c_int32)
    session, text = ctypes.c_void_p, ctypes.c_char_p
    number = ctypes.c_int64
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "dsr1_open": (ctypes.c_int, [text, ctypes.c_int, ctypes.POINTER(session), text, ctypes.c_size_t]),
        "dsr1_prefill": (ctypes.c_int, [session, ids, number, floats]),
        "dsr1_decode": (ctypes.c_int, [session, ctypes.c_int32]),
        "dsr1_logits": (floats, [session]),
        "dsr1_reset": (ctypes.c_int, [session]),
        "dsr1_close": (None, [session]),
        "dsr1_position": (number, [session]),
        "dsr1_context": (number, [session]),
        "dsr1_vocabulary": (number, [session]),
        "dsr1_threads": (ctypes.c_int, [session]),
        "dsr1_error": (text, [session]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name, None)
        if function is None:
            raise BundleError(f"{path} is not the shared object of a bundle: it has no {name}; build the bundle again")
        function.restype, function.argtypes = result, arguments
    return library


class Session:
    """One sequence of tokens with its KV cache. Made by ``load``; a context manager. Use it from one thread at a time."""

    def __init__(self, library: ctypes.CDLL, handle: ctypes.c_void_p, manifest: dict[str, Any]) -> None:
        self._library = library
        self._handle: ctypes.c_void_p | None = handle
        self.manifest = manifest
        self.vocabulary: int = manifest["vocabulary"]
        self.eos_token_ids: tuple[int, ...] = tuple(manifest["eos_token_ids"])

    @property
    def position(self) -> int:
        """Tokens appended so far."""
        return int(self._library.dsr1_position(self._open()))

    @property
    def context(self) -> int:
        """The most tokens that the session holds."""
        return int(self._library.dsr1_context(self._open()))

    @property
    def threads(self) -> int:
        """Threads that the session computes with."""
        return int(self._library.dsr1_threads(self._open()))

    def prefill(self, ids: Sequence[int]) -> Array:
        """Append ``ids`` and return the logits of each, float32 [len(ids), vocabulary].

        Raises ValueError for no ids or an id outside the vocabulary, ContextFull where they do not fit, BundleError where
        the model cannot compute them. After an error the session is as before.
        """
        tokens = self._tokens(ids)
        logits = np.empty((len(tokens), self.vocabulary), dtype=np.float32)
        self._append(tokens, logits.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
        return logits

    def extend(self, ids: Sequence[int]) -> Array:
        """Append ``ids`` and return the logits of the last one, float32 [vocabulary]. Faster than ``prefill``; raises the
        same."""
        self._append(self._tokens(ids), None)
        return self._last_logits()

    def decode(self, token: int) -> Array:
        """Append one token and return its logits, float32 [vocabulary]. Raises the same as ``prefill``."""
        (value,) = self._tokens([token])
        self._check(self._library.dsr1_decode(self._open(), int(value)))
        return self._last_logits()

    def reset(self) -> None:
        """Forget all tokens."""
        self._check(self._library.dsr1_reset(self._open()))

    def generate(
        self,
        ids: Sequence[int],
        max_new: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop_at_eos: bool = True,
    ) -> list[int]:
        """Append ``ids``, then generate at most ``max_new`` tokens and return them. See ``stream``."""
        return list(
            self.stream(ids, max_new, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop_at_eos=stop_at_eos)
        )

    def stream(
        self,
        ids: Sequence[int],
        max_new: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop_at_eos: bool = True,
    ) -> Iterator[int]:
        """The same as ``generate``, token by token.

        Ends after ``max_new`` tokens or, with ``stop_at_eos``, with the first end-of-sequence token, which is yielded.
        Temperature 0 takes the most likely token (ties: the lowest id). Raises what ``prefill`` raises, ContextFull before
        anything is computed if prompt and new tokens do not fit, and ValueError for an option out of range.
        """
        sampling = Sampling(temperature, top_p, top_k)
        tokens = self._tokens(ids)
        if max_new < 1:
            raise ValueError(f"max_new is {max_new}, expected at least 1")
        if seed < 0:
            raise ValueError(f"seed is {seed}, expected 0 or more")
        # The last token is returned, not appended.
        needed, room = len(tokens) + max_new - 1, self.context - self.position
        if needed > room:
            raise ContextFull(
                f"{len(tokens)} tokens of prompt and {max_new} new ones need {needed} places, "
                f"the context of {self.context} tokens has {room} left"
            )
        return self._stream(tokens, max_new, sampling, seed, frozenset(self.eos_token_ids if stop_at_eos else ()))

    def _stream(
        self,
        tokens: "np.ndarray[Any, np.dtype[np.int32]]",
        max_new: int,
        sampling: Sampling,
        seed: int,
        stop: frozenset[int],
    ) -> Iterator[int]:
        generator = np.random.Generator(np.random.PCG64(seed))
        self._append(tokens, None)
        for number in range(max_new):
            token = choose(self._last_logits(), sampling, generator)
            yield token
            if token in stop or number == max_new - 1:
                return
            self._check(self._library.dsr1_decode(self._open(), token))

    def close(self) -> None:
        """Stop the threads and free the memory. Closing twice is allowed."""
        if self._handle is not None:
            self._library.dsr1_close(self._handle)
            self._handle = None

    def __enter__(self) -> "Session":
        self._open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def _open(self) -> ctypes.c_void_p:
        if self._handle is None:
            raise SessionClosed("the session is closed")
        return self._handle

    def _tokens(self, ids: Sequence[int]) -> "np.ndarray[Any, np.dtype[np.int32]]":
        """``ids`` as int32. A number that does not fit there is no token id of any vocabulary, and is refused here."""
        values = np.asarray(ids)
        if values.ndim != 1 or (values.size and not np.issubdtype(values.dtype, np.integer)):
            raise ValueError("token ids must be a sequence of whole numbers")
        for index in np.flatnonzero((values < 0) | (values >= self.vocabulary))[:1]:
            raise ValueError(f"token {index} has the id {values[index]}, the vocabulary has the ids 0 to {self.vocabulary - 1}")
        if not values.size:
            raise ValueError("there are no tokens to append")
        return np.ascontiguousarray(values, dtype=np.int32)

    def _append(self, tokens: "np.ndarray[Any, np.dtype[np.int32]]", logits: Any) -> None:
        ids = tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        self._check(self._library.dsr1_prefill(self._open(), ids, len(tokens), logits))

    def _last_logits(self) -> Array:
        pointer = self._library.dsr1_logits(self._open())
        return np.ctypeslib.as_array(pointer, (self.vocabulary,)).copy()

    def _check(self, code: int) -> None:
        if not code:
            return
        text = self._library.dsr1_error(self._open()).decode("utf-8", "replace")
        if code == _ERROR_CONTEXT:
            raise ContextFull(text)
        if code in (_ERROR_ARGUMENT, _ERROR_TOKEN):
            raise ValueError(text)
        raise BundleError(text)
