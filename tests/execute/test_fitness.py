"""What makes a machine unfit to run an action for a builder elsewhere is told by its name."""

from dsr1build.execute import fitness
from dsr1build.execute.fitness import expectation, package_digest, unfit
from dsr1build.toolchains import tools

TOOLS = {"ziglang/zig": "ab" * 32}


def test_this_machine_is_fit_for_itself():
    assert unfit(expectation(), {"text": "x"}) == ""
    assert unfit(expectation(["sse2"]), {}) == ""


def test_another_package_is_named_by_its_digest():
    expected = {**expectation(), "sources": "1" * 64}
    assert unfit(expected, {}) == f"its dsr1build has the sources {package_digest()[:12]}, the builder's has {'1' * 12}"


def test_what_the_cpu_lacks_is_named():
    assert unfit(expectation(["avx9", "sse2", "avx10"]), {}) == "its CPU lacks avx10, avx9"


def test_a_builder_that_says_nothing_is_refused():
    assert unfit({"sources": package_digest()}, {}) == "the builder does not say which CPU it expects"
    assert unfit({}, {}).endswith("the builder's has None")


def test_tools_are_compared_one_by_one(monkeypatch):
    monkeypatch.setattr(tools, "identity", lambda job, remembered=None: TOOLS if job == "link" else {})
    assert unfit(expectation(), {"tools": TOOLS}) == ""
    assert unfit(expectation(), {"tools": {"ziglang/zig": "cd" * 32}}) == (
        "its tool ziglang/zig is abababababab, the builder's is cdcdcdcdcdcd"
    )
    assert unfit(expectation(), {"tools": {**TOOLS, "ziglang/more": "00" * 32}}) == "its toolchain has no ziglang/more"
    assert unfit(expectation(), {"tools": {}}) == ""


def test_a_missing_toolchain_is_a_reason(monkeypatch):
    def missing(job, remembered=None):
        raise fitness.EnvironmentUnfit("the Python package 'llvm' is missing")

    monkeypatch.setattr(tools, "identity", missing)
    expected = "its toolchain is not complete: the Python package 'llvm' is missing"
    assert unfit(expectation(), {"tools": {"llvm/bin/opt": "00" * 32}}) == expected
