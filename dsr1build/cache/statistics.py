"""What became of the look-ups of all builds on a store. The sums are one small row of the index, written once a build."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

REASONS: Mapping[str, str] = {
    "absent": "never made here, or evicted",
    "damaged": "a file was not what its name says; it is set aside",
    "lost": "a file was gone",
    "unreadable": "a file could not be read",
    "untrusted": "the signature was wrong",
}


@dataclass(slots=True)
class Counters:
    """``builds`` counts processes that looked something up. ``seconds_saved`` is what the results that were found had cost,
    ``bytes_served`` their size. ``misses`` counts by the reasons of ``REASONS``."""

    builds: int = 0
    hits: int = 0
    misses: dict[str, int] = field(default_factory=dict)
    seconds_saved: float = 0.0
    bytes_served: int = 0

    def add(self, other: "Counters") -> None:
        self.builds += other.builds
        self.hits += other.hits
        for reason, count in other.misses.items():
            self.misses[reason] = self.misses.get(reason, 0) + count
        self.seconds_saved += other.seconds_saved
        self.bytes_served += other.bytes_served


def render_counters(counters: Counters) -> bytes:
    return json.dumps(asdict(counters), sort_keys=True).encode("ascii")


def parse_counters(data: bytes) -> Counters:
    """The counters that ``data`` holds; what is not of their form counts as nothing."""
    try:
        found: Any = json.loads(data)
    except ValueError:
        return Counters()
    if not isinstance(found, dict) or set(found) != {"builds", "hits", "misses", "seconds_saved", "bytes_served"}:
        return Counters()
    numbers = (found["builds"], found["hits"], found["bytes_served"], found["seconds_saved"])
    misses = found["misses"]
    if not all(type(n) in (int, float) and n >= 0 for n in numbers) or not isinstance(misses, dict):
        return Counters()
    counted = {reason: count for reason, count in misses.items() if reason in REASONS and type(count) is int}
    return Counters(int(numbers[0]), int(numbers[1]), counted, float(numbers[3]), int(numbers[2]))
