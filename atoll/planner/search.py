"""The search for large problems: every draft of a broad family gets balanced cuts and an estimate, the best estimates are priced in full.

The family: parallelism inside a replica × sets of kinds × columns of sites × kinds chained or mixed × stages × micro-batches ×
recomputation. Best estimate first; `refine` then improves the leaders by local moves.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from atoll.plan import CodecName, Plan
from atoll.plan.division import even_shares, split_units
from atoll.plan.modes import hosts_of
from atoll.planner.arrange import DeviceClass, Slot, arrange, site_columns, slots_of
from atoll.planner.draft import Draft, Drafted, complete, with_names
from atoll.planner.rules import Rules
from atoll.planner.timing import Inside, SlotTimes

__all__ = ["BroadSearch", "Found", "Tally", "micro_batch_sizes"]


class Tally:
    """What became of every plan looked at: priced in full, or ruled out before, by reason. Each is counted once, so the numbers add up."""

    def __init__(self) -> None:
        self.priced = 0
        self.ruled_out: Counter[str] = Counter()

    @property
    def considered(self) -> int:
        """All of them."""
        return self.priced + self.ruled_out.total()

    def reasons(self) -> str:
        """The three for which most were ruled out, where nothing was found."""
        return ", ".join(f"{reason} ({count:,})" for reason, count in self.ruled_out.most_common(3) if count) or "no layout is possible"

    def lines(self, chosen: bool, why_not: str) -> tuple[str, ...]:
        """A line for each reason, most first; of those priced, all but the one chosen, if it was among them, were not taken: `why_not`."""
        rest = self.priced - chosen
        lines = [f"{count:,} × {reason}" for reason, count in self.ruled_out.most_common() if count]
        return (*lines, f"{rest:,} × {why_not}") if rest else tuple(lines)


Progress = Callable[[str, int, int], None]
_Slots = tuple[tuple[Slot, ...], ...]  # by stage
FEW_DEVICES = 64  # up to which even small parts of a cluster are tried


class Found(NamedTuple):
    """A priced plan that fits."""

    seconds: float
    plan: Plan


def insides(timing: SlotTimes, rules: Rules) -> list[Inside]:
    """Parallelism inside a replica worth trying on these devices."""
    if rules.execution.whole_stages:
        return _whole_hosts(timing.classes)
    graph = timing.evaluator.graph
    units = split_units(graph.layers)
    per_host = max(len(names) for each in timing.classes for names in each.hosts)
    largest = max(each.size for each in timing.classes)
    few = sum(each.size for each in timing.classes) <= FEW_DEVICES
    usual = range(1, 9) if few else (1, 2, 4, 8)
    degrees = [t for t in sorted({*usual, 16, 32, *rules.counts}) if t <= min(per_host, max(units, default=1))]
    tensors = [t for t in degrees if t == 1 or any(u % t == 0 for u in units)]
    found = _lane_splits(timing, rules, largest)
    if few:  # parts that are not equal: one head more here than there
        found += [Inside(t, tensor_shares=parts) for t in degrees if t > 1 and (parts := even_shares(units, t))]
    for tensor in tensors:
        found.append(Inside(tensor))
        lanes = [lanes for lanes in _lane_counts(timing.classes, tensor, largest) if lanes > 1]
        found.extend(Inside(tensor, count, sharded=True) for count in lanes)
        experts = max((layer.experts for layer in graph.layers), default=0)
        divided = [count for count in lanes if experts and experts % count == 0]
        found.extend(Inside(tensor, count, expert=True) for count in divided)
        found.extend(Inside(tensor, count, sharded=True, expert=True) for count in divided)
    return found


def _whole_hosts(classes: Sequence[DeviceClass]) -> list[Inside]:
    """Every device a worker, or every host one, so that its sums leave it once; cores are faster in processes of their own."""
    several = [each for each in classes if len(each.hosts) > 1 and not each.device.kind.cpu]
    return [Inside(lanes=count) for count in sorted({1, *(len(names) for each in several for names in each.hosts)})]


def _lane_splits(timing: SlotTimes, rules: Rules, largest: int) -> list[Inside]:
    """Lanes that divide the layers which hold much of the model, or are annotated so, and repeat (or shard) the others."""
    graph = timing.evaluator.graph
    layers = rules.worth_splitting
    most = min((graph.layers[i].tensor_units for i in layers), default=1)
    counts = [n for n in sorted({*_lane_counts(timing.classes, 1, largest), *rules.counts}) if 1 < n <= most]
    return [Inside(1, count, sharded=sharded, split=layers) for count in counts for sharded in (False, True)]


def _lane_counts(classes: Sequence[DeviceClass], tensor: int, largest: int) -> list[int]:
    """A host's worth of lanes, four and sixteen hosts' worth, and a whole class."""
    counts: set[int] = set()
    for each in classes:
        host = max(len(names) for names in each.hosts) // tensor
        if host:
            counts.update(host * hosts for hosts in (1, 4, 16, len(each.hosts)) if hosts <= len(each.hosts))
    return sorted(count for count in counts if count * tensor <= largest)


def stage_counts(slots: int, layers: int, rules: Rules) -> list[int]:
    """Numbers of stages worth trying."""
    if rules.bounds is not None:
        return [len(rules.bounds) - 1] if len(rules.bounds) - 1 <= slots else []
    usual = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64, 96, 128)
    few = range(1, 17) if slots <= FEW_DEVICES else ()
    return [n for n in sorted({*usual, *few}) if n <= min(slots, layers)]


def micro_batch_sizes(batch_size: int, rules: Rules, replicas: int = 0) -> list[int]:
    """Divisors of the batch, thinned to about one per doubling; `refine` tries those between.

    Where shares are free, of `replicas` of one stage, any size is possible: parts of a share and of twice a share, which the fastest may
    have.
    """
    if (asked := rules.micro_batch_sizes(batch_size)) is not None:
        return asked
    if replicas:
        share = -(-batch_size // replicas)
        return sorted({min(batch_size, -(-2 * share // parts)) for parts in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)})
    divisors = [b for b in range(1, min(batch_size, 4096) + 1) if batch_size % b == 0]
    kept: list[int] = []
    for b in divisors:
        if not kept or b >= 1.9 * kept[-1]:
            kept.append(b)
    return kept


def _kind_sets(timing: SlotTimes) -> list[tuple[DeviceClass, ...]]:
    """All classes; without the slowest kinds, one after another; the strongest site alone; in small clusters also parts of a class."""
    precision = timing.evaluator.graph.precision
    speed = {each.number: each.device.kind.peak(precision) * each.device.speed for each in timing.classes}
    names = sorted({(speed[each.number], each.device.kind.name) for each in timing.classes}, reverse=True)
    sets: list[tuple[DeviceClass, ...]] = []
    for k in range(len(names), 0, -1):
        kept = {name for _, name in names[:k]}
        sets.append(tuple(each for each in timing.classes if each.device.kind.name in kept))
    strength: Counter[str] = Counter()
    for each in timing.classes:
        strength[each.device.site] += int(speed[each.number] * each.size)
    best = strength.most_common(1)[0][0]
    sets.append(tuple(each for each in timing.classes if each.device.site == best))
    if sum(each.size for each in timing.classes) <= FEW_DEVICES:
        sets += _small_sets(timing)
    return list(dict.fromkeys(sets))


def _first_hosts(classes: Sequence[DeviceClass], most: int) -> tuple[DeviceClass, ...]:
    """The first `most` devices of these classes, host by host."""
    kept: list[DeviceClass] = []
    for each in classes:
        hosts: list[tuple[str, ...]] = []
        for names in each.hosts:
            hosts.append(names[:most])
            most -= len(hosts[-1])
            if not most:
                return (*kept, each._replace(hosts=tuple(hosts)))
        kept.append(each)
    return tuple(kept)


def _small_sets(timing: SlotTimes) -> list[tuple[DeviceClass, ...]]:
    """A small model may want two sites, one, a single host, or a single device."""
    classes = timing.classes
    sites = sorted({each.device.site for each in classes})
    few = [*combinations(sites, 2), *((site,) for site in sites)]
    found = [tuple(each for each in classes if each.device.site in chosen) for chosen in few]
    hosts: dict[str, list[DeviceClass]] = {}
    for each in classes:
        found.append((each,))
        found.append((each._replace(hosts=(each.hosts[0][:1],)),))
        for names in each.hosts:
            hosts.setdefault(timing.evaluator.devices[names[0]].host, []).append(each._replace(hosts=(names,)))
    alike: dict[tuple[tuple[int, int], ...], tuple[DeviceClass, ...]] = {}
    for members in hosts.values():
        alike.setdefault(tuple((each.number, each.size) for each in members), tuple(members))
    return [*found, *alike.values()]


def _could_fit(timing: SlotTimes, classes: Sequence[DeviceClass], inside: Inside, stages: int) -> bool:
    """Whether the state of an average stage fits the roomiest device: a quick no to most hopeless layouts."""
    evaluator = timing.evaluator
    held = evaluator.amounts
    experts = held.expert_parameters[-1] / (inside.lanes if inside.expert else 1)
    split = sum(evaluator.graph.layers[layer].split_parameters for layer in inside.split)
    dense = (held.parameters[-1] - held.expert_parameters[-1] - split) / (inside.lanes if inside.sharded else 1)
    state = (dense + experts + split / inside.lanes) / inside.tensor / stages * (8 + evaluator.optimizer.state_bytes)
    return state <= max(each.device.memory_bytes for each in classes)


class BroadSearch(NamedTuple):
    """A search of the family, and what became of those looked at."""

    timing: SlotTimes
    rules: Rules
    batch_size: int
    codec_sets: Sequence[dict[str, CodecName]]
    tally: Tally
    progress: Progress

    def run(self, keep: int, budget: int, most_devices: int | None) -> list[Found]:
        """The best plans found, best first; at most `budget` are priced in full. `most_devices` bounds those that a plan may use."""
        drafted: list[Drafted] = []
        sets = _kind_sets(self.timing)
        if most_devices is not None:
            some = (part for chosen in sets for part in (chosen, *((one,) for one in chosen)))
            sets = list(dict.fromkeys(_first_hosts(part, most_devices) for part in some))
        layouts = list(self._layouts(sets))
        for number, (inside, stages) in enumerate(layouts):
            self.progress("drafting", number, len(layouts))
            drafted.extend(self._drafts(inside, stages))
        return self._priced(sorted(drafted, key=lambda each: each.estimate), keep, budget)

    def _layouts(self, sets: Sequence[tuple[DeviceClass, ...]]) -> Iterator[tuple[Inside, _Slots]]:
        timing, rules = self.timing, self.rules
        layers = len(timing.evaluator.graph.layers)
        seen: set[tuple[Inside, _Slots]] = set()
        for inside in insides(timing, rules):
            for chosen in sets:
                slots = slots_of(chosen, inside.size)
                if rules.execution.whole_stages:
                    slots = [slot for slot in slots if len(hosts_of(slot.devices)) == 1]
                if not slots:
                    continue
                possible = stage_counts(len(slots), layers, rules)
                counts = [n for n in possible if _could_fit(timing, chosen, inside, n)]
                self.tally.ruled_out["out of memory"] += len(possible) - len(counts)
                if inside.lanes > 1:
                    counts = [n for n in counts if n <= 8 or rules.bounds]  # sharding replaces stages more than it joins them
                for layout in self._arrangements(slots, inside, counts):
                    if (inside, layout) not in seen and (rules.hosts == 1 or all(map(_on_several_hosts, layout))):
                        seen.add((inside, layout))
                        yield inside, layout

    def _arrangements(self, slots: Sequence[Slot], inside: Inside, counts: Sequence[int]) -> Iterator[_Slots]:
        timing = self.timing
        first = {slot.kind: slot for slot in reversed(slots)}
        layers = len(timing.evaluator.graph.layers)
        times = {kind: timing.slot(slot, inside, 1.0 * inside.lanes, False)[layers] for kind, slot in first.items()}
        sites = sorted({timing.classes[slot.kind].device.site for slot in slots})
        ways = [way for way in site_columns(timing.evaluator.cluster, sites) if len(way) in (1, 2, 4, len(sites))]
        several = len(first) > len(sites)
        for stages in counts:
            for columns in ways if stages > 1 else ways[:1]:
                for mixed in (False, True) if several and stages > 1 else (False,):
                    for reverse in (False, True) if several and stages > 1 and not mixed else (False,):
                        found = arrange(slots, timing.classes, columns, stages, lambda kind: 1 / times[kind], mixed, reverse)
                        if found is not None:
                            yield tuple(tuple(stage) for stage in found)

    def _drafts(self, inside: Inside, stages: _Slots) -> Iterator[Drafted]:
        for micro in micro_batch_sizes(self.batch_size, self.rules, len(stages[0]) if self.rules.any_share(len(stages)) else 0):
            if micro < inside.lanes:
                continue
            for recompute in (False, True):
                outcome = complete(Draft(inside, stages, micro, recompute), self.timing, self.rules, self.batch_size)
                if isinstance(outcome, Drafted):
                    yield outcome
                    break  # it fits without recomputation: recomputing would only be slower
                self.tally.ruled_out[outcome] += 1
                if outcome != "out of memory" or recompute:
                    return  # larger micro-batches only need more memory, or leave fewer of them

    def _priced(self, drafted: Sequence[Drafted], keep: int, budget: int) -> list[Found]:
        found: list[Found] = []
        evaluator, tally = self.timing.evaluator, self.tally
        tried = 0
        for number, each in enumerate(drafted):
            if tried >= budget:
                tally.ruled_out["a worse estimate than those priced"] += len(drafted) - number
                break
            if len(found) >= keep and each.estimate > 1.3 * found[keep - 1].seconds:
                tally.ruled_out["an estimate a third above the best prices"] += len(drafted) - number
                break
            self.progress("pricing", number, min(budget, len(drafted)))
            for codecs in self.codec_sets:
                plan = with_names(each, self.timing, self.rules, self.batch_size, codecs)
                if plan is None:
                    tally.ruled_out["shares do not divide"] += 1
                    break
                if (why_not := self.rules.why_not(plan)) is not None:
                    tally.ruled_out[why_not] += 1
                    break
                tried += 1
                if not evaluator.fits(plan):
                    tally.ruled_out["out of memory"] += 1
                    break
                tally.priced += 1
                found.append(Found(evaluator.seconds(plan), plan))
                if len({evaluator.devices[name].site for stage in plan.stages for name in stage.devices}) == 1:
                    break
            found.sort(key=lambda one: one.seconds)
        return found


def _on_several_hosts(slots: Sequence[Slot]) -> bool:
    """Of slots that are on one host each."""
    (first,) = hosts_of(slots[0].devices)
    return any(first not in hosts_of(slot.devices) for slot in slots)
