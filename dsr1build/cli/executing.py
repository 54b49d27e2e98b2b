"""The options of `build` that say how actions run, and what they mean for the executor."""

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dsr1build.cli.caches import bytes_option
from dsr1build.errors import InvalidInput

if TYPE_CHECKING:
    from dsr1build.config.schema import Target
    from dsr1build.execute.executor import OpenExecutor
    from dsr1build.execute.options import Options

FAILURES = "failures"


def add_execution_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-j", "--jobs", type=int, metavar="N", help="run N actions at once (default: the CPUs that may be used, or make's -j)"
    )
    parser.add_argument("-k", "--keep-going", action="store_true", help="after a failure go on with what does not depend on it")
    parser.add_argument("--timeout", metavar="SECONDS", help="kill an action that takes longer (default: 1800)")
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="memory for all actions that run at once, as 8GiB or 50%% (default: 80%%)",
    )
    parser.add_argument(
        "--executor",
        metavar="WHERE",
        help="local (the default), dask://HOST:PORT or dask+tls://HOST:PORT",
    )
    for name, what in (
        ("ca", "who may sign the executor's certificate"),
        ("cert", "the certificate to show it"),
        ("key", "its private key"),
    ):
        parser.add_argument(f"--executor-{name}", type=Path, metavar="FILE", help=f"PEM file for TLS: {what}")
    parser.add_argument("--remote-fallback", action="store_true", help="where the executor fails, go on with this machine")
    parser.add_argument(
        "--retry-failed", action="store_true", help="run actions again that have failed twice in the same way in an earlier build"
    )
    parser.add_argument("--save-temps", type=Path, metavar="DIR", help="keep the IR after each pass group; compiles again")


def execution_options(arguments: argparse.Namespace, file: Path, features: Callable[[], Iterable[str]] = tuple) -> "Options":
    """What the options say. ``file`` is the BUILD.yaml, beside which failed actions are kept. ``features`` tells, when an
    executor elsewhere is opened, what the CPUs there must have. Raises InvalidInput."""
    from dsr1build.execute.executor import Limits
    from dsr1build.execute.options import Options
    from dsr1build.plan.record import RECORD_PATH

    if arguments.jobs is not None and arguments.jobs < 1:
        raise InvalidInput(f"-j {arguments.jobs} runs nothing", where="dsr1build build", hint="Write a number from 1.")
    limits = Limits() if arguments.timeout is None else Limits(seconds=seconds_option(arguments.timeout))
    return Options(
        jobs=arguments.jobs or 0,
        keep_going=arguments.keep_going,
        limits=limits,
        memory=0 if arguments.memory is None else memory_option(arguments.memory),
        executor=chosen_executor(arguments, features),
        fallback=arguments.remote_fallback,
        failures=file.parent / RECORD_PATH.parent / FAILURES,
        retry_failed=arguments.retry_failed,
        save_temps=arguments.save_temps,
    )


def seconds_option(text: str) -> float:
    """A time from one second to a week. Raises InvalidInput."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 1 <= value <= 7 * 24 * 3600:
        raise InvalidInput(f"{text} is no number of seconds", where="--timeout", hint="Write seconds from 1 to 604800.")
    return value


def memory_option(text: str) -> int:
    """Bytes, from a size such as ``8GiB`` or a part of what this process may use such as ``50%``. Raises InvalidInput."""
    if part := re.fullmatch(r"([0-9]{1,3})%", text):
        from dsr1build.execute.resources import usable_memory

        if not 1 <= int(part[1]) <= 100:
            raise InvalidInput(f"{text} is no part of the memory", where="--memory", hint="Write 1% to 100%, or a size as 8GiB.")
        return usable_memory() * int(part[1]) // 100
    size = bytes_option(text, "--memory")
    if size < 1 << 20:
        raise InvalidInput(f"{text} is too little for any action", where="--memory", hint="Write at least 1MiB.")
    return size


def native_features(targets: "Iterable[Target]") -> list[str]:
    """The CPU features, in LLVM's names, that targets of the CPU ``native`` stand for on this machine."""
    from dsr1build.plan.build_plan import target_spec
    from dsr1build.toolchains.cpu import required_features

    specs = [target_spec(target) for target in targets if target.cpu == "native"]
    return sorted({name for spec in specs for name in required_features(spec.cpu, spec.features)})


def chosen_executor(arguments: argparse.Namespace, features: Callable[[], Iterable[str]] = tuple) -> "OpenExecutor | None":
    """What opens the executor that ``--executor`` names; None for this machine. Raises InvalidInput."""
    where = arguments.executor
    scheme = "" if where is None else where.partition("://")[0]
    files = {"ca": arguments.executor_ca, "cert": arguments.executor_cert, "key": arguments.executor_key}
    if where is None or where == "local":
        given = [f"--executor-{name}" for name, file in files.items() if file is not None]
        if given or arguments.remote_fallback:
            option = given[0] if given else "--remote-fallback"
            raise InvalidInput(
                f"{option} is for an executor elsewhere", where="dsr1build build", hint="Name one with --executor."
            )
        return None
    if scheme in ("dask", "dask+tls"):
        from dsr1build.execute.dask_executor import open_dask

        return lambda scratch, warn: open_dask(where, **files, features=features(), warn=warn)
    raise InvalidInput(
        f"{where} names no executor", where="--executor", hint="Write local, dask://HOST:PORT or dask+tls://HOST:PORT."
    )
