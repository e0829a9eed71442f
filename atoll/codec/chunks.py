"""Chunks: a tensor as rows of one block each, taken a cacheful at a time.

Every step of a codec is one PyTorch operator. Over a whole tensor each would read and write main memory; over a chunk that stays in cache
only the first read and the last write do. A chunk is large enough that the operators' own start-up costs little.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

__all__ = ["BLOCK", "as_blocks", "block_count", "chunk_rows", "one_thread", "padded_tail", "row_chunks"]

BLOCK = 256
"""Elements that share one scale; part of the wire format."""

_ROWS = 512
"""Half a megabyte of fp32: of 63 to 511 rows the largest were the fastest on processors with 512 KB of second-level cache a core."""


def chunk_rows(device: torch.device) -> int:
    """How many blocks to work on at once; GPUs take all."""
    return _ROWS if device.type == "cpu" else 2**22


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside, PyTorch's operators do not divide their work in this thread; afterwards they do as before.

    Dividing operators of a few microseconds makes threads wait for each other thousands of times a tensor: on two busy cores it was 25
    times slower. Whoever has cores to spare encodes several tensors, or parts of one, in threads of their own: operators let them run.
    """
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)  # of the calling thread; others keep theirs
    try:
        yield
    finally:
        torch.set_num_threads(before)


def block_count(elements: int) -> int:
    """Blocks of a tensor, the last one perhaps not full."""
    return -(-elements // BLOCK)


def as_blocks(flat: torch.Tensor) -> torch.Tensor:
    """The full blocks of a flat tensor: (blocks, BLOCK), a view."""
    return flat[: flat.numel() // BLOCK * BLOCK].view(-1, BLOCK)


def padded_tail(flat: torch.Tensor) -> torch.Tensor | None:
    """The last block where it is not full, filled up with zeros: (1, BLOCK), a copy."""
    rest = flat.numel() % BLOCK
    if not rest:
        return None
    tail = flat.new_zeros(1, BLOCK)
    tail[0, :rest] = flat[-rest:]
    return tail


def row_chunks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of several tensors, a chunk at a time. Tensors may have more rows than the first one has; those are left out."""
    first = tensors[0]
    if not first.shape[0]:
        return
    rows = chunk_rows(first.device)
    yield from zip(*(torch.split(tensor[: first.shape[0]], rows) for tensor in tensors), strict=True)
