"""Keys and digests count in their full width: nothing is found by a part of a key, or by one that agrees in a part."""

import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsr1build.cache.index import Index
from dsr1build.cache.record import Record, parse_record, render_record
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, encode, key_of

DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A store with 60 results, each with a content of its own, and the content of each key."""
    directory = tmp_path_factory.mktemp("filled")
    contents = {}
    with LocalStore(directory / "store", pytest.fail) as store:
        for number in range(60):
            fields = {"kernel": number % 7, "tokens": number}
            source = directory / "source"
            source.write_bytes(f"object {number}".encode())
            contents[key_of(fields)] = store.publish(key_of(fields), fields, {"kernel.o": source}).key, source.read_bytes()
    return directory / "store", contents


def test_many_keys_are_distinct_and_each_finds_its_own_bytes(filled):
    directory, contents = filled
    assert len(contents) == 60 and {len(key) for key in contents} == {64}
    with LocalStore(directory, pytest.fail) as store:
        for key, (published, data) in contents.items():
            found = store.lookup(key)
            assert found is not None and found.key == published == key
            assert store.read_blob(found.outputs["kernel.o"]) == data
        entries = store.entries()
    assert {len(key) for key in entries} == {64} == {len(entry.manifest.sha256) for entry in entries.values()}
    files = [path.name for tree in ("blobs", "manifests") for path in (directory / "v1" / tree).rglob("*") if path.is_file()]
    assert len(files) == 60 * 3 and {len(name) for name in files} == {64}


def test_no_part_of_a_key_and_no_other_spelling_finds_anything(filled):
    directory, contents = filled
    with LocalStore(directory, lambda text: None) as store:
        for key in list(contents)[:6]:
            others = {key[:length] for length in range(64)} | {key[length:] for length in range(1, 64)}
            others |= {key + "0", key + key, key.upper(), " " + key, key + "\n", key[:32] + "-" + key[32:], "0x" + key}
            assert [other for other in others - {key} if store.lookup(other) is not None] == []


@pytest.mark.parametrize("row", [b"totals", b"counters", b"complete 2"])
def test_rows_about_the_whole_are_no_results(filled, row):
    with LocalStore(filled[0], lambda text: None) as store:
        assert store.lookup(row.hex()) is None and store.record_bytes(row.hex()) is None


def test_a_key_that_agrees_in_all_digits_but_one_is_another_key(filled):
    directory, contents = filled
    with LocalStore(directory, lambda text: None) as store:
        key = next(iter(contents))
        for place in range(64):
            other = key[:place] + format(int(key[place], 16) ^ 1, "x") + key[place + 1 :]
            assert store.lookup(other) is None


def test_an_index_that_confuses_two_keys_of_one_beginning_makes_a_miss(filled):
    directory, contents = filled
    keys = list(contents)
    with LocalStore(directory, lambda text: None) as store:
        entries = store.entries()
    wrong = {key[:16] + other[16:]: entries[key] for key, other in itertools.pairwise(keys)}
    index = Index(directory / "v1" / "index", lambda: iter(()))
    for key, entry in wrong.items():
        index.put(key, entry)
    index.close()
    with LocalStore(directory, lambda text: None) as store:
        assert [key for key in wrong if store.lookup(key) is not None] == []
        assert all(store.lookup(key) is not None for key in keys[:20])


@settings(max_examples=200, deadline=None)
@given(DIGESTS, DIGESTS, st.integers(0, 63))
def test_a_record_is_that_of_its_whole_key(key, output, place):
    data = render_record(Record(key, {"kernel.o": (BlobRef(output), 7)}, 1.0, None, "compile", "k"))
    assert parse_record(data, key).outputs["kernel.o"] == (BlobRef(output), 7)
    other = key[:place] + format(int(key[place], 16) ^ 1, "x") + key[place + 1 :]
    for wrong in (other, key[:place], key[:16], key + "0"):
        with pytest.raises(ValueError):
            parse_record(data, wrong)


@settings(max_examples=100, deadline=None)
@given(DIGESTS, st.integers(1, 63))
def test_a_record_with_a_shortened_digest_is_refused(digest, length):
    whole = render_record(Record(digest, {"kernel.o": (BlobRef("ab" * 32), 7)}, 1.0, None, "compile", "k"))
    for text in (digest, "ab" * 32):
        with pytest.raises(ValueError):
            parse_record(whole.replace(text.encode(), text[:length].encode()), None)


FIELD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.dictionaries(st.text(max_size=6), FIELD_VALUES, max_size=4), min_size=2, max_size=6))
def test_equal_keys_are_equal_fields(fields):
    for one in fields:
        for other in fields:
            assert (key_of(one) == key_of(other)) == (encode(one) == encode(other))
            assert len(key_of(one)) == 64


def test_kernels_that_share_the_beginning_of_their_digest_do_not_share_a_result():
    with tempfile.TemporaryDirectory() as name, LocalStore(Path(name) / "store", pytest.fail) as store:
        source = Path(name) / "source"
        results = []
        for tail in "0123456789abcdef":
            fields = {"kernel": BlobRef("ab" * 31 + "0" + tail)}
            assert store.lookup(key_of(fields)) is None
            source.write_text(tail)
            results.append(store.publish(key_of(fields), fields, {"kernel.o": source}))
        assert [store.read_blob(result.outputs["kernel.o"]) for result in results] == [t.encode() for t in "0123456789abcdef"]
