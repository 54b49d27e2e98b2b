"""What every benchmark prints: one row for each goal, and the same as JSON."""

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """``goal`` is None where a figure is printed for honesty and has no goal."""

    what: str
    measured: float
    unit: str
    peer: str = ""
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.measured <= self.goal


def arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows as JSON")
    return parser.parse_args()


def report(rows: Sequence[Row], json_file: Path | None) -> int:
    """Print the rows, write them where asked, and return 1 if a goal was missed."""
    width = max(len(row.what) for row in rows)
    for row in rows:
        goal = "" if row.goal is None else f"  goal <= {row.goal:g} {row.unit}: {'met' if row.met else 'MISSED'}"
        peer = f"  ({row.peer})" if row.peer else ""
        print(f"{row.what:<{width}}  {row.measured:>10.3f} {row.unit}{peer}{goal}")
    if json_file is not None:
        json_file.write_text(json.dumps([{**asdict(row), "met": row.met} for row in rows], indent=1) + "\n", encoding="utf-8")
    return 1 if any(row.met is False for row in rows) else 0


def median(values: Sequence[float]) -> float:
    return statistics.median(values)
