"""The sum of the experts' results, dense (in graphs) and sparse (in kernels).

There is one order of additions, that of transformers' DeepseekV3MoE with experts in id order::

    routed = ((0 + w_0 e_0) + w_1 e_1) + ...        in increasing order of expert id
    y      = residual + (routed + shared)

``CombineExperts`` adds all experts, ``CombineSlots`` those that were chosen. An expert that was not chosen has weight 0
and adds a zero, and no partial sum that starts from +0 is ever -0, so that the two are equal bit by bit when the slots
stand in the order of expert ids and slots that are not used hold weight 0 and finite rows.
"""

from collections.abc import Sequence

from dsr1build.errors import InvalidInput
from dsr1build.graph.model import TensorType
from dsr1build.ops.copy import in_blocks
from dsr1build.ops.emitter import Body, Emitter, Value
from dsr1build.ops.operator import Attributes, Operands, Operator, Types, activation, aligned, required, same


def _residual(residual: TensorType | None, shared: TensorType | None) -> TensorType:
    activation(residual, "residual")
    result = required(residual, "residual")
    if shared is not None:
        same(shared, "shared", result)
    return result


def _infer_experts(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    result = _residual(types[0], types[1])
    experts = types[3:]
    same(types[2], "weights", TensorType("f32", (result.shape[0], len(experts))))
    for number, expert in enumerate(experts):
        same(expert, f"expert{number}", result)
    return (result,)


def _reference_experts(types: Types, attributes: Attributes) -> str:
    lines = ["zero = Constant <value_float = 0.0> ()", "last = Constant <value_ints = [1]> ()"]
    total = "zero"
    for number in range(len(types) - 3):
        lines += [
            f"id{number} = Constant <value_ints = [{number}]> ()",
            f"weight{number} = Gather <axis = 1> (weights, id{number})",
            f"term{number} = Mul (expert{number}, weight{number})",
            f"sum{number} = Add ({total}, term{number})",
        ]
        total = f"sum{number}"
    return "\n".join([*lines, *_reference_end(total, types[1])])


def _reference_end(total: str, shared: TensorType | None) -> Sequence[str]:
    if shared is None:
        return [f"y = Add (residual, {total})"]
    return [f"branches = Add ({total}, shared)", "y = Add (residual, branches)"]


def _lower_experts(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """Raises InvalidInput always: sparse dispatch replaces the operator by CombineSlots before kernels are made."""
    raise InvalidInput(
        "a dense sum over all experts has no kernel",
        where="CombineExperts",
        hint="set `dispatch: sparse` in the recipe, so that only the chosen experts run.",
    )


def _infer_slots(types: Types, attributes: Attributes) -> tuple[TensorType, ...]:
    residual, shared, slots, slot_weights = aligned(types, 4)
    result = _residual(residual, shared)
    slots = required(slots, "slots")
    if slots.dtype != "f32" or len(slots.shape) != 3 or (slots.shape[0], slots.shape[2]) != result.shape:
        raise ValueError(f"slots is {slots}, expected f32[{result.shape[0]}, top_k, {result.shape[1]}]")
    same(slot_weights, "slot_weights", TensorType("f32", slots.shape[:2]))
    return (result,)


def _reference_slots(types: Types, attributes: Attributes) -> str:
    slots = required(types[2], "slots").shape[1]
    assert isinstance(slots, int)
    lines = ["zero = Constant <value_float = 0.0> ()", "axis = Constant <value_ints = [1]> ()"]
    total = "zero"
    for number in range(slots):
        lines += [
            f"id{number} = Constant <value_ints = [{number}]> ()",
            f"weight{number} = Gather <axis = 1> (slot_weights, id{number})",
            f"slot{number} = Gather <axis = 1> (slots, id{number})",
            f"row{number} = Squeeze (slot{number}, axis)",
            f"term{number} = Mul (row{number}, weight{number})",
            f"sum{number} = Add ({total}, term{number})",
        ]
        total = f"sum{number}"
    return "\n".join([*lines, *_reference_end(total, types[1])])


def _lower_slots(emitter: Emitter, operands: Operands, attributes: Attributes) -> tuple[Value, ...]:
    """One phase over (token, block of columns)."""
    residual, shared, slots, slot_weights = aligned(operands, 4)
    residual = required(residual, "residual")
    weights = required(slot_weights, "slot_weights")
    y = in_blocks(emitter, emitter.destination(0, residual.type), 1)
    addends = [in_blocks(emitter, v, 1) for v in (shared, residual) if v is not None]
    rows = in_blocks(emitter, required(slots, "slots"), 2)

    def weigh(b: Body, row: str, weight: str, acc: str) -> str:
        return b.mac(acc, row, weight)

    def add(b: Body, routed: str, *rest: str) -> str:
        for addend in rest[:-1]:
            routed = b.add(routed, addend)
        return routed

    emitter.phase("map2")
    operands_sum = [(rows, "t, k, w, j"), (weights, "t, k")]
    routed = emitter.generic("routed", "t, w, k, j", operands_sum, (emitter.filled(y.type), "t, w, j"), "pprp", weigh)
    columns = "t, w, j"
    y = emitter.generic("out", columns, [(v, columns) for v in (routed, *addends)], (y, columns), "ppp", add)
    return (emitter.collapse(y, [[0], [1, 2]], residual.type.shape),)


COMBINE_EXPERTS = Operator(
    name="CombineExperts",
    inputs=("residual", "shared?", "weights", "expert*"),
    outputs=("y",),
    attributes=(),
    infer=_infer_experts,
    reference=_reference_experts,
    lower=_lower_experts,
    tolerance=1e-6,
    row_independent=True,
)

COMBINE_SLOTS = Operator(
    name="CombineSlots",
    inputs=("residual", "shared?", "slots", "slot_weights"),
    outputs=("y",),
    attributes=(),
    infer=_infer_slots,
    reference=_reference_slots,
    lower=_lower_slots,
    tolerance=1e-6,
    row_independent=True,
)

OPERATORS = (COMBINE_EXPERTS, COMBINE_SLOTS)
