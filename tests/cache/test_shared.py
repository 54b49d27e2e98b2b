"""The caches of one build as one: what is found where, what is believed, what a bad remote costs."""

import hashlib
import threading
import time

import pytest
from directory_remote import DirectoryRemote

from dsr1build.cache.policy import AttachedRemote
from dsr1build.cache.record import Record, parse_record, render_record
from dsr1build.cache.remote import RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.shared import Notices, SharedCache
from dsr1build.cache.signing import Trust, load_signing_key, new_key_pair, sign_record
from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, key_of


class Machine:
    """A machine with a store of its own; each ``with`` block is one build on it."""

    def __init__(self, directory, *remotes, trust=None, signer=None, writable=True, timeouts=None, **options):
        self.directory = directory
        self.remotes = [AttachedRemote(r, writable, timeouts or Timeouts(1.0, 3.0)) for r in remotes]
        self.trust = trust or Trust()
        self.signer = signer
        self.unchanged = True
        self.warnings = []
        self.alarms = []
        self.options = options

    def __enter__(self):
        self.store = LocalStore(self.directory, self.warnings.append, **self.options)
        notices = Notices(self.warnings.append, self.alarms.append)
        self.shared = SharedCache(self.store, self.remotes, self.trust, self.signer, lambda: self.unchanged, notices)
        return self

    def __exit__(self, *error):
        self.shared.finish()
        self.shared.close()
        self.store.close()

    def build(self, *texts):
        """Build what is in no cache; gives text -> source."""
        wave = {key_of(fields(text)): fields(text) for text in texts}
        found = self.shared.lookup_many(wave)
        sources = {}
        for text in texts:
            key = key_of(fields(text))
            if key in found:
                sources[text] = found[key].source
                result = found[key].result
            else:
                sources[text] = "built"
                path = self.directory.parent / "output"
                path.write_bytes(output(text))
                files = {"text": path, "sub/size": path}
                result = self.store.publish(key, fields(text), files, 0.5, "compile", text)
                self.shared.offer(key, fields(text), result, 0.5, "compile", text)
            assert self.store.read_blob(result.outputs["text"]) == output(text)
            assert set(result.outputs) == {"text", "sub/size"}
        return sources


def fields(text):
    return {"toy": "upper", "text": text}


def output(text):
    return text.upper().encode() * 100


def all_from(source, *texts):
    return dict.fromkeys(texts, source)


@pytest.fixture
def remote(tmp_path):
    return DirectoryRemote(tmp_path / "remote")


@pytest.fixture
def machine(tmp_path):
    number = iter(range(100))

    def make(*remotes, **options):
        directory = tmp_path / f"machine{next(number)}"
        directory.mkdir()
        return Machine(directory / "store", *remotes, **options)

    return make


@pytest.fixture
def key(tmp_path):
    new_key_pair(tmp_path / "key.pem")
    return load_signing_key(tmp_path / "key.pem", {})


REMOTE = "remote:dir://shared"
LOCAL = "local"


def test_what_one_machine_built_another_finds(machine, remote):
    with machine(remote) as first:
        assert first.build("a", "b", "c") == all_from("built", "a", "b", "c")
    assert sorted(remote.stored) == sorted(key_of(fields(t)) for t in "abc") and remote.closed
    second = machine(remote)
    with second:
        assert second.build("a", "b", "d") == {"a": REMOTE, "b": REMOTE, "d": "built"}
    with second:
        assert second.build("a", "b", "d") == all_from(LOCAL, "a", "b", "d")
    assert not (first.warnings or first.alarms or second.warnings or second.alarms)


