"""Replaces calls of a graph's functions by the functions' nodes."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dsr1build.graph.model import Function, Node


def inline_calls(nodes: Iterable[Node], functions: Mapping[str, Function], scope: str = "") -> tuple[Node, ...]:
    """The same computation without module calls, in the same order.

    Values of the given nodes keep their names; a value inside a call becomes ``<scope><number of the call>/<name>``, which
    no other value of the same scope has. A node inside a call takes the name of the outermost call that it comes from.
    """
    out: list[Node] = []
    calls = 0

    def expand(node: Node, names: Mapping[str, str], prefix: str, label: str) -> None:
        nonlocal calls
        inputs = tuple(names.get(name, prefix + name) if name else "" for name in node.inputs)
        outputs = tuple(names.get(name, prefix + name) for name in node.outputs)
        if node.domain != "module":
            out.append(replace(node, inputs=inputs, outputs=outputs, name=label))
            return
        function = functions[node.op]
        inner = {**dict(zip(function.inputs, inputs, strict=True)), **dict(zip(function.outputs, outputs, strict=True))}
        calls += 1
        inner_prefix = f"{scope}{calls}/"
        for child in function.nodes:
            expand(child, inner, inner_prefix, label)

    for node in nodes:
        expand(node, {}, "", node.name)
    return tuple(out)
