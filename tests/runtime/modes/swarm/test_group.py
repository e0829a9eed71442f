"""Several devices as one worker compute what one device would: activations, gradients, losses, dropout, whatever the division."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll import Job
from atoll.control.messages import Committed
from atoll.graph.capture import Captured, capture_program
from atoll.runtime.modes.swarm.compute import CPU, DividedJob, StageCompute, programs_of
from atoll.runtime.modes.swarm.group import GroupCompute
from atoll.runtime.modes.swarm.micro_batches import SampleFeed, divided

from .one_process import OneProcess
from .test_compute import check, job, plain

BATCH, TOKENS, WIDTH = 12, 3, 8
AnyCompute = StageCompute | GroupCompute


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(TOKENS, WIDTH, generator=generator), torch.randn(TOKENS, generator=generator), torch.rand(1, generator=generator)


class Attention(nn.Module):
    """Draws in a product of several values, and in one whose samples lie in the second dimension."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(WIDTH, 3 * WIDTH), dropout

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        found = nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout if self.training else 0.0)
        turned = nn.functional.dropout(found.transpose(1, 2).flatten(2).transpose(0, 1), self.dropout, self.training)
        return x + turned.transpose(0, 1)


class Model(nn.Module):
    def __init__(self, dropout: float = 0.0, between: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(dropout)) for _ in range(2))
        self.attention, self.between = Attention(dropout), between()
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(self.between(self.attention(x))).squeeze(-1)  # type: ignore[no-any-return]


