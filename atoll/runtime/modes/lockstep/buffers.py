"""Buffers that training changes: after every step all ranks have those of one.

Running statistics are those of the samples a rank has seen, so replicas and lanes come to different ones. As in
`DistributedDataParallel`, where rank 0's count, one rank's count here: the first of the first stage that changes the buffer. Everybody else
takes them over, so that training, evaluation, checkpoints and what is exported from them never disagree.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.modes.lockstep.layout import RankPlace

__all__ = ["Bundle", "ChangedBuffers", "SaidOfBuffers", "bundles"]


class SaidOfBuffers(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its buffers, by the user's names."""

    held: list[str]
    changed: dict[str, tuple[int, int, int, int]]  # by its training → the first place (stage, replica, lane, tensor) that does


class Bundle(msgspec.Struct, frozen=True, order=True):
    """Buffers that go from one rank to the same others."""

    ranks: tuple[int, ...]  # all that have them
    source: int  # whose values count
    names: tuple[str, ...]


def bundles(said: Sequence[SaidOfBuffers]) -> list[Bundle]:
    """What is to be passed on, given what every rank says: the same list on all of them."""
    together: dict[tuple[tuple[int, ...], int], list[str]] = defaultdict(list)
    for name in sorted({name for one in said for name in one.changed}):
        _, source = min((one.changed[name], rank) for rank, one in enumerate(said) if name in one.changed)
        ranks = tuple(rank for rank, one in enumerate(said) if name in one.held)
        if len(ranks) > 1:
            together[ranks, source].append(name)
    return sorted(Bundle(ranks, source, tuple(names)) for (ranks, source), names in together.items())


@dataclass
class _Travelling:
    """Buffers of one type of number, which travel as one tensor."""

    source: int
    group: Any
    tensors: list[list[Tensor]]  # each buffer's copies on this rank; the first is training's where training has it
    flat: Tensor


class ChangedBuffers:
    """This rank's buffers that training changes somewhere. All ranks make theirs together: groups are made on the way."""

    def __init__(self, rank: int, held: Mapping[str, Sequence[Tensor]], changed: Mapping[str, RankPlace]) -> None:
        self.rank = rank
        places = {name: (place.stage, place.replica, place.lane, place.tensor) for name, place in changed.items()}
        said = CheckpointRanks(dist.group.WORLD).gather(SaidOfBuffers(held=sorted(held), changed=places), SaidOfBuffers)
        self._travelling: list[_Travelling] = []
        everyone, groups = tuple(range(len(said))), dict[tuple[int, ...], Any]()
        for bundle in bundles(said):
            if bundle.ranks not in groups:
                groups[bundle.ranks] = dist.group.WORLD if bundle.ranks == everyone else dist.new_group(list(bundle.ranks))
            if rank in bundle.ranks:
                self._pack(bundle, groups[bundle.ranks], held)

    def _pack(self, bundle: Bundle, group: Any, held: Mapping[str, Sequence[Tensor]]) -> None:
        alike: dict[torch.dtype, list[list[Tensor]]] = defaultdict(list)
        for name in bundle.names:
            alike[held[name][0].dtype].append(list(held[name]))
        for dtype, tensors in sorted(alike.items(), key=lambda item: str(item[0])):
            size = sum(copies[0].numel() for copies in tensors)
            flat = torch.empty(size, dtype=dtype, device=tensors[0][0].device)
            self._travelling.append(_Travelling(bundle.source, group, tensors, flat))

    def agree(self) -> None:
        """Take over the values that count. Every rank calls it after the same steps."""
        pending = [(row, self._send_or_receive(row)) for row in self._travelling]
        for row, work in pending:
            work.wait()
            parts = torch.split(row.flat, [copies[0].numel() for copies in row.tensors])
            for copies, part in zip(row.tensors, parts, strict=True):
                for copy in copies:
                    copy.copy_(part.view_as(copy))

    def _send_or_receive(self, row: _Travelling) -> Any:
        if row.source == self.rank:
            torch.cat([copies[0].reshape(-1) for copies in row.tensors], out=row.flat)
        return dist.broadcast(row.flat, row.source, group=row.group, async_op=True)
