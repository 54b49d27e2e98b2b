"""Explanations of misses: the first field that differs, and the earlier action that an action is compared with."""

import json

import pytest

from dsr1build.digest import BlobRef, encode, sha256_hex
from dsr1build.plan.explain import (
    Difference,
    Explanation,
    Known,
    compare,
    explain_miss,
    first_difference,
    nearest,
    render_explanation,
    shorten,
    show,
)

LONG = "x" * 500


def digest(value):
    return sha256_hex(encode(value))[:16]


@pytest.mark.parametrize(
    ("before", "after", "text"),
    [
        ({"target": {"cpu": "x86-64-v3"}}, {"target": {"cpu": "x86-64-v2"}}, 'target.cpu was "x86-64-v3", is "x86-64-v2"'),
        ({"a": 1}, {"a": 1, "b": "x"}, 'b was absent, is "x"'),
        ({"a": 1, "b": {"c": [1]}}, {"a": 1}, 'b was {"c": [1]}, is absent'),
        ({"a": [1, 2]}, {"a": [1, 3]}, "a[1] was 2, is 3"),
        ({"a": [1, 2]}, {"a": [1]}, "a was [1, 2], is [1]"),
        ({"a": [["x", 1], ["y", 2]]}, {"a": [["x", 1], ["y", 3]]}, "a.y was 2, is 3"),
        ({"a": [["x", 1]]}, {"a": [["z", 1]]}, 'a[0][0] was "x", is "z"'),
        ({"a": 1}, {"a": True}, "a was 1, is true"),
        ({"a": 1}, {"a": 1.0}, "a was 1, is 1.0"),
        ({"a": 0.0}, {"a": -0.0}, "a was 0.0, is -0.0"),
        ({"a": None}, {"a": ""}, 'a was null, is ""'),
        ({"a": "1"}, {"a": 1}, 'a was "1", is 1'),
        ({"a": BlobRef("a" * 64)}, {"a": BlobRef("b" * 64)}, "a was blob aaaaaaaaaaaaaaaa, is blob bbbbbbbbbbbbbbbb"),
        ({"a": b"xy"}, {"a": {"k": 1}}, f'a was 2 bytes (digest {digest(b"xy")}), is {{"k": 1}}'),
        ({"a": LONG}, {"a": ""}, f'a was "{"x" * 40}...", 500 characters (digest {digest(LONG)}), is ""'),
        ({"z": 1, "é": 2}, {"z": 2, "é": 3}, "z was 1, is 2"),
    ],
)
def test_the_first_difference_is_told_with_both_values(before, after, text):
    assert str(first_difference(encode(before), encode(after))) == text
    assert first_difference(encode(before), encode(before)) is None


def test_of_long_texts_the_place_where_they_part_is_shown():
    before, after = "cse," * 100 + "canonicalize," + "cse," * 100, "cse," * 100 + "inline," + "cse," * 100
    found = first_difference(encode({"passes": before}), encode({"passes": after}))
    assert "...cse,cse,cse,cse,cse,canonicalize,cse,cse,cse,cse,cse,cse,cse..." in found.before
    assert found.before.endswith(f", 813 characters (digest {digest(before)})")
    assert "cse,inline,cse" in found.after and len(found.after) < 200


def test_large_lists_and_mappings_are_shown_by_length_and_digest():
    value = {"x": list(range(100))}
    assert show(value["x"]) == f"100 items (digest {digest(value['x'])})"
    assert show({str(n): n for n in range(50)}).startswith("50 fields (digest ")
    assert show(shorten(value["x"])) == show(value["x"])


def known(fields, origin="last build", action="a", label="label"):
    return Known.from_encoded(encode(fields), origin, action, label)


def fields(**changes):
    return {"abi": 1, "text": "t", "signature": "s", "target": {"cpu": "v3"}, "tools": {"opt": "1" * 64}, **changes}


