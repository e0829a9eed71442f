"""Channels: how a micro-batch's values get from the ranks of one stage to those of the next, sent and received in the background.

Lanes hold different samples, ranks of one lane the same values. Each receiver takes from every lane that holds some of its samples exactly
those, so that a gather followed by the same partition is no exchange at all but one message a pair (a hop). Gradients go the same way back.

A send keeps its tensor until it has left; a receive is posted early and waited for by whoever needs it. A value that a codec makes smaller
travels as a message of bytes, whose length both ends know from the value's shape.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.codec.registry import FixedSizeCodec
from atoll.plan import CodecName
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.stage.program import Crossing

__all__ = ["Arrival", "Channels", "SampleTransfer", "Transfer", "backward_hops", "forward_hops"]

_LATE = 64  # sends under way before the oldest is waited for


@dataclass(frozen=True)
class SampleTransfer:
    """One message: samples `start` to `stop` of the global batch, from one rank to another (which may be the same)."""

    source: int
    target: int
    start: int
    stop: int
    codec: CodecName = "none"


def _overlaps(layout: Layout, stage: int, lane: int, micro_batch: int, other: int) -> list[tuple[int, int, int]]:
    """Lanes of stage `other` that hold samples of this lane: (lane, start, stop)."""
    own_start, own_stop = layout.pieces(stage, micro_batch)[lane]
    found = []
    for index, (start, stop) in enumerate(layout.pieces(other, micro_batch)):
        first, last = max(start, own_start), min(stop, own_stop)
        if first < last:
            found.append((index, first, last))
    return found


def _hops(layout: Layout, sender: int, receiver: int, micro_batch: int) -> tuple[SampleTransfer, ...]:
    plan, route = layout.plan, layout.route
    theirs, own = plan.stages[sender], plan.stages[receiver]
    hops = []
    for lane in range(own.lanes):
        for other, start, stop in _overlaps(layout, receiver, lane, micro_batch, sender):
            for tensor in range(own.tensor):
                source = RankPlace(sender, route[sender][micro_batch], other, tensor * theirs.tensor // own.tensor)
                target = RankPlace(receiver, route[receiver][micro_batch], lane, tensor)
                codec = layout.codec_between(source, target)
                hops.append(SampleTransfer(layout.rank(source), layout.rank(target), start, stop, codec))
    return tuple(hops)


@lru_cache(maxsize=4096)
def forward_hops(layout: Layout, stage: int, micro_batch: int) -> tuple[SampleTransfer, ...]:
    """Messages that bring stage `stage` what the one before it made of a micro-batch."""
    return _hops(layout, stage - 1, stage, micro_batch)


@lru_cache(maxsize=4096)
def backward_hops(layout: Layout, stage: int, micro_batch: int) -> tuple[SampleTransfer, ...]:
    """Messages that bring stage `stage` the gradients of what it sent on."""
    return _hops(layout, stage + 1, stage, micro_batch)


class Transfer:
    """What is said about one micro-batch in one direction between two stages: every value, in order, with a tag of its own."""

    def __init__(self, crossings: Sequence[Crossing], dims: Sequence[int | None], number: int, messages: int) -> None:
        self.crossings, self.dims, self._number, self._messages = crossings, dims, number, messages

    def tag(self, index: int) -> int:
        """Distinguishes the values of a micro-batch, where the backend looks at tags; elsewhere order does."""
        return self._number + index * self._messages


class Arrival:
    """Values on their way here; `wait` gives them."""

    def __init__(self, tensors: list[Tensor], works: list[Any], copies: list[tuple[Tensor, Tensor, FixedSizeCodec | None]]) -> None:
        self._tensors, self._works, self._copies = tensors, works, copies  # copies: a place, what arrives for it, how that is written

    def wait(self) -> list[Tensor]:
        """The values, once they are all here."""
        for work in self._works:
            work.wait()
        for place, part, codec in self._copies:
            if codec is None:
                place.copy_(part)
            else:
                codec.decode(part, place)
        self._works, self._copies = [], []
        return self._tensors


class Channels:
    """This rank's ends of all channels."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self._leaving: list[tuple[Any, Tensor]] = []

    def send(self, message: Transfer, hops: Sequence[SampleTransfer], values: Sequence[Tensor], first_sample: int) -> None:
        """Send each receiver its samples of the values; `first_sample` is where this rank's own begin."""
        for hop in hops:
            if hop.source != self.rank or hop.target == self.rank:
                continue
            for index, value in enumerate(values):
                part = _part(value, message.dims[index], hop, first_sample).detach().contiguous()
                if (coded := _coded(hop, part)) is not None:
                    part = coded[0].encode(part).to(self.device)
                self._leaving.append((dist.isend(part, hop.target, tag=message.tag(index)), part))
        while len(self._leaving) > _LATE:
            self._leaving.pop(0)[0].wait()

    def receive(self, message: Transfer, hops: Sequence[SampleTransfer], shapes: Sequence[tuple[int, ...]], first_sample: int) -> Arrival:
        """Post receives for this rank's samples of the values, whole `shapes` of them, which begin at `first_sample`."""
        mine = [hop for hop in hops if hop.target == self.rank]
        tensors, works, copies = [], [], []
        for index, (crossing, shape) in enumerate(zip(message.crossings, shapes, strict=True)):
            whole = torch.empty(shape, dtype=crossing.dtype, device=self.device)
            for hop in mine:
                place = _part(whole, message.dims[index], hop, first_sample)
                codec, buffer = None, place
                if (coded := _coded(hop, place)) is not None:
                    codec, buffer = coded[0], torch.empty(coded[1], dtype=torch.uint8, device=self.device)
                elif not place.is_contiguous():
                    buffer = torch.empty_like(place, memory_format=torch.contiguous_format)
                works.append(dist.irecv(buffer, hop.source, tag=message.tag(index)))
                if buffer is not place:
                    copies.append((place, buffer, codec))
            tensors.append(whole)
        return Arrival(tensors, works, copies)

    def settle(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._leaving:
            work.wait()
        self._leaving.clear()


@lru_cache(maxsize=8)
def _fixed_size(name: str) -> FixedSizeCodec:
    return FixedSizeCodec(name)


def _coded(hop: SampleTransfer, part: Tensor) -> tuple[FixedSizeCodec, int] | None:
    """How a hop writes its part of a value, and the bytes that gives; None: as it is. Both ends ask it of the same shape and type."""
    if hop.codec == "none":
        return None
    codec = _fixed_size(hop.codec)
    nbytes = codec.message_bytes(tuple(part.shape), part.dtype)
    return None if nbytes is None else (codec, nbytes)


def _part(value: Tensor, dim: int | None, hop: SampleTransfer, first_sample: int) -> Tensor:
    """A hop's samples of a value that begins at `first_sample`. A value that cannot be divided goes whole."""
    if dim is None or value.shape[dim] == hop.stop - hop.start:
        return value
    return value.narrow(dim, hop.start - first_sample, hop.stop - hop.start)
