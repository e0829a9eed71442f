"""Gathering: whole tensors in the memory of rank 0, from what every rank holds of them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.runtime.checkpoint.assignment import Assigned, Outline, assign, outlines
from atoll.runtime.checkpoint.checkpointer import Staging
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.local_shard import LocalShard, pieces
from atoll.runtime.checkpoint.safetensors_file import DTYPES

__all__ = ["gather_tensors"]


def gather_tensors(tensors: Sequence[LocalShard], group: "dist.ProcessGroup | None") -> dict[str, Tensor]:
    """On rank 0 every tensor, whole, by its name, on the CPU; nothing on the others. All ranks of the Gloo group call it together."""
    ranks = CheckpointRanks(group)
    keyed = [(shard.name, shard) for shard in tensors]
    held = pieces(keyed)
    layouts = ranks.gather(outlines(keyed, held), dict[str, Outline])
    everything = {key: outline for layout in layouts for key, outline in layout.items()}
    assigned = assign(layouts, {key: DTYPES[outline.dtype].itemsize for key, outline in everything.items()})
    copies = {Assigned(copy.key, copy.rectangle): copy.view for copy in Staging().copy(held, assigned[ranks.rank])}
    if ranks.rank != 0:
        for one in assigned[ranks.rank]:
            dist.send(_bytes(copies[one]), group=group, group_dst=0)
        return {}
    whole = {key: torch.empty(outline.shape, dtype=DTYPES[outline.dtype]) for key, outline in everything.items()}
    for rank, parts in enumerate(assigned):
        for one in parts:
            value = copies[one] if rank == 0 else torch.empty(one.rectangle.sizes, dtype=whole[one.key].dtype)
            if rank:
                dist.recv(_bytes(value), group=group, group_src=rank)
            whole[one.key][one.rectangle.slices()] = value
    return whole


def _bytes(value: Tensor) -> Tensor:
    """Gloo does not know all types of numbers."""
    return value.reshape(-1).view(torch.uint8)
