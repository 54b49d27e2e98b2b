"""Build records: bounded, exact where they are not shortened, and read back or refused as a whole."""

import json
import os

import jsonschema
import pytest

from dsr1build.digest import BlobRef, encode, key_of
from dsr1build.errors import InvalidInput
from dsr1build.plan.action import Action
from dsr1build.plan.explain import Difference, Explanation, compare
from dsr1build.plan.explain_report import EXPLAIN_SCHEMA, choose, compare_records, explain_record, render_report
from dsr1build.plan.record import (
    BYTES_AN_ACTION,
    RECORD_PATH,
    RECORD_SCHEMA,
    SHARED_BYTES,
    Done,
    last_record,
    make_record,
    read_record,
    record_from_json,
    record_to_json,
    watch_fields,
    write_record,
)


def action(id, fields, kind="compile", label=None):
    return Action(id, kind, label or f"label of {id}", "m:f", (), lambda results: fields)


def record(explanations=(), done=None, **fields):
    actions = {id: action(id, given) for id, given in fields.items()}
    seen = {id: encode(given) for id, given in fields.items()}
    outcomes = {id: Done("ran", 0.5) for id in fields} if done is None else done
    return make_record("name", actions, seen, outcomes, dict(explanations))


SAMPLE = {
    "null": None,
    "yes": True,
    "int": 1 << 70,
    "float": -0.0,
    "infinite": float("inf"),
    "text": "größer",
    "bytes": b"xy",
    "blob": BlobRef("ab" * 32),
    "nested": {"list": [1, [2.0, "x"], {}], "deep": {"a": {"b": {}}}},
}


def test_a_record_comes_back_as_it_was():
    explanation = Explanation("changed", "cache", "", "", "1" * 64, Difference("a", "1", "2"), ("b",))
    made = record(
        {"x": explanation}, {"x": Done("ran", 1.25), "y": Done("remote hit")}, x=SAMPLE, y={**SAMPLE, "int": 2}, z={"a": 1}
    )
    data = record_to_json(made)
    jsonschema.Draft202012Validator.check_schema(RECORD_SCHEMA)
    jsonschema.validate(data, RECORD_SCHEMA)
    again = record_from_json(json.loads(json.dumps(data, allow_nan=False)))
    assert record_to_json(again) == data
    assert again.actions["x"].explanation == explanation
    assert [a.outcome for a in again.actions.values()] == ["ran", "remote hit", "skipped"]
    assert again.known_action("x", "").key == key_of(SAMPLE)
    difference, others = compare(again.known_action("x", ""), made.known_action("y", ""))
    assert (str(difference), others) == (f"int was {1 << 70}, is 2", ())


def test_a_value_that_many_actions_share_is_written_once():
    tools = {f"library {n}": "0" * 64 for n in range(200)}
    made = record(**{f"a{n}": {"tools": tools, "n": n} for n in range(300)})
    text = json.dumps(record_to_json(made))
    assert text.count('library 7"') == 1
    assert len(text) < 300 * 700 + 20_000


def test_a_record_is_bounded_whatever_the_fields_hold():
    huge = {
        f"a{n}": {"n": n, "text": f"{n}" * 50_000, "list": [[n] * 20] * 100, "map": {str(i): [n, i] for i in range(300)}}
        for n in range(8)
    }
    made = record(**huge)
    text = json.dumps(record_to_json(made))
    assert len(text) <= SHARED_BYTES + 2 * BYTES_AN_ACTION * len(huge)
    jsonschema.validate(json.loads(text), RECORD_SCHEMA)
    first, second = made.known_action("a0", ""), made.known_action("a1", "")
    assert compare(first, second)[0].path.startswith("list")
    changed = record(a0={**huge["a0"], "map": {**huge["a0"]["map"], "7": [0, 8]}}, **{k: v for k, v in huge.items() if k != "a0"})
    assert compare(first, changed.known_action("a0", ""))[0].path.split(".")[0] == "map"


