"""The meaning of an operator as a real ONNX function, and as a small model of its own for tests and checks.

Heavy: imports onnx. Nothing that builds a bundle imports this module.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import onnx
from onnx import TensorProto, helper, numpy_helper, parser

from dsr1build.graph.model import Attribute, TensorType
from dsr1build.graph.onnx_form import DTYPES, IR_VERSION, OPSET
from dsr1build.ops.operator import Operator

Precision: TypeAlias = Literal["f32", "f64"]


def formal_inputs(operator: Operator, count: int) -> tuple[str, ...]:
    """The formal names of ``count`` inputs: no ``?``, and ``expert*`` as ``expert0``, ``expert1``, ..."""
    fixed = [n.rstrip("?") for n in operator.inputs if not n.endswith("*")]
    repeated = [n.rstrip("*") for n in operator.inputs if n.endswith("*")]
    more = [f"{repeated[0]}{i}" for i in range(count - len(fixed))] if repeated else []
    return (*fixed, *more)


def function_proto(
    operator: Operator,
    types: Sequence[TensorType | None],
    attributes: Mapping[str, Attribute],
    overload: str = "",
    precision: Precision = "f32",
) -> onnx.FunctionProto:
    """The ONNX function of an operator for these operand types and attributes, in domain ``dsr1``.

    Attributes are constants of the body, rounded to float as all ONNX attributes: two calls with different attributes
    are two functions; ``overload`` tells them apart. With precision ``f64`` every float of the body is a double, and so
    must be the f32 inputs: the measure that a lowering is compared with.

    Raises onnx.parser.ParseError where the body is not valid.
    """
    inputs = formal_inputs(operator, len(types))
    text = (
        f'<opset_import: ["" : {OPSET}], domain: "dsr1">\n'
        f"{operator.name} ({', '.join(inputs)}) => ({', '.join(operator.outputs)})\n"
        f"{{\n{operator.reference(types, attributes)}\n}}"
    )
    function = parser.parse_function(text)
    function.overload = overload
    if precision == "f64":
        for node in function.node:
            _widen(node)
    return function


def _widen(node: onnx.NodeProto) -> None:
    """Double instead of float in the node's attributes: cast targets and constants."""
    for attribute in node.attribute:
        if attribute.name == "to" and attribute.i == TensorProto.FLOAT:
            attribute.i = TensorProto.DOUBLE
        elif node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
            single = attribute.name == "value_float"
            values = [attribute.f] if single else list(attribute.floats)
            tensor = helper.make_tensor("", TensorProto.DOUBLE, [] if single else [len(values)], values)
            attribute.CopyFrom(helper.make_attribute("value", tensor))
        elif attribute.t.data_type == TensorProto.FLOAT:
            attribute.t.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(attribute.t).astype("float64")))


def model_proto(
    operator: Operator,
    types: Sequence[TensorType | None],
    attributes: Mapping[str, Attribute],
    precision: Precision = "f32",
) -> onnx.ModelProto:
    """A model with one call of the operator: inputs and outputs carry the formal names, absent inputs are left out.

    Runs in onnxruntime (f32) and in ``onnx.reference.ReferenceEvaluator`` (both precisions).
    """
    inputs = formal_inputs(operator, len(types))
    present = {n: t for n, t in zip(inputs, types, strict=False) if t is not None}
    calls = [n if n in present else "" for n in inputs]
    node = helper.make_node(operator.name, calls, list(operator.outputs), domain="dsr1")
    results = operator.infer(types, attributes)
    graph = helper.make_graph(
        [node],
        operator.name,
        [_value_info(n, t, precision) for n, t in present.items()],
        [_value_info(n, t, precision) for n, t in zip(operator.outputs, results, strict=True)],
    )
    model = helper.make_model(
        graph,
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid("dsr1", 1)],
        functions=[function_proto(operator, types, attributes, precision=precision)],
    )
    onnx.checker.check_model(model)
    return model


def _value_info(name: str, type_: TensorType, precision: Precision) -> onnx.ValueInfoProto:
    dtype = TensorProto.DOUBLE if precision == "f64" and type_.dtype == "f32" else DTYPES[type_.dtype]
    return helper.make_tensor_value_info(name, dtype, list(type_.shape))
