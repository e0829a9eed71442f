"""What parameters that are not trained cost in a swarm: nothing in sums, states and checkpoints; who joins has made them."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from atoll.errors import RebuiltWeightsError
from atoll.events import AnyEvent, StepFinished
from atoll.graph.capture import Captured, capture_program
from atoll.job import Job
from atoll.runtime.checkpoint.state_file import StateReader
from atoll.runtime.modes.swarm.compute import DividedJob, StageCompute

from .one_process import OneProcess
from .test_compute import BATCH, Model, job, plain

WIDE = 64


class Adapted(Model):
    """A wide model of which the last layer and a narrow one are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(6, 16)
        self.wide = torch.nn.Sequential(torch.nn.Linear(16, WIDE), torch.nn.Tanh(), torch.nn.Linear(WIDE, 16))
        for module in (self.first, self.wide, self.blocks, self.unused):
            module.requires_grad_(False)
        self.adapter = torch.nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.wide(x) + self.adapter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)  # type: ignore[no-any-return]


def compute_of(it: Job, captured: Captured, **given: Any) -> StageCompute:
    layers = len(captured.graph.layers)
    return StageCompute(DividedJob(it, captured, (0, layers), [(0, BATCH)], threading.Lock(), **given))


def trained_numbers() -> int:
    return sum(parameter.numel() for parameter in Adapted().parameters() if parameter.requires_grad)


@pytest.mark.parametrize("staleness", [0, 1])
def test_states_and_sums_are_of_what_is_trained(staleness: int) -> None:
    it = job(model=Adapted)
    captured = capture_program(it, divided=True)

    async def look() -> None:
        compute = compute_of(it, captured, staleness=staleness)
        state = await compute.initial(0)
        assert compute.buffer(0).flat.numel() == trained_numbers() + 3, "and how many micro-batches gave each of three parameters one"
        content = compute.snapshot(state)
        stored = sum(entry.size_bytes for entry in StateReader(content).index.tensors.values())
        assert stored == 4 * trained_numbers() * (1 + staleness)
        again = await compute.restore(0, content)
        for one, other in zip(state.executor.shards(), again.executor.shards(), strict=True):
            assert torch.equal(one.tensor, other.tensor)
        assert torch.equal(compute.snapshot(again), content)
        compute.close()

    asyncio.run(look())


def test_a_state_of_other_frozen_weights_is_refused() -> None:
    it, other = job(model=Adapted), job(model=Adapted, seed=1)
    captured = capture_program(it, divided=True)

    async def look() -> None:
        ours, theirs = compute_of(it, captured), compute_of(other, captured)
        content = theirs.snapshot(await theirs.initial(0))
        with pytest.raises(RebuiltWeightsError, match="a stage's state: it leaves out the weights that are not trained"):
            await ours.assemble(0, [content])
        whole = compute_of(job(model=Adapted, seed=1, store_frozen=True), captured)
        stored = whole.snapshot(await whole.initial(0))
        state = await ours.restore(0, stored)  # what is in a state is taken from it, and stays in the states after it
        assert torch.equal(ours.snapshot(state), stored)
        for compute in (ours, theirs, whole):
            compute.close()

    asyncio.run(look())


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_swarm_of_adapters_trains_as_plain_pytorch_with_one_who_joins(staleness: int) -> None:
    it = job(model=Adapted)
    layers = len(capture_program(it, divided=True).graph.layers)

    def disturb(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            swarm.add_worker("late")

    swarm = OneProcess(it, [0, layers - 2, layers], 2, 4, staleness=staleness, chunks=3)
    asyncio.run(swarm.run(disturb))
    losses, weights = plain(it, staleness)
    assert swarm.coordinator is not None
    found = [event.loss for event in swarm.events if isinstance(event, StepFinished)]
    assert found == pytest.approx(losses, rel=1e-5)
    held = {
        part.name: part.tensor for worker in swarm.workers.values() if worker.state is not None for part in worker.state.executor.shards()
    }
    assert held.keys() == weights.keys()
    assert all(torch.allclose(held[name], value, atol=1e-5) for name, value in weights.items())
