"""`cost(graph, cluster, plan)`: the prediction for a plan. Pure: the same three nouns always give the same answer.

An `Evaluator` prepares a graph and a cluster once and then prices thousands of plans a second, remembering what repeats: a layer's time
by device and size, a replica's by stage, a group's span by its members.
"""

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from atoll.cluster import Cluster
from atoll.cost.calibration import Calibration
from atoll.cost.communication import Span, all_reduce_seconds, slowest_of
from atoll.cost.context import DevicePlace, PricingContext
from atoll.cost.memory import Memory, MemoryUse
from atoll.cost.pipeline import Played
from atoll.cost.replica import ReplicaPrices, ReplicaSeconds
from atoll.cost.sites import cluster_of_site, merged_costs
from atoll.cost.synchronisation import (
    Ending,
    ReductionWork,
    Synchronisation,
    activation_seconds,
    is_overlapped,
    overlapped_ending,
    swarm_ending,
    with_copying,
)
from atoll.cost.timeline import play
from atoll.cost.traffic import Traffic
from atoll.cost.transfer import Transfers
from atoll.graph import Graph
from atoll.plan import Plan, Replica, Stage
from atoll.plan.division import micro_batch_counts
from atoll.plan.modes import mode_rules
from atoll.plan.schedule_policy import held_bounds, in_flight_bounds
from atoll.plan.sites import site_parts, site_problems
from atoll.units import format_bytes, format_seconds

__all__ = ["DEFAULT_BUCKET_BYTES", "Cost", "StageCost", "Evaluator", "StalenessEffect", "bucket_bytes", "cost", "staleness_effect"]


