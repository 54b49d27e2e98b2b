"""What actions are expected to cost, from what earlier ones of the same name or kind have cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from dsr1build.cache.store import LocalStore
from dsr1build.plan.action import Action

# Seconds that an action is taken to need in a store that has seen none of its kind.
_UNKNOWN_SECONDS: Mapping[str, float] = {"lower": 0.2, "compile": 2.0, "runtime": 3.0, "link": 1.0}


@dataclass(frozen=True, slots=True)
class Cost:
    """``seconds`` on the clock; ``peak`` resident bytes, 0 where nothing is known of it."""

    seconds: float
    peak: int


def expected_costs(store: LocalStore, actions: Mapping[str, Action]) -> dict[str, Cost]:
    """The cost of each action, by its id: that of the entry of the same kind and label that was used last, else the median
    of the seconds and the largest peak of its kind. One look over the index."""
    named: dict[tuple[str, str], tuple[float, Cost]] = {}
    kinds: dict[str, list[float]] = {}
    peaks: dict[str, int] = {}
    for entry in store.entries().values():
        kinds.setdefault(entry.kind, []).append(entry.seconds)
        peaks[entry.kind] = max(peaks.get(entry.kind, 0), entry.peak)
        name = (entry.kind, entry.label)
        if name not in named or named[name][0] <= entry.used:
            named[name] = (entry.used, Cost(entry.seconds, entry.peak))
    of_kind = {kind: median(seconds) for kind, seconds in kinds.items()}

    def expected(action: Action) -> Cost:
        if (found := named.get((action.kind, action.label))) is not None:
            return found[1]
        return Cost(of_kind.get(action.kind, _UNKNOWN_SECONDS.get(action.kind, 1.0)), peaks.get(action.kind, 0))

    return {id: expected(action) for id, action in actions.items()}
