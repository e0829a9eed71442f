"""What the ranks of a run measured: the records in its directory, and what links and exchanges took by them. Read without PyTorch.

A collective lasts from when its last rank was there, a transfer from its send. Ranks are laid over each other by their hosts' clocks, which
is exact on one host and as good as the clocks are between several.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from atoll.cluster import Cluster, Device
from atoll.cluster.cluster import device_index, site_index
from atoll.cost import Calibration
from atoll.cost.communication import collective_bytes, span_of
from atoll.errors import JobError
from atoll.plan import Plan
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.schedule import Action
from atoll.runtime.modes.lockstep.trace import TraceSpan
from atoll.runtime.run_directory import RunDirectory

__all__ = [
    "Bucket",
    "Exchange",
    "Links",
    "MeasuredSpan",
    "MeasuredStep",
    "RankMeasured",
    "StageMeasured",
    "Sync",
    "distinct_exchanges",
    "executed_spans",
    "link_bytes",
    "link_name",
    "measure_links",
    "read_measured",
    "sync_seconds",
    "transfer_seconds",
    "write_measured",
]

_INSIDE_HOSTS = "inside hosts"
_PASSES = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "broadcast": 1.0}
_LEAST_BYTES = 32 * 1024  # below, an exchange tells of latency and nothing of a rate
_BLOCKED_SECONDS = 50e-6  # a receive that was waited for less had arrived before


class Exchange(msgspec.Struct, frozen=True, kw_only=True):
    """What one group of ranks exchanged in a step by one kind of collective, or one rank sent another (`ranks`: from, to)."""

    kind: str  # "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"
    ranks: tuple[int, ...]
    calls: int
    bytes: int  # of the whole: what is reduced, what has been gathered, what is scattered


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """A bucket of gradients that some ranks add up together once a step."""

    ranks: tuple[int, ...]
    stage: int  # -1: of parameters that several stages use
    bytes: int


class MeasuredSpan(msgspec.Struct, frozen=True, array_like=True):
    """Something a rank did, in seconds from the beginning of its step."""

    kind: str
    stage: int
    index: int  # the micro-batch; of `G` the bucket
    begin_seconds: float
    end_seconds: float


class MeasuredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step, span by span."""

    step: int
    unix_seconds: float  # when it began; comparable between ranks as far as their hosts' clocks agree
    seconds: float
    spans: tuple[MeasuredSpan, ...]


class StageMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """One stage on one rank."""

    stage: int
    replica: int
    lane: int
    tensor: int
    samples: int  # of a micro-batch on this rank; the most common size
    micro_batches: int  # a step
    forward_seconds: float  # of one such micro-batch, the median
    backward_seconds: float


class RankMeasured(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank measured: a typical one of its last thousand steps, stages' medians over the last few, sums over all."""

    format: int = 1
    rank: int
    device: str
    accelerator: str  # PyTorch's name of what it computed on
    threads: int  # that computed, on a CPU
    first_step: int  # of this process: a resumed run begins later
    steps: int  # measured
    step_seconds: float  # median
    seconds: dict[str, float]  # by part, averaged over the fifth of the steps whose length is in the middle; "other" is what is left
    total_seconds: dict[str, float]  # of all steps
    stages: tuple[StageMeasured, ...]
    exchanges: tuple[Exchange, ...]  # of one step
    buckets: tuple[Bucket, ...]
    peak_memory_bytes: int | None
    recent: tuple[MeasuredStep, ...]


def write_measured(directory: RunDirectory, measured: RankMeasured) -> None:
    """Put what a rank measured into the run's directory."""
    directory.write(f"measured/rank-{measured.rank:04d}.json", msgspec.json.encode(measured))


def read_measured(directory: RunDirectory) -> list[RankMeasured]:
    """What the ranks of a run measured, in order; empty when none has written yet."""
    found = []
    for path in sorted(directory.measured.glob("rank-*.json")):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=RankMeasured))
        except (OSError, msgspec.MsgspecError, UnicodeError) as error:
            raise JobError(f"{path}: this is not what a rank measured: {error}; remove it to report without it") from None
    return sorted(found, key=lambda measured: measured.rank)


def executed_spans(ranks: Sequence[RankMeasured], steps: int = 3) -> list[TraceSpan]:
    """The last steps as all ranks did them, on one time line, as `predict` has them. Waits for data and for agreement are no actions."""
    shown = _common_steps(ranks)[-steps:]
    if not shown:
        return []
    began = min(by_step[shown[0]].unix_seconds for by_step in map(_by_step, ranks))
    spans = []
    for rank in ranks:
        by_step = _by_step(rank)
        for number in shown:
            offset = by_step[number].unix_seconds - began
            for span in by_step[number].spans:
                action = _action(span, rank)
                if action is not None:
                    spans.append(TraceSpan(rank.rank, action, offset + span.begin_seconds, offset + span.end_seconds))
    return sorted(spans, key=lambda span: (span.begin_seconds, span.process, span.end_seconds, span.action))


def _common_steps(ranks: Sequence[RankMeasured]) -> list[int]:
    rows = [{step.step for step in rank.recent} for rank in ranks]
    return sorted(set.intersection(*rows)) if rows else []


