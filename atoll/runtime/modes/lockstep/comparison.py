"""Predicted against measured: the pieces of a step laid side by side. Pure: plan, prediction and measurements in, rows out."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median

import msgspec

from atoll.cluster import Cluster
from atoll.cost import Cost
from atoll.plan import Plan
from atoll.runtime.modes.lockstep.exchange_times import Sync, distinct_exchanges, link_bytes, link_name, sync_seconds, transfer_seconds
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.measurement import Exchange, RankMeasured
from atoll.runtime.report import Compared
from atoll.units import format_seconds

__all__ = ["CollectiveReport", "Comparison", "Difference", "LinkReport", "StageReport", "compare"]

_INSIDE = "inside forward and backward"
_COMPUTE = ("compute", "recompute", "tensor", "expert", "shard", "codec")  # of the prediction: what forward and backward contain
_ADVICE = {
    "data": "Reading data takes its time: make samples cheaper to load, or let the data set keep them in memory.",
    "waiting": "Devices wait for one another: their shares do not fit their speeds, or links are slower than the cluster file says.",
    "synchronise": "Gradients take longer to add up than predicted: look at the link's rate in the cluster file.",
    "sending": "Starting transfers takes long: micro-batches are small, or the processors are shared with other programs.",
    "optimizer": "The optimizer takes longer than predicted; `fused=True` or `foreach=True` often helps.",
    "other": "It passed outside the model: callbacks, checkpoints, or other programs on the machine.",
    "compute": "The devices compute at another speed than the cluster file says, or share their processors with others.",
}


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """One stage; forward and backward are of one micro-batch on its slowest rank, waiting is of a step."""

    stage: int
    devices: list[str]
    micro_batch_samples: int
    micro_batches: int
    forward_seconds: Compared
    backward_seconds: Compared
    wait_seconds: Compared  # for other stages and replicas: the bubble


class CollectiveReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one group exchanges in a step."""

    what: str
    kind: str
    devices: list[str]
    calls: int
    bytes: int
    seconds: Compared
    exposed_seconds: float | None = None  # of it, what nothing hid


class LinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a link carries in a step, and for how long it is busy with transfers and synchronisation."""

    name: str
    bytes: Compared
    seconds: Compared


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """The piece of a step whose prediction was furthest off."""

    what: str
    seconds: Compared
    sentence: str


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All rows."""

    breakdown: dict[str, Compared] = {}
    stages: list[StageReport] = []
    collectives: list[CollectiveReport] = []
    links: list[LinkReport] = []
    link_bytes: dict[str, float] = {}
    memory_bytes: dict[str, Compared] = {}
    differs_most: Difference | None = None


def compare(
    plan: Plan, cluster: Cluster | None, predicted: Cost | None, ranks: Sequence[RankMeasured], *, measured_step: float | None
) -> Comparison:
    """Everything that can be compared, with what is there."""
    whole = len({rank.device for rank in ranks}) == Layout(plan).world_size
    syncs = sync_seconds(ranks) if whole else []
    breakdown = _breakdown(predicted, ranks, syncs)
    carried = link_bytes(cluster, plan, ranks) if whole else {}
    collectives = _collectives(plan, predicted, ranks, syncs)
    inside = sum(row.calls for row in collectives if row.what == _INSIDE)
    return Comparison(
        breakdown=breakdown,
        stages=[_stage(plan, s, predicted, ranks, syncs) for s in range(len(plan.stages))],
        collectives=collectives,
        links=_links(plan, cluster, predicted, carried, ranks, syncs),
        link_bytes=carried,
        memory_bytes=_memory(plan, predicted, ranks),
        differs_most=_most(breakdown, measured_step, inside),
    )


def _waited(rank: RankMeasured, ranks: Sequence[RankMeasured], syncs: Sequence[Sync]) -> float:
    """Seconds of a step that a rank waited for others: for what they send, and where all meet, beyond what the exchange itself took."""
    agreeing = min(one.seconds["agree"] for one in ranks)
    exposed = sum(sync.exposed_seconds for sync in syncs if rank.rank in sync.ranks)
    meeting = max(0.0, rank.seconds["agree"] - agreeing) + max(0.0, rank.seconds["synchronise"] - exposed)
    return rank.seconds["receive"] + meeting


