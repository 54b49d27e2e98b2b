"""Choose the next token from logits: greedily, or by seeded sampling with temperature, top-k and top-p."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Logits: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.float32]]"


@dataclass(frozen=True, slots=True)
class Sampling:
    """``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 keep all tokens; top-k is applied before top-p.

    Raises ValueError for a value out of range.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature is {self.temperature}, expected 0 or more")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, expected 0 (all) or more")


def choose(logits: Logits, sampling: Sampling, generator: np.random.Generator) -> int:
    """The next token id. Greedy ties go to the lowest id; the same generator state gives the same id.

    Raises ValueError where the logits hold a NaN.
    """
    if np.isnan(logits).any():
        raise ValueError("the logits are not numbers (NaN)")
    if sampling.temperature == 0.0:
        return int(np.argmax(logits))
    # Most likely first; equal logits by rising id, so that the order does not depend on the sort.
    order = np.argsort(-logits, kind="stable")
    if sampling.top_k:
        order = order[: sampling.top_k]
    scaled = logits[order].astype(np.float64)
    weights = np.exp((scaled - scaled[0]) / sampling.temperature)
    cumulative = np.cumsum(weights / weights.sum())
    # The smallest set whose probability reaches top_p; rounding must not empty it or run past its end.
    kept = min(int(np.searchsorted(cumulative, sampling.top_p)) + 1, len(order))
    drawn = generator.random() * cumulative[kept - 1]
    return int(order[min(int(np.searchsorted(cumulative[:kept], drawn, side="right")), kept - 1)])
