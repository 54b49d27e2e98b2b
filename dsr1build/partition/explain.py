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
    types = ({a.name: a for a in first.signature.arguments}, {a.name: a for a in second.signature.arguments})
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
            left, right = types[0].get(x), types[1].get(y)
            if left and right and (left.role, left.type, left.layout) != (right.role, right.type, right.layout):
                return f"{place}: the operand {name} is {_argument(left)} in the one and {_argument(right)} in the other"
            if x != y:
                return f"{place}: the operand {name} is {_source(first, x)} in the one and {_source(second, y)} in the other"
    if len(first.nodes) != len(second.nodes):
        return f"the one has {len(first.nodes)} operators, the other {len(second.nodes)}"
    for left, right in zip(first.signature.arguments, second.signature.arguments, strict=False):
        if left != right:
            return f"the argument {left.name} is {_argument(left)} in the one and {_argument(right)} in the other"
    counts = [sum(a.role == "output" for a in kernel.signature.arguments) for kernel in (first, second)]
    if counts[0] != counts[1]:
        return f"the one returns {counts[0]} values to other partitions, the other {counts[1]}"
    return f"they return other values: {', '.join(first.results)} and {', '.join(second.results)}"


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


def _source(kernel: Kernel, name: str) -> str:
    """Where an operand comes from, told so that two kernels' answers can be compared."""
    for argument in kernel.signature.arguments:
        if argument.name == name:
            sharing = sum(name in node.inputs for node in kernel.nodes)
            return f"{argument.role} {name}" + (f" (read by {sharing} operators)" if sharing > 1 else "")
    for number, node in enumerate(kernel.nodes, 1):
        if name in node.outputs:
            return f"the result of operator {number}, {node.op}"
    return f"the run-time dimension {name}"
