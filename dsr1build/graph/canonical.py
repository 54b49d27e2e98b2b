"""The canonical form of a piece of a graph: what is left when names, places and call structure are taken away.

Two pieces are the same kernel exactly when the encodings of their canonical forms are equal bytes. The digest only finds
candidates; it is never the proof.

The form is built by one depth-first walk from the ordered roots over operands. Values and arguments are numbered where
the walk first meets them, so the form does not depend on names nor on the order of independent nodes, and nodes that no
root needs are not in it. Roots are the outputs in graph order, then the state updates in graph order. Commutative
operands are not reordered: floating-point results may depend on the order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dsr1build.digest import encode, sha256_hex
from dsr1build.errors import InvalidInput
from dsr1build.graph.model import Node, TensorType
from dsr1build.graph.signature import Argument, Role, Signature, ordered_dims

LeafRole: TypeAlias = Literal["input", "weight", "state", "dimension"]

_ORDER: tuple[Role, ...] = ("input", "weight", "state", "output")


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that comes from outside of the piece. A scalar run-time dimension (``past``) is a ``dimension``."""

    role: LeafRole
    type: TensorType


@dataclass(frozen=True, slots=True)
class CanonicalForm:
    """``nodes``, ``signature`` and ``results`` as in a kernel; ``encoding`` holds all three, exactly.

    The encoding is injective (``dsr1build.digest``): floats count by their bits, an integer is not a float.
    """

    nodes: tuple[Node, ...]
    signature: Signature
    results: tuple[str, ...]
    encoding: bytes


def canonical_form(
    nodes: Sequence[Node],
    leaves: Mapping[str, Leaf],
    outputs: Sequence[tuple[str, TensorType]],
    state_updates: Sequence[tuple[str, str]],
) -> tuple[CanonicalForm, tuple[str, ...]]:
    """The canonical form of ``nodes`` (no module calls) and the original name of each of its arguments.

    ``outputs`` are the values that others read, with their types; ``state_updates`` pairs each state with the value that
    holds it afterwards. Raises InvalidInput where a state is not updated in place: its update must be the result of the
    one node that reads it, as that node's first operand.
    """
    _check_states(nodes, leaves, outputs, state_updates)
    producer = {name: node for node in nodes for name in node.outputs}
    order: list[Node] = []
    met: dict[str, None] = {}
    _walk([*(name for name, _ in outputs), *(value for _, value in state_updates)], producer, order, met)

    by_role: dict[str, list[str]] = {role: [] for role in _ORDER}
    used: set[str] = set()
    names: dict[str, str] = {"": ""}
    for name in met:
        leaf = leaves[name]
        if leaf.role == "dimension":
            used.add(name)
            names[name] = name
        else:
            by_role[leaf.role].append(name)
    types = {name: leaves[name].type for name in met}
    by_role["output"] = [name for name, _ in outputs]
    types.update(outputs)

    arguments: list[Argument] = []
    originals: list[str] = []
    for role in _ORDER:
        for name in by_role[role]:
            argument = f"a{len(arguments)}"
            if role != "output":
                names[name] = argument
            arguments.append(Argument(argument, role, types[name]))
            originals.append(name)
            used.update(d for d in types[name].shape if isinstance(d, str))
    signature = Signature(tuple(arguments), ordered_dims(used))

    canonical: list[Node] = []
    values = 0
    for node in order:
        inputs = tuple(names[name] for name in node.inputs)
        # Left out and absent are the same for operands at the end.
        while inputs and not inputs[-1]:
            inputs = inputs[:-1]
        for name in node.outputs:
            names[name] = f"v{values}"
            values += 1
        results = tuple(names[name] for name in node.outputs)
        canonical.append(Node(node.op, inputs, results, tuple(sorted(node.attributes)), node.domain))
    updated = dict(state_updates)
    finals = tuple(names[updated[name]] for name in by_role["state"]) + tuple(names[name] for name, _ in outputs)
    return CanonicalForm(tuple(canonical), signature, finals, _encode(canonical, signature, finals)), tuple(originals)


def structural_digest(form: bytes) -> str:
    """SHA-256 of a canonical form's encoding, 64 lower-case hexadecimal digits."""
    return sha256_hex(form)


def _walk(roots: Sequence[str], producer: Mapping[str, Node], order: list[Node], met: dict[str, None]) -> None:
    """Fill ``order`` with the nodes that the roots need, operands first, and ``met`` with the leaves in order of first visit.

    The stack is explicit: a piece may be a whole model, deeper than Python's recursion goes.
    """
    done: set[int] = set()
    for root in roots:
        if root not in producer:
            met[root] = None
            continue
        stack: list[tuple[Node, int]] = [(producer[root], 0)]
        while stack:
            node, place = stack.pop()
            if id(node) in done:
                continue
            while place < len(node.inputs):
                name = node.inputs[place]
                below = producer.get(name)
                place += 1
                if below is None:
                    if name:
                        met[name] = None
                elif id(below) not in done:
                    stack += [(node, place), (below, 0)]
                    break
            else:
                done.add(id(node))
                order.append(node)


def _check_states(
    nodes: Sequence[Node],
    leaves: Mapping[str, Leaf],
    outputs: Sequence[tuple[str, TensorType]],
    state_updates: Sequence[tuple[str, str]],
) -> None:
    states = {name for name, leaf in leaves.items() if leaf.role == "state"}
    updates = dict(state_updates)
    exported = {name for name, _ in outputs}
    for state in sorted(states):
        readers = [node for node in nodes if state in node.inputs]
        where = f"node {readers[0].name or readers[0].op!r}" if readers else f"state {state!r}"
        if state not in updates:
            raise InvalidInput(f"the state {state!r} is read here, but its update is computed elsewhere", where=where)
        if len(readers) != 1 or readers[0].inputs.count(state) != 1:
            raise InvalidInput(
                f"the old value of state {state!r} is read {len(readers)} times; only the node that updates it may read it, once",
                where=where,
            )
        if readers[0].inputs[0] != state or updates[state] != readers[0].outputs[0]:
            raise InvalidInput(
                f"the state {state!r} is not updated in place: its update {updates[state]!r} must be the result of the node that"
                f" reads it as its first operand",
                where=where,
            )
        if updates[state] in exported:
            raise InvalidInput(f"the updated state {state!r} is read by another partition", where=where)
    for state, value in state_updates:
        if state not in states:
            raise InvalidInput(f"the update {value!r} of state {state!r} does not read the state", where=f"state {state!r}")


def _encode(nodes: Sequence[Node], signature: Signature, results: Sequence[str]) -> bytes:
    return encode(
        {
            "nodes": [[n.domain, n.op, n.inputs, n.outputs, [[name, value] for name, value in n.attributes]] for n in nodes],
            "signature": signature.to_json(),
            "results": results,
        }
    )
