"""The sampler: greedy ties, the sets that top-k and top-p keep, seeds, frequencies."""

import numpy as np
import pytest

from dsr1build.runtime.sampling import Sampling, choose

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.3, 0.15], dtype=np.float32))


def draw(count: int, sampling: Sampling, seed: int = 0, logits: np.ndarray = LOGITS) -> list[int]:
    generator = np.random.Generator(np.random.PCG64(seed))
    return [choose(logits, sampling, generator) for _ in range(count)]


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals() -> None:
    assert draw(3, Sampling()) == [1, 1, 1]
    assert draw(1, Sampling(), logits=np.array([0, 2, 1, 2], dtype=np.float32)) == [1]


def test_frequencies_follow_the_probabilities() -> None:
    counts = np.bincount(draw(20000, Sampling(temperature=1.0)), minlength=5) / 20000
    np.testing.assert_allclose(counts, np.exp(LOGITS), atol=0.012)
    sharp = np.bincount(draw(20000, Sampling(temperature=0.5)), minlength=5) / 20000
    np.testing.assert_allclose(sharp, np.exp(2 * LOGITS) / np.exp(2 * LOGITS).sum(), atol=0.012)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=2), {1, 3}),
        (Sampling(1.0, top_p=0.05), {1}),
        (Sampling(1.0, top_p=0.6), {1, 3}),
        (Sampling(1.0, top_p=0.8), {1, 3, 4}),
        (Sampling(1.0, top_p=1.0), {0, 1, 2, 3, 4}),
        (Sampling(1.0, top_p=0.99, top_k=3), {1, 3, 4}),
        (Sampling(1.0, top_k=50), {0, 1, 2, 3, 4}),
    ],
)
def test_what_is_kept(sampling: Sampling, kept: set[int]) -> None:
    assert set(draw(2000, sampling)) == kept


def test_a_seed_repeats_and_another_differs() -> None:
    assert draw(50, Sampling(1.0), seed=3) == draw(50, Sampling(1.0), seed=3)
    assert draw(50, Sampling(1.0), seed=3) != draw(50, Sampling(1.0), seed=4)


def test_extreme_logits_and_temperatures_do_not_overflow() -> None:
    extreme = np.array([-np.inf, 3e38, -3e38, 3e38], dtype=np.float32)
    assert set(draw(200, Sampling(1e-6), logits=extreme)) == {1, 3}
    assert draw(5, Sampling(1e-30)) == [1] * 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature is -0.1, expected 0 or more"),
        ({"temperature": float("nan")}, "temperature is nan, expected 0 or more"),
        ({"top_p": 0.0}, "top_p is 0.0, expected more than 0 and at most 1"),
        ({"top_p": 1.5}, "top_p is 1.5, expected more than 0 and at most 1"),
        ({"top_k": -1}, "top_k is -1, expected 0 (all) or more"),
    ],
)
def test_options_out_of_range(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Sampling(**options)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_logits_that_are_no_numbers() -> None:
    with pytest.raises(ValueError, match=r"^the logits are not numbers \(NaN\)$"):
        draw(1, Sampling(), logits=np.array([0.0, np.nan], dtype=np.float32))
