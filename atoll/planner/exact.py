"""The exact search for small problems: every plan of a stated space, cut short only where a bound proves that no better one follows.

The space: ordered partitions of any of the devices into stages × legal cuts × replicas, tensor or sharded groups of any of a stage's
devices, or groups that divide the layers worth it × micro-batches that divide the batch × whole-number shares × 1F1B or GPipe × codecs,
recomputing on a stage only where it would not fit otherwise; all as annotated. Of all this, what the mode can run; where it divides
nothing inside a stage, every device is a replica. The bounds: a replica of stage s is busy for all of its micro-batches, after the first
has come through the stages before it and before the last has gone back through them; then it synchronises, over links it has to itself;
and all that passes between stages in different sites passes the links between them, at best encoded to the fewest bits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import combinations, pairwise, product
from typing import NamedTuple

from msgspec.structs import replace

from atoll.codec import codec_spec
from atoll.cost import Evaluator
from atoll.plan import CodecName, Plan, Replica, Stage
from atoll.plan.division import even_shares, split_units
from atoll.planner.balance import shares
from atoll.planner.rules import Rules

__all__ = ["Exact", "groupings", "is_small"]

Group = tuple[str, ...]


class Fill(NamedTuple):
    """The least time of a micro-batch through some stages: there, and there and back."""

    forward: float
    both: float

    def plus(self, more: "Fill") -> "Fill":
        """Through more stages."""
        return Fill(self.forward + more.forward, self.both + more.both)

    def bound(self, busy: float, exposed: float) -> float:
        """The least step of a stage behind these, `busy` for so long: its gradients synchronise while earlier stages still go backward."""
        return max(self.both + busy, self.forward + busy + exposed)


class Option(NamedTuple):
    """One way to run some layers on some devices, and what that costs at least."""

    stage: Stage
    seconds: tuple[float, ...]  # of one micro-batch, by replica
    busy: float  # of the busiest replica at best shares
    exposed: float  # what of the synchronisation its last backward cannot hide
    least: Fill  # of one micro-batch on its fastest replica


def is_small(devices: int, layers: int, batch_size: int) -> bool:
    """Whether the exact search is worth starting."""
    return devices <= 5 and layers <= 12 and batch_size <= 64


class Exact:
    """Branch and bound over the space above, starting from plans already found."""

    def __init__(
        self, evaluator: Evaluator, rules: Rules, batch_size: int, codecs: Mapping[str, Sequence[CodecName]], budget: Callable[[], bool]
    ) -> None:
        self.evaluator = evaluator
        self.rules = rules
        self.batch_size = batch_size
        self.codecs = codecs
        self.budget = budget
        self.best_seconds = float("inf")
        self.best: Plan | None = None
        self.priced = 0
        self.complete = True
        self._options: dict[tuple[int, int, Group, int, bool], list[Option]] = {}

    def run(self, start: Plan | None, seconds: float) -> tuple[Plan | None, float]:
        """The best plan of the space, or the one given where that is better; `complete` says whether all of it was covered."""
        self.best, self.best_seconds = start, seconds
        names = tuple(device.name for device in self.evaluator.cluster.devices)
        sizes = [b for b in range(1, self.batch_size + 1) if self.batch_size % b == 0]
        if (asked := self.rules.micro_batch_sizes(self.batch_size)) is not None:
            sizes = asked
        for micro in reversed(sizes):
            self._extend(micro, [], 0, names, Fill(0.0, 0.0))
        return self.best, self.best_seconds

    def _extend(self, micro: int, chosen: list[Option], start: int, left: Group, fill: Fill) -> None:
        """Adds a stage that begins at `start`, on any of the devices left; `fill` is the least time of the stages before it."""
        if not self.budget():
            self.complete = False
            return
        ends = [end for end in (*self.rules.cuts, len(self.evaluator.graph.layers)) if end > start]
        ends = [end for end in ends if self.rules.may_hold(start, end)]
        layers = len(self.evaluator.graph.layers)
        for group in subsets(self.evaluator, left):
            rest = tuple(name for name in left if name not in group)
            for stop in ends:
                if stop < layers and not rest:
                    continue
                if chosen and self._crossing(chosen[-1].stage, group) >= self.best_seconds:
                    continue
                for option in self._stage_options(start, stop, group, micro, self.rules.any_share(1) and stop - start == layers):
                    if fill.bound(option.busy, option.exposed) >= self.best_seconds:
                        continue
                    if stop == layers:
                        self._price(micro, [*chosen, option])
                    else:
                        self._extend(micro, [*chosen, option], stop, rest, fill.plus(option.least))

    def _crossing(self, here: Stage, there: Group) -> float:
        """The least time for all activations of a step to pass from a stage to devices in other sites; 0 where some are in its own."""
        devices = self.evaluator.devices
        ours, theirs = ({devices[name].site for name in names} for names in (here.devices, there))
        if not ours.isdisjoint(theirs):
            return 0.0
        links = [link for link in self.evaluator.cluster.links if len(ours & set(link.between)) == 1 == len(theirs & set(link.between))]
        rate = sum(link.bytes_per_s for link in links) * self.evaluator.calibration.network_efficiency
        boundary = self.evaluator.graph.layers[here.stop - 1]
        return max(boundary.output_bytes, boundary.gradient_bytes) * self.batch_size * self._fewest_bits() / rate

    def _fewest_bits(self) -> float:
        element = 4.0 if self.evaluator.graph.precision == "fp32" else 2.0
        return min((codec_spec(name).ratio(element) for names in self.codecs.values() for name in names), default=1.0)

    def _exposed(self, stage: Stage, micro: int) -> float:
        """What the last backward cannot hide of a stage's synchronisation, were no other stage to share its links."""
        alone = Plan(graph="", cluster="", batch_size=self.batch_size, micro_batch_size=micro, stages=(stage,))
        backward = max(self.evaluator.replica_seconds(stage, replica, float(micro)).backward for replica in stage.replicas)
        return max(0.0, self.evaluator.sync_seconds(alone)[0] - self.evaluator.calibration.sync_overlap * backward)

    def _stage_options(self, start: int, stop: int, group: Group, micro: int, any_share: bool) -> list[Option]:
        key = (start, stop, group, micro, any_share)
        if key not in self._options:
            stages = (stage for stage in self._stages(start, stop, group, micro) if self.rules.allows_stage(stage))
            options = (self._option(stage, micro, any_share) for stage in stages)
            self._options[key] = [option for option in options if option is not None]
        return self._options[key]

    def _stages(self, start: int, stop: int, group: Group, micro: int) -> Iterator[Stage]:
        units = split_units(self.evaluator.graph.layers[start:stop])
        for size in range(1, len(group) + 1):
            if len(group) % size or (size > 1 and self.rules.execution.whole_stages):
                continue
            for blocks in groupings(group, size):
                divided = even_shares(units, size)
                if size == 1 or (units and divided is not None):
                    plain = tuple(Replica(devices=block, samples=(1,), tensor_shares=divided or ()) for block in blocks)
                    yield Stage(start=start, stop=stop, replicas=plain, tensor=size)
                if size > 1 and micro % size == 0:
                    lanes = tuple(Replica(devices=block, samples=(1,) * size) for block in blocks)
                    yield Stage(start=start, stop=stop, replicas=lanes, sharded=True)
                    yield from self._dividing_lanes(start, stop, lanes)

    def _dividing_lanes(self, start: int, stop: int, replicas: tuple[Replica, ...]) -> Iterator[Stage]:
        """Lanes that divide layers (annotated ones, or those with much of the model), or where there are annotations experts."""
        layers = self.evaluator.graph.layers
        lanes = len(replicas[0].samples)
        split = tuple(layer for layer in self.rules.worth_splitting if start <= layer < stop)
        if split and all(layers[layer].tensor_units >= lanes for layer in split):
            yield Stage(start=start, stop=stop, replicas=replicas, split=split)
            yield Stage(start=start, stop=stop, replicas=replicas, split=split, sharded=True)
        experts = [layer.experts for layer in layers[start:stop] if layer.experts]
        if self.rules.graph.constraints and experts and lanes <= min(experts):
            yield Stage(start=start, stop=stop, replicas=replicas, expert=True)

    def _option(self, stage: Stage, micro: int, any_share: bool) -> Option | None:
        unit = stage.lanes if any_share else micro
        total = self.batch_size // unit
        if self.batch_size % unit or total < len(stage.replicas):
            return None
        each = [self.evaluator.replica_seconds(stage, replica, float(micro)) for replica in stage.replicas]
        seconds = [one.forward + one.backward for one in each]
        counts = shares(total, [1.0 / value for value in seconds])
        assert counts is not None  # there are at least as many as replicas
        exposed = self._exposed(stage, micro)
        # where any share is possible: a sample takes no less in a smaller micro-batch
        even = self.batch_size / sum(micro / value for value in seconds)
        busy = even if any_share else max(n * s for n, s in zip(counts, seconds, strict=True))
        return Option(stage, tuple(seconds), busy, exposed, Fill(min(one.forward for one in each), min(seconds)))

    def _price(self, micro: int, chosen: list[Option]) -> None:
        any_share = self.rules.any_share(len(chosen))
        rows = []
        fill = Fill(0.0, 0.0)
        for option in chosen:
            rows.append(list(self._shares(option, micro, fill, any_share)))
            fill = fill.plus(option.least)
        for stages in product(*rows):
            for schedule in self.rules.execution.schedules if len(chosen) > 1 else ("1f1b",):
                plan = self._fitting(self.rules.make_plan(self.evaluator.cluster, self.batch_size, micro, stages, schedule))
                if plan is not None:
                    self._try(plan)

    def _shares(self, option: Option, micro: int, fill: Fill, any_share: bool) -> Iterator[Stage]:
        stage = option.stage
        lanes = stage.lanes
        unit = 1 if any_share else micro // lanes
        total = self.batch_size // (lanes if any_share else micro)
        for counts in compositions(total, len(stage.replicas)):
            busy = max(n * s for n, s in zip(counts, option.seconds, strict=True)) * (lanes / micro if any_share else 1)
            if fill.bound(busy, option.exposed) >= self.best_seconds:
                continue
            replicas = (replace(r, samples=(n * unit,) * lanes) for r, n in zip(stage.replicas, counts, strict=True))
            yield replace(stage, replicas=tuple(replicas))

    def _fitting(self, plan: Plan) -> Plan | None:
        """The plan, recomputing on the stages that would not fit otherwise; None where even that does not help."""
        over = _over_memory(self.evaluator, plan)
        if not over:
            return plan
        stages = tuple(replace(s, recompute=True) if over.intersection(s.devices) else s for s in plan.stages)
        plan = replace(plan, stages=stages)
        return None if _over_memory(self.evaluator, plan) else plan

    def _try(self, plan: Plan) -> None:
        if not self.rules.allows(plan):
            return
        sites = {self.evaluator.devices[name].site for stage in plan.stages for name in stage.devices}
        links = [link for link in self.codecs if len(sites) > 1]
        for names in product(*(self.codecs[link] for link in links)):
            codecs = {link: name for link, name in zip(links, names, strict=True) if name != "none"}
            candidate = replace(plan, codecs=codecs)
            self.priced += 1
            seconds = self.evaluator.seconds(candidate)
            if seconds < self.best_seconds * (1 - 1e-9):
                self.best, self.best_seconds = candidate, seconds


