"""Puts partitions into an order in which each one's inputs are ready, or says why there is none."""

import heapq
from collections.abc import Mapping, Sequence
from typing import NoReturn

from dsr1build.errors import InvalidInput
from dsr1build.graph.model import Node
from dsr1build.partition.rules import Piece


def ordered_pieces(nodes: Sequence[Node], pieces: Sequence[Piece], reads: Mapping[int, Sequence[str]]) -> tuple[int, ...]:
    """The numbers of the pieces in a topological order; among those that are ready, the one with the first node goes first.

    ``reads`` are further values that a node depends on, by the node's place. A topological order of the pieces exists
    exactly when each is convex and no two need each other's results. Else raises InvalidInput that names the modules and
    the path that leaves and re-enters.
    """
    owner = {place: number for number, piece in enumerate(pieces) for place in piece.nodes}
    producer = {name: place for place, node in enumerate(nodes) for name in node.outputs}
    below: list[set[int]] = [set() for _ in pieces]
    above: list[set[int]] = [set() for _ in pieces]
    for place, node in enumerate(nodes):
        number = owner[place]
        names = (*node.inputs, *reads[place]) if place in reads else node.inputs
        for name in names:
            if name in producer and owner[producer[name]] != number:
                below[number].add(owner[producer[name]])
                above[owner[producer[name]]].add(number)
    waiting = [len(sources) for sources in below]
    ready = [number for number, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        number = heapq.heappop(ready)
        order.append(number)
        for reader in above[number]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(pieces):
        stuck = [number for number, count in enumerate(waiting) if count]
        _refuse(nodes, pieces, stuck, below, producer, reads)
    return tuple(order)


def _refuse(
    nodes: Sequence[Node],
    pieces: Sequence[Piece],
    stuck: Sequence[int],
    below: Sequence[set[int]],
    producer: Mapping[str, int],
    reads: Mapping[int, Sequence[str]],
) -> NoReturn:
    consumers: list[list[int]] = [[] for _ in nodes]
    for place, node in enumerate(nodes):
        for name in dict.fromkeys((*node.inputs, *reads.get(place, ()))):
            if name in producer:
                consumers[producer[name]].append(place)

    for number in stuck:
        piece = pieces[number]
        path = _path_outside(set(piece.nodes), consumers)
        if path:
            modules = _listed([nodes[place].name for place in piece.nodes])
            raise InvalidInput(
                f"the {piece.kind} partition of {modules} is not convex: the path"
                f" {' -> '.join(dict.fromkeys(nodes[place].name for place in path))} leaves it and enters it again",
                where=_rule(piece),
                hint=f"Add {nodes[path[1]].name!r} to the same rule, or give the modules before and after it rules of their own.",
            )
    # Every piece is convex by itself: follow what each stuck piece waits for until one comes back.
    trail = [stuck[0]]
    while True:
        following = min(number for number in below[trail[-1]] if number in set(stuck))
        if following in trail:
            cycle = [*trail[trail.index(following) :], following]
            break
        trail.append(following)
    names = [f"{pieces[n].kind} partition of {_listed([nodes[p].name for p in pieces[n].nodes])}" for n in cycle]
    raise InvalidInput(
        f"partitions need each other's results: the {' needs the '.join(names)}",
        where=_rule(pieces[cycle[0]]),
        hint="Give the modules of one of them rules of their own.",
    )


def _path_outside(inside: set[int], consumers: Sequence[Sequence[int]]) -> list[int]:
    """A shortest path of nodes that starts inside, goes on outside and ends inside; empty if there is none."""
    came: dict[int, int] = {}
    front = []
    for place in sorted(inside):
        for reader in consumers[place]:
            if reader not in inside and reader not in came:
                came[reader] = place
                front.append(reader)
    for place in front:
        for reader in consumers[place]:
            if reader in inside:
                path = [reader, place]
                while path[-1] not in inside:
                    path.append(came[path[-1]])
                return path[::-1]
            if reader not in came:
                came[reader] = place
                front.append(reader)
    return []


def _listed(names: Sequence[str]) -> str:
    shown = [f"{name!r}" for name in dict.fromkeys(names)]
    return ", ".join(shown) if len(shown) <= 4 else f"{', '.join(shown[:3])} and {len(shown) - 3} more"


def _rule(piece: Piece) -> str:
    return "recipe" if piece.rule is None else f"recipe, rule {piece.rule + 1} of `partitions`"
