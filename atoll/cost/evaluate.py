"""`cost(graph, cluster, plan)`: the prediction for a plan. Pure: the same three nouns always give the same answer.

An `Evaluator` prepares a graph and a cluster once and then prices thousands of plans a second, remembering what repeats: a layer's time
by device and size, a replica's by stage, a group's span by its members.
"""

from collections.abc import Sequence
from math import ceil, gcd, log2
from typing import NamedTuple

from atoll.cluster import Cluster, Device
from atoll.cluster.cluster import device_index
from atoll.codec import codec_spec
from atoll.cost.calibration import Calibration
from atoll.cost.communication import Span, all_gather_seconds, all_reduce_seconds, all_to_all_seconds, span_of
from atoll.cost.compute import Compute
from atoll.cost.cost import Cost, MemoryUse, StageCost
from atoll.cost.memory import Amounts, Held, held_parameters, memory_use, optimizer_cost
from atoll.cost.pipeline import Hop, Worker, column_seconds, route, simulate
from atoll.cost.traffic import link_bytes
from atoll.graph import Graph
from atoll.plan import Plan, Replica, Stage

__all__ = ["Evaluator", "cost"]

_SIMULATED_MICRO_BATCHES = 96  # more than this are extrapolated from two shorter steps


class ReplicaSeconds(NamedTuple):
    """One micro-batch through one replica of a stage, by what the time goes to."""

    forward: float  # everything below that belongs to forward
    backward: float
    compute: float  # forward and backward arithmetic and memory traffic
    recompute: float
    tensor: float
    expert: float
    shard: float
    update: float  # once a step


class Flow(NamedTuple):
    """A transfer between two replicas before contention: bytes on the wire, rate, latency, codec time, and the link it queues for."""

    wire_bytes: float
    bytes_per_s: float
    latency: float
    codec: float
    resource: tuple[str, ...]  # () where nothing is shared


class StagePrices(NamedTuple):
    """All the pieces of a plan's price that do not depend on the order of events."""

    replicas: list[list[ReplicaSeconds]]  # by stage
    counts: list[list[int]]  # micro-batches of each replica
    sync: list[float]