def test_a_wave_is_one_request_a_remote_and_each_is_asked_for_what_the_one_before_lacks(machine, tmp_path):
    near, far = DirectoryRemote(tmp_path / "near", "near"), DirectoryRemote(tmp_path / "far", "far")
    with machine(far) as one:
        one.build("a", "b", "c")
    with machine(near) as two:
        two.build("b")
    near.calls.clear(), far.calls.clear(), far.asked.clear()
    with machine(near, far, writable=False) as three:
        assert three.build(*"abcd") == {"a": "remote:far", "b": "remote:near", "c": "remote:far", "d": "built"}
    assert near.calls == {"find_records": 1, "fetch_blobs": 1}
    assert far.calls == {"find_records": 1, "fetch_blobs": 1}
    assert far.asked == [[key_of(fields(t)) for t in "acd"]]


def test_the_record_and_the_fields_travel_with_their_signature(machine, remote, key):
    trust = Trust(frozenset({key.public}), False)
    with machine(remote, trust=trust, signer=key) as first:
        first.build("a")
    (name,) = remote.stored
    data = (remote.root / "records" / name).read_bytes()
    record = parse_record(data, name)
    assert (record.signature.key, record.kind, record.label, record.seconds) == (key.public, "compile", "a", 0.5)
    with machine(remote, trust=trust) as second:
        assert second.build("a") == {"a": REMOTE}
        assert render_record(second.store.record(name)) == data
        assert hashlib.sha256(second.store.read_blob(BlobRef(name))).hexdigest() == name


def forge(remote, name, change):
    path = remote.root / "records" / name
    path.write_bytes(change(path.read_bytes()))


def stranger_signs(tmp_path):
    new_key_pair(tmp_path / "stranger.pem")
    stranger = load_signing_key(tmp_path / "stranger.pem", {})
    return lambda data: render_record(sign_record(parse_record(data), stranger))


def unsign(data):
    record = parse_record(data)
    return render_record(Record(record.key, record.outputs, record.seconds, None, record.kind, record.label))


@pytest.mark.parametrize("case", ["stranger", "unsigned", "other files", "half", "empty", "replay", "revoked"])
def test_what_nobody_trusted_vouches_for_is_a_miss_with_one_alarm(machine, remote, key, tmp_path, case):
    trust = Trust(frozenset({key.public}), False)
    with machine(remote, trust=trust, signer=key) as first:
        first.build("a", "b", "c")
    names = [key_of(fields(t)) for t in "ab"]
    good = {name: (remote.root / "records" / name).read_bytes() for name in names}
    reader_trust = Trust(frozenset({"ed25519:" + "aa" * 32}), False) if case == "revoked" else trust
    changes = {
        "stranger": stranger_signs(tmp_path),
        "unsigned": unsign,
        "other files": lambda data: data.replace(b'"sub/size"', b'"sub/sizf"'),
        "half": lambda data: data[: len(data) // 2],
        "empty": lambda data: b"",
        "replay": lambda data: (remote.root / "records" / key_of(fields("c"))).read_bytes(),
        "revoked": lambda data: data,
    }
    for name in names:
        forge(remote, name, changes[case])
    why = {
        "stranger": "unknown signer",
        "unsigned": "unsigned",
        "other files": "wrong signature",
        "half": "Unterminated string",
        "empty": "Expecting value",
        "replay": "the record belongs to another key",
        "revoked": "unknown signer",
    }
    with machine(remote, trust=reader_trust, signer=None, writable=False) as second:
        assert second.build("a", "b") == all_from("built", "a", "b")
        assert len(second.alarms) == 1
    assert second.alarms[0].startswith(f"a result of dir://shared is not used: {why[case]}")
    assert second.alarms[0].endswith(f"(key {names[0]})")
    assert second.alarms[1:] == ["2 results of dir://shared in all were not used"]
    assert remote.calls["fetch_blobs"] == 0
    # Whoever has the key puts the good ones back.
    with machine(remote, trust=trust, signer=key) as third:
        expected = all_from(REMOTE if case == "revoked" else "built", "a", "b")
        assert third.build("a", "b") == expected
    assert {name: (remote.root / "records" / name).read_bytes() for name in names} == good


def test_every_flipped_byte_of_a_record_is_a_miss(machine, remote, key):
    trust = Trust(frozenset({key.public}), False)
    with machine(remote, trust=trust, signer=key) as first:
        first.build("a")
    (name,) = remote.stored
    path = remote.root / "records" / name
    good = path.read_bytes()
    with machine(remote, trust=trust, writable=False) as reader:
        for at in range(len(good)):
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x01]) + good[at + 1 :])
            assert reader.shared.lookup_many({name: fields("a")}) == {}, at
        path.write_bytes(good)
        assert len(reader.shared.lookup_many({name: fields("a")})) == 1


