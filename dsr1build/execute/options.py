"""How a build runs: what the options of the command line mean for the engine."""

from dataclasses import dataclass, field
from pathlib import Path

from dsr1build.execute.executor import Limits, OpenExecutor


@dataclass(frozen=True, slots=True)
class Options:
    """How a build runs.

    ``jobs`` actions run at once; 0 stands for as many as the executor has places, which for this machine are the CPUs that
    may be used and, under GNU make, what its jobserver gives. ``memory`` bytes are shared by all that runs here; 0 stands for
    a part of what this process may use. ``limits`` are those of one action. With ``keep_going`` a failure stops only what
    depends on it.

    ``executor`` opens what runs the actions (by default this machine); with ``fallback`` this machine goes on where that
    fails.
    ``failures`` is a directory that takes what is needed to run a failed action again, and tells which actions have failed
    twice in the same way: these are not run, except with ``retry_failed``.
    ``save_temps`` is a directory that takes what the workers of compile actions leave in the directory that they are then
    given as a fourth argument, by the action's label; these actions run even where the cache holds their results.
    ``import_path`` is searched for workers beside the package.
    """

    jobs: int = 0
    keep_going: bool = False
    limits: Limits = field(default_factory=Limits)
    memory: int = 0
    executor: OpenExecutor | None = None
    fallback: bool = False
    failures: Path | None = None
    retry_failed: bool = False
    save_temps: Path | None = None
    import_path: tuple[Path, ...] = ()
