"""Feeding: a rank reads its own pieces, once a step, ahead of time, and errors reach whoever asks."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from atoll.data import Samples
from atoll.errors import JobFailedError
from atoll.graph.capture import Captured, capture_program
from atoll.plan import Plan
from atoll.runtime.batch_loader import BatchLoader
from atoll.runtime.modes.lockstep.data_loader import ShardLoader
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rank import make_plan_schedule
from atoll.runtime.modes.lockstep.schedule_runner import StageWork
from atoll.runtime.stage.program import cut_stage
from atoll.runtime.stage.sizes import Sizes
from tests.runtime.stage.stage_chain import job_of

from .equality_cases import plan_of

STEPS = 3


@dataclass
class Numbered:
    """Sample i is i, padded to how many stand together: who read what, and with whom, can be told."""

    read: list[int] = field(default_factory=list)
    broken: int | None = None
    hanging: dict[int, threading.Event] = field(default_factory=dict)  # samples that come when their event does

    def __len__(self) -> int:
        return STEPS * 8

    def __getitem__(self, index: int) -> int:
        if index == self.broken:
            raise ArithmeticError("a bad sample")
        if index in self.hanging:
            self.hanging[index].wait()
        self.read.append(index)
        return index


def fixed(samples: list[int]) -> dict[str, Tensor]:
    return {"x": torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, 5).contiguous()}


def longest(samples: list[int]) -> dict[str, Tensor]:
    """As long as the largest of them says."""
    return {"x": torch.tensor(samples, dtype=torch.float32)[:, None].expand(-1, 3 + max(samples)).contiguous()}


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.unsqueeze(-1)).relu())


def squares(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"]).square().mean()


def of(collate: Any) -> Captured:
    return capture_program(job_of(Layers, squares, lambda samples: collate(list(range(samples)))))


@pytest.fixture(scope="module")
def even() -> Captured:
    return of(fixed)


def feed_of(captured: Captured, plan: Plan, rank: int, data: Numbered, collate: Any, ahead: int) -> ShardLoader:
    layout, device = Layout(plan), torch.device("cpu")
    stages = []
    for place in layout.places(rank):
        stage = plan.stages[place.stage]
        program = cut_stage(captured, stage.start, stage.stop)
        module: Any = None
        stages.append(StageWork(program=program, module=module, place=place, parameters=[], before_backward=lambda last: None))
    actions = make_plan_schedule(layout)[layout.worker_of(rank)]
    loader = BatchLoader(Samples(data, collate, 0, plan.batch_size), 0)
    return ShardLoader(loader, layout, actions, stages, Sizes(captured), device, last_step=STEPS, ahead=ahead)


def seen(feed: ShardLoader, layout: Layout, rank: int, step: int) -> list[list[float]]:
    """First numbers of the samples of each of the rank's pieces."""
    (place,) = layout.places(rank)
    return [feed.get(step, place.stage, m)[0]["batch_x"][:, 0].tolist() for m in layout.micro_batches_of(place.stage, place.replica)]


@pytest.mark.parametrize("ahead", [0, 2])
def test_ranks_read_their_own_samples_and_together_all(even: Captured, ahead: int) -> None:
    plan = plan_of(even.graph, "2 | a=5 b=3", 8)
    layout = Layout(plan)
    order = Samples(Numbered(), fixed, 0, 8)
    for rank, (first, last) in enumerate(((0, 5), (5, 8))):
        data = Numbered()
        feed = feed_of(even, plan, rank, data, fixed, ahead)
        for step in range(1, STEPS + 1):
            expected = order.batch(step - 1)["x"][:, 0].tolist()[first:last]
            assert [number for piece in seen(feed, layout, rank, step) for number in piece] == expected
        feed.close()
        assert len(data.read) == len(set(data.read)) == STEPS * (last - first), "each sample is read once, and no other"


def test_a_run_continues_in_the_middle(even: Captured) -> None:
    plan = plan_of(even.graph, "4 | a=8", 8)
    feed = feed_of(even, plan, 0, Numbered(), fixed, 2)
    expected = Samples(Numbered(), fixed, 0, 8).batch(1)["x"][:, 0].tolist()
    assert [number for piece in seen(feed, Layout(plan), 0, 2) for number in piece] == expected
    feed.close()


def test_a_bad_sample_is_told_to_who_asks_for_it(even: Captured) -> None:
    plan = plan_of(even.graph, "4 | a=8", 8)
    bad = int(Samples(Numbered(), fixed, 0, 8).index(8 + 1))  # of the second step
    feed = feed_of(even, plan, 0, Numbered(broken=bad), fixed, 2)
    seen(feed, Layout(plan), 0, 1)
    with pytest.raises(JobFailedError, match=r"step 2: loading the batch failed: .*a bad sample"):
        seen(feed, Layout(plan), 0, 2)
    feed.close()


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_sample_that_does_not_come_is_named_to_who_wants_to_know(even: Captured, ahead: int) -> None:
    plan = plan_of(even.graph, "4 | a=8", 8)
    late, comes = int(Samples(Numbered(), fixed, 0, 8).index(2)), threading.Event()
    feed = feed_of(even, plan, 0, Numbered(hanging={late: comes}), fixed, ahead)
    waiting = threading.Thread(target=seen, args=(feed, Layout(plan), 0, 1))
    waiting.start()
    while str(feed.reading) != f"reading sample {late} of the data":  # fails by the test's time-out
        time.sleep(0.01)
    assert waiting.is_alive()
    comes.set()
    waiting.join()
    feed.close()
    assert str(feed.reading) == "reading the data"


def test_lanes_that_meet_have_their_samples_padded_alike() -> None:
    captured = of(longest)
    plan = plan_of(captured.graph, "4 | (a b)=4,4", 8)
    layout = Layout(plan)
    feeds = [feed_of(captured, plan, rank, Numbered(), longest, 0) for rank in range(2)]
    for step in range(1, STEPS + 1):
        for m, (start, stop) in enumerate(layout.micro_batches):
            whole = Samples(Numbered(), longest, 0, 8).batch(step - 1, start, stop)["x"]
            pieces = [feed.get(step, 0, m)[0]["batch_x"] for feed in feeds]
            assert torch.equal(torch.cat(pieces), whole)


def masked(samples: list[int]) -> dict[str, Tensor]:
    """Each time another half of them."""
    return {"x": fixed(samples)["x"] * (torch.rand(len(samples), 5) < 0.5)}


def test_lanes_that_meet_have_what_was_drawn_for_the_batch_of_both(even: Captured) -> None:
    plan = plan_of(even.graph, "4 | (a b)=4,4", 8)
    layout = Layout(plan)
    feeds = [feed_of(even, plan, rank, Numbered(), masked, 0) for rank in range(2)]
    for step in range(1, STEPS + 1):
        for m, (start, stop) in enumerate(layout.micro_batches):
            whole = Samples(Numbered(), masked, 0, 8).batch(step - 1, start, stop)["x"]
            assert torch.equal(torch.cat([feed.get(step, 0, m)[0]["batch_x"] for feed in feeds]), whole)
