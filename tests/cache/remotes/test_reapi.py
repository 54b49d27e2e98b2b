"""What is particular to REAPI: broken servers, limits, compressed blobs, instances, read-only servers, addresses."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib

import grpc
import pytest
import zstandard
from servers_reapi import broken_line, free_port, scripted

from dsr1build.cache.remote import ActionName, RemoteBusy, RemoteDenied, RemoteUnavailable, Timeouts
from dsr1build.cache.remotes.proto import generate, message
from dsr1build.cache.remotes.reapi import open_reapi
from dsr1build.cache.remotes.reapi_compress import DEFLATE, ZSTD
from dsr1build.digest import BlobRef, sha256_hex
from dsr1build.errors import InvalidInput

MiB = 1 << 20
SHORT = Timeouts(connect=0.5, request=1.0)
ACTION = ActionName(sha256_hex(b"an action"), 9)
CAS, STREAM = "ContentAddressableStorage", "google.bytestream.ByteStream"


@pytest.fixture
def opened():
    with contextlib.ExitStack() as stack:

        def opened(url, timeouts=None, headers=None):
            remote = open_reapi(url, timeouts=timeouts or Timeouts(), headers=headers or {})
            stack.callback(remote.close)
            return remote

        yield opened


@pytest.fixture
def blob(tmp_path):
    (tmp_path / "sources").mkdir()

    def blob(data):
        path = tmp_path / "sources" / sha256_hex(data)
        path.write_bytes(data)
        return BlobRef(path.name), len(data), path

    return blob


@pytest.fixture
def into(tmp_path):
    (tmp_path / "into").mkdir()
    return tmp_path / "into"


def capabilities(**fields):
    cache = {"digest_functions": [1], "action_cache_update_capabilities": {"update_enabled": True}, **fields}
    return {("Capabilities", "GetCapabilities"): lambda request, context: _capabilities_of(cache)}


def _capabilities_of(cache):
    return message("ServerCapabilities")(cache_capabilities=message("CacheCapabilities")(**cache))


def refuse(code, details="no", metadata=()):
    def answer(request, context):
        context.set_trailing_metadata(metadata)
        context.abort(code, details)

    return answer


def batch_answer(data, compressor=0):
    """Answers BatchReadBlobs with the bytes ``data(hash)``."""

    def answer(request, context):
        entry = message("BatchReadBlobsResponse").Response
        return message("BatchReadBlobsResponse")(
            responses=[entry(digest=digest, data=data(digest.hash), compressor=compressor) for digest in request.digests]
        )

    return answer


# Servers that keep the wrong bytes


def damage(server, ref, change):
    found = list((server.home / "store/cas/objects").glob(f"{ref.sha256[:2]}/{ref.sha256[2:]}"))
    assert len(found) == 1
    found[0].chmod(0o600)
    found[0].write_bytes(change(found[0].read_bytes()))


@pytest.mark.parametrize("size", [2000, 5 * MiB])
@pytest.mark.parametrize(
    "change",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: data[: len(data) // 2],
        lambda data: data + b"more",
        lambda data: b"",
    ],
    ids=["flipped", "half", "longer", "nothing"],
)
def test_of_blobs_damaged_on_the_servers_disk_only_right_bytes_arrive(casd, opened, blob, into, size, change):
    bad, good = blob(os.urandom(size)), blob(os.urandom(1000))
    remote = opened(casd.url())
    remote.store_blobs({bad[0]: bad[2], good[0]: good[2]})
    damage(casd, bad[0], change)
    arrived = remote.fetch_blobs({bad[0]: bad[1], good[0]: good[1]}, into)
    # Of a file that has become longer this server sends the part that was asked for, which is the blob.
    whole = {good[0], bad[0]} if change(b"blob").startswith(b"blob") else {good[0]}
    assert arrived == whole
    assert {path.name: sha256_hex(path.read_bytes()) for path in into.iterdir()} == {ref.sha256: ref.sha256 for ref in whole}


def test_a_record_damaged_on_the_servers_disk_is_a_miss(casd, opened, blob):
    output = blob(b"output" * 100)
    remote = opened(casd.url())
    remote.store_blobs({output[0]: output[2]})
    remote.store_record(ACTION, b"{record}", {"out": output[:2]})
    damage(casd, BlobRef(sha256_hex(b"{record}")), lambda data: b"{recorx}")
    assert remote.find_records([ACTION]) == {}


# Servers that break off


@pytest.mark.parametrize("after", [2 * MiB, 0])
def test_a_server_killed_in_a_transfer(casd, opened, blob, into, after):
    large = blob(os.urandom(12 * MiB))
    opened(casd.url()).store_blobs({large[0]: large[2]})
    with broken_line(casd.port, after, casd.process.kill) as port:
        begun = time.monotonic()
        with pytest.raises(RemoteUnavailable):
            opened(f"grpc://127.0.0.1:{port}", Timeouts(1.0, 2.0)).fetch_blobs({large[0]: large[1]}, into)
        assert time.monotonic() - begun < 6
    assert list(into.iterdir()) == []


def test_a_transfer_that_stops_is_bounded(casd, opened, blob, into):
    large = blob(os.urandom(8 * MiB))
    opened(casd.url()).store_blobs({large[0]: large[2]})
    with broken_line(casd.port, 2 * MiB, lambda: None) as port:
        begun = time.monotonic()
        with pytest.raises(RemoteUnavailable, match="DEADLINE_EXCEEDED"):
            opened(f"grpc://127.0.0.1:{port}", Timeouts(1.0, 1.5)).fetch_blobs({large[0]: large[1]}, into)
        assert time.monotonic() - begun < 5
    assert list(into.iterdir()) == []


def test_a_stopped_server_costs_one_timeout(casd, opened):
    remote = opened(casd.url(), SHORT)
    assert remote.find_records([ACTION]) == {}
    casd.process.send_signal(signal.SIGSTOP)
    try:
        begun = time.monotonic()
        with pytest.raises(RemoteUnavailable, match="DEADLINE_EXCEEDED"):
            remote.find_records([ActionName(sha256_hex(b"%d" % number), 9) for number in range(300)])
        assert time.monotonic() - begun < 3
    finally:
        casd.process.send_signal(signal.SIGCONT)


def test_a_server_that_comes_back_is_used_again(casd, opened):
    remote = opened(casd.url(), SHORT)
    casd.process.send_signal(signal.SIGSTOP)
    with pytest.raises(RemoteUnavailable):
        remote.find_records([ACTION])
    casd.process.send_signal(signal.SIGCONT)
    until = time.monotonic() + 20
    while time.monotonic() < until:
        with contextlib.suppress(RemoteUnavailable):
            assert remote.find_records([ACTION]) == {}
            return
        time.sleep(0.1)
    pytest.fail("the remote was not used again")


def test_a_listener_that_says_nothing_costs_one_connect_timeout_for_all_threads(opened):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        remote = opened(f"grpc://127.0.0.1:{listener.getsockname()[1]}", SHORT)
        errors = []

        def look_up():
            try:
                remote.find_records([ACTION])
            except RemoteUnavailable as error:
                errors.append(str(error))

        threads = [threading.Thread(target=look_up) for _ in range(4)]
        begun = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        look_up()
        assert time.monotonic() - begun < 2
    assert errors == [f"{remote.name}: GetActionResult: no connection within 0.5 s"] * 5


def test_a_port_without_a_server_fails_at_once(opened):
    remote = opened(f"grpc://127.0.0.1:{free_port()}", Timeouts(connect=30.0, request=30.0))
    begun = time.monotonic()
    with pytest.raises(RemoteUnavailable, match="UNAVAILABLE"):
        remote.find_records([ACTION])
    assert time.monotonic() - begun < 10


def test_a_server_of_other_services_is_no_cache(opened, into):
    with scripted({}) as url:
        remote = opened(url)
        with pytest.raises(RemoteUnavailable, match="does not offer this part of the Remote Execution API"):
            remote.find_records([ACTION])
        with pytest.raises(RemoteUnavailable, match="UNIMPLEMENTED"):
            remote.fetch_blobs({BlobRef("0" * 64): 5}, into)


def test_nothing_is_printed_by_a_dead_server_or_a_child_process():
    code = f"""