def _by_step(rank: RankMeasured) -> Mapping[int, MeasuredStep]:
    return {step.step: step for step in rank.recent}


def _action(span: MeasuredSpan, rank: RankMeasured) -> Action | None:
    if span.kind in ("P", "D", "S", "A"):
        return None
    if span.kind == "O":
        return Action("O")
    if span.kind == "G":
        shared = rank.stages[0].stage if rank.stages else 0  # synchronised with the rank's own, as far as the schedule knows
        return Action("G", span.stage if span.stage >= 0 else shared)
    return Action(span.kind, span.stage, span.index)  # type: ignore[arg-type]


class Sync(NamedTuple):
    """What a group of ranks needed to add up its gradients, in a median step."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]  # whose gradients; none for parameters that several stages use
    bytes: int
    buckets: int
    seconds: float  # while buckets were under way and everybody was there
    exposed_seconds: float  # of it after the last backward


def sync_seconds(ranks: Sequence[RankMeasured]) -> list[Sync]:
    """Every group's synchronisation of gradients. A bucket that nobody had to wait for may have been faster than it seems."""
    groups: dict[tuple[int, ...], list[Bucket]] = {}
    for rank in ranks:
        for members in {bucket.ranks for bucket in rank.buckets}:
            groups.setdefault(members, [bucket for bucket in rank.buckets if bucket.ranks == members])
    by_number = {rank.rank: rank for rank in ranks}
    found = []
    for members, buckets in sorted(groups.items()):
        present = [by_number[number] for number in members if number in by_number]
        rows = list(_sync_of_steps(members, present))
        if rows and len(present) == len(members):
            seconds, exposed = (median(column) for column in zip(*rows, strict=True))
            stages = tuple(sorted({bucket.stage for bucket in buckets if bucket.stage >= 0}))
            found.append(Sync(members, stages, sum(bucket.bytes for bucket in buckets), len(buckets), seconds, exposed))
    return found


def _sync_of_steps(members: tuple[int, ...], ranks: Sequence[RankMeasured]) -> Iterator[tuple[float, float]]:
    for step in _typical_steps(ranks):
        rows = []  # of each rank: its buckets of this group in order, and when it began to wait for all of them
        waiting = 0.0
        for rank in ranks:
            measured = next(one for one in rank.recent if one.step == step)
            own = [span for span in measured.spans if span.kind == "G" and rank.buckets[span.index].ranks == members]
            rows.append([(measured.unix_seconds + span.begin_seconds, measured.unix_seconds + span.end_seconds) for span in own])
            waits = [measured.unix_seconds + span.begin_seconds for span in measured.spans if span.kind == "S"]
            waiting = max([waiting, *waits])
        seconds = exposed = last = 0.0
        for same in zip(*rows, strict=False):
            begin, end = max(last, *(begun for begun, _ in same)), max(ended for _, ended in same)
            seconds += max(0.0, end - begin)
            exposed += max(0.0, end - max(begin, waiting))
            last = max(last, end)
        yield seconds, exposed


def _typical_steps(ranks: Sequence[RankMeasured]) -> list[int]:
    """Steps that all ranks have kept, without a run's first two (one warms up, one was counted) where there are others."""
    common = _common_steps(ranks)
    early = max((rank.first_step + 1 for rank in ranks), default=0)
    return [step for step in common if step > early] or common[-1:]