def _over_memory(evaluator: Evaluator, plan: Plan) -> set[str]:
    devices = evaluator.devices
    return {name for name, use in evaluator.memory(plan).items() if use.total_bytes > devices[name].memory_bytes}


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` positive whole numbers."""
    for bars in combinations(range(1, total), parts - 1):
        edges = (0, *bars, total)
        yield tuple(b - a for a, b in pairwise(edges))


def groupings(names: Group, size: int) -> Iterator[tuple[Group, ...]]:
    """All ways to divide `names` into groups of `size`, order aside."""
    if not names:
        yield ()
        return
    first, rest = names[0], names[1:]
    for others in combinations(rest, size - 1):
        left = tuple(name for name in rest if name not in others)
        for tail in groupings(left, size):
            yield ((first, *others), *tail)


def subsets(evaluator: Evaluator, names: Group) -> Iterator[Group]:
    """All non-empty subsets, one of each kind: devices alike in one host are taken in their order."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for name in names:
        device = evaluator.devices[name]
        alike.setdefault((device.host, device.kind.name, device.speed, device.memory_bytes), []).append(name)
    pools = list(alike.values())
    for counts in product(*(range(len(pool) + 1) for pool in pools)):
        if any(counts):
            yield tuple(name for pool, count in zip(pools, counts, strict=True) for name in pool[:count])