class Evaluator:
    """Prices plans for one graph on one cluster."""

    def __init__(self, graph: Graph, cluster: Cluster, *, optimizer: str = "adamw", calibration: Calibration | None = None) -> None:
        self.graph = graph
        self.cluster = cluster
        self.calibration = calibration or Calibration()
        self.optimizer = optimizer_cost(optimizer)
        self.amounts = Amounts.of(graph)
        self.devices = device_index(cluster)
        half = graph.precision != "fp32"
        self._half = half
        self._element = 2.0 if half else 4.0
        self._compute = Compute(graph, self.calibration, self.optimizer.update_bytes)
        self._replicas: dict[tuple[object, ...], ReplicaSeconds] = {}
        self._spans: dict[tuple[object, ...], Span] = {}
        self._largest: dict[tuple[int, int, int], float] = {}

    # ---- the two questions -------------------------------------------------------------------------------------------------------

    def seconds(self, plan: Plan) -> float:
        """The predicted step time alone."""
        prices = self._prices(plan)
        finish, _, _ = self._play(plan, prices, with_hops=True)
        return self._step(plan, prices, finish)[0]

    def cost(self, plan: Plan) -> Cost:
        """Everything there is to say about a plan."""
        prices = self._prices(plan)
        finish, busy, in_flight = self._play(plan, prices, with_hops=True)
        step, critical = self._step(plan, prices, finish)
        memory = self.memory(plan, in_flight)
        stages = tuple(self._stage_cost(plan, prices, s, busy, in_flight) for s in range(len(plan.stages)))
        carried = link_bytes(self, plan)
        dollars = step / 3600 * sum(self.devices[name].price_per_hour for name in memory)
        dollars += sum(carried.get(link.name, 0.0) * link.price_per_byte for link in self.cluster.links)
        return Cost(
            step_seconds=step,
            samples_per_second=plan.batch_size / step,
            breakdown=self._breakdown(plan, prices, step, critical, finish),
            stages=stages,
            memory=memory,
            memory_available={name: self.devices[name].memory_bytes for name in memory},
            link_bytes=carried,
            dollars_per_step=dollars,
        )

    def fits(self, plan: Plan) -> bool:
        """Whether every device holds its part, by the schedule's bound on micro-batches in flight."""
        return all(use.total_bytes <= self.devices[name].memory_bytes for name, use in self.memory(plan).items())

    # ---- one replica ---------------------------------------------------------------------------------------------------------------

    def replica_seconds(self, stage: Stage, replica: Replica, micro_samples: float) -> ReplicaSeconds:
        """One micro-batch of `micro_samples` (over all lanes) through a replica."""
        key = (stage.start, stage.stop, stage.tensor, stage.sharded, stage.expert, stage.recompute, replica, micro_samples)
        found = self._replicas.get(key)
        if found is None:
            found = self._replicas[key] = self._price_replica(stage, replica, micro_samples)
        return found

    def _price_replica(self, stage: Stage, replica: Replica, micro_samples: float) -> ReplicaSeconds:
        lanes = len(replica.devices) // stage.tensor
        expert_lanes = lanes if stage.expert else 1
        total = replica.total_samples or 1
        best: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0)
        seen = set()
        for lane in range(lanes):
            samples = micro_samples * replica.samples[lane] / total
            for position in range(stage.tensor):
                device = self.devices[replica.devices[lane * stage.tensor + position]]
                fraction = tensor_fraction(replica, stage.tensor, position)
                kind = (device.kind.name, device.speed, samples, fraction)
                if kind in seen:
                    continue
                seen.add(kind)
                table = self._compute.table(device, samples, fraction, stage.tensor, expert_lanes)
                a, b = stage.start, stage.stop
                row = (
                    table.forward[b] - table.forward[a],
                    table.backward[b] - table.backward[a],
                    table.update[b] - table.update[a],
                    samples,
                )
                if row[0] + row[1] >= best[0] + best[1]:
                    best = row
        forward, backward, update, samples = best
        return self._with_collectives(stage, replica, forward, backward, update, samples, lanes)

    def _with_collectives(
        self, stage: Stage, replica: Replica, forward: float, backward: float, update: float, samples: float, lanes: int
    ) -> ReplicaSeconds:
        a, b = stage.start, stage.stop
        amounts = self.amounts
        tensor = expert = gather = 0.0
        if stage.tensor > 1:
            reductions = amounts.tensor_reductions[b] - amounts.tensor_reductions[a]
            if reductions:
                nbytes = (amounts.tensor_bytes[b] - amounts.tensor_bytes[a]) * samples
                span = self._lane_span(stage, replica)
                tensor = reductions * all_reduce_seconds(span, nbytes / reductions, self.calibration, {}, self._element)
        if stage.expert and lanes > 1:
            layers = amounts.expert_layers[b] - amounts.expert_layers[a]
            if layers:
                nbytes = (amounts.expert_bytes[b] - amounts.expert_bytes[a]) * samples / stage.tensor
                expert = 2 * layers * all_to_all_seconds(self._lanes_span(stage, replica), nbytes / layers, self.calibration)
        if stage.sharded and lanes > 1:
            held = self.held(stage, replica, 0)
            gather = all_gather_seconds(self._lanes_span(stage, replica), held.dense * self._element, self.calibration)
            update /= lanes
        recompute = forward if stage.recompute else 0.0
        again = 1.0 if stage.recompute else 0.0
        forth = forward + tensor + expert
        back = backward + recompute + (tensor + expert) * (1 + again)
        # gathers (and in backward the reduce-scatter) run beside the compute of the layer before: only what exceeds it is waited for
        forth_gather, back_gather = max(0.0, gather - forth), max(0.0, 2 * gather - back)
        return ReplicaSeconds(
            forward=forth + forth_gather,
            backward=back + back_gather,
            compute=forward + backward,
            recompute=recompute,
            tensor=tensor * (2 + again),
            expert=expert * (2 + again),
            shard=forth_gather + back_gather,
            update=update,
        )

    def held(self, stage: Stage, replica: Replica, position: int) -> Held:
        """Parameters the device at a position of a lane holds, before lanes shard them."""
        lanes = len(replica.devices) // stage.tensor
        fraction = tensor_fraction(replica, stage.tensor, position)
        return held_parameters(self.amounts, stage.start, stage.stop, fraction, lanes if stage.expert else 1)

    # ---- spans of collectives ----------------------------------------------------------------------------------------------------

    def _lane_span(self, stage: Stage, replica: Replica) -> Span:
        """Devices of a lane, which all-reduce activations; lanes that leave a host do so all at once."""
        key = ("lane", stage.tensor, replica.devices)
        if key not in self._spans:
            first = [self.devices[name] for name in replica.devices[: stage.tensor]]
            groups = [first]
            if len({device.host for device in first}) > 1:
                names = [name for other in stage.replicas for name in other.devices]
                groups = [[self.devices[n] for n in names[i : i + stage.tensor]] for i in range(0, len(names), stage.tensor)]
            self._spans[key] = span_of(self.cluster, groups, self.calibration)
        return self._spans[key]

    def _lanes_span(self, stage: Stage, replica: Replica) -> Span:
        """The same position of every lane: gathers of shards and exchanges of tokens."""
        key = ("lanes", stage.tensor, replica.devices)
        if key not in self._spans:
            members = [self.devices[name] for name in replica.devices]
            groups = [members[position :: stage.tensor] for position in range(stage.tensor)]
            self._spans[key] = span_of(self.cluster, groups, self.calibration)
        return self._spans[key]

    def sync_groups(self, stage: Stage, across_lanes: bool) -> list[list[Device]]:
        """Devices that hold the same parameters: over replicas, and over lanes too where lanes repeat them."""
        lanes, tensor = stage.lanes, stage.tensor
        rows = [[self.devices[name] for name in replica.devices] for replica in stage.replicas]
        if across_lanes:
            return [[row[lane * tensor + p] for row in rows for lane in range(lanes)] for p in range(tensor)]
        return [[row[i] for row in rows] for i in range(lanes * tensor)]

    def sync_span(self, stage: Stage, across_lanes: bool, site: str = "") -> Span | None:
        """Where the first such group lives (within one site, if named); None where it has one member."""
        key = ("sync", stage.replicas, stage.tensor, across_lanes, site)
        if key not in self._spans:
            groups = self.sync_groups(stage, across_lanes)
            if site:
                groups = [kept for group in groups if (kept := [device for device in group if device.site == site])]
            self._spans[key] = span_of(self.cluster, groups, self.calibration) if groups else None  # type: ignore[assignment]
        span = self._spans[key]
        return span if span is not None and span.members > 1 else None

    # ---- synchronisation -----------------------------------------------------------------------------------------------------------

    def sync_volumes(self, stage: Stage) -> list[tuple[bool, float]]:
        """(across lanes?, bytes of gradient) that each device of a stage reduces once a step."""
        held = self.held(stage, stage.replicas[0], 0)
        size = self.calibration.gradient_bytes
        lanes = stage.lanes
        volumes = [(False, held.dense * size / lanes)] if stage.sharded else [(lanes > 1, held.dense * size)]
        if held.expert and stage.expert:
            volumes.append((False, held.expert * size))
        elif held.expert:
            volumes = [(volumes[0][0], volumes[0][1] + held.expert * size / (lanes if stage.sharded else 1))]
        return volumes

    def _sync(self, plan: Plan) -> list[float]:
        """Seconds each stage's replicas need to agree on their gradients, all stages at once."""
        return [
            sum(self._sync_seconds(plan, stage, across, nbytes) for across, nbytes in self.sync_volumes(stage)) for stage in plan.stages
        ]

    def _sync_seconds(self, plan: Plan, stage: Stage, across: bool, nbytes: float) -> float:
        span = self.sync_span(stage, across)
        if span is None:
            return 0.0
        codecs = plan.codecs
        if plan.mode != "islands" or not span.wan_links:
            return all_reduce_seconds(self._contended(plan, stage, span), nbytes, self.calibration, codecs)
        whole = all_reduce_seconds(self._contended(plan, stage, span), nbytes, self.calibration, codecs)
        inside = 0.0
        for site in span.site_names:
            local = self.sync_span(stage, across, site)
            if local is not None:
                inside = max(inside, all_reduce_seconds(self._contended(plan, stage, local), nbytes, self.calibration, codecs))
        return inside + whole / max(1, plan.outer_steps)

    def _contended(self, plan: Plan, stage: Stage, span: Span) -> Span:
        """Stages that leave the same host or site synchronise at the same time and share its way out."""
        if len(plan.stages) == 1:
            return span
        same_host = same_wan = 0
        for other in plan.stages:
            theirs = self.sync_span(other, other.lanes > 1 and not other.sharded)
            if theirs is None:
                continue
            same_host += theirs.site.members > 1 and theirs.host_name == span.host_name
            same_wan += bool(theirs.wan_links) and not set(theirs.wan_links).isdisjoint(span.wan_links)
        site = span.site._replace(sharing=span.site.sharing * max(1, same_host))
        return span._replace(site=site, wan=span.wan._replace(sharing=span.wan.sharing * max(1, same_wan)))

    def _tied(self, plan: Plan) -> list[float]:
        """Seconds each stage spends on gradients of parameters it shares with other stages."""
        seconds = [0.0] * len(plan.stages)
        for shared in self.graph.shared:
            homes = sorted({s for s, stage in enumerate(plan.stages) for layer in shared.layers if stage.start <= layer < stage.stop})
            if len(homes) < 2:
                continue
            first = [self.devices[plan.stages[s].replicas[0].devices[0]] for s in homes]
            span = span_of(self.cluster, [first], self.calibration)
            nbytes = shared.parameters * self.calibration.gradient_bytes / plan.stages[homes[0]].tensor
            taken = all_reduce_seconds(span, nbytes, self.calibration, plan.codecs)
            for s in homes:
                seconds[s] += taken
        return seconds

    # ---- the order of events -------------------------------------------------------------------------------------------------------

    def _prices(self, plan: Plan) -> StagePrices:
        single = len(plan.stages) == 1
        replicas: list[list[ReplicaSeconds]] = []
        counts: list[list[int]] = []
        for stage in plan.stages:
            row, number = [], []
            for replica in stage.replicas:
                samples = replica.total_samples
                rounds = -(-samples // plan.micro_batch_size)
                size = samples / rounds if single and rounds else float(plan.micro_batch_size)
                row.append(self.replica_seconds(stage, replica, size))
                number.append(rounds)
            replicas.append(row)
            counts.append(number)
        return StagePrices(replicas, counts, self._sync(plan))

    def _play(self, plan: Plan, prices: StagePrices, with_hops: bool) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
        """When each replica ends its last backward, how long it was busy, and how many micro-batches it held at once."""
        if len(plan.stages) == 1:
            busy = [n * (r.forward + r.backward) for r, n in zip(prices.replicas[0], prices.counts[0], strict=True)]
            return [busy], [busy], [[max(prices.counts[0]) if plan.schedule == "gpipe" else 1] * len(busy)]
        if self._columns_alike(plan, prices):
            return self._play_column(plan, prices, with_hops)
        return self._play_events(plan, prices, with_hops)

    def _columns_alike(self, plan: Plan, prices: StagePrices) -> bool:
        width = len(prices.counts[0])
        if plan.schedule == "interleaved" or any(len(row) != width for row in prices.counts):
            return False
        if any(len(set(row)) > 1 for row in prices.counts) or any(len(set(row)) > 1 for row in prices.replicas):
            return False
        for here, there in zip(plan.stages, plan.stages[1:], strict=False):
            links = {
                (flow.bytes_per_s, flow.latency)
                for a, b in zip(here.replicas, there.replicas, strict=True)
                for flow in (self._flow(plan, here, a, there, b, True),)
            }
            if len(links) > 1:
                return False
        return True

    def _play_column(
        self, plan: Plan, prices: StagePrices, with_hops: bool
    ) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
        stages = len(plan.stages)
        width = len(prices.counts[0])
        count = prices.counts[0][0]
        forward = [row[0].forward for row in prices.replicas]
        backward = [row[0].backward for row in prices.replicas]
        onward, back = self._column_hops(plan, forward, backward) if with_hops else ([Hop(0.0, 0.0, -1)] * (stages - 1),) * 2
        _, finish = column_seconds(forward, backward, onward, back, count, plan.schedule)
        busy = [count * (f + b) for f, b in zip(forward, backward, strict=True)]
        held = [count if plan.schedule == "gpipe" else min(count, stages - s) for s in range(stages)]
        return [[f] * width for f in finish], [[b] * width for b in busy], [[h] * width for h in held]

    def _column_hops(self, plan: Plan, forward: list[float], backward: list[float]) -> tuple[list[Hop], list[Hop]]:
        """Hops of the first column, each slowed by the flows that share its link; codec time is added to the sender's."""
        flows: dict[tuple[str, ...], int] = {}
        firsts: list[tuple[int, int, Flow]] = []
        for s, (here, there) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
            for i, (a, b) in enumerate(zip(here.replicas, there.replicas, strict=True)):
                for direction in (0, 1):
                    flow = self._flow(plan, here, a, there, b, True) if direction == 0 else self._flow(plan, there, b, here, a, False)
                    if flow.resource:
                        flows[flow.resource] = flows.get(flow.resource, 0) + 1
                    if i == 0:
                        firsts.append((s, direction, flow))
        onward: list[Hop] = []
        back: list[Hop] = []
        for s, direction, flow in firsts:
            sharing = flows.get(flow.resource, 1)
            hop = Hop(flow.wire_bytes * sharing / flow.bytes_per_s, flow.latency, 0)
            (back if direction else onward).append(hop)
            if direction:
                backward[s + 1] += flow.codec
            else:
                forward[s] += flow.codec
        return onward, back

    def _play_events(
        self, plan: Plan, prices: StagePrices, with_hops: bool
    ) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
        total = sum(prices.counts[0])
        common = gcd(*(count for row in prices.counts for count in row))
        unit = total // common
        pieces = max(1, -(-_SIMULATED_MICRO_BATCHES // unit))
        if common <= 2 * pieces:
            return self._simulate(plan, prices, prices.counts, with_hops)
        short = self._simulate(plan, prices, [[count // common * pieces for count in row] for row in prices.counts], with_hops)
        longer = self._simulate(plan, prices, [[count // common * 2 * pieces for count in row] for row in prices.counts], with_hops)
        steps = (common - 2 * pieces) / pieces

        def extended(a: list[list[float]], b: list[list[float]]) -> list[list[float]]:
            return [[y + (y - x) * steps for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]

        return extended(short[0], longer[0]), extended(short[1], longer[1]), longer[2]

    def _simulate(
        self, plan: Plan, prices: StagePrices, counts: list[list[int]], with_hops: bool
    ) -> tuple[list[list[float]], list[list[float]], list[list[int]]]:
        groups: dict[tuple[str, ...], int] = {}
        for stage in plan.stages:
            for replica in stage.replicas:
                groups.setdefault(replica.devices, len(groups))
        codec = [[[0.0, 0.0] for _ in row] for row in counts]
        hops = self._event_hops(plan, codec, with_hops)
        workers = [
            [
                Worker(r.forward + codec[s][i][0], r.backward + codec[s][i][1], groups[plan.stages[s].replicas[i].devices])
                for i, r in enumerate(row)
            ]
            for s, row in enumerate(prices.replicas)
        ]
        timeline = simulate(workers, [route(row) for row in counts], hops, plan.schedule, in_flight_limits(plan, counts, groups))
        return timeline.finish, timeline.busy, timeline.in_flight

    def _event_hops(self, plan: Plan, codec: list[list[list[float]]], with_hops: bool) -> dict[tuple[int, int, int, int], Hop]:
        hops: dict[tuple[int, int, int, int], Hop] = {}
        links: dict[tuple[str, ...], int] = {}
        for s, (here, there) in enumerate(zip(plan.stages, plan.stages[1:], strict=False)):
            for i, a in enumerate(here.replicas):
                for j, b in enumerate(there.replicas):
                    for forth in (True, False):
                        flow = self._flow(plan, here, a, there, b, True) if forth else self._flow(plan, there, b, here, a, False)
                        link = links.setdefault(flow.resource, len(links)) if flow.resource else -1
                        hop = Hop(flow.wire_bytes / flow.bytes_per_s, flow.latency, link) if with_hops else Hop(0.0, 0.0, -1)
                        hops[(s, i, s + 1, j) if forth else (s + 1, j, s, i)] = hop
                        sender = codec[s][i] if forth else codec[s + 1][j]
                        sender[not forth] = max(sender[not forth], flow.codec)
        return hops

    def _flow(self, plan: Plan, here: Stage, a: Replica, there: Stage, b: Replica, forth: bool) -> Flow:
        """One micro-batch's tensors from replica a of a stage to replica b of its neighbour."""
        boundary = self.graph.layers[(here if forth else there).stop - 1]
        nbytes = (boundary.output_bytes if forth else boundary.gradient_bytes) * plan.micro_batch_size
        sender, receiver = self.devices[a.devices[0]], self.devices[b.devices[0]]
        if sender.name == receiver.name:
            return Flow(0.0, 1.0, 0.0, 0.0, ())
        link = self.cluster.link_between(sender, receiver)
        if sender.host == receiver.host:
            return Flow(nbytes, link.bytes_per_s * self.calibration.host_link_efficiency, link.latency_s, 0.0, ())
        rate = link.bytes_per_s * self.calibration.network_efficiency
        if sender.site == receiver.site:
            return Flow(nbytes, rate, link.latency_s, 0.0, (sender.host, receiver.site))
        spec = codec_spec(plan.codecs.get(link.name, "none"))
        passes = spec.memory_passes * nbytes / len(a.devices)
        slowest = min(sender.kind.memory_bytes_per_s * sender.speed, receiver.kind.memory_bytes_per_s * receiver.speed)
        codec = passes / (slowest * self.calibration.memory_efficiency)
        return Flow(nbytes * spec.ratio(self._element), rate, link.latency_s, codec, (sender.site, receiver.site))

    # ---- putting it together -------------------------------------------------------------------------------------------------------

    def _exposed(self, plan: Plan, prices: StagePrices, tied: list[float], s: int) -> float:
        """The part of a stage's synchronisation that its last backward does not hide."""
        sync = prices.sync[s]
        stage = plan.stages[s]
        window = self.calibration.sync_overlap * min(replica.backward for replica in prices.replicas[s])
        first_bucket = sync / (stage.stop - stage.start) if self.calibration.sync_overlap else sync
        return max(first_bucket, sync - window) + tied[s]

    def _step(self, plan: Plan, prices: StagePrices, finish: list[list[float]]) -> tuple[float, int]:
        """Step time and the stage that ends last."""
        tied = self._tied(plan)
        worst, critical = -1.0, 0
        for s in range(len(plan.stages)):
            update = max(replica.update for replica in prices.replicas[s])
            end = max(finish[s]) + self._exposed(plan, prices, tied, s) + update
            if end > worst:
                worst, critical = end, s
        devices = len({name for stage in plan.stages for name in stage.devices})
        return worst * (1 + self.calibration.jitter * log2(max(1, devices))) + self.calibration.step_seconds, critical

    def _breakdown(self, plan: Plan, prices: StagePrices, step: float, critical: int, finish: list[list[float]]) -> dict[str, float]:
        busiest = max(range(len(prices.counts[critical])), key=lambda i: finish[critical][i])
        replica, count = prices.replicas[critical][busiest], prices.counts[critical][busiest]
        parts = {
            "compute": replica.compute * count,
            "recompute": replica.recompute * count,
            "tensor": replica.tensor * count,
            "expert": replica.expert * count,
            "shard": replica.shard * count,
            "sync": self._exposed(plan, prices, self._tied(plan), critical),
            "optimizer": max(r.update for r in prices.replicas[critical]),
            "overhead": self.calibration.step_seconds,
        }
        alone, _, _ = self._play(plan, prices, with_hops=False)
        parts["transfer"] = max(0.0, max(finish[critical]) - max(alone[critical]))
        parts["bubble"] = max(0.0, step - sum(parts.values()))
        return {name: seconds for name, seconds in parts.items() if seconds > 0}

    def _stage_cost(self, plan: Plan, prices: StagePrices, s: int, busy: list[list[float]], in_flight: list[list[int]]) -> StageCost:
        transfer = 0.0
        if s + 1 < len(plan.stages):
            here, there = plan.stages[s], plan.stages[s + 1]
            flow = self._flow(plan, here, here.replicas[0], there, there.replicas[0], True)
            transfer = flow.wire_bytes / flow.bytes_per_s + flow.latency + flow.codec
        return StageCost(
            forward_seconds=max(r.forward for r in prices.replicas[s]),
            backward_seconds=max(r.backward for r in prices.replicas[s]),
            transfer_seconds=transfer,
            sync_seconds=prices.sync[s],
            busy_seconds=max(busy[s]),
            in_flight=max(in_flight[s]),
        )

    # ---- memory --------------------------------------------------------------------------------------------------------------------

    def memory(self, plan: Plan, in_flight: list[list[int]] | None = None) -> dict[str, MemoryUse]:
        """What every device holds at its peak; without a timeline, by the schedule's bound on micro-batches in flight."""
        held = in_flight or in_flight_bounds(plan)
        uses: dict[str, MemoryUse] = {}
        for s, stage in enumerate(plan.stages):
            for i, replica in enumerate(stage.replicas):
                self._replica_memory(plan, stage, replica, held[s][i], uses)
        return uses

    def _replica_memory(self, plan: Plan, stage: Stage, replica: Replica, held: int, uses: dict[str, MemoryUse]) -> None:
        lanes = len(replica.devices) // stage.tensor
        total = replica.total_samples or 1
        rounds = -(-total // plan.micro_batch_size)
        micro = total / rounds if len(plan.stages) == 1 else float(plan.micro_batch_size)
        known: dict[tuple[float, float, bool], MemoryUse] = {}
        for index, name in enumerate(replica.devices):
            lane, position = divmod(index, stage.tensor)
            fraction = tensor_fraction(replica, stage.tensor, position)
            is_cpu = self.devices[name].kind.link_bytes_per_s == 0.0
            key = (fraction, replica.samples[lane] / total * micro, is_cpu)
            if key not in known:
                known[key] = self.device_memory(stage, fraction, key[1], held, lanes, is_cpu)
            before = uses.get(name)
            uses[name] = known[key] if before is None else _sum(before, known[key])

    def device_memory(self, stage: Stage, fraction: float, samples: float, held: int, lanes: int, is_cpu: bool) -> MemoryUse:
        """What a device with `fraction` of the tensors holds when `held` micro-batches of `samples` each are in flight."""
        parameters = held_parameters(self.amounts, stage.start, stage.stop, fraction, lanes if stage.expert else 1)
        shards = lanes if stage.sharded else 1
        working = 2 * parameters.dense / max(1, stage.stop - stage.start) if stage.sharded and lanes > 1 else 0.0
        activations = self.activation_bytes(stage.start, stage.stop, stage.recompute, fraction) * samples
        once = self._largest_saved(stage.start, stage.stop, fraction) * samples if stage.recompute else 0.0
        return memory_use(parameters, shards, activations * held + once, working, self._half, self.optimizer, self.calibration, is_cpu)

    def activation_bytes(self, start: int, stop: int, recompute: bool, fraction: float) -> float:
        """Bytes one sample in flight keeps in a stage."""
        amounts = self.amounts
        if recompute:
            return amounts.inputs[stop] - amounts.inputs[start]
        split = amounts.split_saved[stop] - amounts.split_saved[start]
        return (amounts.saved[stop] - amounts.saved[start]) - split * (1 - fraction)

    def _largest_saved(self, start: int, stop: int, fraction: float) -> float:
        """The most any one layer keeps while it is recomputed."""
        key = (start, stop, round(fraction * 1e6))
        if key not in self._largest:
            layers = self.graph.layers[start:stop]
            self._largest[key] = max(layer.saved_bytes - layer.split_saved_bytes * (1 - fraction) for layer in layers)
        return self._largest[key]


def tensor_fraction(replica: Replica, tensor: int, position: int) -> float:
    """The part of every split tensor that a position of a lane holds."""
    if tensor == 1:
        return 1.0
    shares: Sequence[int] = replica.tensor_shares
    return shares[position] / sum(shares) if shares else 1.0 / tensor


def in_flight_bounds(plan: Plan) -> list[list[int]]:
    """The most micro-batches each replica may hold, by schedule."""
    counts = [[-(-replica.total_samples // plan.micro_batch_size) for replica in stage.replicas] for stage in plan.stages]
    if plan.schedule == "gpipe":
        return counts
    if plan.schedule == "interleaved":
        return [[min(count, len(plan.stages)) for count in row] for row in counts]
    return [
        [min(count, limit) for count, limit in zip(row, limits, strict=True)] for row, limits in zip(counts, _limits(counts), strict=True)
    ]


def _limits(counts: list[list[int]]) -> list[list[int]]:
    """1F1B's warm-up, for any numbers of replicas: enough to give each replica from here to the end one, in proportion to the share."""
    ahead = 0
    rows = []
    for row in reversed(counts):
        ahead += len(row)
        total = sum(row) or 1
        rows.append([max(1, ceil(ahead * count / total - 1e-9)) for count in row])
    return rows[::-1]


def in_flight_limits(plan: Plan, counts: list[list[int]], groups: dict[tuple[str, ...], int]) -> list[int]:
    """The bound for each group of devices; under interleaving it is Megatron-LM's warm-up over all the stages a group holds."""
    limits = [0] * len(groups)
    rows = _limits(counts)
    if plan.schedule == "interleaved":
        per_group = len(plan.stages) * len(plan.stages[0].replicas) // len(groups)
        depth = len(plan.stages) // max(1, per_group)
        for s, stage in enumerate(plan.stages[:depth]):
            for replica in stage.replicas:
                limits[groups[replica.devices]] = (depth - s - 1) * 2 + (per_group - 1) * depth + 1
        return limits
    for s, stage in enumerate(plan.stages):
        for i, replica in enumerate(stage.replicas):
            limits[groups[replica.devices]] += rows[s][i]
    return limits


def _sum(a: MemoryUse, b: MemoryUse) -> MemoryUse:
    return MemoryUse(
        parameters=a.parameters + b.parameters,
        gradients=a.gradients + b.gradients,
        optimizer=a.optimizer + b.optimizer,
        activations=a.activations + b.activations,
        buffers=max(a.buffers, b.buffers),
    )


def cost(graph: Graph, cluster: Cluster, plan: Plan, *, optimizer: str = "adamw", calibration: Calibration | None = None) -> Cost:
    """The prediction for one plan. To price many plans of one graph and cluster, keep an `Evaluator`."""
    return Evaluator(graph, cluster, optimizer=optimizer, calibration=calibration).cost(plan)
