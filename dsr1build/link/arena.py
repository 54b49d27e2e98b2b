"""The arena: one block of memory in which values that are never alive together share their bytes.

Liveness intervals make an interval graph; buffers are placed in order of falling size, each at the lowest address that is
free of all placed buffers that live at the same time (first fit by decreasing size).
"""

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A buffer of ``size`` bytes that is alive from step ``first`` to step ``last``, both included."""

    size: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """``offsets`` in the order of the buffers, multiples of 64; ``size`` is the bytes of the whole arena."""

    offsets: tuple[int, ...]
    size: int


def plan_arena(lifetimes: Sequence[Lifetime]) -> ArenaPlan:
    """Place the buffers so that no two that are alive at the same step overlap. Equal input gives equal offsets."""
    order = sorted(range(len(lifetimes)), key=lambda i: (-lifetimes[i].size, lifetimes[i].first, i))
    offsets = [0] * len(lifetimes)
    placed: list[int] = []
    total = 0
    for i in order:
        buffer = lifetimes[i]
        size = _aligned(buffer.size)
        busy = sorted(
            (offsets[j], offsets[j] + _aligned(lifetimes[j].size))
            for j in placed
            if lifetimes[j].first <= buffer.last and buffer.first <= lifetimes[j].last
        )
        at = 0
        for start, end in busy:
            if at + size <= start:
                break
            at = max(at, end)
        offsets[i] = at
        placed.append(i)
        total = max(total, at + size)
    return ArenaPlan(tuple(offsets), total)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
