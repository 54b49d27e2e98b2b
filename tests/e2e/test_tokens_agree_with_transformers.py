"""The numbers of a built bundle against ``transformers`` on the same checkpoint, loaded as float32."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

import dsr1build
from builds import Built
from dsr1build.runtime.session import Session

MODELS = [
    ("r1-mini", "deepseek_v3", "float32", 1),
    ("r1-mini", "deepseek_v3", "bfloat16", 3),
    ("r1-mini-no-q-lora", "deepseek_v3", "float32", 1),
    ("r1-mini-tied", "deepseek_v3", "float32", 1),
    ("r1-mini-softmax", "deepseek_v3", "float32", 1),
    ("r1-mini-fp8", "deepseek_v3", "float8_e4m3fn", 1),
    ("qwen2-mini", "qwen2", "float32", 1),
    ("llama-mini", "llama", "float16", 2),
]
TOLERANCE = 2e-4
LENGTHS = (1, 2, 63, 64, 65, 100)
DECODE_STEPS = 40
GENERATED = 64

Logits = NDArray[np.float32]


@pytest.fixture(scope="module", params=MODELS, ids=lambda m: f"{m[0]}-{m[2]}")
def built(request: pytest.FixtureRequest, build_model: Callable[..., Built]) -> Built:
    name, recipe, dtype, shards = request.param
    return build_model(name, recipe, dtype=dtype, shards=shards)


@pytest.fixture(scope="module")
def reference(built: Built) -> Callable[[list[int]], Logits]:
    from checkpoints import reference_logits

    return lambda ids: np.asarray(reference_logits(built.checkpoint, ids), dtype=np.float32)


@pytest.fixture
def session(built: Built) -> Session:
    return dsr1build.load(built.bundle)


def prompt(length: int, vocabulary: int) -> list[int]:
    return [int(i) for i in np.random.default_rng(7).integers(0, vocabulary, length)]


def difference(ours: Logits, theirs: Logits) -> float:
    """Largest difference relative to the range of the reference's logits."""
    return float(np.abs(ours - theirs).max() / (theirs.max() - theirs.min()))


@pytest.mark.slow
@pytest.mark.parametrize("length", LENGTHS)
def test_prefill(session: Session, reference: Callable[[list[int]], Logits], length: int) -> None:
    ids = prompt(length, session.vocabulary)
    assert difference(session.prefill(ids), reference(ids)) < TOLERANCE


@pytest.mark.slow
def test_decode_steps(session: Session, reference: Callable[[list[int]], Logits]) -> None:
    ids = prompt(60 + DECODE_STEPS, session.vocabulary)
    theirs = reference(ids)
    session.prefill(ids[:60])
    ours = np.stack([session.decode(token) for token in ids[60:]])
    assert difference(ours, theirs[60:]) < TOLERANCE


@pytest.mark.slow
def test_greedy_tokens(session: Session, reference: Callable[[list[int]], Logits]) -> None:
    start = prompt(12, session.vocabulary)
    ours = session.generate(start, GENERATED, stop_at_eos=False)
    assert len(ours) == GENERATED
    theirs = reference([*start, *ours])[len(start) - 1 : -1]
    spread = float(theirs.max() - theirs.min())
    for step, token in enumerate(ours):
        best = int(theirs[step].argmax())
        # Another token is right only where the reference itself cannot tell the two apart.
        assert token == best or float(theirs[step][best] - theirs[step][token]) < TOLERANCE * spread


@pytest.mark.slow
@pytest.mark.parametrize("length", (1, 63, 64, 70))
def test_prefill_then_decode_equals_longer_prefill(session: Session, length: int) -> None:
    ids = prompt(length + 1, session.vocabulary)
    whole = session.prefill(ids)
    session.reset()
    session.prefill(ids[:-1])
    assert difference(session.decode(ids[-1]), whole[-1]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("chunk", (1, 7, 64, 65))
def test_prefill_in_chunks(session: Session, chunk: int) -> None:
    ids = prompt(100, session.vocabulary)
    whole = session.prefill(ids)
    session.reset()
    parts = np.concatenate([session.prefill(ids[i : i + chunk]) for i in range(0, len(ids), chunk)])
    assert difference(parts, whole) < TOLERANCE


@pytest.mark.slow
def test_one_thread_and_many_give_equal_bits(built: Built) -> None:
    results = []
    for threads in (1, 2, 3):
        with dsr1build.load(built.bundle, threads=threads) as session:
            ids = prompt(70, session.vocabulary)
            results.append(session.prefill(ids).tobytes() + session.decode(5).tobytes())
    assert results[0] == results[1] == results[2]
