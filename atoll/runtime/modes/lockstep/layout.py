"""Layout: a plan as ranks see it — who stands where, which samples a micro-batch is, which replica takes it. Pure.

A rank is a process and a device of the plan; unless told otherwise, ranks are numbered in the order the plan first names their devices. A
worker is a replica's whole grid of devices: its ranks run the same actions in the same order. With virtual stages a worker hosts several.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from atoll.cluster import Cluster
from atoll.errors import PlanError
from atoll.plan import CodecName, Plan
from atoll.plan.division import lane_pieces, micro_batches_of, routes_of
from atoll.plan.link_codecs import PlanCodecs
from atoll.plan.modes.lockstep import LOCKSTEP

__all__ = ["Layout", "RankPlace"]


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands in one stage."""

    stage: int
    replica: int
    lane: int
    tensor: int  # index along the lane


class Layout:
    """Everything about a plan's ranks and micro-batches."""

    def __init__(self, plan: Plan, order: Sequence[str] | None = None, cluster: Cluster | None = None) -> None:
        """`order` names devices in the order of ranks (those the plan leaves out are passed over); by default the plan's own order.
        `cluster` is needed to send with codecs, and for nothing else."""
        if plan.mode != LOCKSTEP.name:
            raise PlanError(f"the plan's mode is {plan.mode}, and it was to be run in lockstep; see `atoll run --help` for --mode")
        self.plan = plan
        self._cluster = cluster
        self.devices = tuple(dict.fromkeys(device for stage in plan.stages for device in stage.devices))
        if order is not None and set(self.devices) <= set(order):
            self.devices = tuple(device for device in order if device in set(self.devices))
        self._rank = {device: rank for rank, device in enumerate(self.devices)}
        self.workers: dict[tuple[str, ...], int] = {}
        for stage in plan.stages:
            for replica in stage.replicas:
                self.workers.setdefault(replica.devices, len(self.workers))
        _check_whole_lanes(self)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.devices)

    def rank(self, place: RankPlace) -> int:
        """The rank at a place."""
        stage = self.plan.stages[place.stage]
        return self._rank[stage.replicas[place.replica].devices[place.lane * stage.tensor + place.tensor]]

    def rank_of_device(self, device: str) -> int:
        """The rank that runs a device."""
        return self._rank[device]

    @cached_property
    def codecs(self) -> PlanCodecs:
        """The plan's codecs, by devices; PlanError where it has some and the cluster it was made for was not given."""
        return PlanCodecs(self.plan, self._cluster)

    def codec_between(self, a: RankPlace, b: RankPlace) -> CodecName:
        """What lanes of neighbouring stages send each other with. The first ranks of both decide, so that all ranks of a lane, which
        compute with the same values, receive the same ones."""
        if not self.codecs:
            return "none"
        firsts = [self.devices[self.rank(replace(place, tensor=0))] for place in (a, b)]
        return self.codecs.between(*firsts)

    @cached_property
    def _places(self) -> dict[int, list[RankPlace]]:
        places: dict[int, list[RankPlace]] = {rank: [] for rank in range(self.world_size)}
        for s, stage in enumerate(self.plan.stages):
            for r, replica in enumerate(stage.replicas):
                for position, device in enumerate(replica.devices):
                    places[self._rank[device]].append(RankPlace(s, r, *divmod(position, stage.tensor)))
        return places

    def places(self, rank: int) -> list[RankPlace]:
        """Where a rank stands, a place for every stage it hosts, in order of stages."""
        return self._places[rank]

    def worker_of(self, rank: int) -> int:
        """The worker a rank belongs to."""
        place = self.places(rank)[0]
        return self.workers[self.plan.stages[place.stage].replicas[place.replica].devices]

    @cached_property
    def homes(self) -> tuple[tuple[int, ...], ...]:
        """The worker of every replica of every stage."""
        return tuple(tuple(self.workers[replica.devices] for replica in stage.replicas) for stage in self.plan.stages)

    @cached_property
    def micro_batches(self) -> tuple[tuple[int, int], ...]:
        """Samples of the global batch that each micro-batch is: start and stop."""
        return micro_batches_of(self.plan)

    @cached_property
    def route(self) -> tuple[tuple[int, ...], ...]:
        """The replica of each stage that takes each micro-batch: `route[stage][micro_batch]`."""
        return routes_of(self.plan)

    def micro_batches_of(self, stage: int, replica: int) -> list[int]:
        """The micro-batches a replica takes, in order."""
        return [m for m, taken_by in enumerate(self.route[stage]) if taken_by == replica]

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        """(stage, micro-batch) → samples of each lane of the replica that takes it."""
        pieces = {}
        for s, stage in enumerate(self.plan.stages):
            for r, replica in enumerate(stage.replicas):
                own = self.micro_batches_of(s, r)
                bounds = [self.micro_batches[m] for m in own]
                rows = lane_pieces([stop - start for start, stop in bounds], replica.samples)
                for m, (start, _), row in zip(own, bounds, rows, strict=True):
                    pieces[s, m] = tuple(pairwise(accumulate(row, initial=start)))
        return pieces

    def pieces(self, stage: int, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """Samples (start, stop in the global batch) of each lane of the replica that takes the micro-batch."""
        return self._pieces[stage, micro_batch]


def _check_whole_lanes(layout: Layout) -> None:
    """Every lane has something to do in every micro-batch: its ranks take part in exchanges that nobody may leave out."""
    for s, stage in enumerate(layout.plan.stages):
        if stage.lanes == 1:
            continue
        for m in range(len(layout.micro_batches)):
            empty = [lane for lane, (start, stop) in enumerate(layout.pieces(s, m)) if start == stop]
            if empty:
                r = layout.route[s][m]
                samples = ", ".join(str(n) for n in stage.replicas[r].samples)
                raise PlanError(
                    f"stage {s}, replica {r}: lane {empty[0]} gets no sample of micro-batch {m} (lanes take {samples} of the batch, "
                    f"a micro-batch has {layout.plan.micro_batch_size}); make micro-batches larger or lanes more equal"
                )