import subprocess, sys
from dsr1build.cache.remote import *
from dsr1build.cache.remotes.reapi import open_reapi
remote = open_reapi("grpc://127.0.0.1:{free_port()}", timeouts=Timeouts(0.5, 1.0))
try:
    remote.find_records([ActionName("0" * 64, 1)])
except RemoteUnavailable:
    subprocess.run([sys.executable, "-c", ""])
remote.close()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# Servers that refuse


def retry_info(seconds):
    delay = message("google.rpc.RetryInfo")(retry_delay={"seconds": seconds, "nanos": 500_000_000}).SerializeToString()
    detail = {"type_url": "type.googleapis.com/google.rpc.RetryInfo", "value": delay}
    return message("google.rpc.Status")(code=8, details=[detail]).SerializeToString()


@pytest.mark.parametrize(
    ("metadata", "seconds"),
    [((), 0.0), ((("grpc-status-details-bin", retry_info(7)),), 7.5), ((("grpc-status-details-bin", b"\xff\xff"),), 0.0)],
)
def test_a_busy_server_says_when_to_come_back(opened, metadata, seconds):
    busy = refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, metadata=metadata)
    with scripted({("ActionCache", "GetActionResult"): busy}) as url, pytest.raises(RemoteBusy) as caught:
        opened(url).find_records([ACTION])
    assert caught.value.retry_after == seconds


