"""The Dask executor against a real scheduler and real workers: what an action does costs that action alone, and whoever dies,
nothing hangs and no finished result is lost."""

import datetime
import ipaddress
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dask_cluster import Cluster, request, until

from dsr1build.cache.store import LocalStore
from dsr1build.digest import BlobRef, encode, sha256_hex
from dsr1build.errors import EnvironmentUnfit, InvalidInput
from dsr1build.execute import dask_executor, dask_task
from dsr1build.execute.dask_executor import open_dask
from dsr1build.execute.engine import run_actions
from dsr1build.execute.events import Failed, Finished
from dsr1build.execute.executor import Limits
from dsr1build.execute.fitness import expectation
from dsr1build.execute.options import Options
from dsr1build.execute.server import ForkServer
from dsr1build.plan.action import Action

HERE = Path(__file__).parent
PACKAGE = Path(dask_task.__file__).parents[1]
LIMITS = Limits(memory=1 << 30, seconds=30.0, file_size=64 << 20)


def ends(executor, *requests, seconds=60.0):
    """Run the actions and return their ends by id."""
    for one in requests:
        executor.start(one)
    found = {}
    deadline = time.monotonic() + seconds
    while executor.running and time.monotonic() < deadline:
        found.update({ended.id: ended for ended in executor.wait(1.0)})
    assert executor.running == 0, f"{executor.running} actions have not ended"
    return found


def files(one):
    outputs = one.directory / "outputs"
    return {p.relative_to(outputs).as_posix(): p.read_bytes() for p in outputs.rglob("*") if p.is_file()}


def connect(cluster, **options):
    options.setdefault("warn", pytest.fail)
    return open_dask(cluster.url, import_path=[HERE], **options)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.add("left")
        cluster.add("right")
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def executor(cluster):
    executor = connect(cluster)
    try:
        assert until(lambda: executor.slots == 2)
        yield executor
    finally:
        executor.close()


@pytest.fixture
def private(tmp_path):
    """Makes a cluster that the test may break."""
    clusters = []

    def start(*workers, **options):
        clusters.append(Cluster(tmp_path / f"cluster-{len(clusters)}", **options))
        for name in workers:
            clusters[-1].add(name)
        return clusters[-1]

    yield start
    for one in clusters:
        one.close()


def test_the_outputs_are_the_bytes_of_a_local_run(executor, tmp_path):
    inputs = {sha256_hex(part): part for part in (b"one", b"two" * 1_000_000)}
    cases = [("upper", {"text": "straße"}), ("join", {"inputs": inputs, "outputs": ("sub/joined",)})]
    local = ForkServer(tmp_path, [HERE])
    try:
        for function, options in cases:
            here = request(tmp_path / "here", function, function, **options)
            there = request(tmp_path / "there", function, function, **options)
            assert ends(local, here)[function].exit == 0
            ended = ends(executor, there)[function]
            assert (ended.exit, ended.signal, ended.lost) == (0, None, "")
            assert ended.place in ("left", "right") and ended.peak > 1 << 20 and 0 < ended.seconds < 20 and ended.cpu > 0
            assert files(there) == files(here) != {}
    finally:
        local.close()


def test_the_record_of_pass_groups_comes_back(executor, tmp_path):
    one = request(tmp_path, "a", "note_groups")
    assert ends(executor, one)["a"].signal == signal.SIGABRT
    assert (one.directory / "work/pass-groups").read_bytes() == b'{"name": "bufferize", "at": 0.5, "ir_bytes": 7}\n'