def test_what_the_last_record_says_of_equal_keys_is_taken_over():
    fields = {"a": SAMPLE, "b": {**SAMPLE, "int": 2}}
    last = record(**fields)
    actions = {id: action(id, given) for id, given in {**fields, "c": {"new": 1}}.items()}
    seen = {id: encode(a.fields({})) for id, a in actions.items()}
    done = {id: Done("local hit") for id in actions}
    assert record_to_json(make_record("n", actions, seen, done, {}, last)) == record_to_json(
        make_record("n", actions, seen, done, {})
    )


def test_watched_actions_compute_the_same_fields():
    seen = {}
    watched = watch_fields({"x": action("x", SAMPLE)}, seen)
    assert seen == {}
    assert watched["x"].fields({}) == SAMPLE
    assert seen == {"x": encode(SAMPLE)}


def test_writing_and_reading(tmp_path):
    build_file = tmp_path / "BUILD.yaml"
    assert last_record(build_file) is None
    for fields in ({"a": 1}, {"a": 2}):
        write_record(record(x=fields), build_file, pytest.fail)
        assert last_record(build_file).actions["x"].key == key_of(fields)
    assert [p.name for p in (tmp_path / ".dsr1build").iterdir()] == ["last-build.json"]
    assert (tmp_path / RECORD_PATH).stat().st_mode & 0o777 == 0o644


def test_where_it_cannot_be_written_there_is_one_warning(tmp_path):
    (tmp_path / ".dsr1build").write_text("a file")
    warnings = []
    write_record(record(x={"a": 1}), tmp_path / "BUILD.yaml", warnings.append)
    assert warnings == [
        "the build record .dsr1build/last-build.json cannot be written (File exists); explanations will know the cache alone"
    ]
    assert last_record(tmp_path / "BUILD.yaml") is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_directory_is_no_error(tmp_path):
    tmp_path.chmod(0o555)
    warnings = []
    write_record(record(x={"a": 1}), tmp_path / "BUILD.yaml", warnings.append)
    assert len(warnings) == 1


def test_a_damaged_record_is_none_or_an_error(tmp_path):
    build_file = tmp_path / "BUILD.yaml"
    write_record(record({"x": Explanation("first")}, x=SAMPLE), build_file, pytest.fail)
    path = tmp_path / RECORD_PATH
    good = path.read_bytes()
    for size in range(0, len(good), 7):
        path.write_bytes(good[:size])
        assert last_record(build_file) is None, size
    for data in (b"[]", b"null", b"{}", b"\xff", b'{"version":1}', good.replace(b'"values"', b'"value"')):
        path.write_bytes(data)
        assert last_record(build_file) is None
        with pytest.raises(InvalidInput) as error:
            read_record(path)
        assert error.value.render() == (
            f"{path}: error: the file is not a build record\n"
            "help: Each build writes one to .dsr1build/last-build.json beside its BUILD.yaml."
        )
    path.write_bytes(good.replace(b'"version":1', b'"version":2'))
    with pytest.raises(InvalidInput, match="version 2 of the build record is unknown"):
        read_record(path)
    with pytest.raises(InvalidInput, match="the build record cannot be read: No such file or directory"):
        read_record(tmp_path / "none.json")


