"""Workers that do what real ones must not, for the tests of the engine."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from dsr1build.digest import BlobRef


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
