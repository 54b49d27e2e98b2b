"""What runs actions: the interface that the local fork server, a REAPI farm and a Dask cluster share."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Limits:
    """What one action may use. ``memory`` is address space beyond what its parent maps (bytes), ``seconds`` is time on the
    clock and on the CPU, ``file_size`` is bytes of one file."""

    memory: int = 4 << 30
    seconds: float = 1800.0
    file_size: int = 4 << 30


@dataclass(frozen=True, slots=True)
class Request:
    """One action to run, laid out in ``directory``.

    ``directory`` is on the builder's disk and holds ``fields`` (their canonical encoding), ``inputs/`` (each blob of the
    fields, named by its digest) and the empty ``outputs/`` and ``work/``. Wherever the action runs, its output files have to
    be in ``outputs/`` when its end is told, and what it left of ``work/pass-groups`` in ``work/``.

    ``id`` is unique among what runs. ``worker`` is ``module:function``, ``preload`` the modules that it imports and that cost
    time. ``outputs`` are the files that it has to leave. With ``temps`` it keeps its intermediate files in
    ``directory/temps``; only the local executor is asked for that.
    """

    id: str
    key: str
    kind: str
    label: str
    worker: str
    directory: Path
    preload: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)
    temps: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """How an action ended. One of ``exit``, ``signal`` and ``lost`` is set.

    ``lost`` says why the executor could not run it to its end (its server died, a worker refused it); this tells nothing of
    the action itself. ``seconds`` on the clock, ``cpu`` seconds of it and of its children (0 where that is not known),
    ``peak`` resident bytes, ``tail`` the last of what it printed; ``timed_out``: it was killed for its time. ``place`` names
    the machine that ran it, "" for this one.
    """

    id: str
    exit: int | None
    signal: int | None
    seconds: float
    peak: int
    tail: str
    timed_out: bool = False
    lost: str = ""
    place: str = ""
    cpu: float = 0.0


class Executor(Protocol):
    """Runs actions side by side. It is driven by one thread, and closed by it: ``close`` ends all that runs.

    ``name`` is for people. ``slots`` is how many actions it can run at once, or 0 where that is for the caller to say.
    """

    @property
    def name(self) -> str: ...

    @property
    def slots(self) -> int: ...

    @property
    def running(self) -> int: ...

    def start(self, request: Request) -> None: ...

    def wait(self, timeout: float | None = None, wake: int | None = None) -> list[Ended]:
        """The actions that ended since. Waits for the first, at most ``timeout`` seconds, and not beyond the moment when the
        file descriptor ``wake`` can be read. Returns at once where nothing runs. Never raises for what an action does."""
        ...

    def close(self) -> None: ...


# Opens an executor for a build whose temporary directory is given; what users should know is told to the function.
OpenExecutor: TypeAlias = Callable[[Path, Callable[[str], None]], Executor]
