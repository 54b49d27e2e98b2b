"""What a bundle asks of a CPU: the features that its code may use, and never a hint for tuning."""

import pytest
from test_build_plan import all_kinds, changed, edit

from dsr1build.errors import InvalidInput
from dsr1build.plan.build_plan import target_spec
from dsr1build.runtime.session import missing_features
from dsr1build.toolchains import target as toolchain
from dsr1build.toolchains.cpu import CPUINFO_FLAG, required_features, resolve

OPTIONS = [(schedule, option) for schedule, options in toolchain.SCHEDULES.items() for option in options]


def required(target):
    spec = target_spec(target)
    return required_features(spec.cpu, spec.features)


@pytest.mark.parametrize(("schedule", "option"), OPTIONS)
def test_no_schedule_option_is_a_required_feature(planner, schedule, option):
    for factor in (2, 4):
        tuned = edit(planner.target, schedules={schedule: {option: factor * toolchain.SCHEDULES[schedule][option]}})
        assert required(tuned) == required(planner.target)
    assert changed(planner, target=tuned), "the option does nothing"


@pytest.mark.parametrize("group", list(toolchain.PIPELINE))
def test_no_pass_is_a_required_feature(planner, group):
    assert required(edit(planner.target, passes={group: "cse"})) == required(planner.target)


@pytest.mark.parametrize(
    "hint", ["+prefer-256-bit", "+fast-gather", "-slow-3ops-lea", "+tuning-fast-imm-vector-shift", "+idivq-to-divl"]
)
def test_llvms_tuning_flags_are_no_features_of_a_target(planner, hint):
    with pytest.raises(InvalidInput, match="unknown CPU feature"):
        target_spec(edit(planner.target, features=(hint,)))


def test_a_feature_is_required_and_one_taken_away_is_not(planner):
    assert set(required(edit(planner.target, features=("+avx512f",)))) == {*required(planner.target), "avx512f"}
    assert set(required(edit(planner.target, features=("-fma",)))) == {*required(planner.target)} - {"fma"}
    assert changed(planner, target=edit(planner.target, features=("-fma",))) == all_kinds(planner)


def test_what_is_built_for_this_machine_runs_on_it():
    name, features = resolve("native")
    flags = [CPUINFO_FLAG[feature] for feature in required_features(name, features)]
    assert flags and missing_features({"target": {"cpuinfo_flags": flags}}) == []