def test_what_an_action_does_costs_that_action_alone(executor, tmp_path):
    quick = Limits(memory=256 << 20, seconds=1.0, file_size=1 << 20)
    found = ends(
        executor,
        request(tmp_path, "abort", "abort"),
        request(tmp_path, "crash", "crash"),
        request(tmp_path, "hang", "slow", limits=quick, seconds=60),
        request(tmp_path, "memory", "exhaust", limits=quick),
        request(tmp_path, "disk", "fill", limits=quick),
        request(tmp_path, "exit", "write_then_fail"),
        request(tmp_path, "nothing", "leave_nothing"),
        request(tmp_path, "link", "link_out"),
        request(tmp_path, "lost", "kill_server"),
    )
    assert found["abort"].signal == signal.SIGABRT
    assert found["crash"].signal == signal.SIGSEGV and found["crash"].tail == "about to die\n"
    assert found["hang"].timed_out and found["hang"].signal == signal.SIGKILL
    assert found["memory"].exit == 1 and "MemoryError" in found["memory"].tail
    assert found["disk"].exit == 1 and "File too large" in found["disk"].tail
    assert found["exit"].exit == 1 and "RuntimeError: no good" in found["exit"].tail
    assert not list((tmp_path / "exit/outputs").iterdir())
    assert found["nothing"].exit == 0 and not list((tmp_path / "nothing/outputs").iterdir())
    assert found["link"].exit == 0 and (tmp_path / "link/outputs/text").is_symlink()
    assert found["lost"].lost == "its fork server was lost"
    # The workers are the same two, they go on, and no limit of an action has stayed with them.
    after = ends(executor, *(request(tmp_path, f"after-{n}", "limits") for n in range(8)))
    assert {ended.place for ended in after.values()} == {"left", "right"}
    assert {(tmp_path / id / "outputs/text").read_text() for id in after} == {str(LIMITS.file_size)}
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE):
        assert set(executor._client.run(resource.getrlimit, kind).values()) == {resource.getrlimit(kind)}


def test_a_build_through_the_cluster_publishes_what_came_back(cluster, tmp_path):
    actions = [toy(f"a{n}", "upper", text=f"text {n}") for n in range(4)]
    actions += [toy("bad", "write_then_fail"), toy("link", "link_out")]
    events = []
    options = Options(keep_going=True, import_path=(HERE,), executor=lambda scratch, warn: connect(cluster, warn=warn))
    with LocalStore(tmp_path / "store", pytest.fail) as store:
        outcome = run_actions({a.id: a for a in actions}, store, options, events.append)
        assert set(outcome.executed) == {"a0", "a1", "a2", "a3"} and set(outcome.failed) == {"bad", "link"}
        assert store.read_blob(outcome.results["a3"].outputs["text"]) == b"TEXT 3"
    reasons = {event.action: event.reason for event in events if isinstance(event, Failed)}
    assert reasons == {"bad": "exit code 1", "link": "left text, which is not a regular file"}


def toy(id, function, **fields):
    worker = f"toy_workers:{function}"
    return Action(id, "compile", f"toy {id}", worker, (), lambda results: {"toy": function, **fields}, ("text",))


def test_what_runs_ends_when_its_builder_leaves(cluster, tmp_path):
    executor = connect(cluster)
    pid_file = tmp_path / "pid"
    executor.start(request(tmp_path, "hang", "hang", pid_file=str(pid_file)))
    assert until(lambda: executor.wait(0.1) == [] and pid_file.exists() and pid_file.read_text())
    started = time.monotonic()
    executor.close()
    assert time.monotonic() - started < 2.0
    assert executor.running == 0
    pid = int(pid_file.read_text())
    assert until(lambda: not Path(f"/proc/{pid}").exists(), 10.0)


BUILDER = """
import sys
from pathlib import Path
from dask_cluster import request
from dsr1build.execute.dask_executor import open_dask

executor = open_dask(sys.argv[1], import_path=[Path(sys.argv[2])])
executor.start(request(Path(sys.argv[3]), "hang", "hang", pid_file=sys.argv[3] + "/pid"))
while True:
    executor.wait(1.0)
"""


def test_what_runs_ends_when_its_builder_is_killed(cluster, tmp_path):
    words = [sys.executable, "-c", BUILDER, cluster.url, str(HERE), str(tmp_path)]
    builder = subprocess.Popen(words, env={**os.environ, "PYTHONPATH": str(HERE)})
    try:
        pid_file = tmp_path / "pid"
        assert until(lambda: pid_file.exists() and pid_file.read_text())
    finally:
        builder.kill()
        builder.wait()
    pid = int(pid_file.read_text())
    assert until(lambda: not Path(f"/proc/{pid}").exists(), 10.0)


def test_a_descriptor_wakes_the_builder(executor, tmp_path):
    read, write = os.pipe()
    os.write(write, b"x")
    executor.start(request(tmp_path, "a", "slow", seconds=0.5))
    started = time.monotonic()
    assert executor.wait(None, read) == []
    assert time.monotonic() - started < 0.5
    assert executor.wait(0.0) == []
    assert [ended.exit for ended in executor.wait(30.0)] == [0]
    assert executor.wait(30.0) == []
    os.close(read)
    os.close(write)