def _breakdown(predicted: Cost | None, ranks: Sequence[RankMeasured], syncs: Sequence[Sync]) -> dict[str, Compared]:
    """The step of the rank that computes longest, by what it was spent on."""
    expected = predicted.breakdown if predicted is not None else None

    def compared(measured: float | None, *names: str) -> Compared:
        return Compared(measured=measured, predicted=sum(expected.get(name, 0.0) for name in names) if expected is not None else None)

    if not ranks:
        return {}
    busiest = max(ranks, key=lambda rank: rank.seconds["forward"] + rank.seconds["backward"])
    seconds = busiest.seconds
    exposed = min(seconds["synchronise"], sum(sync.exposed_seconds for sync in syncs if busiest.rank in sync.ranks))
    agreeing = min(rank.seconds["agree"] for rank in ranks)
    return {
        "compute": compared(seconds["forward"] + seconds["backward"], *_COMPUTE),
        "waiting": compared(_waited(busiest, ranks, syncs), "bubble", "transfer", "jitter"),
        "synchronise": compared(exposed, "sync"),
        "sending": compared(seconds["send"]),
        "optimizer": compared(seconds["optimizer"], "optimizer"),
        "data": compared(seconds["data"]),
        "other": compared(seconds["other"] + agreeing, "overhead"),
    }


def _stage(plan: Plan, s: int, predicted: Cost | None, ranks: Sequence[RankMeasured], syncs: Sequence[Sync]) -> StageReport:
    price = predicted.stages[s] if predicted is not None else None
    own = [(rank, stage) for rank in ranks for stage in rank.stages if stage.stage == s and stage.samples]
    slowest = max((stage for _, stage in own), key=lambda stage: stage.forward_seconds + stage.backward_seconds, default=None)
    waits = [_waited(rank, ranks, syncs) for rank, _ in own]
    return StageReport(
        stage=s,
        devices=list(plan.stages[s].devices),
        micro_batch_samples=slowest.samples if slowest else 0,
        micro_batches=slowest.micro_batches if slowest else 0,
        forward_seconds=Compared(measured=slowest.forward_seconds if slowest else None, predicted=price.forward_seconds if price else None),
        backward_seconds=Compared(
            measured=slowest.backward_seconds if slowest else None, predicted=price.backward_seconds if price else None
        ),
        wait_seconds=Compared(measured=median(waits) if waits else None, predicted=_predicted_wait(predicted, s)),
    )


def _predicted_wait(predicted: Cost | None, s: int) -> float | None:
    """What a stage's busiest replica does not work, of what is left of the step after synchronisation and the optimizer."""
    if predicted is None:
        return None
    rest = sum(predicted.breakdown.get(name, 0.0) for name in ("sync", "optimizer", "overhead"))
    wait = predicted.step_seconds - rest - predicted.stages[s].busy_seconds
    return wait if wait > 1e-9 * predicted.step_seconds else 0.0


def _collectives(plan: Plan, predicted: Cost | None, ranks: Sequence[RankMeasured], syncs: Sequence[Sync]) -> list[CollectiveReport]:
    devices = Layout(plan).devices
    rows = []
    for sync in syncs:
        price = sum(predicted.stages[s].sync_seconds for s in sync.stages) if predicted is not None and sync.stages else None
        of = f"stage {' and '.join(map(str, sync.stages))}" if sync.stages else "shared weights"
        rows.append(
            CollectiveReport(
                what=f"gradients of {of}",
                kind="all_reduce",
                devices=[devices[number] for number in sync.ranks],
                calls=sync.buckets,
                bytes=sync.bytes,
                seconds=Compared(measured=sync.seconds, predicted=price),
                exposed_seconds=sync.exposed_seconds,
            )
        )
    for exchange in distinct_exchanges(ranks):
        if exchange.kind != "send":
            rows += _other_collective(exchange, devices, ranks, syncs)
    return rows


def _other_collective(
    exchange: Exchange, devices: Sequence[str], ranks: Sequence[RankMeasured], syncs: Iterable[Sync]
) -> list[CollectiveReport]:
    """What a group exchanges beside its gradients' buckets; only the last exchange of a step was timed by itself."""
    own = [sync for sync in syncs if sync.ranks == exchange.ranks and exchange.kind == "all_reduce"]
    calls, nbytes = exchange.calls - sum(sync.buckets for sync in own), exchange.bytes - sum(sync.bytes for sync in own)
    if calls <= 0 or nbytes <= 0:
        return []
    last = exchange.kind == "all_reduce" and len(exchange.ranks) == len(devices) and calls == 1
    return [
        CollectiveReport(
            what="loss and norm" if last else _INSIDE,
            kind=exchange.kind,
            devices=[devices[number] for number in exchange.ranks],
            calls=calls,
            bytes=nbytes,
            seconds=Compared(measured=min(rank.seconds["agree"] for rank in ranks) if last else None),
        )
    ]


