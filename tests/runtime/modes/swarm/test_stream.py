"""A swarm trains on a stream: its feeder reads it in order and ahead of time, and has the samples of work that is done again."""

import asyncio
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, SequentialSampler

from atoll.events import AnyEvent, StepFinished

from .one_process import OneProcess
from .test_compute import check, job, plain

COUNT = 20  # of an epoch: it ends within a batch


class Rows(IterableDataset[tuple[Tensor, Tensor]]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        for _ in range(COUNT):
            yield torch.randn(6, generator=generator), torch.randint(0, 5, (), generator=generator)


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
