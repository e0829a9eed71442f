"""Gradient synchronisation: parts of parameters that several ranks hold are added up in buckets, while backward still runs.

Every holder of a part contributes what its own micro-batches (or its own use of a tied parameter) made of the gradient; the gradient is the
sum. Ranks of one lane that hold the same part have the same gradient already, so each counts for its share of one. A bucket belongs to one
group of ranks and is reduced when the last micro-batch has left its gradients in it. Groups reduce their buckets in one order on all their
ranks, whatever order gradients become ready in.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.errors import JobFailedError
from atoll.runtime.modes.lockstep.measurement import Bucket
from atoll.runtime.modes.lockstep.recorder import Recorder
from atoll.runtime.stage.shard_spec import ShardSpec

__all__ = ["GradientGroup", "Gradients", "OuterReduction", "Pending", "Share", "gradient_groups"]


class Pending(Protocol):
    """A reduction under way."""

    def wait(self) -> object:
        """Until the sum is in the buffer."""


class OuterReduction(Protocol):
    """Adds buckets up beyond this world: over all of its ranks, and others elsewhere. Every rank holds all parameters, whole."""

    bucket_bytes: int
    batch_size: int  # of everybody together: what a mean loss is divided by

    def add(self, bucket: int, slots: Sequence[tuple[str, int]], buffer: Tensor) -> None:
        """There is such a bucket: parameters and their elements, one after another; behind them a number for each says who has a
        gradient. All ranks make the same, in the same order."""

    def begin(self, bucket: int) -> Pending:
        """The bucket is complete on this rank. All ranks begin them in the same order, and wait for them in it."""


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's hold on a parameter through one stage."""

    rank: int
    stage: int
    tensor: int  # the rank's index along its lane
    lane: tuple[int, ...]  # ranks of the lane it is in
    holding: ShardSpec


class GradientGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a parameter, and who adds up its gradient: ranks, and how many times over each counts (1 ÷ repeats)."""

    name: str
    dim: int | None  # None: the whole
    start: int = 0
    stop: int = 0
    ranks: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()  # by rank: ranks of its lane that have the same gradient
    holders: int = 1  # ranks that hold the part, those of other groups included: what one of its numbers counts in a norm
    stages: tuple[int, ...] = ()

    def ranges_in(self, holding: ShardSpec) -> list[tuple[int, int]]:
        """Where a part that is not the whole lies in what a rank holds, along `dim`."""
        assert self.dim is not None
        ranges, offset = [], 0
        for start, stop in holding.parts if holding.dim is not None else ((0, holding.shape[self.dim]),):
            first, last = max(start, self.start), min(stop, self.stop)
            if first < last:
                ranges.append((offset + first - start, offset + last - start))
            offset += stop - start
        return ranges


def gradient_groups(shares: Sequence[Share]) -> list[GradientGroup]:
    """The parts of one parameter, ascending. Where lanes line up, ranks agree with those at the same index of other lanes only."""
    dims = {share.holding.dim for share in shares} - {None}
    assert len(dims) <= 1, f"{shares[0].holding.name} is divided along {dims}"
    dim = dims.pop() if dims else None
    length = shares[0].holding.shape[dim] if dim is not None else 1
    bounds = {0, length} | {bound for share in shares for part in share.holding.parts for bound in part}
    parts: list[GradientGroup] = []
    for start, stop in pairwise(sorted(bounds)):
        holders = [share for share in shares if dim is None or _covers(share.holding, start, stop)]
        for part in _groups(holders, dim, start, stop):
            if parts and _continues(parts[-1], part):
                parts[-1] = msgspec.structs.replace(parts[-1], stop=part.stop)
            else:
                parts.append(part)
    return parts


def _covers(holding: ShardSpec, start: int, stop: int) -> bool:
    return holding.dim is None or any(first <= start and stop <= last for first, last in holding.parts)


def _groups(holders: list[Share], dim: int | None, start: int, stop: int) -> list[GradientGroup]:
    repeats = {share.rank: len({other.rank for other in holders if other.rank in share.lane}) for share in holders}
    rows = [sorted(repeats)]
    if len(set(repeats.values())) == 1 and next(iter(repeats.values())) > 1:
        rows = _by_index(holders)
    return [
        GradientGroup(
            name=holders[0].holding.name,
            dim=dim,
            start=start,
            stop=stop,
            ranks=tuple(row),
            repeats=tuple(repeats[rank] if len(rows) == 1 else 1 for rank in row),
            holders=len(repeats),
            stages=tuple(sorted({share.stage for share in holders})),
        )
        for row in rows
    ]


def _by_index(holders: list[Share]) -> list[list[int]]:
    """Ranks at the same index of their lanes."""
    rows: dict[int, set[int]] = {}
    for share in holders:
        rows.setdefault(share.tensor, set()).add(share.rank)
    sizes = {len(row) for row in rows.values()}
    if len(sizes) > 1 or sum(len(row) for row in rows.values()) != len({share.rank for share in holders}):
        return [sorted({share.rank for share in holders})]
    return [sorted(row) for _, row in sorted(rows.items())]


def _continues(before: GradientGroup, part: GradientGroup) -> bool:
    same = (before.ranks, before.repeats, before.holders, before.dim) == (part.ranks, part.repeats, part.holders, part.dim)
    return same and before.stop == part.start and part.dim is not None


@dataclass
class _Slot:
    """Where a part's gradient lies in its bucket."""

    name: str
    parameter: nn.Parameter
    pieces: tuple[tuple[int, int], ...] | None  # along `dim` of what the rank holds; None: all of it
    dim: int
    start: int
    stop: int
    scale: float