class Centred(nn.Module):
    """What a sample becomes depends on the others."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(TOKENS, track_running_stats=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)  # type: ignore[no-any-return]


def weighted(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, wanted, weights = batch
    return (weights * (model(inputs) - wanted) ** 2).sum(), weights.sum()


def mean(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def contrasted(model: nn.Module, batch: Any) -> Tensor:
    """No mean over samples: every one is compared with all."""
    found = model(batch[0])
    return nn.functional.cross_entropy(found @ found.T, torch.arange(found.shape[0]))


class Pair:
    """One device and a group beside it, with the same job."""

    def __init__(
        self,
        model: Callable[[], nn.Module],
        loss: Any,
        cuts: Sequence[int],
        sizes: Sequence[int],
        shares: Sequence[int],
        recompute: bool = False,
    ) -> None:
        self.job = Job(model=model, loss=loss, data=Data(), optimizer=partial(torch.optim.AdamW, lr=0.02), batch_size=BATCH, steps=4)
        captured: Captured = capture_program(self.job)
        layers = len(captured.graph.layers)
        self.bounds = (0, *(cut for cut in cuts if cut < layers), layers)
        ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
        micro_batches = list(zip([0, *ends], ends, strict=False))
        lock = threading.Lock()
        self.said: list[str] = []
        stages = range(len(self.bounds) - 1)
        job = DividedJob(self.job, captured, self.bounds, micro_batches, lock, chunks=2)
        again = replace(job, recompute=[recompute for _ in stages])
        self.singles: list[AnyCompute] = [StageCompute(job) for _ in stages]
        self.groups: list[AnyCompute] = [GroupCompute(again, [CPU] * len(shares), shares, self.said.append) for _ in stages]
        self.feed = SampleFeed(self.job, captured, programs_of(captured, self.bounds), micro_batches, lock)
        self.micro_batches = range(len(micro_batches))

    def close(self) -> None:
        for compute in (*self.singles, *self.groups):
            compute.close()
        self.feed.close()


async def trained(pair: Pair, computes: Sequence[AnyCompute], steps: int = 2) -> list[Tensor]:
    """All that passes between stages, and all sums, of some steps. In the second, backwards find nothing kept of their forwards."""
    *inner, last = range(len(computes))
    states = [await compute.initial(stage) for stage, compute in enumerate(computes)]
    seen: list[Tensor] = []
    for version in range(steps):
        weight = 0.0
        buffers = [compute.buffer(stage) for stage, compute in enumerate(computes)]
        paths = {m: [await pair.feed.load(version, m)] for m in pair.micro_batches}
        for m, path in paths.items():
            for stage in inner:
                path.append(await computes[stage].forward(states[stage], version, m, stage, path[stage]))
                seen += path[-1].values
        if version:
            states = [await compute.restore(stage, compute.snapshot(states[stage])) for stage, compute in enumerate(computes)]
        for m, path in paths.items():
            gradients, own, loss, share = await computes[last].turn(states[last], version, m, last, path[last])
            await computes[last].accumulate(buffers[last], own)
            seen += [torch.tensor([loss, share]), *gradients]
            weight += share
            for stage in reversed(inner):
                gradients, own = await computes[stage].backward(states[stage], version, m, stage, path[stage], gradients)
                await computes[stage].accumulate(buffers[stage], own)
                seen += gradients
        for stage, compute in enumerate(computes):
            sums = [compute.part([buffers[stage]], stage, 0, chunk) for chunk in (0, 1)]
            seen += [part.clone() for part in sums]
            commit = Committed(0, version, (1, 1), (), 1.0, False, 0.0, weight)
            states[stage] = await compute.apply(states[stage], sums, commit)
    return seen


def compare(pair: Pair) -> None:
    try:
        expected = asyncio.run(trained(pair, pair.singles))
        found = asyncio.run(trained(pair, pair.groups))
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("dropout", "loss", "cuts", "sizes", "shares", "recompute"),
    [
        (0.0, mean, (2,), (4, 4, 4), (1, 1), False),
        (0.4, mean, (2, 4), (5, 5, 2), (1, 1, 1), False),
        (0.4, weighted, (3,), (5, 1, 6), (3, 1), False),
        (0.4, weighted, (3,), (5, 1, 6), (3, 1), True),
        (0.4, weighted, (), (6, 6), (1, 1, 1, 1), False),
    ],
)
def test_a_group_computes_what_one_device_does(dropout: float, loss: Any, cuts: Any, sizes: Any, shares: Any, recompute: bool) -> None:
    pair = Pair(partial(Model, dropout), loss, cuts, sizes, shares, recompute)
    compare(pair)
    assert len(pair.said) == (loss is mean)  # the last stage, whose samples may count differently


@pytest.mark.parametrize(
    ("model", "loss", "why"),
    [
        (partial(Model, 0.3, Normalized), mean, "other numbers"),
        (partial(Model, 0.3, Centred), mean, "other numbers"),
        (partial(Model, 0.3), contrasted, "other numbers"),
    ],
)
def test_what_cannot_be_divided_is_computed_whole_and_said_once(model: Callable[[], nn.Module], loss: Any, why: str) -> None:
    pair = Pair(model, loss, (4,), (6, 6), (1, 1))
    compare(pair)
    assert len(pair.said) == 1
    assert why in pair.said[0]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_swarm_with_groups_in_it_equals_plain_pytorch(staleness: int) -> None:
    it = job()
    swarm = OneProcess(it, [0, 1, 3, 5], 5, 4, groups={"worker-0": 2, "worker-3": 3}, staleness=staleness)
    asyncio.run(swarm.run())
    check(swarm, plain(it, staleness))


@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(1, 20), min_size=1, max_size=6), st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_pieces_cover_every_sample_once_in_order(sizes: list[int], shares: list[int]) -> None:
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    micro_batches = list(zip([0, *ends], ends, strict=False))
    rows = divided(micro_batches, shares)
    assert len(rows) == len(shares)
    for number, (start, stop) in enumerate(micro_batches):
        taken = [sample for row in rows for sample in range(*row[number])]
        assert taken == list(range(start, stop))
        ideal = [(stop - start) * share / sum(shares) for share in shares]
        assert all(abs(row[number][1] - row[number][0] - wanted) < 1 for row, wanted in zip(rows, ideal, strict=True))
