"""Layout: a plan as ranks see it — who stands where, which samples a micro-batch is, which replica takes it. Pure.

A rank is a process and a device of the plan; unless told otherwise, ranks are numbered in the order the plan first names their devices. A
worker is a replica's whole grid of devices: its ranks run the same actions in the same order. With virtual stages a worker hosts several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from atoll.cost.routing import route
from atoll.errors import PlanError
from atoll.plan import Plan, Stage

__all__ = ["Layout", "Place", "apportion", "check_supported"]


@dataclass(frozen=True)
class Place:
    """Where a rank stands in one stage."""

    stage: int
    replica: int
    lane: int
    tensor: int  # index along the lane


def apportion(total: int, weights: Sequence[int]) -> list[int]:
    """`total` in whole parts proportional to the weights: each is rounded down, what is left goes to the largest remainders."""
    whole = sum(weights)
    parts = [total * weight // whole for weight in weights]
    order = sorted(range(len(weights)), key=lambda i: (-(total * weights[i] % whole), i))
    for i in order[: total - sum(parts)]:
        parts[i] += 1
    return parts


class Layout:
    """Everything about a plan's ranks and micro-batches."""

    def __init__(self, plan: Plan, order: Sequence[str] | None = None) -> None:
        """`order` names devices in the order of ranks (those the plan leaves out are passed over); by default the plan's own order."""
        check_supported(plan)
        self.plan = plan
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

    def rank(self, place: Place) -> int:
        """The rank at a place."""
        stage = self.plan.stages[place.stage]
        return self._rank[stage.replicas[place.replica].devices[place.lane * stage.tensor + place.tensor]]

    def rank_of_device(self, device: str) -> int:
        """The rank that runs a device."""
        return self._rank[device]

    @cached_property
    def _places(self) -> dict[int, list[Place]]:
        places: dict[int, list[Place]] = {rank: [] for rank in range(self.world_size)}
        for s, stage in enumerate(self.plan.stages):
            for r, replica in enumerate(stage.replicas):
                for position, device in enumerate(replica.devices):
                    places[self._rank[device]].append(Place(s, r, *divmod(position, stage.tensor)))
        return places

    def places(self, rank: int) -> list[Place]:
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
        """Samples of the global batch that each micro-batch is: start and stop.

        With one stage every replica cuts its own contiguous share, evenly if it has lanes: each must get something of every micro-batch.
        With several stages whole micro-batches are routed.
        """
        plan, size = self.plan, self.plan.micro_batch_size
        shares = [replica.total_samples for replica in plan.stages[0].replicas] if len(plan.stages) == 1 else [plan.batch_size]
        evenly = len(plan.stages) == 1 and plan.stages[0].lanes > 1
        found: list[tuple[int, int]] = []
        start = 0
        for share in shares:
            count = -(-share // size)
            sizes = apportion(share, [1] * count) if evenly else [size] * (count - 1) + [share - size * (count - 1)]
            found += pairwise(accumulate(sizes, initial=start))
            start += share
        return tuple(found)

    @cached_property
    def route(self) -> tuple[tuple[int, ...], ...]:
        """The replica of each stage that takes each micro-batch: `route[stage][micro_batch]`."""
        if len(self.plan.stages) == 1:
            size = self.plan.micro_batch_size
            counts = [-(-replica.total_samples // size) for replica in self.plan.stages[0].replicas]
            return (tuple(r for r, count in enumerate(counts) for _ in range(count)),)
        return tuple(self._route(stage) for stage in self.plan.stages)

    def _route(self, stage: Stage) -> tuple[int, ...]:
        """Evenly in turn, and the last micro-batch, where it is short, to the replica whose share is not whole."""
        size = self.plan.micro_batch_size
        order = list(route(tuple(-(-replica.total_samples // size) for replica in stage.replicas)))
        short = [r for r, replica in enumerate(stage.replicas) if replica.total_samples % size]
        if short and order[-1] != short[0]:
            last = len(order) - 1 - order[::-1].index(short[0])
            order[last], order[-1] = order[-1], order[last]
        return tuple(order)

    def micro_batches_of(self, stage: int, replica: int) -> list[int]:
        """The micro-batches a replica takes, in order."""
        return [m for m, taken_by in enumerate(self.route[stage]) if taken_by == replica]

    @cached_property
    def _pieces(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        """(stage, micro-batch) → samples of each lane of the replica that takes it."""
        pieces = {}
        for s, stage in enumerate(self.plan.stages):
            for r, replica in enumerate(stage.replicas):
                left = list(replica.samples)
                for m in self.micro_batches_of(s, r):
                    start, stop = self.micro_batches[m]
                    sizes = apportion(stop - start, left)
                    bounds = [start]
                    for lane, size in enumerate(sizes):
                        left[lane] -= size
                        bounds.append(bounds[-1] + size)
                    pieces[s, m] = tuple(pairwise(bounds))
        return pieces

    def pieces(self, stage: int, micro_batch: int) -> tuple[tuple[int, int], ...]:
        """Samples (start, stop in the global batch) of each lane of the replica that takes the micro-batch."""
        return self._pieces[stage, micro_batch]


def check_supported(plan: Plan) -> None:
    """PlanError where a plan says what lockstep does not do."""
    if plan.mode != "lockstep":
        raise PlanError(f"the plan's mode is {plan.mode}, and it was to be run in lockstep; see `atoll run --help` for --mode")
    coded = [f"{link}: {codec}" for link, codec in plan.codecs.items() if codec != "none"]
    if coded:
        raise PlanError(f"the plan has codecs ({', '.join(coded)}), which lockstep does not use yet; plan again with --lossless")


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
