"""Inlining replaces calls by their nodes and keeps every value apart."""

from graphs import call, op

from dsr1build.graph.inline import inline_calls
from dsr1build.graph.model import Function

INNER = Function("inner", ("x", "w"), ("y",), (op("Linear", "x w", "t"), op("Linear", "t w", "y")))
OUTER = Function("outer", ("x", "w"), ("y",), (call("inner", "x w", "h", ""), call("inner", "h w", "y", "")))


def test_nested_calls_get_values_of_their_own_and_keep_the_outer_names() -> None:
    nodes = [call("outer", "a b", "c", "m.0"), op("Linear", "c b", "d", "m.1")]
    assert inline_calls(nodes, {"inner": INNER, "outer": OUTER}) == (
        op("Linear", "a b", "2/t", "m.0"),
        op("Linear", "2/t b", "1/h", "m.0"),
        op("Linear", "1/h b", "3/t", "m.0"),
        op("Linear", "3/t b", "c", "m.0"),
        op("Linear", "c b", "d", "m.1"),
    )


def test_an_absent_operand_of_a_call_is_absent_inside() -> None:
    function = Function("f", ("x", "w", "bias"), ("y",), (op("Linear", "x w bias x", "y"),))
    assert inline_calls([call("f", "a b -", "c", "m")], {"f": function}) == (op("Linear", "a b - a", "c", "m"),)


def test_scopes_keep_separate_pieces_apart() -> None:
    inner = {"inner": INNER}
    first = inline_calls([call("inner", "a b", "c", "m")], inner, scope="m/")
    second = inline_calls([call("inner", "a b", "d", "n")], inner, scope="n/")
    assert first[0].outputs == ("m/1/t",)
    assert second[0].outputs == ("n/1/t",)
