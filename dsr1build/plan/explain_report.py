"""The reports of ``dsr1build explain``: as objects that ``EXPLAIN_SCHEMA`` describes, and as text.

There are three: what a build would find now (``build``), what a build found (``record``), and where two builds differ
(``comparison``).
"""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from dsr1build.errors import InvalidInput
from dsr1build.plan.action import Action
from dsr1build.plan.explain import Difference, Known, compare, nearest, render_explanation
from dsr1build.plan.record import (
    DIFFERENCE_PROPERTIES,
    EXPLANATION_SCHEMA,
    KIND_SCHEMA,
    ActionRecord,
    BuildRecord,
    difference_to_json,
    explanation_from_json,
    explanation_to_json,
)


def choose(actions: Mapping[str, Action] | Mapping[str, ActionRecord], text: str) -> list[str]:
    """The ids of the actions that ``text`` means: the one of this id, or all whose id or name holds it; all for "".

    Raises InvalidInput where there is none.
    """
    if text in actions:
        return [text]
    names = {id: f"{action.kind} {action.label}" for id, action in actions.items()}
    found = [id for id, name in names.items() if text in id or text in name]
    if found:
        return found
    # Whole names are too long to be near to what somebody types: their first two words are what is meant.
    close = get_close_matches(text, [*names, *(" ".join(name.split()[:2]) for name in names.values())], n=1)
    hint = f"Did you mean `{close[0]}`?" if close else "`dsr1build explain` without an action lists them all."
    raise InvalidInput(f"no action is called `{text}`", where="dsr1build explain", hint=hint)


def explain_record(record: BuildRecord, action: str) -> dict[str, Any]:
    """The report of what a build recorded."""
    entries: list[dict[str, Any]] = []
    for id in choose(record.actions, action):
        found = record.actions[id]
        entry = {"action": id, "kind": found.kind, "label": found.label, "state": found.outcome, "seconds": found.seconds}
        if found.key:
            entry["key"] = found.key
        if found.explanation is not None:
            entry["explanation"] = explanation_to_json(found.explanation)
        entries.append(entry)
    return {"version": 1, "what": "record", "name": record.name, "actions": entries}


def compare_records(first: BuildRecord, second: BuildRecord) -> dict[str, Any]:
    """The report of where two builds differ; actions with equal keys are only counted."""
    equal = 0
    entries: list[dict[str, Any]] = []
    for old, new in pair_actions(list(first.known("first record")), list(second.known("second record"))):
        one = new or old
        assert one is not None
        record = second if new else first
        entry: dict[str, Any] = {"action": one.action, "kind": record.actions[one.action].kind, "label": one.label}
        if old is None or new is None:
            entry["only_in"] = "second" if new else "first"
            entries.append(entry)
        elif old.key == new.key:
            equal += 1
        else:
            difference, others = compare(old, new)
            assert difference is not None
            if old.action != new.action:
                entry["compared_with"] = old.action
            entries.append(entry | difference_to_json(difference, others))
    return {"version": 1, "what": "comparison", "equal": equal, "actions": entries}


def pair_actions(first: Sequence[Known], second: Sequence[Known]) -> Iterable[tuple[Known | None, Known | None]]:
    """Actions of the same id, then of the others each with the nearest one, then those that are alone."""
    by_id = {known.action: known for known in first}
    alone = {id: known for id, known in by_id.items() if id not in {other.action for other in second}}
    for new in second:
        old = by_id.get(new.action) or next((k for k in alone.values() if k.key == new.key), None) or nearest(new, alone.values())
        if old is not None:
            alone.pop(old.action, None)
        yield old, new
    for old in alone.values():
        yield old, None


