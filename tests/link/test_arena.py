"""The arena: no two values that live together share a byte."""

from hypothesis import given, settings
from hypothesis import strategies as st

from dsr1build.link.arena import ALIGNMENT, Lifetime, plan_arena

lifetimes = st.lists(
    st.builds(
        lambda size, first, length: Lifetime(size, first, first + length),
        st.integers(0, 5000),
        st.integers(0, 30),
        st.integers(0, 12),
    ),
    max_size=40,
)


@given(lifetimes)
@settings(max_examples=150, deadline=None)
def test_no_two_live_buffers_overlap(buffers: list[Lifetime]) -> None:
    plan = plan_arena(buffers)
    assert all(offset % ALIGNMENT == 0 for offset in plan.offsets)
    assert all(offset + b.size <= plan.size for offset, b in zip(plan.offsets, buffers, strict=True))
    for i, a in enumerate(buffers):
        for j, b in enumerate(buffers[:i]):
            together = a.first <= b.last and b.first <= a.last
            apart = plan.offsets[i] + a.size <= plan.offsets[j] or plan.offsets[j] + b.size <= plan.offsets[i]
            assert apart or not together or not (a.size and b.size)


@given(lifetimes)
@settings(max_examples=50, deadline=None)
def test_it_needs_no_more_than_all_buffers_and_no_less_than_the_fullest_step(buffers: list[Lifetime]) -> None:
    size = plan_arena(buffers).size
    aligned = [-(-b.size // ALIGNMENT) * ALIGNMENT for b in buffers]
    fullest = max(
        (sum(n for n, b in zip(aligned, buffers, strict=True) if b.first <= step <= b.last) for step in range(45)), default=0
    )
    assert fullest <= size <= sum(aligned)


def test_values_of_a_chain_take_two_places() -> None:
    chain = [Lifetime(1024, i, i + 1) for i in range(20)]
    assert plan_arena(chain).size == 2048


def test_a_gap_is_used_again() -> None:
    plan = plan_arena([Lifetime(640, 0, 9), Lifetime(320, 0, 3), Lifetime(128, 0, 9), Lifetime(300, 4, 9)])
    assert plan.offsets == (0, 640, 960, 640)