def test_results_kept_from_a_remote_count_only_while_their_signer_is_trusted(machine, remote, key):
    trust = Trust(frozenset({key.public}), False)
    with machine(remote, trust=trust, signer=key) as first:
        first.build("a")
    second = machine(remote, trust=trust)
    with second:
        assert second.build("a") == {"a": REMOTE}
    second.trust = Trust(frozenset({"ed25519:" + "aa" * 32}), False)
    with second:
        assert second.build("a") == {"a": "built"}
    assert [text.partition(":")[0] for text in second.alarms] == [
        f"the cache at {second.directory} holds results that are not used",
        "a result of dir",
    ]


def test_unsigned_results_are_not_uploaded_to_where_nobody_would_believe_them(machine, remote, key):
    with machine(remote, trust=Trust(frozenset({key.public}), False)) as first:
        first.build("a")
    assert remote.stored == []
    assert first.warnings == ["nothing is uploaded to dir://shared: results without a signature are refused, and there is no key"]


@pytest.mark.parametrize("damage", ["missing", "half", "empty", "flipped", "longer"])
def test_a_bad_blob_behind_a_record_is_made_again_in_the_same_build_and_uploaded(machine, remote, damage):
    with machine(remote) as first:
        first.build("a", "b")
    blob = remote.root / "blobs" / hashlib.sha256(output("a")).hexdigest()
    data = blob.read_bytes()
    if damage == "missing":
        blob.unlink()
    else:
        changed = {"half": data[:50], "empty": b"", "flipped": b"X" + data[1:], "longer": data + b"x"}
        blob.write_bytes(changed[damage])
    with machine(remote) as second:
        assert second.build("a", "b") == {"a": "built", "b": REMOTE}
    assert second.warnings == [] and second.alarms == []
    assert blob.read_bytes() == data
    with machine(remote) as third:
        assert third.build("a", "b") == all_from(REMOTE, "a", "b")


def test_a_remote_that_claims_wrong_bytes_are_right_is_not_believed(machine, remote):
    with machine(remote) as first:
        first.build("a")

    def lie(blobs, directory):
        for ref in blobs:
            (directory / ref.sha256).write_bytes(b"x" * blobs[ref])
        return frozenset(blobs)

    remote.fetch_blobs = lie
    for read_only in (False, True):
        with machine(remote, writable=False, read_only=read_only) as second:
            assert second.build("a") == {"a": "built"}


def test_answers_to_other_questions_are_ignored(machine, remote):
    with machine(remote) as first:
        first.build("a", "b")
    records = {path.name: path.read_bytes() for path in (remote.root / "records").iterdir()}
    remote.find_records = lambda actions: records
    with machine(remote) as second:
        assert second.build("a") == {"a": REMOTE}
        assert second.build("b") == {"b": REMOTE}


def test_a_store_that_is_read_only_still_serves_what_remotes_have(machine, remote):
    with machine(remote) as first:
        first.build("a", "b")
    with machine(remote, read_only=True) as second:
        assert second.build("a", "b") == all_from(REMOTE, "a", "b")
    assert not second.directory.exists() and second.alarms == []


def unavailable(_):
    raise RemoteUnavailable("it answered 503")