def render_report(report: Mapping[str, Any], first: str = "", second: str = "") -> str:
    """The report as text, one line an action."""
    lines: list[str] = []
    for entry in report["actions"]:
        head = f"{entry['kind']} {entry['label']}: "
        if report["what"] == "comparison":
            if "only_in" in entry:
                lines.append(f"{head}only in {first if entry['only_in'] == 'first' else second}")
                continue
            also = f"; also {', '.join(entry['others'])}" if entry["others"] else ""
            lines.append(f"{head}{Difference(entry['field'], entry['before'], entry['after'])}{also}")
        elif entry["state"] == "waits":
            lines.append(f"{head}its key depends on what {entry['waits_for']} writes, which has to run")
        else:
            text = _render_state(entry)
            lines.append(head + text)
    if report["what"] == "comparison":
        total = report["equal"] + len(report["actions"])
        lines.append(f"{report['equal']} of {total} actions have equal keys")
    else:
        states = [entry["state"] for entry in report["actions"]]
        counts = ", ".join(_counted(states.count(state), state) for state in dict.fromkeys(states))
        lines.append(f"{len(states)} action{'' if len(states) == 1 else 's'}: {counts}")
    return "".join(f"{_visible(line)}\n" for line in lines)


def _visible(line: str) -> str:
    """Names from the record of a stranger may hold what a terminal or a CI service obeys, line ends above all."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in line)


def _counted(count: int, state: str) -> str:
    """``state`` in words after its number."""
    many = {"hit": "hits", "miss": "misses", "waits": "wait", "local hit": "local hits", "remote hit": "remote hits"}
    return f"{count} {state if count == 1 else many.get(state, state)}"


def _render_state(entry: Mapping[str, Any]) -> str:
    state: str = entry["state"]
    if state == "ran":
        state = f"ran for {entry['seconds']:.2f} s"
    if "explanation" not in entry:
        return state
    return f"{state}: {render_explanation(explanation_from_json(entry['explanation']), entry['action'])}"


def _report_schema() -> dict[str, Any]:
    head: dict[str, Any] = {"action": {"type": "string"}, "kind": KIND_SCHEMA, "label": {"type": "string"}}
    key = {"type": "string", "pattern": "^[0-9a-f]{64}$"}

    def entry(properties: Mapping[str, Any], *optional: str) -> dict[str, Any]:
        given = {**head, **properties}
        required = [name for name in given if name not in optional]
        return {"type": "object", "properties": given, "required": required, "additionalProperties": False}

    def report(what: str, properties: Mapping[str, Any], entries: Any) -> dict[str, Any]:
        given = {"version": {"const": 1}, "what": {"const": what}, **properties, "actions": {"type": "array", "items": entries}}
        return {"type": "object", "properties": given, "required": list(given), "additionalProperties": False}

    states = {
        "oneOf": [
            entry({"state": {"const": "hit"}, "key": key}),
            entry({"state": {"const": "miss"}, "key": key, "explanation": EXPLANATION_SCHEMA}),
            entry(
                {
                    "state": {"const": "waits", "description": "The key depends on what another action writes."},
                    "waits_for": {"type": "string", "description": "Id of the action that has to run first."},
                }
            ),
        ]
    }
    recorded = entry(
        {
            "state": {"enum": ["local hit", "remote hit", "ran", "failed", "skipped"]},
            "seconds": {"type": "number", "minimum": 0},
            "key": key,
            "explanation": EXPLANATION_SCHEMA,
        },
        "key",
        "explanation",
    )
    only = entry({"only_in": {"enum": ["first", "second"]}})
    differs = entry(
        {
            "compared_with": {"type": "string", "description": "Id in the first record, where it is another one."},
            **DIFFERENCE_PROPERTIES,
        },
        "compared_with",
    )
    equal = {"type": "integer", "minimum": 0, "description": "Number of actions with equal keys."}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Output of `dsr1build explain --json`",
        "oneOf": [
            report("build", {"name": {"type": "string"}}, states),
            report("record", {"name": {"type": "string"}}, recorded),
            report("comparison", {"equal": equal}, {"oneOf": [only, differs]}),
        ],
    }


EXPLAIN_SCHEMA: Mapping[str, Any] = _report_schema()
