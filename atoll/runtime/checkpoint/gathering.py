"""Gathering: all that ranks hold of a model and its optimizer, whole, in rank 0's memory. Each number travels once."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.callbacks import Snapshot
from atoll.runtime.checkpoint.assignment import Assigned, Outline, assign, outlines
from atoll.runtime.checkpoint.checkpointer import Staging
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.local_shard import LocalShard, Piece, pieces
from atoll.runtime.checkpoint.manifest import MODEL, SmallState, merge_small
from atoll.runtime.checkpoint.safetensors_file import DTYPES
from atoll.runtime.checkpoint.training_state import optimizer_state
from atoll.runtime.checkpoint.values import from_plain

__all__ = ["gather_snapshot"]


def gather_snapshot(
    ranks: CheckpointRanks, step: int, shards: Sequence[LocalShard], optimizers: Sequence[torch.optim.Optimizer], tied: Mapping[str, str]
) -> Snapshot | None:
    """What all ranks hold, on rank 0; None on the others. All ranks must call it after the same step."""
    state = optimizer_state(optimizers, shards)
    keyed = [(MODEL + shard.name, shard) for shard in shards] + state.tensors
    mine = pieces(keyed)
    layouts = ranks.gather(outlines(keyed, mine), dict[str, Outline])
    small = merge_small(ranks.gather(state.small, SmallState), {})
    found = _gathered(ranks, layouts, mine)
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


def _gathered(ranks: CheckpointRanks, layouts: Sequence[Mapping[str, Outline]], mine: Sequence[Piece]) -> dict[str, Tensor]:
    """Every tensor, whole, by key, on rank 0."""
    known = {key: outline for layout in layouts for key, outline in layout.items()}
    assigned = assign(layouts, {key: DTYPES[outline.dtype].itemsize for key, outline in known.items()})
    own = Staging().copy(mine, assigned[ranks.rank])
    if ranks.rank:
        for piece in own:
            dist.send(_bytes(piece.view), group=ranks.group, group_dst=0)
        return {}
    found = {key: torch.empty(outline.shape, dtype=DTYPES[outline.dtype]) for key, outline in known.items()}
    for piece in own:
        found[piece.key][piece.rectangle.slices()] = piece.view
    for rank in range(1, ranks.count):
        for one in assigned[rank]:
            _receive(ranks, rank, one, found[one.key])
    return found


def _receive(ranks: CheckpointRanks, rank: int, one: Assigned, into: Tensor) -> None:
    part = torch.empty(one.rectangle.sizes, dtype=into.dtype)
    dist.recv(_bytes(part), group=ranks.group, group_src=rank)
    into[one.rectangle.slices()] = part


def _bytes(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)