@pytest.mark.parametrize("method", ["find_records", "fetch_blobs"])
def test_the_first_failure_is_the_last_request(machine, remote, method):
    with machine(remote) as first:
        first.build(*"abcdef")
    remote.calls.clear()
    remote.faults[method] = unavailable
    with machine(remote) as second:
        assert second.build(*"abc") == all_from("built", *"abc")
        assert second.build(*"def") == all_from("built", *"def")
    assert remote.calls[method] == 1
    assert remote.calls["missing_blobs"] == remote.calls["store_blobs"] == 0
    assert second.warnings == ["the shared cache dir://shared is not used for the rest of this build: it answered 503"]


def test_the_next_remote_takes_over(machine, tmp_path):
    bad, good = DirectoryRemote(tmp_path / "bad", "bad"), DirectoryRemote(tmp_path / "good", "good")
    for remote in (bad, good):
        with machine(remote) as one:
            one.build("a", "b")
    bad.faults["fetch_blobs"] = unavailable
    with machine(bad, good) as two:
        assert two.build("a", "b") == all_from("remote:good", "a", "b")
    assert len(two.warnings) == 1


def test_hanging_costs_one_time_out_however_many_wait(machine, remote):
    with machine(remote) as first:
        first.build(*"abcdefgh")
    release = threading.Event()
    remote.faults["find_records"] = lambda actions: release.wait(30)
    remote.calls.clear()
    try:
        with machine(remote, timeouts=Timeouts(0.1, 0.4)) as second:
            started = time.monotonic()
            for text in "abcd":
                second.shared.begin({key_of(fields(text)): fields(text)})
            answers = []
            while second.shared.pending:
                answers += second.shared.collect(wait=True)
            assert sorted(key for key, _ in answers) == sorted(key_of(fields(t)) for t in "abcd")
            assert all(found is None for _, found in answers)
            assert second.build(*"efgh") == all_from("built", *"efgh")
            assert time.monotonic() - started < 5
    finally:
        release.set()
    assert remote.calls["find_records"] == 4 and remote.calls["missing_blobs"] == 0
    assert second.warnings == [
        "the shared cache dir://shared is not used for the rest of this build: no answer within 0.5 seconds"
    ]


def test_an_answer_that_comes_too_late_is_ignored(machine, remote):
    with machine(remote) as first:
        first.build("a")
    release = threading.Event()
    remote.faults["find_records"] = lambda actions: release.wait(30)
    # Other tests may have left threads that end with the process.
    before = set(threading.enumerate())
    with machine(remote, timeouts=Timeouts(0.1, 0.1)) as second:
        assert second.build("a") == {"a": "built"}
        release.set()
        for thread in set(threading.enumerate()) - before:
            thread.join(20)
            assert not thread.is_alive()
        assert remote.asked[-1:] == [[key_of(fields("a"))]]
        assert second.shared.collect() == []


def busy_first(times, retry_after):
    left = iter([True] * times)

    def fault(_):
        if next(left, False):
            raise RemoteBusy("429 Too Many Requests", retry_after)

    return fault


def test_a_pause_that_a_remote_asks_for_is_honoured_once(machine, remote):
    with machine(remote) as first:
        first.build("a", "b")
    remote.calls.clear()
    remote.faults["find_records"] = busy_first(1, 0.2)
    with machine(remote) as second:
        started = time.monotonic()
        assert second.build("a") == {"a": REMOTE}
        assert time.monotonic() - started >= 0.2
        assert remote.calls["find_records"] == 2 and second.warnings == []
        remote.faults["find_records"] = busy_first(1, 0.2)
        assert second.build("b") == {"b": "built"}
    assert remote.calls["find_records"] == 3
    assert second.warnings == ["the shared cache dir://shared is not used for the rest of this build: 429 Too Many Requests"]


def test_a_pause_beyond_the_time_out_is_not_waited_for(machine, remote):
    remote.faults["find_records"] = busy_first(100, 3600)
    with machine(remote) as one:
        assert one.build("a") == {"a": "built"}
    assert remote.calls == {"find_records": 1} and len(one.warnings) == 1


