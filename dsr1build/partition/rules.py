"""Applies the recipe's rules: which nodes of a graph become which partition."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsr1build.config.schema import PLACEHOLDER_PATTERN, PartitionRule, placeholders
from dsr1build.graph.model import Kind


@dataclass(frozen=True, slots=True)
class Piece:
    """Nodes that form one partition: their places in the graph, in order. ``rule`` is None for what no rule took."""

    kind: Kind
    nodes: tuple[int, ...]
    rule: int | None


def apply_rules(names: Sequence[str], rules: Sequence[PartitionRule]) -> tuple[tuple[Piece, ...], tuple[int, ...]]:
    """Cut nodes, given by name in graph order, into pieces; also the places of the rules that took nothing.

    A rule applies for each choice of placeholder values for which every one of its patterns matches a module that no
    earlier rule took; all nodes of that name go with it. Nodes that no rule takes become pieces of kind ``other``, each
    alone. Pieces come in the order of their first nodes.
    """
    places: dict[str, list[int]] = {}
    for place, name in enumerate(names):
        places.setdefault(name, []).append(place)
    free = dict.fromkeys(places)
    pieces: list[Piece] = []
    idle: list[int] = []
    for number, rule in enumerate(rules):
        found = [_matches(pattern, free) for pattern in rule.modules]
        shared = [values for values in found[0] if all(values in other for other in found[1:])]
        for values in shared:
            modules = [matches[values] for matches in found]
            for name in modules:
                free.pop(name, None)
            pieces.append(Piece(rule.kind, tuple(sorted({place for name in modules for place in places[name]})), number))
        if not shared:
            idle.append(number)
    pieces += [Piece("other", (place,), None) for name in free for place in places[name]]
    pieces.sort(key=lambda piece: piece.nodes[0])
    return tuple(pieces), tuple(idle)


def _matches(pattern: str, names: Mapping[str, None]) -> dict[tuple[str, ...], str]:
    """The name that the pattern matches, by placeholder values in the order of the placeholders' names."""
    variables = sorted(placeholders(pattern))
    if not variables:
        return {(): pattern} if pattern in names else {}
    seen: set[str] = set()
    text = ""
    # Literal text and the names of placeholders take turns.
    for number, part in enumerate(re.split(PLACEHOLDER_PATTERN, pattern)):
        if number % 2 == 0:
            text += re.escape(part)
        elif part in seen:
            text += f"(?P={part})"
        else:
            text += f"(?P<{part}>[0-9]+)"
            seen.add(part)
    match = re.compile(text).fullmatch
    # Most of R1's 15,000 names are ruled out by their ends, which is cheaper than matching.
    tail = pattern.rpartition("}")[2]
    return {found.group(0, *variables)[1:]: name for name in names if name.endswith(tail) and (found := match(name))}