def _links(
    plan: Plan,
    cluster: Cluster | None,
    predicted: Cost | None,
    carried: dict[str, float],
    ranks: Sequence[RankMeasured],
    syncs: Sequence[Sync],
) -> list[LinkReport]:
    expected = predicted.link_bytes if predicted is not None else {}
    busy = _busy_links(plan, cluster, ranks, syncs)
    planned = _planned_busy_links(plan, cluster, predicted)
    return [
        LinkReport(
            name=name,
            bytes=Compared(measured=carried.get(name), predicted=expected.get(name)),
            seconds=Compared(measured=busy.get(name), predicted=planned.get(name)),
        )
        for name in sorted(carried.keys() | expected.keys())
    ]


def _busy_links(plan: Plan, cluster: Cluster | None, ranks: Sequence[RankMeasured], syncs: Sequence[Sync]) -> dict[str, float]:
    """Seconds of a step that transfers and synchronisation took on each link; where several go at once, all are counted."""
    devices = Layout(plan).devices
    calls = {exchange.ranks: exchange.calls for exchange in distinct_exchanges(ranks) if exchange.kind == "send"}
    busy: dict[str, float] = defaultdict(float)
    for (sender, receiver), (seconds, _) in transfer_seconds(ranks, plan).items():
        busy[link_name(cluster, devices[sender], devices[receiver])] += seconds * calls[sender, receiver]
    for sync in syncs:
        busy[_slowest_link(plan, cluster, [devices[number] for number in sync.ranks])] += sync.seconds
    return dict(busy)


def _planned_busy_links(plan: Plan, cluster: Cluster | None, predicted: Cost | None) -> dict[str, float]:
    if predicted is None:
        return {}
    busy: dict[str, float] = defaultdict(float)
    for s, price in enumerate(predicted.stages):
        stage = plan.stages[s]
        if s + 1 < len(plan.stages):
            ends = stage.replicas[0].devices[0], plan.stages[s + 1].replicas[0].devices[0]
            if ends[0] != ends[1]:
                busy[link_name(cluster, *ends)] += 2 * plan.micro_batches * price.transfer_seconds  # there and back
        if price.sync_seconds:
            busy[_slowest_link(plan, cluster, list(stage.devices))] += price.sync_seconds
    return dict(busy)


def _slowest_link(plan: Plan, cluster: Cluster | None, names: Sequence[str]) -> str:
    """The link that a collective of these devices waits for: the slowest between any two."""
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    if cluster is None:
        return link_name(cluster, *pairs[0])
    slowest = min(pairs, key=lambda pair: cluster.link_between(*map(cluster.device, pair)).bytes_per_s)
    return link_name(cluster, *slowest)


def _memory(plan: Plan, predicted: Cost | None, ranks: Sequence[RankMeasured]) -> dict[str, Compared]:
    measured = {rank.device: rank.peak_memory_bytes for rank in ranks}
    expected = {device: use.total_bytes for device, use in predicted.memory.items()} if predicted is not None else {}
    return {
        device: Compared(measured=measured.get(device), predicted=expected.get(device))
        for device in Layout(plan).devices
        if device in measured or device in expected
    }


def _most(breakdown: dict[str, Compared], measured_step: float | None, inside: int) -> Difference | None:
    """The part of the step that differs most from its prediction, in seconds; `inside` are exchanges in forward and backward."""
    known = {name: row for name, row in breakdown.items() if row.measured is not None and row.predicted is not None}
    if not known or measured_step is None:
        return None
    what, row = max(known.items(), key=lambda item: abs((item[1].measured or 0.0) - (item[1].predicted or 0.0)))
    assert row.measured is not None, "only such rows are looked at"
    assert row.predicted is not None, "only such rows are looked at"
    sentence = f"Most of the difference is in {what}: {format_seconds(row.measured)}, predicted {format_seconds(row.predicted)}."
    if row.measured > row.predicted and row.measured - row.predicted > 0.05 * measured_step:
        sentence += f" {_ADVICE[what]}"
        if what == "compute" and inside:
            sentence += f" {inside} exchanges inside forward and backward are part of it: slow links make sharding and tensor splits dear."
    return Difference(what=what, seconds=row, sentence=sentence)