class StageCost(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of one stage; forward and backward are of one micro-batch on its slowest replica, collectives inside included."""

    forward_seconds: float
    backward_seconds: float
    transfer_seconds: float  # sending one micro-batch on to the next stage
    sync_seconds: float  # gradient synchronisation among replicas, hidden or not
    busy_seconds: float  # of its busiest replica in one step
    in_flight: int  # micro-batches held at once by its busiest replica


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The prediction for one plan; `breakdown` sums to `step_seconds`."""

    step_seconds: float
    samples_per_second: float
    breakdown: dict[str, float]
    stages: tuple[StageCost, ...]
    memory: dict[str, MemoryUse]  # by device
    memory_available: dict[str, float]
    link_bytes: dict[str, float]  # by link name, per step
    dollars_per_step: float = 0.0

    @property
    def over_memory(self) -> dict[str, float]:
        """Devices that would not hold their part, with the bytes they lack."""
        return {
            device: use.total_bytes - self.memory_available[device]
            for device, use in self.memory.items()
            if use.total_bytes > self.memory_available[device]
        }

    @property
    def fits(self) -> bool:
        """Whether every device holds its part."""
        return not self.over_memory


class _Prices(NamedTuple):
    """All the pieces of a plan's price that do not depend on the order of events."""

    places: list[DevicePlace]  # by stage
    replicas: list[list[ReplicaSeconds]]
    counts: list[list[int]]  # micro-batches of each replica
    works: list[list[ReductionWork]]  # what each stage synchronises
    tied_volumes: list[tuple[list[int], float]]  # and what several stages hold copies of
    sync: list[float]  # by stage, hidden or not
    tied: list[float]


class _Step(NamedTuple):
    """How long a step is, and because of what."""

    seconds: float
    ending: Ending
    jitter: float


class Evaluator:
    """Prices plans for one graph on one cluster."""

    def __init__(self, graph: Graph, cluster: Cluster, *, optimizer: str = "adamw", calibration: Calibration | None = None) -> None:
        self._optimizer_name = optimizer
        self.context = PricingContext(graph, cluster, optimizer, calibration or Calibration())
        self.graph = graph
        self.cluster = cluster
        self.calibration = self.context.calibration
        self.optimizer = self.context.optimizer
        self.amounts = self.context.amounts
        self.devices = self.context.devices
        self._replica_prices = ReplicaPrices(self.context)
        self._synchronisation = Synchronisation(self.context)
        self._memory = Memory(self.context)
        self._transfers = Transfers(self.context)
        self._traffic = Traffic(self.context, self._synchronisation, self._transfers)

    def seconds(self, plan: Plan) -> float:
        """The predicted step time alone; a long step of an irregular plan is extrapolated (see `timeline`), `cost` plays it whole."""
        if self._by_site(plan):
            return self.cost(plan).step_seconds
        prices = self._prices(plan)
        return self._step(plan, prices, play(self._transfers, plan, prices.places, prices.replicas, prices.counts, only_step=True)).seconds

    def cost(self, plan: Plan) -> Cost:
        """Everything there is to say about a plan."""
        if self._by_site(plan):
            return self._cost_of_sites(plan)
        prices = self._prices(plan)
        played = play(self._transfers, plan, prices.places, prices.replicas, prices.counts, only_step=False)
        step = self._step(plan, prices, played)
        memory = self._memory.plan(plan, prices.places, held_bounds(plan, played.in_flight))
        carried = self._traffic.link_bytes(plan, prices.places, prices.counts, prices.works, prices.tied_volumes)
        dollars = step.seconds / 3600 * sum(self.devices[name].price_per_hour for name in memory)
        dollars += sum(carried.get(link.name, 0.0) * link.price_per_byte for link in self.cluster.links)
        return Cost(
            step_seconds=step.seconds,
            samples_per_second=plan.batch_size / step.seconds,
            breakdown=self._breakdown(prices, step, played),
            stages=tuple(self._stage_cost(plan, prices, s, played) for s in range(len(plan.stages))),
            memory=memory,
            memory_available={name: self.devices[name].memory_bytes for name in memory},
            link_bytes=carried,
            dollars_per_step=dollars,
        )

    def _by_site(self, plan: Plan) -> bool:
        """Whether each site trains its part by itself; a plan that its mode cannot run so is priced as one of all devices."""
        return mode_rules(plan.mode).sites_apart and next(site_problems(plan, self.cluster), None) is None

    def _cost_of_sites(self, plan: Plan) -> Cost:
        """Each site's part is priced alone."""
        found = []
        for part in site_parts(plan, self.cluster):
            own = Evaluator(
                self.graph, cluster_of_site(self.cluster, part.site), optimizer=self._optimizer_name, calibration=self.calibration
            )
            found.append((part, own.cost(part.plan)))
        return merged_costs(found, plan.batch_size)

    def fits(self, plan: Plan) -> bool:
        """Whether every device holds its part, by the schedule's bound on micro-batches in flight."""
        return all(use.total_bytes <= self.devices[name].memory_bytes for name, use in self.memory(plan).items())

    def memory(self, plan: Plan, in_flight: Sequence[Sequence[int]] | None = None) -> dict[str, MemoryUse]:
        """What every device holds at its peak; without a timeline, by the schedule's bound on micro-batches in flight."""
        return self._memory.plan(plan, self.context.places(plan), in_flight or held_bounds(plan, in_flight_bounds(plan)))

    def replica_seconds(self, stage: Stage, replica: Replica, micro_samples: float) -> ReplicaSeconds:
        """One micro-batch of `micro_samples` (over all lanes) through a replica."""
        return self._replica_prices.seconds(stage, replica, micro_samples)

    def device_memory(self, stage: Stage, fraction: float, samples: float, held: int, lanes: int, is_cpu: bool) -> MemoryUse:
        """What a device with `fraction` of the tensors holds when `held` micro-batches of `samples` each are in flight."""
        return self._memory.device(stage, fraction, samples, held, lanes, is_cpu)

    def sync_seconds(self, plan: Plan) -> list[float]:
        """What each stage's replicas need to agree on their gradients, hidden behind the backward pass or not."""
        return self._synchronisation.seconds(self._synchronisation.works(plan, self.context.places(plan)))

    def sync_volumes(self, stage: Stage) -> list[tuple[bool, float]]:
        """(across lanes?, bytes of gradient) that each device of a stage reduces once a step."""
        return self._synchronisation.volumes(stage)

    def sync_span(self, stage: Stage, across_lanes: bool) -> Span | None:
        """Where the slowest group of devices that agree on a gradient lives; None where none has two."""
        groups = self._synchronisation.groups(self.context.place(stage), across_lanes)
        return slowest_of(groups, self.calibration) if groups else None

    def activation_links(self, plan: Plan) -> set[str]:
        """The links between sites that activations and their gradients cross."""
        return self._traffic.activation_links(self.context.places(plan), micro_batch_counts(plan))

    def _prices(self, plan: Plan) -> _Prices:
        places = self.context.places(plan)
        counts = micro_batch_counts(plan)
        replicas: list[list[ReplicaSeconds]] = []
        for stage, place, row in zip(plan.stages, places, counts, strict=True):
            sizes = [float(plan.micro_batch_size)] * len(row)
            if len(plan.stages) == 1:  # nothing is routed: a replica divides its share evenly
                sizes = [replica.total_samples / max(1, rounds) for replica, rounds in zip(stage.replicas, row, strict=True)]
            replicas.append(self._replica_prices.stage(stage, place, sizes))
        works = self._synchronisation.works(plan, places)
        volumes = self._synchronisation.tied_volumes(plan) if len(places) > 1 else []
        sync, tied = self._synchronisation.seconds(works), self._synchronisation.tied(plan, places, volumes)
        return _Prices(places, replicas, counts, works, volumes, sync, tied)

    def _exposed(self, plan: Plan, prices: _Prices, played: Played, s: int) -> float:
        """What a stage's synchronisation adds after its last backward.

        It begins once every replica is in the part of its last backward that can hide it, and its last bucket waits for the end of them.
        """
        sync, overlap, finish = prices.sync[s], self.calibration.sync_overlap, played.finish[s]
        if not sync:
            return prices.tied[s]
        begin = max([end - overlap * replica.backward for end, replica in zip(finish, prices.replicas[s], strict=True)])
        last_bucket = sync / (plan.stages[s].stop - plan.stages[s].start) if overlap else sync
        return max(begin + sync - max(finish), last_bucket) + prices.tied[s]

    def _step(self, plan: Plan, prices: _Prices, played: Played) -> _Step:
        one_by_one = not mode_rules(plan.mode).reduces_after_all_stages
        ending = self._ending_by_stage(plan, prices, played) if one_by_one else self._ending_of_all(plan, prices, played)
        jitter = 0.0
        if self.calibration.jitter or self.calibration.straggler_seconds:
            names = {name for stage in plan.stages for name in stage.devices}
            hosts = len({self.devices[name].host for name in names})
            jitter = ending.seconds * self.calibration.jitter * log2(len(names)) + self.calibration.straggler_seconds * log2(hosts)
        return _Step(ending.seconds + jitter + self.calibration.step_seconds, ending, jitter)

    def _ending_by_stage(self, plan: Plan, prices: _Prices, played: Played) -> Ending:
        """Every stage goes on to its gradients and its optimizer by itself; the last one ends the step."""
        last = Ending(-1.0, 0, 0.0, 0.0)
        for s, finish in enumerate(played.finish):
            exposed, update = self._exposed(plan, prices, played, s), max([replica.update for replica in prices.replicas[s]])
            end = max(finish) + exposed + update
            if end > last.seconds:
                last = Ending(end, s, exposed, update)
        return last

    def _ending_of_all(self, plan: Plan, prices: _Prices, played: Played) -> Ending:
        finish = [max(row) for row in played.finish]
        exchange = [sync + tied for sync, tied in zip(prices.sync, prices.tied, strict=True)]
        update = [max(replica.update for replica in row) for row in prices.replicas]
        if not is_overlapped(plan):
            return swarm_ending(finish, exchange, update)
        held = activation_seconds(self._transfers, plan, prices.places, prices.counts)
        beside = [max((held.get(name, 0.0) for name in self._exchange_links(prices, s)), default=0.0) for s in range(len(finish))]
        copying = [with_copying(seconds, self.optimizer.update_bytes) for seconds in update]
        return overlapped_ending(finish, exchange, copying, beside)

    def _exchange_links(self, prices: _Prices, s: int) -> set[str]:
        """Hosts whose interfaces, and links between sites, that a stage's gradients cross."""
        groups = [group for work in prices.works[s] for group in work.groups]
        for homes, _ in prices.tied_volumes:
            if s in homes:
                groups.extend(self._synchronisation.tied_groups([prices.places[home] for home in homes]))
        return {name for group in groups for name in (*group.hosts, *group.links)}

    def _breakdown(self, prices: _Prices, step: _Step, played: Played) -> dict[str, float]:
        """Where the time of the replica that ends last goes; `bubble` is what it waits beyond the transfers."""
        s = step.ending.critical
        last = max(range(len(prices.counts[s])), key=lambda i: played.finish[s][i])
        replica, count = prices.replicas[s][last], prices.counts[s][last]
        idle = max(0.0, played.finish[s][last] - played.busy[s][last])
        transfer = min(idle, played.transfer(s, last))
        parts = {
            "compute": replica.compute * count,
            "recompute": replica.recompute * count,
            "tensor": replica.tensor * count,
            "expert": replica.expert * count,
            "shard": replica.shard * count,
            "codec": played.busy[s][last] - (replica.forward + replica.backward) * count,
            "transfer": transfer,
            "bubble": idle - transfer,
            "sync": step.ending.sync,
            "optimizer": step.ending.update,
            "jitter": step.jitter,
            "overhead": self.calibration.step_seconds,
        }
        return {name: seconds for name, seconds in parts.items() if seconds > 1e-12 * step.seconds}

    def _stage_cost(self, plan: Plan, prices: _Prices, s: int, played: Played) -> StageCost:
        transfer = 0.0
        if s + 1 < len(plan.stages):
            path = self._transfers.both_ways(prices.places[s], prices.places[s + 1], 0, 0)[0]
            nbytes = self._transfers.boundary_bytes(plan, plan.stages[s])[0]
            hop = self._transfers.hop(plan, path, nbytes)
            transfer = hop.occupancy + hop.latency + self._transfers.codec_seconds(plan, path, nbytes)
        return StageCost(
            forward_seconds=max([r.forward for r in prices.replicas[s]]),
            backward_seconds=max([r.backward for r in prices.replicas[s]]),
            transfer_seconds=transfer,
            sync_seconds=prices.sync[s],
            busy_seconds=max(played.busy[s]),
            in_flight=max(played.in_flight[s]),
        )


def cost(graph: Graph, cluster: Cluster, plan: Plan, *, optimizer: str = "adamw", calibration: Calibration | None = None) -> Cost:
    """The prediction for one plan. To price many plans of one graph and cluster, keep an `Evaluator`."""
    return Evaluator(graph, cluster, optimizer=optimizer, calibration=calibration).cost(plan)


class StalenessEffect(NamedTuple):
    """A swarm's plan with staleness=1, against the same without. It prints as a part of a sentence."""

    without_seconds: float
    with_seconds: float
    more_bytes: float  # on the device that needs most of them
    lacking_bytes: float  # of the device that has least room; 0 where all have enough

    @property
    def gain(self) -> float:
        """How many times as fast steps are."""
        return self.without_seconds / self.with_seconds

    def __str__(self) -> str:
        gain = f"{self.gain:.2f}× as fast" if self.gain > 1.005 else "nothing is gained by it here"
        step = f"{format_seconds(self.with_seconds)} a step instead of {format_seconds(self.without_seconds)}, {gain}"
        lack = f", of which one lacks {format_bytes(self.lacking_bytes)}" if self.lacking_bytes else ""
        return f"{step}, for up to {format_bytes(self.more_bytes)} more memory a device{lack}; gradients are of the weights one step before"


def staleness_effect(evaluator: Evaluator, plan: Plan) -> StalenessEffect:
    """For a plan of a mode that may have it, whatever staleness it has."""
    without, with_it = (evaluator.cost(replace(plan, staleness=staleness)) for staleness in (0, 1))
    more = max(use.total_bytes - without.memory[name].total_bytes for name, use in with_it.memory.items())
    return StalenessEffect(without.step_seconds, with_it.step_seconds, more, max(with_it.over_memory.values(), default=0.0))


DEFAULT_BUCKET_BYTES = 25 * 2**20  # where nothing is known of the links
_SIZES = [1 << power for power in range(18, 29)]  # 256 KB to 256 MB


def bucket_bytes(evaluator: Evaluator, plan: Plan) -> int:
    """The size of buckets for the stage with the most gradient to synchronise."""
    volumes = [(nbytes, stage, across) for stage in plan.stages for across, nbytes in evaluator.sync_volumes(stage) if nbytes]
    for nbytes, stage, across in sorted(volumes, key=lambda volume: -volume[0]):
        span = evaluator.sync_span(stage, across)
        if span is not None:
            seconds = {size: _exposed_seconds(evaluator, span, nbytes, size) for size in _SIZES}
            return min(_SIZES, key=seconds.__getitem__)
    return DEFAULT_BUCKET_BYTES


def _exposed_seconds(evaluator: Evaluator, span: Span, total_bytes: float, size: int) -> float:
    """The last bucket, which nothing hides, and the latency of all."""
    last = all_reduce_seconds(span, min(float(size), total_bytes), evaluator.calibration)
    return last + total_bytes / size * all_reduce_seconds(span, 1.0, evaluator.calibration)
