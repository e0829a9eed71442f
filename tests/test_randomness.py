"""The order of the data: a bijection, well mixed, the same for everybody, and of no memory."""

import itertools
import random
from collections import Counter

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from atoll.randomness import Order, mix, own_randomness, seed_everything

SEEDS = st.integers(-(2**70), 2**70)


@given(SEEDS, st.integers(0, 1000), st.integers(0, 700))
def test_an_order_visits_every_sample_once(seed: int, epoch: int, length: int) -> None:
    assert sorted(Order(seed, epoch, length)) == list(range(length))


@given(SEEDS, st.integers(0, 5), st.integers(2, 10**15), st.data())
def test_random_access_works_at_any_size(seed: int, epoch: int, length: int, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, length - 1), min_size=2, max_size=20, unique=True))
    order = Order(seed, epoch, length)
    indices = [order[position] for position in positions]
    assert all(0 <= index < length for index in indices)
    assert len(set(indices)) == len(indices)
    assert order[positions[0] - length] == indices[0]


def test_the_order_is_a_fact_that_must_not_change_between_versions() -> None:
    assert list(Order(0, 0, 10)) == [2, 3, 0, 4, 9, 7, 8, 6, 1, 5]
    assert Order(7, 3, 10**9)[123456789] == 358885141


def test_orders_differ_between_epochs_and_seeds() -> None:
    orders = {tuple(Order(seed, epoch, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


@pytest.mark.parametrize("length", [2, 3, 4])
def test_small_orders_are_uniform_over_all_permutations(length: int) -> None:
    counts = Counter(tuple(Order(seed, 0, length)) for seed in range(12_000))
    permutations = list(itertools.permutations(range(length)))
    assert stats.chisquare([counts[permutation] for permutation in permutations]).pvalue > 1e-4


@pytest.mark.parametrize("length", [5, 17, 64])
def test_every_sample_is_equally_likely_at_every_position(length: int) -> None:
    counts = numpy.zeros((length, length))
    for seed in range(2000):
        counts[range(length), list(Order(seed, 1, length))] += 1
    assert stats.chisquare(counts.ravel()).pvalue > 1e-4


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    order = numpy.array(Order(1, 0, 10_000))
    assert abs(stats.spearmanr(order[:-1], order[1:]).statistic) < 0.05
    assert abs(stats.spearmanr(numpy.arange(10_000), order).statistic) < 0.05
    differences = Counter((order[1:] - order[:-1]).tolist())
    assert max(differences.values()) < 12  # a uniform shuffle gives about 6


def test_positions_outside_are_errors() -> None:
    with pytest.raises(IndexError, match="position 3 of an order of 3 samples"):
        Order(0, 0, 3)[3]
    assert Order(0, 0, 5)[1:3] == list(Order(0, 0, 5))[1:3]


def test_mix_depends_on_every_argument_and_their_order() -> None:
    keys = {mix(a, b, c) for a in range(20) for b in range(20) for c in range(20)}
    assert len(keys) == 8000
    assert mix(1) != mix(1, 0)


def test_own_randomness_leaves_the_callers_streams_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(()).item(), float(numpy.random.rand()), random.random()

    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with own_randomness(4):
        inside = draw()
    assert draw() == expected != inside
    with own_randomness(4):
        assert draw() == inside
