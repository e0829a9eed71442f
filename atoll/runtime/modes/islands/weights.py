"""A site's trained weights as all of its ranks hold them together: brought to rank 0 as one row of numbers, and changed from there.

The row is of all trained parameters in the order of their names, in fp32 on the CPU, whatever plan the site has: with data parallelism rank
0 has them all, else it gathers and the others cut what is theirs out of what it sends, parameter by parameter.
"""

import math
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.gathering import gather_tensors
from atoll.runtime.checkpoint.local_shard import LocalShard, Piece, pieces

__all__ = ["SiteWeights"]


class SiteWeights:
    """What is exchanged, of one rank. Every method but `local` is called by all ranks together."""

    def __init__(self, held: Sequence[LocalShard], group: "dist.ProcessGroup") -> None:
        """`held` are this rank's parts of trained parameters; `group` is a Gloo group of all ranks of the site."""
        self._held, self.group = list(held), group
        ranks = CheckpointRanks(group)
        self.rank, self._several = ranks.rank, dist.get_world_size(group) > 1
        said = ranks.gather({shard.name: shard.holding.shape for shard in self._held}, dict[str, tuple[int, ...]])
        self.shapes = dict(sorted({name: shape for own in said for name, shape in own.items()}.items()))
        self._pieces: dict[str, list[Piece]] = {name: [] for name in self.shapes}
        for piece in pieces([(shard.name, shard) for shard in self._held]):
            self._pieces[piece.key].append(piece)
        self._whole = all(ranks.gather(self._has_all(), bool)[:1])  # rank 0 has
        self._sent: dict[str, list[Tensor]] = {}

    @property
    def elements(self) -> int:
        """How many numbers are exchanged."""
        return sum(map(math.prod, self.shapes.values()))

    def _has_all(self) -> bool:
        return all(sum(piece.rectangle.elements for piece in self._pieces[name]) == math.prod(shape) for name, shape in self.shapes.items())

    def gather(self) -> Tensor | None:
        """The row, on rank 0: its own memory."""
        if self._whole:
            return self._flat(self._local()) if self.rank == 0 else None
        whole = gather_tensors(self._held, self.group)
        return self._flat(whole) if self.rank == 0 else None

    def _local(self) -> dict[str, Tensor]:
        return {shard.name: shard.tensor for shard in self._held}

    def _flat(self, whole: dict[str, Tensor]) -> Tensor:
        row = torch.empty(self.elements)
        for name, part in self._named(row):
            part.copy_(whole[name].detach().view(part.shape))
        return row

    def _named(self, row: Tensor) -> Iterator[tuple[str, Tensor]]:
        parts = torch.split(row, [math.prod(shape) for shape in self.shapes.values()])
        return ((name, part.view(shape)) for (name, shape), part in zip(self.shapes.items(), parts, strict=True))

    def remember(self) -> None:
        """Progress counts from the weights as they are now."""
        self._sent = {name: [piece.view.clone() for piece in own] for name, own in self._pieces.items()}

    @torch.no_grad()
    def replace(self, row: Tensor | None) -> None:
        """The weights are those of the row, which rank 0 has."""
        for name, whole in self._spread(row):
            for piece in self._pieces[name]:
                piece.view.copy_(whole[piece.rectangle.slices()])

    @torch.no_grad()
    def carry_over(self, row: Tensor | None, base: Tensor | None, *, remembered: bool) -> None:
        """The weights are those of the row with the progress since those remembered, or since `base`, which rank 0 has."""
        bases = None if remembered else self._spread(base)
        for name, whole in self._spread(row):
            before = None if bases is None else next(bases)[1]
            for number, piece in enumerate(self._pieces[name]):
                part = piece.rectangle.slices()
                since = self._sent[name][number] if before is None else before[part].to(piece.view)
                piece.view.copy_(whole[part].to(piece.view.device) + (piece.view - since).float())

    @torch.no_grad()
    def shards_of(self, row: Tensor | None) -> list[LocalShard]:
        """What this rank would hold if the weights were those of the row, which rank 0 has: for a checkpoint."""
        found = {shard.name: LocalShard(shard.holding, torch.empty_like(shard.tensor), shard.flat, shard.parameter) for shard in self._held}
        places: dict[str, list[Piece]] = {name: [] for name in self.shapes}
        for piece in pieces(list(found.items())):
            places[piece.key].append(piece)
        for name, whole in self._spread(row):
            for piece in places[name]:
                piece.view.copy_(whole[piece.rectangle.slices()])
        return list(found.values())

    def _spread(self, row: Tensor | None) -> Iterator[tuple[str, Tensor]]:
        """Each parameter as rank 0 has it in the row."""
        empty = ((name, torch.empty(shape)) for name, shape in self.shapes.items())
        for name, part in empty if row is None else self._named(row):
            if self._several:
                part = part.contiguous()
                dist.broadcast(part, group=self.group, group_src=0)
            yield name, part