def test_the_action_of_the_same_id_goes_before_a_nearer_one():
    now = known(fields(abi=2), action="a")
    last = [known(fields(abi=2, text="u"), action="b"), known(fields(text="u", tools={}), action="a")]
    found = explain_miss(now, last, list)
    assert (found.reason, found.action, found.difference, found.others) == (
        "changed",
        "a",
        Difference("abi", "1", "2"),
        ("text", "tools"),
    )
    assert render_explanation(found, "a") == "abi was 1, is 2; also text, tools"


def test_without_it_the_nearest_one_of_the_same_name_counts():
    now = known(fields(), action="n", label="expert 0123456789abcdef tokens=1 for v3")
    other_name = known(fields(abi=2), action="x", label="expert 0123456789abcdef tokens=64 for v3")
    same_name = known(fields(abi=2, text="u"), action="y", label="expert fedcba9876543210 tokens=1 for v3")
    found = explain_miss(now, [other_name, same_name], list)
    assert found.action == "y"
    assert render_explanation(found, "n") == (
        "abi was 2, is 1; also text (compared with expert fedcba9876543210 tokens=1 for v3 of the last build)"
    )


def test_the_cache_is_read_only_where_the_last_build_has_nothing_alike():
    now = known(fields(), action="n")
    assert explain_miss(now, [known(fields(abi=2), action="n")], lambda: pytest.fail("read")).reason == "changed"
    entry = known(fields(target={"cpu": "v2"}), "cache", "", "")
    found = explain_miss(now, [known({"other": 1}, action="x")], lambda: [entry])
    assert render_explanation(found, "n") == (
        f'target.cpu was "v2", is "v3" (compared with the entry {entry.key[:16]} of the cache)'
    )


def test_of_equally_near_ones_the_one_with_fewer_different_leaves_counts():
    now = known(fields(target={"cpu": "v3", "triple": "x", "features": ["+a"]}), action="n")
    far = known(fields(target={"cpu": "v2", "triple": "y", "features": []}), action="far")
    near = known(fields(target={"cpu": "v2", "triple": "x", "features": ["+a"]}), action="near")
    assert nearest(now, [far, near]) is near and nearest(now, [near, far]) is near


def test_an_action_with_little_in_common_is_not_compared():
    now = known(fields(), action="n")
    assert nearest(now, [known(fields(abi=2, text="u", signature="v"))]) is None
    assert nearest(now, [known({"abi": 1})]) is None
    assert explain_miss(now, [], list) == Explanation("first")
    assert render_explanation(Explanation("first")) == "nothing like it in the last build or in the cache"


def test_a_result_that_was_there_and_is_gone():
    now = known(fields(), action="n")
    found = explain_miss(now, [known(fields(), action="moved")], list)
    assert (found.reason, found.key) == ("gone", now.key)
    assert render_explanation(found, "n") == "its key is that of the last build; the result is no longer in the cache"


def test_a_difference_inside_of_what_one_side_does_not_hold_is_told_by_digest():
    whole = known({"a": {"b": [1, 2], "c": "x"}})
    cut = Known("record", "a", "", "0" * 64, {"a": "f" * 64}, lambda name: {"b": shorten([1, 2]), "c": "x"})
    difference, others = compare(cut, whole)
    assert (difference.path, difference.before, others) == ("a", "digest ffffffffffffffff", ())
    cut = Known("record", "a", "", "0" * 64, {"a": "f" * 64}, lambda name: {"b": shorten([1, 3]), "c": "x"})
    assert compare(cut, whole)[0].path == "a.b"


def test_every_field_that_is_named_can_be_shown():
    for value in (None, True, 0, 1.5, float("inf"), "", b"", [], {}, [b"x"], {"a": BlobRef("a" * 64)}, ["x" * 100]):
        assert show(value) and len(show(value)) < 200
        assert "\n" not in show(value)
    assert json.loads(show({"a": [1, "é"]})) == {"a": [1, "é"]}
