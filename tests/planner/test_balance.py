"""Shares and cuts against every alternative, on small cases."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from atoll.planner.balance import balanced_cuts, shares

speeds = st.lists(st.floats(0.1, 10), min_size=1, max_size=4)


def divisions(total: int, parts: int) -> list[tuple[int, ...]]:
    return [counts for counts in itertools.product(range(1, total + 1), repeat=parts) if sum(counts) == total]


@given(speeds, st.integers(1, 9))
def test_shares_minimise_the_longest_time(given_speeds: list[float], total: int) -> None:
    found = shares(total, given_speeds)
    if total < len(given_speeds):
        assert found is None
        return
    assert found is not None
    assert sum(found) == total
    assert min(found) >= 1
    longest = max(n / v for n, v in zip(found, given_speeds, strict=True))
    best = min(max(n / v for n, v in zip(counts, given_speeds, strict=True)) for counts in divisions(total, len(given_speeds)))
    assert longest <= best * (1 + 1e-9)


@given(st.data())
def test_cuts_minimise_the_slowest_stage(data: st.DataObject) -> None:
    layers = data.draw(st.integers(1, 7))
    stages = data.draw(st.integers(1, 4))
    times = [data.draw(st.lists(st.floats(0.1, 5), min_size=layers, max_size=layers)) for _ in range(stages)]
    cuts = [c for c in range(1, layers) if data.draw(st.booleans())]
    most = data.draw(st.integers(1, layers))  # memory: no stage may hold more layers
    prefixes = [[0.0, *itertools.accumulate(row)] for row in times]
    found = balanced_cuts([*cuts, layers], prefixes, lambda s, a, b: b - a <= most)
    possible = []
    for chosen in itertools.combinations(cuts, stages - 1):
        bounds = [0, *chosen, layers]
        if all(b - a <= most for a, b in itertools.pairwise(bounds)):
            possible.append(max(prefixes[s][b] - prefixes[s][a] for s, (a, b) in enumerate(itertools.pairwise(bounds))))
    if not possible:
        assert found is None
        return
    assert found is not None
    slowest = max(prefixes[s][b] - prefixes[s][a] for s, (a, b) in enumerate(itertools.pairwise(found)))
    assert slowest <= min(possible) * (1 + 2e-3)


def test_stages_that_find_other_layers_dear_do_better_than_in_balance() -> None:
    times = [[1.0, 2.0, 1.0, 1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 5.0], [1.0, 5.0, 5.0, 1.0, 1.0]]
    prefixes = [[0.0, *itertools.accumulate(row)] for row in times]
    assert balanced_cuts([1, 2, 3, 5], prefixes, lambda s, a, b: b - a <= 2) == [0, 1, 3, 5]