@pytest.mark.parametrize("method", ["missing_blobs", "store_blobs", "store_record"])
def test_a_refused_upload_ends_uploads_and_not_look_ups(machine, remote, method):
    with machine(remote) as first:
        first.build("a")

    def deny(_):
        raise RemoteDenied("403 Forbidden")

    remote.calls.clear()
    remote.faults[method] = deny
    with machine(remote) as second:
        assert second.build("b") == {"b": "built"}
        while not second.warnings:
            second.shared.collect()
        assert second.build("c") == {"c": "built"}
        assert second.build("a") == {"a": REMOTE}
    assert remote.calls[method] == 1
    assert second.warnings == ["nothing more is uploaded to dir://shared: 403 Forbidden"]


def test_a_remote_that_is_read_only_gets_nothing(machine, remote):
    with machine(remote, writable=False) as one:
        assert one.build("a") == {"a": "built"}
    assert remote.calls == {"find_records": 1} and remote.stored == []


def test_nothing_is_uploaded_once_tools_or_sources_have_changed(machine, remote):
    with machine(remote) as one:
        one.unchanged = False
        assert one.build("a", "b") == all_from("built", "a", "b")
    assert remote.calls == {"find_records": 1}
    assert one.warnings == ["nothing more is uploaded to dir://shared: tools or sources have changed since the build began"]


def test_hits_are_not_uploaded_anywhere(machine, tmp_path):
    near, far = DirectoryRemote(tmp_path / "near", "near"), DirectoryRemote(tmp_path / "far", "far")
    with machine(far) as one:
        one.build("a")
    with machine(near, far) as two:
        assert two.build("a") == {"a": "remote:far"}
    assert near.stored == []


def test_an_upload_that_hangs_holds_the_end_for_one_time_out(machine, remote):
    release = threading.Event()
    remote.faults["store_blobs"] = lambda blobs: release.wait(30)
    started = time.monotonic()
    try:
        with machine(remote, timeouts=Timeouts(0.1, 0.4)) as one:
            one.build("a", "b")
        assert time.monotonic() - started < 5
    finally:
        release.set()
    assert len(one.warnings) == 1 and "dir://shared" in one.warnings[0]
    assert remote.stored == []


def test_many_results_go_in_portions(machine, remote):
    texts = [f"text{number}" for number in range(150)]
    release = threading.Event()
    remote.faults["missing_blobs"] = lambda blobs: release.wait(30)
    with machine(remote, timeouts=Timeouts(5, 25)) as one:
        one.build(*texts)
        release.set()
    assert len(remote.stored) == 150 and remote.calls["store_blobs"] <= 1 + 6
    remote.calls.clear()
    with machine(remote) as two:
        assert two.build(*texts) == all_from(REMOTE, *texts)
    assert remote.calls["find_records"] == 1 and remote.calls["fetch_blobs"] == 5


def test_look_ups_do_not_hold_up_the_caller(machine, remote):
    with machine(remote) as first:
        first.build("a")
    release = threading.Event()
    remote.faults["find_records"] = lambda actions: release.wait(30)
    with machine(remote, timeouts=Timeouts(5, 25)) as second:
        name = key_of(fields("a"))
        second.shared.begin({name: fields("a")})
        assert second.shared.collect() == [] and second.shared.pending == 1
        assert 25 < second.shared.patience() <= 30
        release.set()
        ((answered, found),) = second.shared.collect(wait=True)
        assert (answered, found.source, second.shared.pending) == (name, REMOTE, 0)


def test_a_mistake_in_an_adapter_is_not_hidden(machine, remote):
    def stumble(_):
        raise ZeroDivisionError

    remote.faults["find_records"] = stumble
    with machine(remote) as one, pytest.raises(ZeroDivisionError):
        one.build("a")


def test_no_temporary_file_is_left(machine, remote, tmp_path, monkeypatch):
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    with machine(remote) as first:
        first.build("a", "b")
    with machine(remote) as second:
        second.build("a", "b", "c")
    assert list((tmp_path / "temporary").iterdir()) == []
