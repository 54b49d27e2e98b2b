"""Signatures: who may vouch for a record, and what happens to one that was changed."""

import os
import stat
import subprocess
import sys
from dataclasses import replace

import pytest

from dsr1build.cache.record import Record, Signature, parse_record, render_record
from dsr1build.cache.signing import KEY_FILE_VARIABLE, Trust, load_signing_key, new_key_pair, refusal, sign_record, statement
from dsr1build.digest import BlobRef
from dsr1build.errors import EnvironmentUnfit, InvalidInput

KEY = "ab" * 32
RECORD = Record(KEY, {"kernel.o": (BlobRef("cd" * 32), 100), "kernel.json": (BlobRef("ef" * 32), 7)}, 1.25)


def make_key(directory, name="key.pem"):
    path = directory / name
    public = new_key_pair(path)
    key = load_signing_key(path, {})
    assert key.public == public
    return key


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path)


def test_a_signed_record_is_trusted_and_read_back(key):
    signed = sign_record(RECORD, key)
    assert refusal(parse_record(render_record(signed), KEY), Trust(frozenset({key.public}), False)) is None
    assert sign_record(signed, key) == signed


def test_any_changed_byte_is_refused(key):
    """Every byte of the record, in every bit: it is no record any more, or its signature is wrong, or its signer unknown."""
    data = render_record(sign_record(RECORD, key))
    trust = Trust(frozenset({key.public}), False)
    still_records = 0
    for at in range(len(data)):
        for bit in range(8):
            changed = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            try:
                record = parse_record(changed)
            except ValueError:
                continue
            still_records += 1
            assert refusal(record, trust) is not None, (at, bit)
    assert still_records > 500


@pytest.mark.parametrize(
    "change",
    [
        {"key": "ba" * 32},
        {"outputs": {}},
        {"outputs": {**RECORD.outputs, "more": (BlobRef("00" * 32), 1)}},
        {"outputs": {"kernel.o": RECORD.outputs["kernel.json"], "kernel.json": RECORD.outputs["kernel.o"]}},
        {"outputs": {**RECORD.outputs, "kernel.o": (BlobRef("cd" * 32), 101)}},
        {"outputs": {"kernel.obj": RECORD.outputs["kernel.o"], "kernel.json": RECORD.outputs["kernel.json"]}},
        {"seconds": None},
        {"seconds": 0.0},
        {"kind": "compile"},
        {"label": "attention"},
    ],
    ids=str,
)
def test_a_signature_holds_for_its_record_alone(key, change):
    signed = sign_record(RECORD, key)
    assert refusal(replace(signed, **change), Trust(frozenset({key.public}))) == "wrong signature"
    assert refusal(replace(signed, **change), Trust()) == "wrong signature"


def test_signer_policy(tmp_path):
    ours, theirs = make_key(tmp_path, "ours"), make_key(tmp_path, "theirs")
    by_theirs = sign_record(RECORD, theirs)
    assert refusal(by_theirs, Trust(frozenset({ours.public}))) == "unknown signer"
    assert refusal(by_theirs, Trust(frozenset({ours.public, theirs.public}), False)) is None
    # A key that was taken out of the profile counts no more, whenever it signed.
    assert refusal(by_theirs, Trust(frozenset({ours.public}), True)) == "unknown signer"
    assert refusal(by_theirs, Trust()) is None
    assert refusal(RECORD, Trust(frozenset({ours.public}), False)) == "unsigned"
    assert refusal(RECORD, Trust(frozenset({ours.public}), True)) is None
    assert refusal(RECORD, Trust()) is None
    # Another's name over our signature, and our name over another's.
    assert refusal(replace(by_theirs, signature=replace(by_theirs.signature, key=ours.public)), Trust()) == "wrong signature"
    stranger = Signature(theirs.public, sign_record(RECORD, ours).signature.value)
    assert refusal(replace(RECORD, signature=stranger), Trust(frozenset({theirs.public}))) == "wrong signature"


def test_a_public_key_that_is_no_point_is_a_wrong_signature():
    for text in ("ff" * 32, "00" * 32, "02" + "00" * 31):
        record = replace(RECORD, signature=Signature(f"ed25519:{text}", "00" * 64))
        assert refusal(record, Trust(frozenset({f"ed25519:{'aa' * 32}"}))) == "unknown signer"
        assert text == "00" * 32 or refusal(record, Trust()) == "wrong signature"


def test_the_statement_is_separate_from_other_uses_and_pinned():
    assert statement(Record(KEY, {})) == (
        b"dsr1build cache record 1\0M\x05\0\0\0\0\0\0\0"
        b"\x03\0\0\0\0\0\0\0keyS\x40\0\0\0\0\0\0\0" + KEY.encode() + b"\x04\0\0\0\0\0\0\0kindS\0\0\0\0\0\0\0\0"
        b"\x05\0\0\0\0\0\0\0labelS\0\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0outputsM\0\0\0\0\0\0\0\0"
        b"\x07\0\0\0\0\0\0\0secondsN"
    )


