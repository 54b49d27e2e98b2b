"""The form of records: one spelling for one record, and nothing else is read."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsr1build.cache.record import LARGEST_RECORD, Record, Signature, parse_record, render_record
from dsr1build.digest import BlobRef

KEY = "ab" * 32
FILE = BlobRef("cd" * 32)
SIGNATURE = Signature("ed25519:" + "12" * 32, "34" * 64)
SIGNED = Record(KEY, {"kernel.o": (FILE, 100), "sub/k.json": (BlobRef("ef" * 32), 0)}, 1.25, SIGNATURE)

digests = st.binary(min_size=32, max_size=32).map(bytes.hex)
shown = st.characters(exclude_characters="/", exclude_categories=["C", "Z"], include_characters=" ")
names = st.lists(st.text(shown, min_size=1), min_size=1, max_size=3)
names = names.filter(lambda parts: not {".", ".."} & set(parts)).map("/".join)
records = st.builds(
    Record,
    digests,
    st.dictionaries(names, st.tuples(digests.map(BlobRef), st.integers(0, 2**64 - 1)), max_size=3),
    st.none() | st.floats(0, 1e12),
    st.none() | st.builds(Signature, digests.map("ed25519:{}".format), st.binary(min_size=64, max_size=64).map(bytes.hex)),
    st.sampled_from(["", "lower", "compile"]),
    st.text("abc é-+", max_size=20),
)


@given(records)
def test_what_is_rendered_is_read_back(record):
    data = render_record(record)
    assert parse_record(data, record.key) == record
    assert render_record(parse_record(data)) == data


def test_the_form_is_pinned():
    assert render_record(Record(KEY, {"kernel.o": (FILE, 100)})) == (
        b'{"key":"%s","outputs":{"kernel.o":{"sha256":"%s","size":100}},"version":1}' % (b"ab" * 32, b"cd" * 32)
    )
    assert render_record(Record(KEY, {}, 2.0, peak=300)) == b'{"key":"%s","outputs":{},"peak":300,"seconds":2.0,"version":1}' % (
        b"ab" * 32
    )
    assert render_record(SIGNED).endswith(
        b'"seconds":1.25,"signature":{"key":"ed25519:%s","value":"%s"},"version":1}' % (b"12" * 32, b"34" * 64)
    )


@given(records, st.data())
def test_bytes_that_are_read_are_bytes_that_were_rendered(record, data):
    good = render_record(record)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    try:
        parsed = parse_record(changed)
    except ValueError:
        return
    assert render_record(parsed) == changed


def test_no_prefix_of_a_record_is_a_record():
    data = render_record(SIGNED)
    for size in range(len(data)):
        with pytest.raises(ValueError):
            parse_record(data[:size])


def fields(**changes):
    base = json.loads(render_record(SIGNED))
    base.update(changes)
    return {name: value for name, value in base.items() if value is not ...}


FILES = {"kernel.o": {"sha256": "cd" * 32, "size": 100}}


@pytest.mark.parametrize(
    "changed",
    [
        fields(version=2),
        fields(version=True),
        fields(version=...),
        fields(key=KEY.upper()),
        fields(key=KEY[:-1]),
        fields(key=["ab" * 32]),
        fields(key=...),
        fields(outputs=...),
        fields(outputs=[]),
        fields(outputs={"../kernel.o": FILES["kernel.o"]}),
        fields(outputs={"/etc/passwd": FILES["kernel.o"]}),
        fields(outputs={"a//b": FILES["kernel.o"]}),
        fields(outputs={"": FILES["kernel.o"]}),
        fields(outputs={"a\0b": FILES["kernel.o"]}),
        fields(outputs={"\ud800": FILES["kernel.o"]}),
        fields(outputs={"k": {"sha256": "cd" * 32, "size": -1}}),
        fields(outputs={"k": {"sha256": "cd" * 32, "size": True}}),
        fields(outputs={"k": {"sha256": "cd" * 32, "size": 1.0}}),
        fields(outputs={"k": {"sha256": "cd" * 32, "size": 2**64}}),
        fields(outputs={"k": {"sha256": "CD" * 32, "size": 1}}),
        fields(outputs={"k": {"sha256": "cd" * 32}}),
        fields(outputs={"k": {"sha256": "cd" * 32, "size": 1, "mode": 493}}),
        fields(outputs={"k": "cd" * 32}),
        fields(seconds=None),
        fields(seconds=-1.0),
        fields(seconds=1),
        fields(seconds=10**400),
        fields(seconds=True),
        fields(seconds="1"),
        fields(signature=None),
        fields(signature={}),
        fields(signature="34" * 64),
        fields(signature={"key": "12" * 32, "value": "34" * 64}),
        fields(signature={"key": SIGNATURE.key, "value": "34" * 63}),
        fields(signature={"key": SIGNATURE.key, "value": ["34"]}),
        fields(signature={"key": SIGNATURE.key, "value": SIGNATURE.value, "time": 0}),
        fields(expires=0),
        [],
        "record",
        None,
    ],
    ids=repr,
)
def test_anything_else_is_refused(changed):
    with pytest.raises(ValueError):
        parse_record(json.dumps(changed, sort_keys=True, separators=(",", ":")).encode())


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        render_record(SIGNED) + b"\n",
        b" " + render_record(SIGNED),
        render_record(SIGNED).decode().encode("utf-16"),
        render_record(SIGNED).replace(b'"seconds":1.25', b'"seconds":NaN'),
        render_record(SIGNED).replace(b'"seconds":1.25', b'"seconds":Infinity'),
        render_record(SIGNED).replace(b'"seconds":1.25', b'"seconds":1.250'),
        render_record(SIGNED).replace(b'"seconds":1.25', b'"seconds":1.25,"seconds":1.25'),
        render_record(SIGNED).replace(b"kernel", b"\\u006bernel"),
        b"9" * 10_000,
    ],
    ids=lambda data: repr(data[:20]),
)
def test_other_spellings_and_other_data_are_refused(data):
    with pytest.raises(ValueError):
        parse_record(data)


def test_a_record_of_another_key_is_refused():
    with pytest.raises(ValueError, match="belongs to another key"):
        parse_record(render_record(SIGNED), "ba" * 32)


def test_size_is_bounded_in_both_directions():
    large = Record(KEY, {f"file{number}": (FILE, 1) for number in range(LARGEST_RECORD // 90)})
    with pytest.raises(ValueError, match="more than 1048576"):
        render_record(large)
    with pytest.raises(ValueError, match="more than 1048576"):
        parse_record(b" " * (LARGEST_RECORD + 1))
