"""The order of the data is a sampler's own, drawn from the job's seed: the same for everybody, at any time."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler

from atoll.data import Samples
from atoll.errors import JobError
from atoll.randomness import Order, mix

WEIGHTS = [0.1, 5.0, 1.0, 0.5, 2.0, 3.0]


def samples(sampler: Any, length: int = 6, batch_size: int = 4, **more: Any) -> Samples:
    return Samples(range(length), list, 3, batch_size, sampler=sampler, **more)


def row(of: Samples, count: int) -> list[int]:
    return [of.index(position) for position in range(count)]


@pytest.mark.parametrize("own_generator", [False, True])
def test_a_weighted_sampler_draws_what_it_draws_in_pytorch(own_generator: bool) -> None:
    expected = []
    for epoch in range(5):
        torch.manual_seed(mix(3, 6, epoch))
        expected += list(WeightedRandomSampler(WEIGHTS, 10))
    generator = torch.Generator().manual_seed(99) if own_generator else None
    state = torch.get_rng_state()
    assert row(samples(WeightedRandomSampler(WEIGHTS, 10, generator=generator)), 50) == expected
    assert torch.equal(torch.get_rng_state(), state), "the user's generators are left alone"
    late = samples(WeightedRandomSampler(WEIGHTS, 10, generator=generator))  # a run that goes on, and one that goes back
    assert [late.index(position) for position in (45, 3, 27)] == [expected[position] for position in (45, 3, 27)]


def test_sequence_and_shuffling_are_atolls_own() -> None:
    assert row(samples(SequentialSampler(range(6))), 8) == [0, 1, 2, 3, 4, 5, 0, 1]
    shuffled = [*Order(3, 0, 6), *Order(3, 1, 6)]
    assert row(samples(None), 12) == row(samples(RandomSampler(range(6))), 12) == shuffled
    drawn = row(samples(RandomSampler(range(6), replacement=True, num_samples=40)), 40)
    torch.manual_seed(mix(3, 6, 0))
    assert drawn == list(RandomSampler(range(6), replacement=True, num_samples=40))


def test_a_callable_says_the_indices_of_an_epoch() -> None:
    of = samples(lambda epoch: [epoch, 5, random.randrange(6)])
    random.seed(mix(3, 6, 1))
    assert row(of, 6)[3:] == [1, 5, random.randrange(6)]
    with pytest.raises(JobError, match="gives 2 indices in epoch 1 and 1 in the first"):
        samples(lambda epoch: range(epoch + 1)).index(1)


class Remembering(Sampler[int]):
    """A sampler with a generator that goes on from epoch to epoch, as people write them."""

    def __init__(self) -> None:
        self.random = random.Random(4)

    def __iter__(self) -> Iterator[int]:
        return iter(self.random.sample(range(6), 6))


def test_a_sampler_that_remembers_is_drawn_in_turn_and_cannot_go_far_back() -> None:
    plain = Remembering()
    expected = [index for _ in range(6) for index in plain]
    late = samples(Remembering())
    assert late.index(33) == expected[33]
    with pytest.raises(JobError, match="the order of epoch 1 is asked for again after 6 were drawn, and a Remembering cannot go back"):
        late.index(7)


def test_drop_last_ends_epochs_with_whole_batches() -> None:
    loader = DataLoader(range(6), batch_size=4, sampler=SequentialSampler(range(6)), drop_last=True, collate_fn=list)
    of = samples(SequentialSampler(range(6)), drop_last=True)
    assert [of.batch(step) for step in range(2)] == [batch for _ in range(2) for batch in loader]
    with pytest.raises(JobError, match="an epoch has 3 samples, no whole batch of 4"):
        samples(None, length=3, drop_last=True)


def test_a_distributed_sampler_is_refused() -> None:
    with pytest.raises(JobError, match="a DistributedSampler divides the data among ranks, which Atoll does itself"):
        samples(DistributedSampler(range(6), num_replicas=2, rank=0))
