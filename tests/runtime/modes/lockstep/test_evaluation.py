"""Evaluation: who computes which micro-batch, and what becomes of sums and parts. What comes out is compared in test_equality.py."""

import math
from collections import Counter
from collections.abc import Iterator
from threading import Lock

import pytest
import torch
from torch import nn

from atoll.plan import parse_plan
from atoll.runtime.evaluation import EvaluationSums
from atoll.runtime.modes.lockstep.evaluation import Evaluation, _put
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.sharding import OptimizerShard
from atoll.runtime.stage.shard_spec import ShardSpec
from tests.process_group import fake_group

from .equality_models import JOBS

PLANS = {
    "replicas and lanes": "0-1: (a b)=2,2 (c d)=2,2\nstage 1: layers 2-3: e=8",
    "unequal stages": "0-1: a=8\nstage 1: layers 2-3: b=5 c=2 d=1",
    "tensor and lanes": "0-3 tensor=2 sharded: (a b c d)=4,4",
}


@pytest.fixture(autouse=True)
def five_ranks() -> Iterator[None]:
    """This process is one of five; groups are made of nothing."""
    with fake_group(5):
        yield


def layout_of(stages: str) -> Layout:
    return Layout(parse_plan(f"plan v1 graph=g cluster=c batch=8 micro_batch=4\nstage 0: layers {stages}\n"))


def evaluation(layout: Layout, rank: int) -> Evaluation:
    return Evaluation(JOBS["batch-norm"](), layout, rank, torch.device("cpu"), [], [], set(), lambda action, step: None, Lock())


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("count", [1, 2, 5, 13])
def test_every_micro_batch_is_computed_once_by_the_rank_everybody_expects(name: str, count: int) -> None:
    layout = layout_of(PLANS[name])
    for stage in range(len(layout.plan.stages)):
        taken: Counter[int] = Counter()
        rounds: dict[int, set[int]] = {}
        for rank in range(layout.world_size):
            own = evaluation(layout, rank)
            for place in (place for place in layout.places(rank) if place.stage == stage):
                rounds.setdefault(place.replica, set()).add(own._rounds(place, count))
                numbers = [own._micro_batch(place, number) for number in range(own._rounds(place, count))]
                if place.tensor == 0:
                    taken.update(number for number in numbers if number < count)
                    assert all(own.computes(place, number) == rank for number in numbers if number < count)
        assert taken == Counter(range(count))
        assert all(len(alike) == 1 for alike in rounds.values()), "ranks of a worker put parameters together equally often"


def test_what_is_not_finite_is_none() -> None:
    assert EvaluationSums(torch.tensor([6.0, 4.0])).mean() == 1.5
    assert EvaluationSums(torch.tensor([math.nan, 4.0])).mean() is None
    assert EvaluationSums(torch.tensor([1.0, 0.0])).mean() is None


def test_parts_and_shards_are_put_where_they_belong() -> None:
    holding = ShardSpec(name="w", shape=(2, 6), dim=1, parts=((0, 1), (3, 4)))
    whole = torch.zeros(2, 6)
    part = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    _put(OptimizerShard("w", holding, part, part), part.detach(), whole)
    assert whole.tolist() == [[1, 0, 0, 2, 0, 0], [3, 0, 0, 4, 0, 0]]
    shard = nn.Parameter(torch.tensor([5.0, 6.0]))
    whole = torch.zeros(2, 6)
    _put(OptimizerShard("w", holding, shard, shard, flat=(1, 3)), shard.detach(), whole)
    assert whole.tolist() == [[0, 0, 0, 5, 0, 0], [6, 0, 0, 0, 0, 0]]
