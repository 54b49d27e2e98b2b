"""An action: one cacheable step of a build, and what it leaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dsr1build.digest import BlobRef, Fields

ActionKind: TypeAlias = Literal["lower", "compile", "runtime", "link"]


@dataclass(frozen=True, slots=True)
class ActionResult:
    """What an action left: each output file, by its path relative to the outputs directory, and its content."""

    key: str
    outputs: Mapping[str, BlobRef]


Results: TypeAlias = Mapping[str, ActionResult]


@dataclass(frozen=True, slots=True)
class Action:
    """One step. It depends on ``fields`` and on nothing else.

    * ``id`` is unique in its plan and equal from build to build; ``label`` is for people.
    * ``worker`` is ``module:function``, called in a process of its own as ``function(fields, inputs, outputs)``: ``inputs``
      is a directory that holds each blob of the fields as a file named by its digest, and every file left in the
      directory ``outputs`` is an output. The current directory is empty and the worker's own.
    * ``inputs`` are the ids of the actions whose results ``fields`` reads; it is given those results and no others.
    * ``outputs`` are the files that the worker has to leave; without one of them the action has failed.
    * ``preload`` are modules that the worker imports and that cost time; they may be imported once for many actions.
    """

    id: str
    kind: ActionKind
    label: str
    worker: str
    inputs: tuple[str, ...]
    fields: Callable[[Results], Fields]
    outputs: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
