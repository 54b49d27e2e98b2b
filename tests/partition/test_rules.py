"""The recipe's rules over module names."""

from graphs import rule

from dsr1build.partition.rules import Piece, apply_rules


def test_modules_with_equal_numbers_become_one_piece() -> None:
    names = ["a.0.norm", "a.0.attn", "a.1.norm", "a.1.attn"]
    pieces, idle = apply_rules(names, [rule("attention", "a.{n}.norm", "a.{n}.attn")])
    assert pieces == (Piece("attention", (0, 1), 0), Piece("attention", (2, 3), 0))
    assert idle == ()


def test_a_rule_applies_only_where_all_its_patterns_match() -> None:
    names = ["a.0.norm", "a.0.mlp", "a.1.norm", "a.1.gate"]
    pieces, _ = apply_rules(names, [rule("ffn", "a.{n}.norm", "a.{n}.mlp"), rule("gating", "a.{n}.norm", "a.{n}.gate")])
    assert pieces == (Piece("ffn", (0, 1), 0), Piece("gating", (2, 3), 1))


def test_the_first_rule_wins_and_a_later_one_may_be_left_without_modules() -> None:
    pieces, idle = apply_rules(["a.0", "a.1"], [rule("ffn", "a.{n}"), rule("expert", "a.{n}"), rule("head", "head")])
    assert [piece.kind for piece in pieces] == ["ffn", "ffn"]
    assert idle == (1, 2)


def test_placeholders_stand_for_whole_numbers() -> None:
    names = ["a.0", "a.x", "a.1.b", "a.10", "b.a.2"]
    pieces, _ = apply_rules(names, [rule("ffn", "a.{n}")])
    assert [p.nodes for p in pieces if p.kind == "ffn"] == [(0,), (3,)]


def test_two_placeholders_are_matched_up_by_name() -> None:
    names = ["l.0.up.1", "l.1.up.0", "l.0.down.1", "l.1.down.0"]
    pieces, _ = apply_rules(names, [rule("expert", "l.{n}.up.{e}", "l.{n}.down.{e}")])
    assert [p.nodes for p in pieces] == [(0, 2), (1, 3)]


def test_every_name_of_a_placeholder_that_the_form_allows_matches() -> None:
    names = ["a.0.up.1", "a.1.up.0"]
    pieces, idle = apply_rules(names, [rule("expert", "a.{layer_1}.up.{e2}")])
    assert [p.nodes for p in pieces if p.kind == "expert"] == [(0,), (1,)]
    assert idle == ()


def test_nodes_of_one_name_stay_together_and_leftovers_stand_alone() -> None:
    pieces, _ = apply_rules(["m", "x", "m", "x"], [rule("ffn", "m")])
    assert pieces == (Piece("ffn", (0, 2), 0), Piece("other", (1,), None), Piece("other", (3,), None))