def test_workers_come_and_go_and_a_killed_one_costs_what_it_ran(private, tmp_path):
    cluster = private("left")
    executor = connect(cluster)
    try:
        first = request(tmp_path, "first", "upper", text="kept")
        assert ends(executor, first)["first"].exit == 0
        assert executor.slots == 1
        executor.start(request(tmp_path, "slow-left", "slow", seconds=30))
        cluster.add("right")
        assert until(lambda: executor.slots == 2)
        executor.start(request(tmp_path, "slow-right", "slow", seconds=2))
        assert executor.wait(1.0) == []
        cluster.kill("left")
        started = time.monotonic()
        (lost,) = executor.wait(20.0) or executor.wait(20.0)
        assert (lost.id, lost.exit, lost.signal, lost.place) == ("slow-left", None, None, "left")
        assert lost.lost == "the Dask worker left died while it ran the action"
        assert time.monotonic() - started < 2.0
        assert ends(executor)["slow-right"].exit == 0
        assert until(lambda: executor.slots == 1)
        assert ends(executor, request(tmp_path, "after", "upper", text="on"))["after"].place == "right"
    finally:
        executor.close()


def test_a_killed_scheduler_is_told_at_once(private, tmp_path):
    cluster = private("left")
    executor = connect(cluster)
    try:
        assert until(lambda: executor.slots == 1)
        executor.start(request(tmp_path, "a", "slow", seconds=30))
        executor.start(request(tmp_path, "b", "slow", seconds=30))
        assert executor.wait(0.5) == []
        cluster.scheduler.kill()
        started = time.monotonic()
        lost = ends(executor)
        assert time.monotonic() - started < 3.0
        assert {ended.lost for ended in lost.values()} == {f"the scheduler of {cluster.url} is gone"}
        assert set(lost) == {"a", "b"}
        assert executor.slots == 0
        assert ends(executor, request(tmp_path, "c", "upper", text="x"))["c"].lost == f"the scheduler of {cluster.url} is gone"
        started = time.monotonic()
    finally:
        executor.close()
    assert time.monotonic() - started < 2.0


@pytest.mark.parametrize("victim", ["worker", "scheduler"])
def test_a_build_goes_on_after_a_kill_and_keeps_what_was_finished(private, tmp_path, victim):
    cluster = private("left", "right")
    actions = [toy(f"a{n}", "slow", seconds=0.2, number=n) for n in range(8)]
    events = []

    def tell(event):
        events.append(event)
        if sum(isinstance(one, Finished) for one in events) == 3 and isinstance(event, Finished):
            cluster.kill("left") if victim == "worker" else cluster.scheduler.kill()

    fallback = victim == "scheduler"
    options = Options(
        import_path=(HERE,), executor=lambda scratch, warn: connect(cluster, warn=warn), fallback=fallback, keep_going=True
    )
    with LocalStore(tmp_path / "store", pytest.fail) as store:
        outcome = run_actions({a.id: a for a in actions}, store, options, tell)
    assert set(outcome.executed) == {a.id for a in actions} and not outcome.failed
    finished = [event for event in events if isinstance(event, Finished)]
    assert len(finished) == 8
    places = {event.place for event in finished[4:]}
    assert places == ({""} if fallback else {"right"})


def test_a_scheduler_that_falls_silent_is_given_up(private, tmp_path, monkeypatch):
    monkeypatch.setattr(dask_executor, "SILENT_SECONDS", 1.5)
    cluster = private("left")
    executor = connect(cluster)
    try:
        assert until(lambda: executor.slots == 1)
        executor.start(request(tmp_path, "a", "slow", seconds=30))
        cluster.scheduler.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        assert ends(executor)["a"].lost == f"the scheduler of {cluster.url} has not answered for 1.5 seconds"
        assert time.monotonic() - started < 4.0
        started = time.monotonic()
    finally:
        executor.close()
    assert time.monotonic() - started < 3.0


