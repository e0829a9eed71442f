"""Routes: every replica gets its count, evenly."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from atoll.plan.division import pair_counts, route


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_route_gives_every_replica_its_count_evenly(counts: list[int]) -> None:
    order = route(tuple(counts))
    total = sum(counts)
    assert [order.count(i) for i in range(len(counts))] == counts
    taken = [0] * len(counts)
    for position, choice in enumerate(order, start=1):
        taken[choice] += 1
        for got, count in zip(taken, counts, strict=True):
            assert abs(got - count * position / total) < 1


def test_route_of_thousands() -> None:
    counts = tuple(range(1, 129))
    order = route(counts)
    assert len(order) == sum(counts)
    assert [order.count(i) for i in range(len(counts))] == list(counts)


@given(st.lists(st.integers(1, 12), min_size=1, max_size=4))
def test_pairs_are_those_of_the_routes(counts: list[int]) -> None:
    before = tuple(counts)
    for after in (before, (sum(counts),), before[::-1]):
        assert pair_counts(before, after) == Counter(zip(route(before), route(after), strict=True))
