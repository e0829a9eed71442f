"""Bridges: how a micro-batch's values get from the ranks of one stage to those of the next. Pure.

Lanes hold different samples, ranks of one lane the same values. Each receiver takes from every lane that holds some of its samples exactly
those, so that a gather followed by the same partition is no exchange at all but one message a pair. Gradients go the same way back.
"""

from dataclasses import dataclass
from functools import lru_cache

from atoll.plan import CodecName
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace

__all__ = ["SampleTransfer", "backward_hops", "forward_hops"]


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
