"""Which action starts next: the one that most work waits for, among those that memory has room for."""

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

# How often actions that fit may start before one that does not, so that a large one is not put off for ever.
_OVERTAKEN = 8


@dataclass(order=True, slots=True)
class _Waiting:
    order: tuple[float, int]
    id: str = field(compare=False)
    memory: int = field(compare=False)
    alone: bool = field(compare=False)


class ReadyQueue:
    """Actions whose inputs are there. ``budget`` bytes of memory are shared by all that run."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._waiting: list[_Waiting] = []
        self._running: dict[str, int] = {}
        self._alone = False
        self._added = 0
        self._overtaken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def add(self, id: str, priority: float, memory: int, alone: bool = False) -> None:
        """``memory`` is what the action is expected to need (bytes); with ``alone`` nothing else runs beside it."""
        self._added += 1
        heapq.heappush(self._waiting, _Waiting((-priority, self._added), id, memory, alone))

    def take(self, jobs: int) -> str | None:
        """The action to start now; None where all have to wait. At most ``jobs`` run at once."""
        if self._alone or len(self._running) >= jobs or not self._waiting:
            return None
        passed: list[_Waiting] = []
        chosen: _Waiting | None = None
        while self._waiting and chosen is None:
            first = heapq.heappop(self._waiting)
            if self._fits(first):
                chosen = first
            else:
                passed.append(first)
                if self._overtaken >= _OVERTAKEN:
                    break
        for waiting in passed:
            heapq.heappush(self._waiting, waiting)
        if chosen is None:
            return None
        self._overtaken = self._overtaken + 1 if passed else 0
        self._running[chosen.id] = chosen.memory
        self._alone = chosen.alone
        return chosen.id

    def end(self, id: str) -> None:
        """The action does not run any more."""
        del self._running[id]
        self._alone = False

    def _fits(self, waiting: _Waiting) -> bool:
        # One that needs more than there is runs all the same, with nothing beside it.
        if not self._running:
            return True
        return not waiting.alone and sum(self._running.values()) + waiting.memory <= self._budget


def critical_paths(inputs: Mapping[str, Iterable[str]], seconds: Mapping[str, float]) -> dict[str, float]:
    """For each action, the seconds of the longest chain of actions that begins with it.

    ``inputs`` has all actions in an order in which inputs come first; ``seconds`` is what each is expected to take.
    """
    longest = {id: seconds[id] for id in inputs}
    for id in reversed(list(inputs)):
        for source in inputs[id]:
            longest[source] = max(longest[source], seconds[source] + longest[id])
    return longest
