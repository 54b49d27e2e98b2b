"""The lower action: a kernel and a specialization in, ``kernel.mlir`` and ``signature.json`` out.

Fields of the action, all that its key and its worker know::

    action          "lower"
    nodes           [{op, inputs, outputs, attributes: [[name, value]]}]    the kernel's canonical nodes
    signature       as in signature.json, before specialization
    results         value names, states first, then outputs
    specialization  {guard, tokens}
    sources         digest of the sources of graph, ops and lower
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dsr1build.digest import Fields, FieldValue
from dsr1build.graph.model import Attribute, Node
from dsr1build.graph.signature import Guard, Signature, Specialization
from dsr1build.lower.sources import sources_digest

SOURCE_ROOMS = ("graph", "ops", "lower")
WORKER = "dsr1build.lower.action:lower_worker"
OUTPUTS = ("kernel.mlir", "signature.json")


def lower_fields(
    nodes: Sequence[Node], signature: Signature, results: Sequence[str], specialization: Specialization
) -> dict[str, FieldValue]:
    """The fields of the action that lowers this kernel; arguments as in ``lower_kernel``.

    Two kernels that differ in anything but the names of their nodes have different fields.
    """
    return {
        "action": "lower",
        "nodes": [_node_fields(node) for node in nodes],
        "signature": signature.to_json(),
        "results": list(results),
        "specialization": {"guard": specialization.guard, "tokens": specialization.tokens},
        "sources": sources_digest(SOURCE_ROOMS),
    }


def kernel_of_fields(fields: Fields) -> tuple[tuple[Node, ...], Signature, tuple[str, ...], Specialization]:
    """The inverse of ``lower_fields``: nodes, signature, results, specialization."""
    # The fields were written by lower_fields above, possibly encoded and decoded since, which turns tuples into lists.
    data = cast("Mapping[str, Any]", fields)
    bound = data["specialization"]
    return (
        tuple(_node_of_fields(node) for node in data["nodes"]),
        Signature.from_json(dict(data["signature"])),
        tuple(data["results"]),
        Specialization(_guard(bound["guard"]), bound["tokens"]),
    )


def lower_worker(fields: Fields, inputs: Path, outputs: Path) -> None:
    """Lower the kernel of ``fields`` and write ``kernel.mlir`` and ``signature.json`` (specialized) into ``outputs``.

    Raises what ``lower_kernel`` raises.
    """
    from dsr1build.lower.kernel_source import lower_kernel

    source = lower_kernel(*kernel_of_fields(fields))
    (outputs / "kernel.mlir").write_text(source.text, encoding="utf-8", newline="\n")
    text = json.dumps(source.signature.to_json(), indent=1, sort_keys=True) + "\n"
    (outputs / "signature.json").write_text(text, encoding="utf-8", newline="\n")


def _node_fields(node: Node) -> dict[str, FieldValue]:
    if node.domain != "dsr1":
        raise ValueError(f"{node.op} of domain {node.domain!r} is not an operator of a kernel")
    attributes: list[FieldValue] = [[name, list(v) if isinstance(v, tuple) else v] for name, v in node.attributes]
    return {"op": node.op, "inputs": list(node.inputs), "outputs": list(node.outputs), "attributes": attributes}


def _node_of_fields(data: Mapping[str, Any]) -> Node:
    def attribute(value: Any) -> Attribute:
        return tuple(value) if isinstance(value, list | tuple) else cast("Attribute", value)

    attributes = tuple((name, attribute(value)) for name, value in data["attributes"])
    return Node(data["op"], tuple(data["inputs"]), tuple(data["outputs"]), attributes)


def _guard(text: str) -> Guard:
    known: tuple[Guard, ...] = ("exact", "padded", "range")
    for guard in known:
        if guard == text:
            return guard
    raise ValueError(f"unknown guard {text!r}")