HOSTILE = {
    "seconds": {"seconds": "x"},
    "endless seconds": {"seconds": float("inf")},
    "label": {"label": 3},
    "outcome": {"outcome": []},
    "kind": {"kind": {}},
    "key": {"key": 3},
    "no key": {"key": "../x"},
    "reason": {"explanation": {"reason": ["first"]}},
    "no difference": {"explanation": {"reason": "changed"}},
    "difference": {"explanation": {"reason": "changed", "field": 1, "before": [], "after": {}, "others": [1]}},
    "against": {"explanation": {"reason": "gone", "against": {"origin": 1, "action": 2, "label": 3, "key": 4}}},
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_record_with_a_part_of_another_form_is_none(tmp_path, what):
    data = record_to_json(record({"x": Explanation("first")}, x=SAMPLE))
    data["actions"]["x"] |= HOSTILE[what]
    (tmp_path / RECORD_PATH).parent.mkdir()
    (tmp_path / RECORD_PATH).write_text(json.dumps(data))
    assert last_record(tmp_path / "BUILD.yaml") is None
    with pytest.raises(InvalidInput, match="the file is not a build record"):
        read_record(tmp_path / RECORD_PATH)


@pytest.mark.parametrize(
    "value",
    [
        "[" * 100_000 + "]" * 100_000,
        "[" * 300 + "]" * 300,
        "9" * 5000,
        '{"shortened": "text", "length": 1e999, "sha256": "%s"}' % ("0" * 64),
        '{"shortened": [1], "length": 3, "sha256": 4}',
        '{"blob": 5}',
        '{"float": 5}',
    ],
)
def test_a_record_with_a_value_of_another_form_is_none(tmp_path, value):
    data = record_to_json(record(x=SAMPLE))
    digest = next(iter(data["values"]))
    data["values"][digest] = "here"
    (tmp_path / RECORD_PATH).parent.mkdir()
    (tmp_path / RECORD_PATH).write_text(json.dumps(data).replace('"here"', value))
    assert last_record(tmp_path / "BUILD.yaml") is None
    with pytest.raises(InvalidInput, match="the file is not a build record"):
        read_record(tmp_path / RECORD_PATH)


def test_names_of_a_record_are_no_commands_to_a_terminal_or_a_service(tmp_path):
    data = record_to_json(record({"x": Explanation("first")}, x=SAMPLE))
    data["actions"]["x"]["label"] = "a\x1b[2J\n::error::forged\r\ud800"
    text = render_report(explain_record(record_from_json(data), ""))
    assert text.splitlines()[0].startswith(r"compile a\x1b[2J\n::error::forged\r\ud800: ran")


def test_two_records_are_compared_action_by_action():
    common = {"abi": 1, "text": "t", "tools": {"opt": "1"}}
    first = record(same=common, cpu={**common, "target": {"cpu": "v3"}}, gone={"x": 1})
    second = record(same=common, cpu={**common, "target": {"cpu": "v2"}, "tools": {"opt": "2"}}, new={"y": 1, "z": 2})
    report = compare_records(first, second)
    jsonschema.validate(report, EXPLAIN_SCHEMA)
    assert render_report(report, "A.json", "B.json") == (
        'compile label of cpu: target.cpu was "v3", is "v2"; also tools\n'
        "compile label of new: only in B.json\n"
        "compile label of gone: only in A.json\n"
        "1 of 4 actions have equal keys\n"
    )


def test_actions_whose_ids_changed_are_paired_with_the_nearest():
    common = {"abi": 1, "text": "t", "tools": {"opt": "1"}}
    report = compare_records(record(old={**common, "shape": 64}), record(new={**common, "shape": 80}))
    assert report["equal"] == 0
    (entry,) = report["actions"]
    assert (entry["compared_with"], entry["field"], entry["before"], entry["after"]) == ("old", "shape", "64", "80")
    assert compare_records(record(old=common), record(new=common))["equal"] == 1


def test_a_record_tells_what_it_holds():
    explanation = Explanation("changed", "last build", "x", "label of x", "0" * 64, Difference("abi", "1", "2"))
    done = {"x": Done("ran", 1.234), "y": Done("local hit"), "z": Done("failed")}
    made = record({"x": explanation, "z": Explanation("first")}, done, x={"a": 1}, y={"a": 2}, z={"a": 3})
    report = explain_record(made, "")
    jsonschema.validate(report, EXPLAIN_SCHEMA)
    assert render_report(report) == (
        "compile label of x: ran for 1.23 s: abi was 1, is 2\n"
        "compile label of y: local hit\n"
        "compile label of z: failed: nothing like it in the last build or in the cache\n"
        "3 actions: 1 ran, 1 local hit, 1 failed\n"
    )


def test_an_action_is_chosen_by_id_or_by_a_part_of_its_name():
    actions = {"lower:ab": action("lower:ab", {}), "compile:ab": action("compile:ab", {}, label="expert ab")}
    assert choose(actions, "") == ["lower:ab", "compile:ab"]
    assert choose(actions, "compile:ab") == choose(actions, "expert") == ["compile:ab"]
    assert choose(actions, ":ab") == ["lower:ab", "compile:ab"]
    with pytest.raises(InvalidInput) as error:
        choose(actions, "compile:ac")
    assert error.value.render() == (
        "dsr1build explain: error: no action is called `compile:ac`\nhelp: Did you mean `compile:ab`?"
    )