def test_memory_is_signed_too(key):
    signed = sign_record(replace(RECORD, peak=300), key)
    assert refusal(signed, Trust(frozenset({key.public}))) is None
    assert refusal(replace(signed, peak=301), Trust(frozenset({key.public}))) == "wrong signature"
    assert refusal(replace(signed, peak=0), Trust(frozenset({key.public}))) == "wrong signature"


def test_no_clock_is_asked(key, monkeypatch):
    signed = sign_record(RECORD, key)
    monkeypatch.setattr("time.time", lambda: 0.0)
    assert sign_record(RECORD, key) == signed
    assert refusal(signed, Trust(frozenset({key.public}), False)) is None


def test_a_new_key_is_for_its_owner_alone(tmp_path):
    old = os.umask(0)
    try:
        public = new_key_pair(tmp_path / "key.pem")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "key.pem").stat().st_mode) == 0o600
    assert public.startswith("ed25519:") and len(public) == 72
    with pytest.raises(InvalidInput, match="the file exists"):
        new_key_pair(tmp_path / "key.pem")
    with pytest.raises(EnvironmentUnfit, match="cannot be written: No such file or directory"):
        new_key_pair(tmp_path / "no" / "key.pem")


def test_a_key_never_enters_a_workspace(tmp_path):
    (tmp_path / "project" / "keys").mkdir(parents=True)
    (tmp_path / "project" / "BUILD.yaml").touch()
    (tmp_path / "link").symlink_to(tmp_path / "project" / "keys")
    for path in (tmp_path / "project" / "keys" / "k.pem", tmp_path / "link" / "k.pem"):
        with pytest.raises(InvalidInput, match="would lie in the workspace"):
            new_key_pair(path)
        assert not path.exists()


def test_a_key_never_lies_in_a_cache(tmp_path):
    (tmp_path / "cache" / "v1" / "manifests").mkdir(parents=True)
    path = tmp_path / "cache" / "v1" / "k.pem"
    with pytest.raises(InvalidInput, match="a private key does not belong in the cache"):
        new_key_pair(path)
    new_key_pair(tmp_path / "k.pem")
    (tmp_path / "k.pem").rename(path)
    with pytest.raises(InvalidInput, match="a private key does not belong in the cache"):
        load_signing_key(path, {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o620, 0o602, 0o610])
def test_a_key_that_others_can_reach_is_refused(tmp_path, mode):
    new_key_pair(tmp_path / "key.pem")
    (tmp_path / "key.pem").chmod(mode)
    with pytest.raises(EnvironmentUnfit) as caught:
        load_signing_key(tmp_path / "key.pem", {})
    path = tmp_path / "key.pem"
    assert caught.value.render() == (
        f"{path}: error: other users can read or replace the signing key\n"
        f"help: Run `chmod 600 {path}` as its owner; if others may have read it, make a new key."
    )


def test_the_variable_goes_before_the_profile(tmp_path):
    first, second = make_key(tmp_path, "first"), make_key(tmp_path, "second")
    assert load_signing_key(tmp_path / "first", {KEY_FILE_VARIABLE: str(tmp_path / "second")}).public == second.public
    assert load_signing_key(tmp_path / "first", {KEY_FILE_VARIABLE: ""}).public == first.public
    assert load_signing_key(None, {}) is None


def test_a_file_that_is_no_key_is_refused_without_repeating_it(tmp_path):
    path = tmp_path / "key.pem"
    other = subprocess.run(
        [
            sys.executable,
            "-c",
            "from cryptography.hazmat.primitives.asymmetric import x25519; from cryptography.hazmat.primitives import"
            " serialization as s; print(x25519.X25519PrivateKey.generate().private_bytes(s.Encoding.PEM,"
            " s.PrivateFormat.PKCS8, s.NoEncryption()).decode(), end='')",
        ],
        capture_output=True,
        check=True,
    ).stdout
    for content in (b"", b"secret words", other, bytes(range(256)), b"x" * 100_000):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(InvalidInput) as caught:
            load_signing_key(path, {})
        assert caught.value.render() == (
            f"{path}: error: the signing key is not an Ed25519 private key in PEM form without a password\n"
            "help: Make one with `dsr1build cache key new --output FILE`."
        )
    path.unlink()
    with pytest.raises(EnvironmentUnfit, match="cannot be read: No such file or directory"):
        load_signing_key(path, {})
    os.mkfifo(path, 0o600)
    with pytest.raises(InvalidInput, match="is not a file"):
        load_signing_key(path, {})


def test_a_private_key_is_not_shown(tmp_path):
    key = make_key(tmp_path)
    secret = (tmp_path / "key.pem").read_text().splitlines()[1]
    assert repr(key) == str(key) == f"SigningKey({key.public})"
    assert secret not in render_record(sign_record(RECORD, key)).decode()


def test_nothing_is_imported_until_a_signature_is_checked():
    code = (
        "import sys, dsr1build.cache.signing as s, dsr1build.cache.record as r\n"
        "s.refusal(r.Record('ab' * 32, {}), s.Trust())\n"
        "s.load_signing_key(None, {})\n"
        "print('cryptography' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
