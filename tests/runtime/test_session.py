"""The runtime on a toy model with hand-written kernels: numbers, chunks, threads, errors that change nothing."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy_model
from toy_model import CHUNK, CONTEXT, NAN_TOKEN, VOCABULARY

from dsr1build.runtime.session import BundleError, ContextFull, Session, SessionClosed, load, missing_features

IDS = [int(i) for i in np.random.default_rng(7).integers(0, NAN_TOKEN, CONTEXT)]
EXPECTED = toy_model.reference(toy_model.weights(), IDS)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.ptp(expected), rtol=0)


@pytest.mark.parametrize("count", [1, 2, 3, 4, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, CONTEXT])
def test_prefill_agrees_with_the_reference(session: Session, count: int) -> None:
    assert_close(session.prefill(IDS[:count]), EXPECTED[:count])
    assert session.position == count


def test_the_context_can_be_filled_to_its_last_place_by_decoding(session: Session) -> None:
    session.prefill(IDS[:5])
    for position in range(5, CONTEXT):
        assert_close(session.decode(IDS[position]), EXPECTED[position])
    with pytest.raises(ContextFull, match=r"^1 tokens at position 48 do not fit into the context of 48 tokens$"):
        session.decode(1)
    assert session.position == CONTEXT


def test_decoding_needs_no_prompt_and_reset_forgets(session: Session) -> None:
    session.prefill(IDS[5:9])
    session.reset()
    assert session.position == 0
    for position in range(4):
        assert_close(session.decode(IDS[position]), EXPECTED[position])


@pytest.mark.parametrize("pieces", [(1, 9, 3), (7, 7), (8, 1, 1, 1), (2, 20)])
def test_prefill_in_pieces_agrees(session: Session, pieces: tuple[int, ...]) -> None:
    at = 0
    for count in pieces:
        assert_close(session.prefill(IDS[at : at + count]), EXPECTED[at : at + count])
        at += count


@pytest.mark.parametrize("count", [1, 2, CHUNK, CHUNK + 1, 2 * CHUNK + 3])
def test_extend_computes_only_the_last_row_and_the_same_numbers(session: Session, count: int) -> None:
    last = session.extend(IDS[:count])
    assert last.shape == (VOCABULARY,)
    assert_close(last, EXPECTED[count - 1])
    assert_close(session.decode(IDS[count]), EXPECTED[count])


def test_any_number_of_threads_gives_the_same_bits(toy_bundle: Path) -> None:
    def run(threads: int) -> bytes:
        with load(toy_bundle, threads=threads) as session:
            assert session.threads == threads
            rows = [session.prefill(IDS[:17])] + [session.decode(i)[None] for i in IDS[17:40]]
            return np.concatenate(rows).tobytes()

    one = run(1)
    for threads in (2, 3, 7):
        assert run(threads) == one


def test_sessions_are_independent(toy_bundle: Path) -> None:
    with load(toy_bundle, threads=1) as a, load(toy_bundle, threads=2) as b:
        a.prefill(IDS[:9])
        b.prefill(IDS[20:30])
        assert_close(a.decode(IDS[9]), EXPECTED[9])
        assert b.position == 10


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, VOCABULARY], "token 1 has the id 19, the vocabulary has the ids 0 to 18"),
        ([-1], "token 0 has the id -1, the vocabulary has the ids 0 to 18"),
        ([1 << 40], "token 0 has the id 1099511627776, the vocabulary has the ids 0 to 18"),
        ([], "there are no tokens to append"),
        ([1.5], "token ids must be a sequence of whole numbers"),
        ([[1]], "token ids must be a sequence of whole numbers"),
        ([1] * (CONTEXT + 1), "49 tokens at position 0 do not fit into the context of 48 tokens"),
    ],
)
def test_wrong_tokens_are_refused_and_change_nothing(session: Session, ids: list[int], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        session.prefill(ids)
    assert str(caught.value) == message
    assert session.position == 0
    assert_close(session.prefill(IDS[:3]), EXPECTED[:3])


def test_the_c_interface_refuses_wrong_tokens_itself(session: Session) -> None:
    import ctypes

    session.prefill(IDS[:4])
    ids = (ctypes.c_int32 * 2)(1, VOCABULARY)
    assert session._library.dsr1_prefill(session._handle, ids, 2, None) == 2
    assert session._library.dsr1_error(session._handle) == b"token 1 has the id 19, the vocabulary has the ids 0 to 18"
    assert session._library.dsr1_prefill(session._handle, ids, 0, None) == 1
    assert session._library.dsr1_decode(session._handle, -1) == 2
    assert_close(session.decode(IDS[4]), EXPECTED[4])


def test_a_router_without_numbers_is_an_error_with_the_layers_name(session: Session) -> None:
    session.prefill(IDS[:3])
    before = session._last_logits()
    # The bad token stands in the second chunk, so the first chunk has already written the cache.
    with pytest.raises(BundleError, match=r"^layers\.0\.experts: the router .* \(row 2\)"):
        session.prefill([*IDS[3 : 3 + CHUNK + 2], NAN_TOKEN, 1])
    assert session.position == 3
    assert session._last_logits().tobytes() == before.tobytes()
    with pytest.raises(BundleError, match=r"^layers\.0\.experts: the router"):
        session.decode(NAN_TOKEN)
    assert_close(session.prefill(IDS[3:20]), EXPECTED[3:20])


def test_a_closed_session_says_so(toy_bundle: Path) -> None:
    session = load(toy_bundle, threads=1)
    session.close()
    session.close()
    for use in (lambda: session.prefill([1]), lambda: session.decode(1), session.reset, lambda: session.position):
        with pytest.raises(SessionClosed, match=r"^the session is closed$"):
            use()


def test_generate_is_greedy_repeatable_and_stops_at_eos(toy_bundle: Path) -> None:
    with load(toy_bundle, threads=1) as session:
        greedy = session.generate(IDS[:4], 12, stop_at_eos=False)
        expected = list(IDS[:4])
        for _ in range(12):
            expected.append(int(toy_model.reference(toy_model.weights(), expected)[-1].argmax()))
        assert greedy == expected[4:]
        assert session.position == 4 + 11
        session.reset()
        sampled = session.generate(IDS[:4], 20, temperature=2.0, top_k=5, seed=5)
        session.reset()
        assert session.generate(IDS[:4], 20, temperature=2.0, top_k=5, seed=5) == sampled
        assert 3 not in sampled[:-1]
        with pytest.raises(
            ContextFull, match=r"4 tokens of prompt and 100 new ones need 103 places, the context of 48 tokens has"
        ):
            session.generate(IDS[:4], 100)


def copy_bundle(bundle: Path, to: Path) -> Path:
    shutil.copytree(bundle, to)
    return to


def edit_manifest(bundle: Path, **changes: object) -> None:
    path = bundle / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def write_binding(bundle: Path, data: bytes) -> None:
    """Put ``data`` in the place of weights.bind and into the manifest, so that only the C reader can find it wrong."""
    (bundle / "weights.bind").write_bytes(data)
    weights = json.loads((bundle / "manifest.json").read_text())["weights"]
    edit_manifest(bundle, weights={**weights, "binding_sha256": hashlib.sha256(data).hexdigest()})


def test_a_bundle_of_another_version_is_refused(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    edit_manifest(bundle, version=2)
    with pytest.raises(BundleError, match=r"manifest\.json has version 2, this runtime reads version 1; build the bundle again$"):
        load(bundle)
    edit_manifest(bundle, version=1, abi=9)
    with pytest.raises(BundleError, match=r"has abi 9, this runtime reads abi 1"):
        load(bundle)


def test_missing_cpu_features_are_named(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    edit_manifest(bundle, target={"cpuinfo_flags": ["sse2", "avx1024", "warp_drive"]})
    with pytest.raises(BundleError) as caught:
        load(bundle)
    assert str(caught.value) == (
        "b needs CPU features that this machine does not have: avx1024, warp_drive; build for a target that this machine supports"
    )
    assert caught.value.environment


def test_features_come_from_the_first_flags_line(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu sse2 avx2\nbugs\t\t: fma\n")
    assert missing_features({"target": {"cpuinfo_flags": ["avx2", "fma", "avx"]}}, cpuinfo) == ["fma", "avx"]


def test_damaged_files_are_refused(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    weights = bundle / "checkpoint" / "a.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    with pytest.raises(BundleError, match=rf"a\.safetensors has {len(content) - 1} bytes, the manifest says {len(content)}"):
        load(bundle)
    weights.write_bytes(content)
    library = next(bundle.glob("model-*.so"))
    code = bytearray(library.read_bytes())
    code[-1] ^= 1
    library.write_bytes(bytes(code))
    with pytest.raises(BundleError, match=r"is damaged: its SHA-256 is not the manifest's"):
        load(bundle)
    library.unlink()
    with pytest.raises(BundleError, match=r"model-.*\.so: No such file or directory"):
        load(bundle)
    with pytest.raises(BundleError, match=r"is not a bundle: it has no manifest\.json$"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (0, r"^weights\.bind is not a binding file$"),
        (8, r"^weights\.bind has version 254, this runtime reads version 1$"),
        (16, r"^weights\.bind is damaged: \d+ bytes instead of \d+$"),
        (40, r"^weights\.bind belongs to another program than the shared object; build the bundle again$"),
        (72 + 8, r"^checkpoint/a\.safetensors has \d+ bytes, the bundle was built with \d+; build the bundle again$"),
        (72 + 3 * 16 + 8, r"^weights\.bind: tensor embed has another type than the program takes$"),
        (72 + 3 * 16 + 18, r"^weights\.bind: tensor embed lies outside its file$"),
        (72 + 3 * 16 + 32, r"^weights\.bind: tensor embed has another type than the program takes$"),
    ],
)
def test_a_damaged_binding_is_refused(toy_bundle: Path, tmp_path: Path, at: int, message: str) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    data = bytearray((bundle / "weights.bind").read_bytes())
    data[at] ^= 0xFF
    write_binding(bundle, bytes(data))
    with pytest.raises(BundleError, match=message):
        load(bundle)


def test_every_truncation_of_the_binding_is_refused(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    data = (bundle / "weights.bind").read_bytes()
    for length in range(0, len(data), 41):
        write_binding(bundle, data[:length])
        with pytest.raises(BundleError, match=r"weights\.bind"):
            load(bundle)


def test_every_flipped_bit_of_the_binding_is_refused(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    binding = bundle / "weights.bind"
    data = binding.read_bytes()
    for at in range(0, len(data), 37):
        binding.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        with pytest.raises(BundleError, match=r"weights\.bind is damaged: its SHA-256 is not the manifest's"):
            load(bundle)


NEEDED_FIELDS = [
    ("target",),
    ("target", "cpuinfo_flags"),
    ("target", "cpuinfo_flags", 0),
    ("library",),
    ("library", "file"),
    ("library", "bytes"),
    ("library", "sha256"),
    ("weights",),
    ("weights", "binding_sha256"),
    ("weights", "files"),
    ("weights", "files", 0),
    ("weights", "files", 0, "path"),
    ("weights", "files", 0, "bytes"),
    ("vocabulary",),
    ("eos_token_ids",),
    ("eos_token_ids", 0),
]


@pytest.mark.parametrize("field", NEEDED_FIELDS, ids=lambda field: ".".join(map(str, field)))
def test_a_manifest_with_any_other_value_is_refused_or_harmless(
    toy_bundle: Path, tmp_path: Path, field: tuple[str | int, ...]
) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    name = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in field).removeprefix(".")
    for value in (None, True, 1.5, -1, 10**30, "", "x", "\0", [], [None], {}, {"a": 1}):
        manifest = json.loads((toy_bundle / "manifest.json").read_text())
        place = manifest
        for key in field[:-1]:
            place = place[key]
        other_type = type(place[field[-1]]) is not type(value) or bool(value and isinstance(value, list | dict))
        place[field[-1]] = value
        (bundle / "manifest.json").write_text(json.dumps(manifest))
        try:
            with load(bundle, threads=1) as session:
                assert not other_type
                assert_close(session.prefill(IDS[:3]), EXPECTED[:3])
        except BundleError as error:
            assert not other_type or f"manifest.json is damaged: {name}" in str(error)


def test_a_vocabulary_that_is_not_the_programs_is_refused(toy_bundle: Path, tmp_path: Path) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    for wrong in (1, VOCABULARY - 1, VOCABULARY + 1, 1 << 40):
        edit_manifest(bundle, vocabulary=wrong)
        message = rf"manifest\.json has a vocabulary of {wrong}, the shared object one of {VOCABULARY}; build the bundle again$"
        with pytest.raises(BundleError, match=message):
            load(bundle, threads=1)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, "\xff", "null"])
def test_a_manifest_that_is_no_manifest_is_refused(toy_bundle: Path, tmp_path: Path, text: str) -> None:
    bundle = copy_bundle(toy_bundle, tmp_path / "b")
    (bundle / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(BundleError, match=r"manifest\.json is not "):
        load(bundle)
    (bundle / "manifest.json").unlink()
    (bundle / "manifest.json").mkdir()
    with pytest.raises(BundleError, match=r"manifest\.json cannot be read: Is a directory$"):
        load(bundle)


@pytest.mark.parametrize("threads", [0, -1, 1025, 1 << 40, 1.5, "2"])
def test_a_number_of_threads_that_cannot_be_is_refused(toy_bundle: Path, threads: int) -> None:
    with pytest.raises(ValueError, match=rf"^threads is {threads}, expected 1 to 1024, or None for all CPUs$"):
        load(toy_bundle, threads=threads)