@pytest.mark.parametrize("code", [grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED])
def test_a_server_that_denies(opened, code):
    with scripted({("ActionCache", "GetActionResult"): refuse(code)}) as url, pytest.raises(RemoteDenied):
        opened(url).find_records([ACTION])


def test_headers_are_sent_and_never_shown(opened):
    seen = []

    def answer(request, context):
        seen.extend(value for key, value in context.invocation_metadata() if key == "authorization")
        context.abort(grpc.StatusCode.UNAUTHENTICATED, "who are you?")

    with scripted({("ActionCache", "GetActionResult"): answer}) as url:
        remote = opened(url, headers={"Authorization": "Bearer s3cr3t"})
        with pytest.raises(RemoteDenied) as caught:
            remote.find_records([ACTION])
    assert seen == ["Bearer s3cr3t"]
    assert "s3cr3t" not in str(caught.value) + remote.name


def test_a_server_with_another_digest_function_is_refused(opened, into):
    with (
        scripted(capabilities(digest_functions=[])) as url,
        pytest.raises(RemoteUnavailable, match="does not name blobs by SHA-256"),
    ):
        opened(url).fetch_blobs({BlobRef("0" * 64): 5}, into)


# Instances, read-only servers, limits


def test_instances_are_separate_and_read_only_ones_take_no_records(buildgrid, opened, blob):
    output = blob(os.urandom(1000))
    frozen = opened(buildgrid.url("team/frozen"))
    assert frozen.name == f"grpc://127.0.0.1:{buildgrid.port}/team/frozen"
    opened(buildgrid.url("main")).store_blobs({output[0]: output[2]})
    assert frozen.missing_blobs({output[0]: output[1]}) == {output[0]}
    frozen.store_blobs({output[0]: output[2]})
    with pytest.raises(RemoteDenied, match="takes no updates"):
        frozen.store_record(ACTION, b"{record}", {"out": output[:2]})
    assert frozen.find_records([ACTION]) == {}


def test_an_instance_that_is_not_there(buildgrid, opened):
    with pytest.raises(RemoteUnavailable, match="INVALID_ARGUMENT"):
        opened(buildgrid.url("elsewhere")).find_records([ACTION])


def test_a_server_that_takes_few_calls_at_a_time_answers_all(buildgrid, opened, blob):
    output = blob(os.urandom(1000))
    remote = opened(buildgrid.url("main"))
    remote.store_blobs({output[0]: output[2]})
    actions = [ActionName(sha256_hex(b"few %d" % number), 7) for number in range(400)]
    for action in actions[::50]:
        remote.store_record(action, action.key.encode(), {"out": output[:2]})
    assert remote.find_records(actions) == {action.key: action.key.encode() for action in actions[::50]}


def test_the_servers_batch_limit_is_honoured(opened, blob):
    limit, batches, streamed = 10_000, [], []

    def update(request, context):
        batches.append(request.ByteSize())
        response = message("BatchUpdateBlobsResponse")
        return response(responses=[response.Response(digest=entry.digest) for entry in request.requests])

    def write(requests, context):
        pieces = list(requests)
        streamed.append((pieces[0].resource_name, sum(len(piece.data) for piece in pieces), pieces[-1].finish_write))
        return message("google.bytestream.WriteResponse")(committed_size=streamed[-1][1])

    methods = {(CAS, "BatchUpdateBlobs"): update, (STREAM, "Write"): write}
    blobs = [blob(os.urandom(3000)) for _ in range(10)]
    large = blob(os.urandom(10_000))
    with scripted(capabilities(max_batch_total_size_bytes=limit) | methods) as url:
        opened(url + "/team/a").store_blobs({ref: path for ref, _, path in [*blobs, large]})
    assert len(batches) == 4
    assert max(batches) <= limit
    ((resource, size, finished),) = streamed
    assert resource.startswith("team/a/uploads/")
    assert resource.endswith(f"/blobs/{large[0].sha256}/10000")
    assert (size, finished) == (10_000, True)


