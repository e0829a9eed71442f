"""Neighbours: processes that compute as other ranks will while one is measured, so that what they share is shared: caches and memory.

`python -m atoll.cluster.neighbours THREADS` is one of them: it says that it is ready, and trains a small network until its input ends.
"""

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["busy_neighbours"]

_WIDTH, _ROWS = 256, 1024


@contextmanager
def busy_neighbours(count: int, threads: int) -> Iterator[None]:
    """Inside, so many other processes train a small network on the CPU with so many threads each."""
    command = [sys.executable, "-m", "atoll.cluster.neighbours", str(threads)]
    pipe = subprocess.PIPE
    started = [subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) for _ in range(count)]
    try:
        for process in started:
            assert process.stdout is not None
            process.stdout.readline()  # it is ready, or has ended
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def _train(threads: int) -> None:
    """As ranks do: products, elementwise work, an optimizer. Whoever started it closes its input when it ends, however that happens."""
    import torch

    torch.set_num_threads(threads)
    block = torch.nn.Linear(_WIDTH, 4 * _WIDTH), torch.nn.GELU(), torch.nn.Linear(4 * _WIDTH, _WIDTH)
    model, inputs = torch.nn.Sequential(*block, *block), torch.randn(_ROWS, _WIDTH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    os.write(1, b"ready\n")
    while not select.select([0], [], [], 0)[0]:
        optimizer.zero_grad()
        torch.autograd.backward(model(inputs).square().mean())
        optimizer.step()


if __name__ == "__main__":
    _train(int(sys.argv[1]))
