"""Ranks for tests: a process group of Gloo or of nothing, and forked processes that are its members."""

import multiprocessing
import multiprocessing.connection
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def process_group(store: Path, rank: int, ranks: int, timeout_seconds: float = 60) -> Iterator[None]:
    """This process is one of `ranks`, which meet at the file `store`."""
    meeting = dist.FileStore(str(store), ranks)
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout_seconds))
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_group(ranks: int) -> Iterator[None]:
    """This process is rank 0 of so many; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def fork_ranks(ranks: int, target: Callable[..., None], *arguments: Any) -> int:
    """Run `target(rank, *arguments)` as so many processes. The worst exit code: once one has failed, the others are killed."""
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=target, args=(rank, *arguments)) for rank in range(ranks)]
    for process in processes:
        process.start()
    running = processes
    while running and not any(process.exitcode for process in processes):
        multiprocessing.connection.wait([process.sentinel for process in running])
        running = [process for process in processes if process.is_alive()]
    failed = max((abs(process.exitcode) for process in processes if process.exitcode), default=0)
    for process in processes:
        if process.is_alive():
            process.kill()
        process.join()
    return failed
