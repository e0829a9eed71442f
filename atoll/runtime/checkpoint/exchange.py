"""Words between ranks: each says something, all hear everything. JSON in byte tensors, never pickled objects."""

from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist

__all__ = ["CheckpointRanks"]

T = TypeVar("T")


class CheckpointRanks:
    """The ranks that save and load together. Without a group, this process alone."""

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.count = 1 if group is None else dist.get_world_size(group)

    def gather(self, message: T, kind: type[T]) -> list[T]:
        """What every rank said, in rank order; all ranks must call it. A rank that dies makes it fail on the others."""
        said = msgspec.json.encode(message)
        if self.group is None:
            return [msgspec.json.decode(said, type=kind)]
        counted = [torch.empty(1, dtype=torch.int64) for _ in range(self.count)]
        dist.all_gather(counted, torch.tensor([len(said)]), group=self.group)
        lengths = [int(length) for length in counted]
        longest = max(lengths)
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        heard = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(heard, mine, group=self.group)
        return [msgspec.json.decode(tensor[:length].numpy().tobytes(), type=kind) for tensor, length in zip(heard, lengths, strict=True)]
