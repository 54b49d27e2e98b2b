"""Why two partitions that look alike are different kernels."""

from dsr1build.digest import encode
from dsr1build.graph.signature import Argument
from dsr1build.ops.registry import OPERATORS
from dsr1build.partition.model import Kernel


def explain_difference(first: Kernel, second: Kernel) -> str:
    """The first difference between two kernels, in words: an operator, an attribute, the wiring or the type of an argument.

    Empty where the canonical forms are equal.
    """
    if first.form == second.form:
        return ""
    arguments = ({a.name: a for a in first.signature.arguments}, {a.name: a for a in second.signature.arguments})
    # Where each value is met first. Argument numbers would not do: one argument more shifts all that follow.
    met: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for number, (a, b) in enumerate(zip(first.nodes, second.nodes, strict=False), 1):
        if (a.domain, a.op) != (b.domain, b.op):
            return f"operator {number} is {a.op} in the one and {b.op} in the other"
        place = f"operator {number}, {a.op}"
        if encode([list(pair) for pair in a.attributes]) != encode([list(pair) for pair in b.attributes]):
            return f"{place}: {_attributes(dict(a.attributes), dict(b.attributes))}"
        if len(a.inputs) != len(b.inputs):
            return f"{place}: it has {len(a.inputs)} operands in the one and {len(b.inputs)} in the other"
        for operand, (x, y) in enumerate(zip(a.inputs, b.inputs, strict=True)):
            name = _operand_name(a.op, operand)
            if (x == "") != (y == ""):
                return f"{place}: the operand {name} is {'absent' if not x else 'present'} in the one only"
            left, right = arguments[0].get(x), arguments[1].get(y)
            if left and right and (left.role, left.type, left.layout) != (right.role, right.type, right.layout):
                return f"{place}: the operand {name} is {_argument(left)} in the one and {_argument(right)} in the other"
            if x and met[0].get(x) != met[1].get(y):
                sources = [where.get(value, "a value of its own") for where, value in zip(met, (x, y), strict=True)]
                return f"{place}: the operand {name} is {sources[0]} in the one and {sources[1]} in the other"
            for where, value in zip(met, (x, y), strict=True):
                where.setdefault(value, f"what operator {number}, {a.op}, reads as {name}")
        for where, node in zip(met, (a, b), strict=True):
            where.update({value: f"result {k} of operator {number}, {a.op}" for k, value in enumerate(node.outputs, 1)})
    if len(first.nodes) != len(second.nodes):
        return f"the one has {len(first.nodes)} operators, the other {len(second.nodes)}"
    returned = [[met[i].get(name, name) for name in kernel.results] for i, kernel in enumerate((first, second))]
    return f"the one returns {_listed(returned[0])}, the other {_listed(returned[1])}"


def look_alikes(kernels: list[Kernel]) -> list[tuple[Kernel, Kernel, str]]:
    """For every kernel that is not the first of its kind: the first one of that kind and what tells them apart."""
    firsts: dict[str, Kernel] = {}
    out = []
    for kernel in kernels:
        first = firsts.setdefault(kernel.kind, kernel)
        if first is not kernel:
            out.append((first, kernel, explain_difference(first, kernel)))
    return out


def _attributes(a: dict[str, object], b: dict[str, object]) -> str:
    for name in sorted({*a, *b}):
        if name not in a or name not in b:
            return f"the attribute {name} is set in the one only"
        if a[name] != b[name] or type(a[name]) is not type(b[name]) or repr(a[name]) != repr(b[name]):
            return f"the attribute {name} is {a[name]!r} in the one and {b[name]!r} in the other"
    return "the attributes differ in their order"


def _operand_name(op: str, place: int) -> str:
    inputs = OPERATORS[op].inputs
    if inputs[-1].endswith("*") and place >= len(inputs) - 1:
        return f"{inputs[-1].rstrip('*')}{place - len(inputs) + 1}"
    return inputs[place].rstrip("?")


def _argument(argument: Argument) -> str:
    return f"{argument.role} {argument.type}" + ("" if argument.layout == "rows" else f" in layout {argument.layout}")


def _listed(items: list[str]) -> str:
    return " and ".join(items) if items else "nothing"