@dataclass
class _Bucket:
    number: int  # in `Gradients.buckets`
    group: Any
    slots: list[_Slot]
    buffer: Tensor
    waiting: set[int] = field(default_factory=set)  # ids of parameters whose gradient is still to come
    work: Any = None
    launched: Any = None  # when, by the recorder


class Gradients:
    """This rank's gradients and the groups it adds them up with.

    `parts` must be the same list on every rank, and all ranks must make their Gradients together: groups are made on the way.
    """

    def __init__(
        self,
        rank: int,
        parts: Sequence[GradientGroup],
        parameters: Mapping[str, nn.Parameter],
        holdings: Mapping[str, ShardSpec],
        recorder: Recorder,
        *,
        bucket_bytes: int,
        ready_late: frozenset[str] = frozenset(),
        buckets: list[Bucket] | None = None,
        outer: OuterReduction | None = None,
    ) -> None:
        self._outer = outer
        self._parameters, self._recorder = dict(parameters), recorder
        self.buckets: list[Bucket] = [] if buckets is None else buckets  # what is added up, for reports; of all turns of a step
        groups = _make_groups(parts)
        early: list[GradientGroup] = []
        late: list[GradientGroup] = []
        for part in parts:
            if rank in part.ranks and (len(part.ranks) > 1 or outer is not None):
                (late if part.name in ready_late or len(part.stages) > 1 else early).append(part)
        self._queues: dict[tuple[tuple[int, ...], bool], list[_Bucket]] = {}
        self._of: dict[int, list[_Bucket]] = {}
        for is_late, chosen in ((False, early[::-1]), (True, late)):  # backward reaches the last parameters first
            self._fill(rank, chosen, groups, holdings, bucket_bytes, is_late)
        self._armed: set[int] = set()
        for parameter in self._parameters.values():
            if id(parameter) in self._of:
                parameter.register_post_accumulate_grad_hook(self._arrived)  # type: ignore[no-untyped-call]

    def _fill(
        self,
        rank: int,
        parts: Sequence[GradientGroup],
        groups: Mapping[tuple[int, ...], Any],
        holdings: Mapping[str, ShardSpec],
        bucket_bytes: int,
        late: bool,
    ) -> None:
        open_slots: dict[tuple[tuple[int, ...], torch.dtype, int], tuple[list[_Slot], int]] = {}

        def close(key: tuple[tuple[int, ...], torch.dtype, int]) -> None:
            slots, size = open_slots.pop(key)
            buffer = torch.zeros(size + len(slots), dtype=key[1], device=slots[0].parameter.device)  # at its end: who has a gradient
            self.buckets.append(Bucket(ranks=key[0], stage=key[2], bytes=size * buffer.element_size()))
            bucket = _Bucket(len(self.buckets) - 1, groups.get(key[0]), slots, buffer)
            if self._outer is not None:
                self._outer.add(bucket.number, [(slot.name, slot.stop - slot.start) for slot in slots], buffer)
            self._queues.setdefault((key[0], late), []).append(bucket)
            for parameter_id in {id(slot.parameter) for slot in slots}:
                self._of.setdefault(parameter_id, []).append(bucket)

        for part in parts:
            parameter, holding = self._parameters[part.name], holdings[part.name]
            pieces, elements = _local_pieces(part, holding)
            stage = -1 if late else part.stages[0]
            key = (part.ranks, parameter.dtype, stage)
            slots, size = open_slots.setdefault(key, ([], 0))
            scale = 1 / part.repeats[part.ranks.index(rank)]
            slots.append(_Slot(part.name, parameter, pieces, part.dim or 0, size, size + elements, scale))
            open_slots[key] = (slots, size + elements)
            if (size + elements) * parameter.element_size() >= bucket_bytes:
                close(key)
        for key in list(open_slots):
            close(key)

    def arm(self, parameters: Sequence[nn.Parameter]) -> None:
        """The next backward is the last of this step for these parameters: reduce their gradients as they become ready."""
        self._armed.update(id(parameter) for parameter in parameters)

    def begin(self) -> None:
        """Before a step's first backward."""
        for queue in self._queues.values():
            for bucket in queue:
                bucket.waiting = {id(slot.parameter) for slot in bucket.slots}
                bucket.work = None

    def _arrived(self, parameter: Tensor) -> None:
        if id(parameter) not in self._armed:
            if any(bucket.work is not None for bucket in self._of[id(parameter)]):
                raise JobFailedError(
                    "a backward pass gave a parameter its gradient again after that was added up with other devices'; if the model uses "
                    "torch.utils.checkpoint with use_reentrant=True, pass use_reentrant=False"
                )
            return
        self._armed.discard(id(parameter))
        for bucket in self._of[id(parameter)]:
            bucket.waiting.discard(id(parameter))
        self._launch_ready(late=False)

    def _launch_ready(self, *, late: bool) -> None:
        """Reduce what is complete, in order: a bucket never overtakes the one before it."""
        for (_, is_late), queue in self._queues.items():
            if is_late and not late:
                continue
            for bucket in queue:
                if bucket.work is not None:
                    continue
                if bucket.waiting:
                    break
                self._launch(bucket)

    def _launch(self, bucket: _Bucket) -> None:
        present = bucket.buffer[bucket.slots[-1].stop :]
        present.copy_(torch.tensor([slot.parameter.grad is not None for slot in bucket.slots]))
        for slot in bucket.slots:
            view = bucket.buffer[slot.start : slot.stop]
            gradient = slot.parameter.grad
            if gradient is None:
                view.zero_()
                continue
            if gradient.layout is not torch.strided:
                raise JobFailedError(
                    f"a parameter of the shape {list(gradient.shape)} has a sparse gradient, and only dense ones are added up over "
                    "devices: build its layer with sparse=False (nn.Embedding, nn.EmbeddingBag), or train with --alone"
                )
            if slot.pieces is None:
                view.view_as(gradient).copy_(gradient)
                slot.parameter.grad = view.view_as(gradient)
            else:
                chosen = [gradient.narrow(slot.dim, start, stop - start).reshape(-1) for start, stop in slot.pieces]
                torch.cat(chosen, out=view)
            if slot.scale != 1.0:
                view.mul_(slot.scale)
        bucket.launched = self._recorder.now()
        if self._outer is not None:
            bucket.work = self._outer.begin(bucket.number)
        else:
            bucket.work = dist.all_reduce(bucket.buffer, group=bucket.group, async_op=True)

    def finish(self) -> None:
        """Reduce what is left and wait for all; afterwards every gradient is the whole batch's."""
        for queue in self._queues.values():
            for bucket in queue:
                bucket.waiting.clear()
        self._launch_ready(late=True)
        for queue in self._queues.values():
            for bucket in queue:
                bucket.work.wait()
                self._recorder.add("G", self.buckets[bucket.number].stage, bucket.number, bucket.launched)
                self._hand_back(bucket)
        self._armed.clear()

    @staticmethod
    def _hand_back(bucket: _Bucket) -> None:
        """A parameter that no rank has a gradient for keeps none: optimizers pass it over, as in one process."""
        present = bucket.buffer[bucket.slots[-1].stop :].tolist()
        for slot, somewhere in zip(bucket.slots, present, strict=True):
            if not somewhere:
                continue
            view = bucket.buffer[slot.start : slot.stop]
            if slot.pieces is None:
                if slot.parameter.grad is None:
                    slot.parameter.grad = view.view_as(slot.parameter)
                continue
            if slot.parameter.grad is None:
                slot.parameter.grad = torch.zeros_like(slot.parameter)
            offset = 0
            for start, stop in slot.pieces:
                place = slot.parameter.grad.narrow(slot.dim, start, stop - start)
                place.copy_(view[offset : offset + place.numel()].view_as(place))
                offset += place.numel()


def _make_groups(parts: Sequence[GradientGroup]) -> dict[tuple[int, ...], Any]:
    """A process group for every set of ranks, made by all ranks in the same order."""
    rows = sorted({part.ranks for part in parts if len(part.ranks) > 1})
    everyone = tuple(range(dist.get_world_size()))
    return {row: dist.group.WORLD if row == everyone else dist.new_group(list(row)) for row in rows}


def _local_pieces(part: GradientGroup, holding: ShardSpec) -> tuple[tuple[tuple[int, int], ...] | None, int]:
    """Where a part lies in what the rank holds, and how many elements it has there."""
    if part.dim is None:
        return None, holding.elements
    pieces = part.ranges_in(holding)
    elements = sum(last - first for first, last in pieces) * (holding.elements // max(1, holding.local_shape[part.dim]))
    return (None if elements == holding.elements and len(pieces) == 1 else tuple(pieces)), elements