def transfer_seconds(ranks: Sequence[RankMeasured], plan: Plan) -> dict[tuple[int, int], tuple[float, int]]:
    """(sender, receiver) → seconds of a median transfer that was waited for, and its bytes; from the send to the end of the wait."""
    layout = Layout(plan)
    sent = {
        (rank.rank, step.step, span.kind, span.stage, span.index): step.unix_seconds + span.begin_seconds
        for rank in ranks
        for step in rank.recent
        for span in step.spans
        if span.kind in ("SF", "SB")
    }
    found: dict[tuple[int, int], list[float]] = defaultdict(list)
    for receiver in ranks:
        for step, span in [(one, span) for one in receiver.recent for span in one.spans]:
            if span.kind not in ("RF", "RB") or span.end_seconds - span.begin_seconds < _BLOCKED_SECONDS:
                continue
            kind, other = ("SF", span.stage - 1) if span.kind == "RF" else ("SB", span.stage + 1)
            replica = plan.stages[other].replicas[layout.route[other][span.index]]  # the ranks at the other end that had the micro-batch
            for sender in map(layout.rank_of_device, replica.devices):
                begun = sent.get((sender, step.step, kind, other, span.index))
                if begun is not None and sender != receiver.rank:
                    found[sender, receiver.rank].append(step.unix_seconds + span.end_seconds - begun)
    sizes = {exchange.ranks: exchange for rank in ranks for exchange in rank.exchanges if exchange.kind == "send"}
    return {
        pair: (median(seconds), sizes[pair].bytes // sizes[pair].calls)
        for pair, seconds in found.items()
        if pair in sizes and median(seconds) > 0
    }


class Links(NamedTuple):
    """Constants of the cost model that say what links and collectives reach; None where nothing told."""

    host_link_efficiency: float | None
    network_efficiency: float | None
    collective_seconds: float | None
    sync_overlap: float | None

    def constants(self) -> dict[str, float]:
        """Those that are known, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def measure_links(cluster: Cluster, plan: Plan, ranks: Sequence[RankMeasured]) -> Links:
    """What links and collectives reached in this run."""
    devices = [device_index(cluster)[name] for name in Layout(plan).devices]
    syncs = sync_seconds(ranks)
    entering = min((rank.seconds["agree"] for rank in ranks), default=0.0) if len(ranks) > 1 else None
    work: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # inside one host? → (seconds at the link's rate, seconds taken)
    for sync in syncs:
        if sync.bytes >= _LEAST_BYTES:
            members = [devices[number] for number in sync.ranks]
            taken = max(sync.seconds - sync.buckets * (entering or 0.0), 0.1 * sync.seconds)
            part = 2 * (len(members) - 1) / len(members)
            work[_one_host(members)].append((part * sync.bytes / _slowest_rate(cluster, members), taken))
    for (sender, receiver), (seconds, nbytes) in transfer_seconds(ranks, plan).items():
        if nbytes >= _LEAST_BYTES:
            pair = [devices[sender], devices[receiver]]
            work[_one_host(pair)].append((nbytes / _slowest_rate(cluster, pair), seconds))
    return Links(_efficiency(work[True]), _efficiency(work[False]), entering, _overlap(ranks, syncs))


def _efficiency(work: Sequence[tuple[float, float]]) -> float | None:
    taken = sum(seconds for _, seconds in work)
    return min(1.5, max(0.001, sum(least for least, _ in work) / taken)) if taken else None


def _overlap(ranks: Sequence[RankMeasured], syncs: Sequence[Sync]) -> float | None:
    """The part of a backward that hid synchronisation; None where there was nothing to hide."""
    hidden = [max(0.0, sync.seconds - sync.exposed_seconds) for sync in syncs]
    backwards = [stage.backward_seconds for rank in ranks for stage in rank.stages if stage.backward_seconds]
    if not syncs or not backwards:
        return None
    part = min(1.0, max(hidden) / median(backwards))
    return part if part > 0.05 else 0.0


def _one_host(devices: Sequence[Device]) -> bool:
    return len({device.host for device in devices}) == 1


def _slowest_rate(cluster: Cluster, devices: Sequence[Device]) -> float:
    """Of the links that join these devices, the least bytes per second."""
    rates = [cluster.link_between(a, b).bytes_per_s for a in devices for b in devices if a.name != b.name]
    crossing = {device.site for device in devices} if len({device.site for device in devices}) > 1 else set()
    return min([*rates, *(site_index(cluster)[site].link.bytes_per_s for site in crossing)])


def link_name(cluster: Cluster | None, a: str, b: str) -> str:
    """What the cost model calls the link between two devices; their names where nothing is known of the cluster."""
    if cluster is None:
        return f"{a}–{b}"
    devices = device_index(cluster)
    return _INSIDE_HOSTS if devices[a].host == devices[b].host else cluster.link_between(devices[a], devices[b]).name


def exchange_bytes(cluster: Cluster | None, plan: Plan, exchange: Exchange) -> dict[str, float]:
    """Bytes that an exchange put on every link, by what its collective sends."""
    names = [Layout(plan).devices[number] for number in exchange.ranks]
    if exchange.kind == "send":
        return {link_name(cluster, *names): float(exchange.bytes)}
    if exchange.kind == "all_to_all" or cluster is None:  # each pair of members by itself
        members = len(names)
        pair = exchange.bytes / members * _PASSES.get(exchange.kind, 1.0)
        pairs: dict[str, float] = defaultdict(float)
        for i, a in enumerate(names):
            for b in names[i + 1 :]:
                pairs[link_name(cluster, a, b)] += 2 * pair
        return dict(pairs)
    span = span_of(cluster, [[device_index(cluster)[name] for name in names]], Calibration())
    return collective_bytes(span, float(exchange.bytes), _PASSES[exchange.kind])


def link_bytes(cluster: Cluster | None, plan: Plan, ranks: Sequence[RankMeasured]) -> dict[str, float]:
    """Bytes a step put on every link, as they were counted: each group's collectives once, each transfer where it was sent."""
    carried: dict[str, float] = defaultdict(float)
    for exchange in distinct_exchanges(ranks):
        for name, nbytes in exchange_bytes(cluster, plan, exchange).items():
            carried[name] += nbytes
    return dict(carried)


def distinct_exchanges(ranks: Sequence[RankMeasured]) -> list[Exchange]:
    """Every exchange of a step once: all members of a group have counted it."""
    found: Mapping[tuple[str, tuple[int, ...]], Exchange] = {
        (exchange.kind, exchange.ranks): exchange
        for rank in ranks
        for exchange in sorted(rank.exchanges, key=lambda exchange: exchange.bytes)
        if len(exchange.ranks) > 1
    }
    return [found[key] for key in sorted(found)]
