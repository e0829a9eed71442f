"""A swarm trains on a stream: its feeder reads it in order and ahead of time, and has the samples of work that is done again."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, SequentialSampler

from atoll.errors import FabricError
from atoll.events import AnyEvent, StepFinished
from atoll.graph.capture import capture_program
from atoll.runtime.modes.swarm.compute import programs_of
from atoll.runtime.modes.swarm.micro_batches import SampleFeed
from atoll.runtime.modes.swarm.stream_places import RemotePlaces, StreamPlaces, ToldPlaces

from .one_process import OneProcess
from .test_compute import check, job, plain

COUNT = 20  # of an epoch: it ends within a batch


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(COUNT):
            yield torch.randn(6, generator=generator), torch.randint(0, 5, (), generator=generator)


class StatefulRows(Rows):
    """Says where it is, and counts what it reads."""

    def __init__(self) -> None:
        self.done = self.read = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for row in islice(super().__iter__(), self.done, None):
            self.done, self.read = self.done + 1, self.read + 1
            yield row
        self.done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Beside:
    """A coordinator in this process, as `Remote` has one elsewhere."""

    def __init__(self, service: StreamPlaces) -> None:
        self.service, self.is_there = service, True

    def call_soon(self, method: Any, request: Any, *, timeout_seconds: float) -> "Future[Any]":
        future: Future[Any] = Future()
        if not self.is_there:
            future.set_exception(FabricError("it is gone"))
            return future
        with ThreadPoolExecutor(1) as thread:
            future.set_result(thread.submit(lambda: asyncio.run(method(self.service, request, None))).result())
        return future


def test_a_feeder_tells_where_the_stream_is_after_each_step_and_another_goes_on_there() -> None:
    places = StreamPlaces({})
    coordinator, warned = Beside(places), list[str]()

    def feed() -> tuple[SampleFeed, StatefulRows]:
        stream = StatefulRows()
        it = job(data=stream)
        captured = capture_program(it, divided=True)
        stream.read = 0
        remote = RemotePlaces(coordinator, warned.append)  # type: ignore[arg-type]
        micro_batches = [(start, min(start + 3, it.batch_size)) for start in range(0, it.batch_size, 3)]
        return SampleFeed(it, captured, programs_of(captured, [0, 2, 5]), micro_batches, threading.Lock(), remote), stream

    async def run() -> None:
        (first, _), (second, stream) = feed(), feed()
        size, last = job().batch_size, range(0, job().batch_size, 3)[-1] // 3
        made = {(version, number): await first.load(version, number) for version in range(4) for number in reversed(range(last + 1))}
        assert places.before(3)["position"] == 3 * size
        coordinator.is_there = False
        await first.load(4, last)
        coordinator.is_there = True
        await first.load(5, last)
        assert places.before(5)["position"] == 5 * size, "what the coordinator did not hear is told again"
        for version, number in [(3, 0), (3, last), (0, 0)]:  # where the other was killed; and everybody has gone back
            found = await second.load(version, number)
            assert {name: leaf.tolist() for name, leaf in found.leaves.items()} == {
                name: leaf.tolist() for name, leaf in made[version, number].leaves.items()
            }
            assert stream.read <= size + (3 if version == 0 else 0), "nothing is read to be left out"

    asyncio.run(run())
    assert not warned
    assert places.before(0) is None
    for step in range(1000):
        asyncio.run(places.tell(ToldPlaces((step,), [torch.tensor(list(b"1"), dtype=torch.uint8)]), None))  # type: ignore[arg-type]
    assert len(places._places) <= 64
    assert [places.before(step) for step in (0, 999)] == [1, 1]


def test_a_swarm_reads_a_stream_and_redoes_work_on_it() -> None:
    rows: Any = list(Rows())
    expected = plain(job(data=rows, sampler=SequentialSampler(rows)))
    swarm = OneProcess(job(data=Rows, num_workers=1), [0, 2, 5], 4, 3, chunks=3, checkpoint_every=2, lost_seconds=2.0)

    def disturb(swarm: OneProcess, event: AnyEvent) -> None:
        if isinstance(event, StepFinished) and event.step == 2:
            victim = next(name for name, worker in swarm.workers.items() if worker.stage == 0)
            asyncio.get_running_loop().create_task(swarm.kill(victim))
            swarm.add_worker("late")

    asyncio.run(swarm.run(disturb))
    check(swarm, expected)
