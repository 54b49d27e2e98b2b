"""The compressions of REAPI blobs that this client has: Zstandard and raw DEFLATE (RFC 1951)."""

import io
import zlib
from collections.abc import Iterable, Iterator
from typing import IO, Any, cast

IDENTITY, ZSTD, DEFLATE = 0, 1, 2
NAMES = {ZSTD: "zstd", DEFLATE: "deflate"}

# Best first.
PREFERENCE = (ZSTD, DEFLATE)

_PIECE = 1 << 20
# Zstandard's largest window that every decoder has to support by RFC 8878 is 8 MiB; its command line writes up to 128 MiB.
_LARGEST_WINDOW = 128 << 20
_ZSTD_LEVEL = 3


class Damaged(Exception):
    """The bytes are not what the compression writes, or end too early."""


class _Source(io.RawIOBase):
    """The bytes of an iterator as a file, which is what Zstandard's bounded reader takes."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)

    def read(self, size: int = -1) -> bytes:
        return next((piece for piece in self._pieces if piece), b"")


def decompress(compressor: int, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The content, in pieces of at most 1 MiB, so that a caller who stops early never holds what a hostile server packed.

    Raises Damaged, and ValueError for a compressor that this client does not have.
    """
    if compressor == IDENTITY:
        yield from pieces
    elif compressor == DEFLATE:
        yield from _inflate(pieces)
    elif compressor == ZSTD:
        import zstandard

        reader = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW).stream_reader(cast(IO[bytes], _Source(pieces)))
        try:
            while piece := reader.read(_PIECE):
                yield piece
        except zstandard.ZstdError as error:
            raise Damaged(str(error)) from None
    else:
        raise ValueError(f"compressor {compressor} is not one of {sorted(NAMES)}")


def _inflate(pieces: Iterable[bytes]) -> Iterator[bytes]:
    state = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        for piece in pieces:
            while piece:
                if content := state.decompress(piece, _PIECE):
                    yield content
                piece = state.unconsumed_tail
        while content := state.decompress(state.unconsumed_tail, _PIECE):
            yield content
    except zlib.error as error:
        raise Damaged(str(error)) from None
    if not state.eof:
        raise Damaged("the compressed data ends too early")


def compress(compressor: int, pieces: Iterable[bytes]) -> Iterator[bytes]:
    """``pieces`` compressed, in pieces of any size that are not empty."""
    if compressor == IDENTITY:
        yield from pieces
        return
    if compressor == DEFLATE:
        state: Any = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    elif compressor == ZSTD:
        import zstandard

        state = zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compressobj()
    else:
        raise ValueError(f"compressor {compressor} is not one of {sorted(NAMES)}")
    for piece in pieces:
        if packed := state.compress(piece):
            yield packed
    if packed := state.flush():
        yield packed
