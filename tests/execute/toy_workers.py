"""Workers that do what real ones must not, for the tests of the engine."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from dsr1build.digest import BlobRef
from dsr1build.toolchains import pass_groups


def upper(fields, inputs, outputs, temps=None):
    if temps:
        (temps / "00-parse.mlir").write_text(fields["text"])
    (outputs / "text").write_bytes(fields["text"].upper().encode())


def join(fields, inputs, outputs):
    parts = [(inputs / ref.sha256).read_bytes() for ref in fields["parts"] if isinstance(ref, BlobRef)]
    (outputs / "sub").mkdir()
    (outputs / "sub/joined").write_bytes(b"+".join(parts))


def slow(fields, inputs, outputs):
    time.sleep(fields["seconds"])
    (outputs / "text").write_bytes(b"slow")


def crash(fields, inputs, outputs):
    (outputs / "text").write_bytes(b"half")
    print("about to die", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def abort(fields, inputs, outputs):
    os.abort()


def hang(fields, inputs, outputs):
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    Path(fields["pid_file"]).write_text(str(os.getpid()))
    while True:
        time.sleep(1)


def exhaust(fields, inputs, outputs):
    keep = []
    while True:
        keep.append(bytearray(64 << 20))


def shout(fields, inputs, outputs):
    block = b"x" * 1023 + b"\n"
    for _ in range(fields["kilobytes"]):
        os.write(1, block)
    os.write(1, b"the last line\n")
    sys.exit(3)


def fill(fields, inputs, outputs):
    with (outputs / "text").open("wb") as out:
        while True:
            out.write(bytes(1 << 20))


def leave_nothing(fields, inputs, outputs):
    pass


def write_then_fail(fields, inputs, outputs):
    (outputs / "text").write_bytes(b"whole")
    raise RuntimeError("no good")


def link_out(fields, inputs, outputs):
    (outputs / "text").symlink_to("/etc/hostname")


def surroundings(fields, inputs, outputs):
    mask = os.umask(0)
    names = sorted(os.environ)
    state = [
        names,
        os.environ["LC_ALL"],
        os.environ["TZ"],
        mask,
        sorted(p.name for p in Path.cwd().iterdir()),
        str(Path.cwd()) == os.environ["HOME"],
    ]
    (outputs / "text").write_text(repr(state))


def kill_server(fields, inputs, outputs):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def fail_once(fields, inputs, outputs):
    """Crashes the first time, and then never again."""
    mark = Path(fields["mark"])
    if not mark.exists():
        mark.write_text("")
        os.abort()
    (outputs / "text").write_bytes(b"good")


def die_in_group(fields, inputs, outputs, temps=None):
    pass_groups.enter_group("parse", 10)
    if temps:
        (temps / "00-parse.mlir").write_text("module {}")
    pass_groups.enter_group("bufferize", 20)
    os.abort()


def hungry(fields, inputs, outputs):
    """Needs 300 MiB and says how often it was started."""
    with Path(fields["log"]).open("a") as log:
        log.write("x")
    keep = bytearray(300 << 20)
    (outputs / "text").write_bytes(b"fed" + keep[:0])


def daemonize(fields, inputs, outputs):
    """Leaves a process behind that has left the group and lost its parent."""
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            Path(fields["pid_file"]).write_text(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    os.waitpid(child, 0)
    while not Path(fields["pid_file"]).exists():
        time.sleep(0.01)
    (outputs / "text").write_bytes(b"done")


def spread(fields, inputs, outputs):
    """Forks again and again and ends before its children do."""
    for _ in range(30):
        if os.fork() == 0:
            with Path(fields["pid_file"]).open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(600)
    time.sleep(0.3)
    sys.exit(1)


def fill_disk(fields, inputs, outputs):
    for number in range(1 << 20):
        (outputs / f"part{number}").write_bytes(os.urandom(1 << 16))


def take_signal(fields, inputs, outputs):
    os.kill(os.getpid(), fields["signal"])
    time.sleep(60)


def no_exit(fields, inputs, outputs):
    """Ends well without an output."""
    os._exit(0)


def note_groups(fields, inputs, outputs):
    Path("pass-groups").write_bytes(b'{"name": "bufferize", "at": 0.5, "ir_bytes": 7}\n')
    os.abort()


def limits(fields, inputs, outputs):
    (outputs / "text").write_text(str(resource.getrlimit(resource.RLIMIT_FSIZE)[0]))
