"""What happens in a build, as typed events; each has a JSON form, one object a line, described by ``EVENT_SCHEMA``."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from dsr1build.toolchains.pass_groups import PassGroup


@dataclass(frozen=True, slots=True)
class Started:
    """An action was not in the cache and runs now."""

    event: ClassVar[str] = "started"
    action: str
    kind: str
    label: str


@dataclass(frozen=True, slots=True)
class Hit:
    """The result of an action was in a cache. ``source`` is ``local`` or ``remote:<name of the remote>``."""

    event: ClassVar[str] = "hit"
    action: str
    kind: str
    label: str
    key: str
    source: str = "local"


@dataclass(frozen=True, slots=True)
class Finished:
    """An action ran and its outputs are kept. ``seconds`` on the clock, ``cpu``
    seconds of its processes (0 where that is not known), ``peak`` resident memory in bytes, ``place`` the machine that ran it
    ("" for this one), ``pass_groups`` what a compile went through."""

    event: ClassVar[str] = "finished"
    action: str
    kind: str
    label: str
    key: str
    seconds: float
    peak: int
    cpu: float = 0.0
    place: str = ""
    pass_groups: tuple[PassGroup, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    """An action failed. ``reason`` says how it ended, ``output`` holds the last lines that it wrote, ``pass_group`` names the
    group in which it ended ("" where that is not known). ``reproducer`` is the directory that holds what is needed to run it
    again ("" where nothing was kept), ``again`` what came of running it once more."""

    event: ClassVar[str] = "failed"
    action: str
    kind: str
    label: str
    reason: str
    output: str
    pass_group: str = ""
    reproducer: str = ""
    again: str = ""


@dataclass(frozen=True, slots=True)
class Warned:
    """Something that the user should know and that does not stop the build. ``security``: somebody may have forged a result."""

    event: ClassVar[str] = "warning"
    message: str
    security: bool = False


@dataclass(frozen=True, slots=True)
class Summary:
    """The last event. ``compiled`` counts compile actions that ran, ``executed`` actions of every kind that ran."""

    event: ClassVar[str] = "summary"
    compiled: int
    executed: int
    hits: Mapping[str, int]
    failed: int
    skipped: int
    seconds: float
    artifacts: tuple[str, ...]


Event: TypeAlias = Started | Hit | Finished | Failed | Warned | Summary
Emit: TypeAlias = Callable[[Event], None]


def to_json(event: Event) -> dict[str, Any]:
    return {"event": event.event, **{k: list(v) if isinstance(v, tuple) else v for k, v in asdict(event).items()}}


def _object(event: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    fields = {"event": {"const": event}, **properties}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


_TEXT = {"type": "string"}
_COUNT = {"type": "integer", "minimum": 0}
_SECONDS = {"type": "number", "minimum": 0}
_KEY = {"type": "string", "pattern": "^[0-9a-f]{64}$"}
_ACTION = {"action": _TEXT, "kind": {"enum": ["lower", "compile", "runtime", "link"]}, "label": _TEXT}
_GROUPS = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": _TEXT,
            "start": _SECONDS,
            "seconds": {"type": ["number", "null"], "minimum": 0},
            "ir_bytes": _COUNT,
        },
        "required": ["name", "start", "seconds", "ir_bytes"],
        "additionalProperties": False,
    },
}

EVENT_SCHEMA: Mapping[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "One line of `dsr1build build --json`",
    "oneOf": [
        _object("started", _ACTION),
        _object("hit", {**_ACTION, "key": _KEY, "source": {"type": "string", "pattern": "^(local$|remote:)"}}),
        _object(
            "finished",
            {
                **_ACTION,
                "key": _KEY,
                "seconds": _SECONDS,
                "peak": _COUNT,
                "cpu": _SECONDS,
                "place": _TEXT,
                "pass_groups": _GROUPS,
            },
        ),
        _object(
            "failed", {**_ACTION, "reason": _TEXT, "output": _TEXT, "pass_group": _TEXT, "reproducer": _TEXT, "again": _TEXT}
        ),
        _object("warning", {"message": _TEXT, "security": {"type": "boolean"}}),
        _object(
            "summary",
            {
                "compiled": _COUNT,
                "executed": _COUNT,
                "hits": {
                    "type": "object",
                    "properties": {"local": _COUNT, "remote": _COUNT},
                    "required": ["local", "remote"],
                    "additionalProperties": False,
                },
                "failed": _COUNT,
                "skipped": _COUNT,
                "seconds": _SECONDS,
                "artifacts": {"type": "array", "items": _TEXT},
            },
        ),
    ],
}