def test_a_server_that_forgets_an_upload_is_noticed(opened, blob):
    small, large = blob(b"small"), blob(os.urandom(5 * MiB))
    methods = {
        (CAS, "BatchUpdateBlobs"): lambda request, context: message("BatchUpdateBlobsResponse")(),
        (STREAM, "Write"): lambda requests, context: message("google.bytestream.WriteResponse")(
            committed_size=sum(len(request.data) for request in requests) - 1
        ),
    }
    with scripted(capabilities() | methods) as url:
        with pytest.raises(RemoteUnavailable, match="no answer for 1 of 1 blobs"):
            opened(url).store_blobs({small[0]: small[2]})
        with pytest.raises(RemoteUnavailable, match=f"kept {5 * MiB - 1} of {5 * MiB} bytes"):
            opened(url).store_blobs({large[0]: large[2]})


# Servers that lie


def test_answers_that_nobody_asked_for_are_ignored(opened, into):
    def answer(request, context):
        entry = message("BatchReadBlobsResponse").Response
        other = message("Digest")(hash="../../outside", size_bytes=3)
        return message("BatchReadBlobsResponse")(responses=[entry(digest=other, data=b"abc")])

    with scripted(capabilities() | {(CAS, "BatchReadBlobs"): answer}) as url:
        assert opened(url).fetch_blobs({BlobRef(sha256_hex(b"abc")): 3}, into) == frozenset()
    assert list(into.iterdir()) == []


def test_an_endless_stream_ends_at_the_expected_length(opened, into):
    sent = []

    def read(request, context):
        while context.is_active() and len(sent) < 1000:
            sent.append(1)
            yield message("google.bytestream.ReadResponse")(data=bytes(MiB))

    with scripted(capabilities() | {(STREAM, "Read"): read}) as url:
        assert opened(url).fetch_blobs({BlobRef("0" * 64): 5 * MiB}, into) == frozenset()
    assert len(sent) < 100
    assert list(into.iterdir()) == []


@pytest.mark.parametrize(
    "file",
    [
        {"path": "kernel.o", "digest": {"hash": sha256_hex(b"{}"), "size_bytes": 2}, "contents": b"{}"},
        {"path": "dsr1-record.json", "digest": {"hash": sha256_hex(b"{}"), "size_bytes": 2}, "contents": b"[]"},
        {"path": "dsr1-record.json", "digest": {"hash": sha256_hex(b"{}"), "size_bytes": 3}, "contents": b"{}"},
        {"path": "dsr1-record.json", "digest": {"hash": "", "size_bytes": 1 << 60}},
        {"path": "dsr1-record.json"},
    ],
)
def test_a_result_without_a_whole_record_is_a_miss(opened, file):
    def answer(request, context):
        return message("ActionResult")(output_files=[file])

    with scripted(capabilities() | {("ActionCache", "GetActionResult"): answer}) as url:
        assert opened(url).find_records([ACTION]) == {}


# Compressed blobs


def deflate(data):
    state = zlib.compressobj(wbits=-15)
    return state.compress(data) + state.flush()


def inflate(data):
    return zlib.decompress(data, wbits=-15)


# One compressor must not be used by two threads, and servers answer in several.
def zstd(data):
    return zstandard.ZstdCompressor().compress(data)


def unzstd(data):
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


PACKERS = {ZSTD: ("zstd", zstd, unzstd), DEFLATE: ("deflate", deflate, inflate)}


@pytest.fixture(params=sorted(PACKERS))
def packing(request):
    return request.param, *PACKERS[request.param]