def test_workers_that_differ_are_refused_by_name(private, tmp_path):
    other = tmp_path / "other"
    (other / "dsr1build").mkdir(parents=True)
    for path in PACKAGE.rglob("*.py"):
        target = other / "dsr1build" / path.relative_to(PACKAGE)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes() + (b"# other\n" if path.name == "errors.py" else b""))
    broken = tmp_path / "broken/dsr1build"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("raise ImportError('not for this machine')\n")
    cluster = private(allowed_failures="2")
    cluster.add("other", python_path=other)
    cluster.add("broken", python_path=broken.parent)
    warnings = []
    executor = connect(cluster, warn=warnings.append)
    try:
        assert until(lambda: executor.slots == 0 and len(warnings) == 3)
        lost = ends(executor, request(tmp_path, "a", "upper", text="x"))["a"]
        assert lost.lost.startswith("every Dask worker is refused: broken: dsr1build cannot be used there (ImportError: not")
        assert "; other: its dsr1build has the sources " in lost.lost
        assert executor.slots == 0
        cluster.add("good")
        assert until(lambda: executor.slots == 1)
        done = ends(executor, *(request(tmp_path, f"b{n}", "upper", text=f"{n}") for n in range(6)))
        assert {(ended.exit, ended.place) for ended in done.values()} == {(0, "good")}
        tools = {"ziglang/zig": "00" * 32}
        lost = ends(executor, request(tmp_path, "c", "upper", text="x", tools=tools))["c"]
        assert "; good: its tool ziglang/zig is " in lost.lost
        assert ", the builder's is 000000000000; other: its dsr1build" in lost.lost
        assert all(process.poll() is None for process in cluster.workers.values())
    finally:
        executor.close()
    assert warnings[0].startswith(f"the scheduler of {cluster.url} runs an action again, up to 2 times, after the death")
    assert len(warnings) == 4
    assert sum(text.startswith("the Dask worker other is refused: its dsr1build has the sources ") for text in warnings) == 1
    demanding = connect(cluster, warn=lambda text: None, features=["sse2", "avx1024"])
    try:
        lost = ends(demanding, request(tmp_path, "d", "upper", text="x"))["d"]
        assert "good: its CPU lacks avx1024" in lost.lost
    finally:
        demanding.close()


def test_a_cluster_without_workers_is_given_up(private, tmp_path, monkeypatch):
    monkeypatch.setattr(dask_executor, "NO_WORKER_SECONDS", 0.8)
    cluster = private()
    executor = connect(cluster)
    try:
        lost = ends(executor, request(tmp_path, "a", "upper", text="x"))["a"]
        assert lost.lost == f"{cluster.url} has had no worker for 0.8 seconds"
    finally:
        executor.close()


def test_a_cluster_with_tls(private, tmp_path):
    ca, cert, key = certificates(tmp_path)
    cluster = private("left", tls=["--tls-ca-file", ca, "--tls-cert", cert, "--tls-key", key])
    executor = connect(cluster, ca=ca, cert=cert, key=key)
    try:
        one = request(tmp_path, "a", "upper", text="hidden")
        assert ends(executor, one)["a"].place == "left"
        assert files(one) == {"text": b"HIDDEN"}
    finally:
        executor.close()
    (tmp_path / "stranger").mkdir()
    strange_ca, strange_cert, strange_key = certificates(tmp_path / "stranger")
    with pytest.raises(EnvironmentUnfit, match=r"answers at dask\+tls://127.0.0.1:\d+: TLS certificate does not match"):
        connect(cluster, ca=strange_ca, cert=strange_cert, key=strange_key, patience=1.0)
    with pytest.raises(EnvironmentUnfit, match="no Dask scheduler answers"):
        open_dask(f"dask://127.0.0.1:{cluster.port}", patience=1.0)


