"""Neighbours: processes that compute as other ranks will while one is measured, so that what they share is shared: caches and memory."""

import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

__all__ = ["busy_neighbours"]

_START_SECONDS = 120.0  # loading PyTorch on a busy machine
_WIDTH, _ROWS = 256, 1024


@contextmanager
def busy_neighbours(count: int, threads: int) -> Iterator[None]:
    """Inside, so many other processes train a small network on the CPU with so many threads each."""
    context = multiprocessing.get_context("spawn")
    started = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_train, args=(theirs, threads, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            started.append((process, ours))
        for _, connection in started:
            if connection.poll(_START_SECONDS):
                connection.recv_bytes()
        yield
    finally:
        for process, connection in started:
            connection.close()
            process.kill()
            process.join()


def _train(connection: Connection, threads: int, parent: int) -> None:
    """As ranks do: products, elementwise work, an optimizer. Ends with the process that asked, however that ends."""
    import torch

    torch.set_num_threads(threads)
    block = torch.nn.Linear(_WIDTH, 4 * _WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * _WIDTH, _WIDTH)
    model, inputs = torch.nn.Sequential(*block, *block), torch.randn(_ROWS, _WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    connection.send_bytes(b"ready")
    while os.getppid() == parent:
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