def test_compressed_blobs_go_both_ways(opened, blob, into, packing):
    number, name, pack, unpack = packing
    kept = {}

    def update(request, context):
        response = message("BatchUpdateBlobsResponse")
        for entry in request.requests:
            assert entry.compressor == number
            kept[entry.digest.hash] = unpack(entry.data)
        return response(responses=[response.Response(digest=entry.digest) for entry in request.requests])

    def write(requests, context):
        pieces = list(requests)
        uploads, _, kind, compressor, sha256, _ = pieces[0].resource_name.split("/")
        assert (uploads, kind, compressor) == ("uploads", "compressed-blobs", name)
        offsets = [piece.write_offset for piece in pieces]
        assert offsets == [sum(len(piece.data) for piece in pieces[:index]) for index in range(len(pieces))]
        kept[sha256] = unpack(b"".join(piece.data for piece in pieces))
        return message("google.bytestream.WriteResponse")(committed_size=-1)

    def read(request, context):
        kind, compressor, sha256, _ = request.resource_name.split("/")
        assert (kind, compressor) == ("compressed-blobs", name)
        packed = pack(kept[sha256])
        for start in range(0, len(packed), 700_000):
            yield message("google.bytestream.ReadResponse")(data=packed[start : start + 700_000])

    methods = {
        (CAS, "BatchUpdateBlobs"): update,
        (CAS, "BatchReadBlobs"): batch_answer(lambda sha256: pack(kept[sha256]), number),
        (STREAM, "Write"): write,
        (STREAM, "Read"): read,
    }
    blobs = [blob(b"text " * 1000), blob(os.urandom(1000)), blob(b"text " * MiB), blob(os.urandom(5 * MiB))]
    whole = {ref.sha256: path.read_bytes() for ref, _, path in blobs}
    offers = capabilities(supported_compressors=[number], supported_batch_update_compressors=[number])
    with scripted(offers | methods) as url:
        remote = opened(url)
        remote.store_blobs({ref: path for ref, _, path in blobs})
        assert kept == whole
        assert remote.fetch_blobs({ref: size for ref, size, _ in blobs}, into) == {ref for ref, _, _ in blobs}
    assert {path.name: path.read_bytes() for path in into.iterdir()} == whole


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:-3], lambda data: b"\xff" * 20, lambda data: b""], ids=["cut", "noise", "nothing"]
)
def test_damaged_compressed_blobs_are_left_out(opened, into, packing, spoil):
    number, _, pack, _ = packing
    data = os.urandom(3000)
    answer = batch_answer(lambda sha256: spoil(pack(data)), number)
    with scripted(capabilities(supported_compressors=[number]) | {(CAS, "BatchReadBlobs"): answer}) as url:
        assert opened(url).fetch_blobs({BlobRef(sha256_hex(data)): 3000}, into) == frozenset()
    assert list(into.iterdir()) == []


def test_a_packed_bomb_is_not_unpacked(opened, into, packing):
    number, _, pack, _ = packing
    bomb = pack(bytes(300 * MiB))
    answer = batch_answer(lambda sha256: bomb, number)
    with scripted(capabilities(supported_compressors=[number]) | {(CAS, "BatchReadBlobs"): answer}) as url:
        begun = time.process_time()
        assert opened(url).fetch_blobs({BlobRef("0" * 64): 3000}, into) == frozenset()
        assert time.process_time() - begun < 0.3


# Addresses and messages


@pytest.mark.parametrize(
    ("url", "message_text"),
    [
        ("grpc://host", "grpc://host is no address of a remote cache"),
        ("http://host:1", "http://host:1 is no address of a remote cache"),
        ("grpc://host:99999", "the address of a remote cache cannot be read"),
        ("grpc://me:s3cr3t@host:1", "the address of a remote cache has a user name or password"),
    ],
)
def test_addresses_that_are_none(url, message_text):
    with pytest.raises(InvalidInput) as caught:
        open_reapi(url, timeouts=Timeouts())
    assert caught.value.message == f"{message_text}, expected grpc://HOST:PORT[/INSTANCE] or grpcs://HOST[:PORT][/INSTANCE]"
    assert "s3cr3t" not in caught.value.render()


def test_a_header_that_cannot_be_sent_is_named_without_its_value():
    with pytest.raises(InvalidInput) as caught:
        open_reapi("grpcs://host/a", timeouts=Timeouts(), headers={"Authorization": "s3cr3t\n"})
    assert caught.value.message == "the header 'Authorization' of a remote cache cannot be sent over gRPC"
    assert "s3cr3t" not in caught.value.render()


def test_the_descriptors_are_those_of_the_proto_files():
    assert generate.descriptor_set() == generate.DESCRIPTORS.read_bytes()