def certificates(directory):
    """Files with a certificate authority, and a certificate and key that it has signed for 127.0.0.1."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.UTC)

    def make(name, issuer, signer, authority):
        private = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer or subject)
            .public_key(private.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        )
        return private, builder.sign(signer or private, hashes.SHA256()), subject

    signer, authority, issuer = make("authority", None, None, True)
    private, certificate, _ = make("cluster", issuer, signer, False)
    paths = [directory / "ca.pem", directory / "cert.pem", directory / "key.pem"]
    paths[0].write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    paths[1].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    plain = serialization.NoEncryption()
    paths[2].write_bytes(private.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
    return paths


def test_without_distributed_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(EnvironmentUnfit) as raised:
        open_dask("dask://127.0.0.1:1")
    assert raised.value.message.startswith("builds on a Dask cluster need the Python package 'distributed': ")
    assert raised.value.hint == "Install it: python -m pip install 'dsr1build[dask]'"


def test_nobody_at_the_address():
    with pytest.raises(EnvironmentUnfit) as raised:
        open_dask("dask://127.0.0.1:1", patience=0.5)
    assert raised.value.message.startswith("no Dask scheduler answers at dask://127.0.0.1:1")


@pytest.mark.parametrize(
    ("url", "files", "message"),
    [
        ("http://host:1", {}, "'http://host:1' does not name a Dask cluster"),
        ("dask://host", {}, "the executor 'dask://host' is not a host and a port"),
        ("dask://host:8786/path", {}, "the executor 'dask://host:8786/path' is not a host and a port"),
        ("dask://host:port", {}, "the executor 'dask://host:port' has no valid port"),
        ("dask://host:1", {"ca": "ca.pem"}, "dask://host:1 is without TLS, but a ca file is given"),
        ("dask+tls://host:1", {"ca": "ca.pem"}, "dask+tls://host:1 needs TLS files; lacking: cert, key"),
        (
            "dask+tls://host:1",
            {"ca": "ca.pem", "cert": "cert.pem", "key": "key.pem"},
            "the ca file for dask+tls://host:1 does not exist",
        ),
    ],
)
def test_a_wrong_address_is_told(url, files, message):
    with pytest.raises(InvalidInput) as raised:
        open_dask(url, **{name: Path(file) for name, file in files.items()})
    assert raised.value.message == message


def answer(**changes):
    good = {
        "place": "w",
        "address": "tcp://x",
        "refused": "",
        "lost": "",
        "exit": 0,
        "signal": None,
        "seconds": 0.5,
        "cpu": 0.25,
        "peak": 1,
        "tail": "",
        "timed_out": False,
        "files": {"sub/text": {"content": BlobRef(sha256_hex(b"data")), "data": b"data"}},
        "others": [],
        "groups": b"",
    }
    return encode({**good, **changes})


def test_a_good_answer_is_taken():
    taken = dask_task.unpack(answer(), "a", LIMITS)
    assert taken.files == {"sub/text": b"data"}
    assert (taken.ended.id, taken.ended.exit, taken.ended.place, taken.ended.cpu) == ("a", 0, "w", 0.25)


def entry(data, content=None):
    return {"content": BlobRef(sha256_hex(data if content is None else content)), "data": data}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x80\x04K\x01.", "unknown tag"),
        (encode([1]), "a mapping is expected"),
        (answer(files={"../text": entry(b"x")}), "is not a relative path"),
        (answer(files={"/etc/text": entry(b"x")}), "is not a relative path"),
        (answer(files={"a//b": entry(b"x")}), "is not a relative path"),
        (answer(files={"text": entry(b"x", b"y")}), "the output 'text' does not have its digest"),
        (answer(files={"text": entry(b"x" * 101)}), "the output 'text' is larger than a file may be"),
        (answer(files={"text": {"data": "x"}}), "data is not of type bytes"),
        (answer(others=["../x"]), "is not a relative path"),
        (answer(exit=None), "it does not say how the action ended"),
        (answer(exit=0, signal=9), "it does not say how the action ended"),
        (answer(exit=True), "an exit code or signal is no number"),
        (answer(peak="1"), "peak is not of type int"),
        (answer(groups=bytes(65537)), "the record of pass groups is too long"),
    ],
)
def test_an_answer_is_held_against_what_can_be_checked(data, message):
    with pytest.raises(ValueError, match=message):
        dask_task.unpack(data, "a", Limits(file_size=100))


def test_a_damaged_input_is_not_used(executor, tmp_path):
    one = request(tmp_path, "a", "join", inputs={sha256_hex(b"good"): b"bad"})
    assert ends(executor, one)["a"].lost == "an input arrived damaged"


def test_a_builder_of_another_make_is_refused():
    assert dask_task.inspect("a-build", encode(expectation())) == ""
    other = encode({**expectation(), "sources": "0" * 64})
    assert dask_task.inspect("b-build", other).startswith("its dsr1build has the sources ")
