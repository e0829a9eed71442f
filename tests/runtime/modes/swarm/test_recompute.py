"""Stages that compute their forward again in the backward: the same numbers, and less is kept until then."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from atoll.cluster import dump_cluster, make_cluster, make_site
from atoll.control.messages import Committed
from atoll.graph.capture import Captured, capture_program
from atoll.job import Job
from atoll.plan import parse_plan
from atoll.runtime.imposed_speed import Imposed, pace_of_worker
from atoll.runtime.modes.swarm.compute import DividedJob, StageCompute, programs_of
from atoll.runtime.modes.swarm.micro_batches import SampleFeed
from atoll.runtime.modes.swarm.spec import spec_of

from . import swarm_job
from .test_compute import BATCH, Model, job

BOUNDS = (0, 2, 5)
MICRO_BATCHES = [(0, 8), (8, BATCH)]


class Counting(StageCompute):
    """Knows how many bytes its forwards left for their backwards."""

    saved_bytes = 0

    def _compute(self, *arguments: Any) -> Any:
        def count(tensor: Tensor) -> Tensor:
            self.saved_bytes += tensor.nbytes
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            return super()._compute(*arguments)


async def a_step(it: Job, captured: Captured, recompute: tuple[bool, ...]) -> tuple[list[Tensor], list[int]]:
    """All that two stages make of a step, their weights after it among it; and what each kept."""
    lock = threading.Lock()
    divided = DividedJob(it, captured, BOUNDS, MICRO_BATCHES, lock, recompute=recompute)
    first, last = computes = [Counting(divided) for _ in range(2)]
    feed = SampleFeed(it, captured, programs_of(captured, BOUNDS), MICRO_BATCHES, lock)
    states = [await compute.initial(stage) for stage, compute in enumerate(computes)]
    buffers = [compute.buffer(stage) for stage, compute in enumerate(computes)]
    seen: list[Tensor] = []
    loaded = [await feed.load(0, m) for m in range(2)]
    between = [await first.forward(states[0], 0, m, 0, entering) for m, entering in enumerate(loaded)]
    for m, (entering, passed) in enumerate(zip(loaded, between, strict=True)):
        back, own, loss, _ = await last.turn(states[1], 0, m, 1, passed)
        await last.accumulate(buffers[1], own)
        _, own = await first.backward(states[0], 0, m, 0, entering, back)
        await first.accumulate(buffers[0], own)
        seen += [torch.tensor(loss), *passed.values, *back]
    for stage, compute in enumerate(computes):
        sums = compute.part([buffers[stage]], stage, 0, 0)
        after = await compute.apply(states[stage], [sums.clone()], Committed(0, 0, (1, 1), (), 1.0, False, 0.0, float(BATCH)))
        seen += [sums, *(parameter.detach() for parameter in after.parameters)]
        compute.close()
    feed.close()
    return seen, [compute.saved_bytes for compute in computes]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_numbers_and_less_is_kept(precision: str) -> None:
    it = job(model=lambda: Model(dropout=0.4), precision=precision)
    captured = capture_program(it)
    expected, kept = asyncio.run(a_step(it, captured, ()))
    for recompute in ((True, False), (False, True), (True, True)):
        found, less = asyncio.run(a_step(it, captured, recompute))
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
        assert [after < before * 0.75 for after, before in zip(less, kept, strict=True)] == list(recompute), (less, kept)


def test_whoever_joins_is_told() -> None:
    stages = "stage 0: layers 0-1 recompute: a/0=12\nstage 1: layers 2-4: b/0=12\n"
    plan = parse_plan(f"plan graph=g cluster=c mode=swarm batch=12 micro_batch=4\n{stages}")
    spec = spec_of(Path(swarm_job.__file__), (), swarm_job.job, plan, capture_program(swarm_job.job), None)
    assert spec.recompute == (True, False)


def test_imposed_speeds_know_of_it(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(dump_cluster(make_cluster("c", [make_site("a", kind="T4", devices=1)])))
    device = Imposed(str(file), "a-0/0")
    graph = capture_program(job()).graph
    plain, again = (pace_of_worker(device, graph, BOUNDS, MICRO_BATCHES, recompute) for recompute in ((), (True, False)))
    assert again.seconds(0, 0, backward=True) == pytest.approx(plain.seconds(0, 0, backward=True) + plain.seconds(0, 0, backward=False))
    assert again.seconds(0, 0, backward=False) == pytest.approx(plain.seconds(0, 0, backward=False))
    assert again.seconds(1, 0, backward=True) == pytest.approx(plain.seconds(1, 0, backward=True))
