"""What every remote promises (dsr1build/cache/remote.py), held against every adapter with a real server behind it."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsr1build.cache.remote import ActionName, RemoteUnavailable
from dsr1build.digest import BlobRef, encode, sha256_hex

MiB = 1 << 20


@pytest.fixture
def remote(open_remote):
    remote = open_remote()
    yield remote
    remote.close()


@pytest.fixture
def blob(tmp_path):
    (tmp_path / "sources").mkdir()

    def blob(seed, size):
        data = random.Random(f"{seed} {tmp_path.name}").randbytes(size)
        path = tmp_path / "sources" / sha256_hex(data)
        path.write_bytes(data)
        return BlobRef(path.name), size, path

    return blob


@pytest.fixture
def into(tmp_path):
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def action(*seed):
    fields = encode({"seed": list(map(str, seed))})
    return ActionName(sha256_hex(fields), len(fields))


def store(remote, *blobs):
    remote.store_blobs({ref: path for ref, _, path in blobs})


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_blobs_of_every_size_come_back_whole(remote, blob, into):
    blobs = [blob(size, size) for size in (0, 1, 1000, 100_000, 4 * MiB - 300, 4 * MiB, 9 * MiB + 1)]
    sizes = {ref: size for ref, size, _ in blobs}
    store(remote, *blobs)
    assert remote.missing_blobs(sizes) == frozenset()
    assert remote.fetch_blobs(sizes, into) == sizes.keys()
    assert contents(into) == {ref.sha256: path.read_bytes() for ref, _, path in blobs}


def test_many_blobs_need_more_than_one_batch(remote, blob, into):
    blobs = [blob(number, 300_000) for number in range(40)]
    store(remote, *blobs)
    assert remote.fetch_blobs({ref: size for ref, size, _ in blobs}, into) == {ref for ref, _, _ in blobs}


def test_missing_blobs_are_told_and_left_out(remote, blob, into):
    kept, lost, large = blob("kept", 5000), blob("lost", 5000), blob("lost large", 5 * MiB)
    store(remote, kept)
    sizes = {ref: size for ref, size, _ in (kept, lost, large)}
    assert remote.missing_blobs(sizes) == {lost[0], large[0]}
    assert remote.fetch_blobs(sizes, into) == {kept[0]}
    assert list(contents(into)) == [kept[0].sha256]


def test_a_blob_of_another_length_than_expected_is_left_out(remote, blob, into):
    small, large = blob("small", 5000), blob("large", 5 * MiB)
    store(remote, small, large)
    assert remote.fetch_blobs({small[0]: 4999, large[0]: 5 * MiB - 1}, into) == frozenset()
    assert contents(into) == {}


def test_records_come_back_by_key(remote, blob):
    output = blob("output", 1000)
    store(remote, output)
    wanted = {}
    for number in range(30):
        name = action("records", number)
        wanted[name.key] = bytes([number]) * (10 + 3000 * number)
        remote.store_record(name, wanted[name.key], {"kernel.o": output[:2], "sub/list": output[:2]})
    asked = [action("records", number) for number in range(200)]
    assert remote.find_records(asked) == wanted
    assert remote.find_records([]) == {}


def test_a_record_may_be_stored_again(remote, blob):
    output = blob("output", 1000)
    store(remote, output)
    for _ in range(2):
        remote.store_record(action("again"), b"{again}", {"out": output[:2]})
    assert remote.find_records([action("again")]) == {action("again").key: b"{again}"}


def test_the_encoded_fields_may_be_given_as_a_blob(remote, tmp_path, blob):
    fields = encode({"fields": "of an action"})
    path = tmp_path / "fields"
    path.write_bytes(fields)
    output = blob("output", 1000)
    remote.store_blobs({BlobRef(sha256_hex(fields)): path, output[0]: output[2]})
    name = ActionName(sha256_hex(fields), len(fields))
    remote.store_record(name, b"{record}", {"out": output[:2]})
    assert remote.find_records([name]) == {name.key: b"{record}"}


@pytest.mark.parametrize("size", [5000, 6 * MiB])
def test_a_file_that_changed_is_not_stored(remote, blob, size):
    ref, _, path = blob("changed", size)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(RemoteUnavailable):
        remote.store_blobs({ref: path})
    assert remote.missing_blobs({ref: size}) == {ref}


def test_a_file_that_is_gone_is_not_stored(remote, blob):
    ref, _, path = blob("gone", 5000)
    path.unlink()
    with pytest.raises(RemoteUnavailable):
        remote.store_blobs({ref: path})


def test_several_threads_share_a_remote(remote, blob, tmp_path):
    def turn(number):
        own = blob(("thread", number), 50_000)
        store(remote, own)
        remote.store_record(action("thread", number), b"%d" % number, {"out": own[:2]})
        directory = tmp_path / f"thread {number}"
        directory.mkdir()
        found = remote.find_records([action("thread", number)])
        return found == {action("thread", number).key: b"%d" % number} and remote.fetch_blobs({own[0]: own[1]}, directory)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(turn, range(12)))


def test_a_closed_remote_says_so(open_remote, tmp_path):
    remote = open_remote()
    remote.close()
    remote.close()
    with pytest.raises(RemoteUnavailable):
        remote.find_records([action("closed")])
