"""Gathering: whole tensors in the memory of rank 0, from what every rank holds of them."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.callbacks import Snapshot
from atoll.runtime.checkpoint.assignment import Assigned, Outline, assign, outlines
from atoll.runtime.checkpoint.checkpointer import Staging
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.local_shard import Keyed, LocalShard, pieces
from atoll.runtime.checkpoint.manifest import MODEL, SmallState, merge_small
from atoll.runtime.checkpoint.safetensors_file import DTYPES
from atoll.runtime.checkpoint.training_state import optimizer_state
from atoll.runtime.checkpoint.values import from_plain

__all__ = ["gather_snapshot", "gather_tensors"]


def gather_tensors(tensors: Sequence[LocalShard], group: "dist.ProcessGroup | None") -> dict[str, Tensor]:
    """On rank 0 every tensor, whole, by its name, on the CPU; nothing on the others. All ranks of the Gloo group call it together."""
    return _gather([(shard.name, shard) for shard in tensors], group)


def gather_snapshot(
    step: int,
    shards: Sequence[LocalShard],
    optimizers: Sequence[torch.optim.Optimizer],
    tied: Mapping[str, str],
    group: "dist.ProcessGroup | None",
) -> Snapshot | None:
    """Weights and optimizers of all ranks, whole, on rank 0; None on the others. All ranks call it together, after the same step."""
    ranks, state = CheckpointRanks(group), optimizer_state(optimizers, shards)
    small = merge_small(ranks.gather(state.small, SmallState), {})
    found = _gather([(MODEL + shard.name, shard) for shard in shards] + state.tensors, group)
    if ranks.rank:
        return None
    model = {key.removeprefix(MODEL): value for key, value in found.items() if key.startswith(MODEL)}
    model |= {alias: model[name] for alias, name in tied.items() if name in model}
    optimizer = {name: {key: from_plain(value, key) for key, value in values.items()} for name, values in small.parameters.items()}
    for key, value in found.items():
        if not key.startswith(MODEL):
            _, kind, name = key.split("/", 2)
            optimizer.setdefault(name, {})[kind] = value
    return Snapshot(step, model, optimizer)


def _gather(keyed: Sequence[Keyed], group: "dist.ProcessGroup | None") -> dict[str, Tensor]:
    ranks = CheckpointRanks(group)
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
