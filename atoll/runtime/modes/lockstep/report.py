"""The report of a lockstep run: what was predicted against what the ranks measured, the pieces of a step side by side. Without PyTorch."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

import msgspec

from atoll.cluster import Cluster
from atoll.cost import Cost
from atoll.plan import Plan
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.measurement import (
    Exchange,
    RankMeasured,
    distinct_exchanges,
    link_bytes,
    link_name,
    read_measured,
    sync_seconds,
    transfer_seconds,
)
from atoll.runtime.report import Compared, ModeReport, ReportSection, ReportTable, RunSummary, figures, read_prediction
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_bytes, format_seconds

__all__ = ["report_lockstep"]

_MOST_DEVICES = 16
_INSIDE = "inside forward and backward"
_COMPUTE = ("compute", "recompute", "tensor", "expert", "shard", "codec")  # of the prediction: what forward and backward contain
_ADVICE = {
    "data": "Reading data takes its time: make samples cheaper to load, or let the data set keep them in memory.",
    "waiting": "Devices wait for one another: their shares do not fit their speeds, or links are slower than the cluster file says.",
    "synchronise": "Gradients take longer to add up than predicted: look at the link's rate in the cluster file.",
    "sending": "Starting transfers takes long: micro-batches are small, or the processors are shared with other programs.",
    "optimizer": "The optimizer takes longer than predicted; `fused=True` or `foreach=True` often helps.",
    "other": "It passed outside the model: callbacks, checkpoints, or other programs on the machine.",
    "compute": "The devices compute at another speed than was predicted, or share their processors with others.",
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
    advice: str = ""  # where it is longer than predicted by something that counts


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """All rows."""

    breakdown: dict[str, Compared] = {}
    stages: list[StageReport] = []
    collectives: list[CollectiveReport] = []
    links: list[LinkReport] = []
    link_bytes: dict[str, float] = {}
    memory_bytes: dict[str, Compared] = {}
    differs_most: Difference | None = None


_Found = tuple[Plan, Cluster | None, Cost | None, list[RankMeasured]]


def report_lockstep(directory: RunDirectory, summary: RunSummary) -> ModeReport:
    """Sections, where prediction and reality differ most, and what is missing to say more."""
    missing: list[str] = []
    found = _found(directory, missing)
    comparison, predicted = Comparison(), None
    if found is not None and (summary.steps_since_start or found[3] or summary.step_seconds is None):
        comparison = _Comparer(*found).comparison(summary.step_seconds)
        predicted = found[2].step_seconds if found[2] is not None else None
    elif found is not None:  # steps were made, but all of them under a plan before this one
        missing.append("plan.json: no step was made under this plan, so there is nothing to compare")
    return ModeReport(
        sections=_sections(comparison),
        predicted_step_seconds=predicted,
        conclusion=_conclusion(directory, summary, predicted, comparison),
        missing=tuple(missing),
    )


def _found(directory: RunDirectory, missing: list[str]) -> _Found | None:
    """What there is of plan, cluster, prediction and measurements; `missing` gets a sentence for each that is not there."""
    if not (directory.path / "plan.json").exists():
        missing.append("plan.json: without it nothing can be compared")
        return None
    plan = directory.plan()
    cluster = directory.load_cluster()
    if cluster is None or cluster.name != plan.cluster:
        missing.append(f"cluster.toml: the devices of {plan.cluster} are not known, so links are called by their devices")
        cluster = None
    predicted = read_prediction(directory)
    if predicted is None or len(predicted.stages) != len(plan.stages):
        missing.append("predicted.json: nothing was predicted; `atoll run` does where --cluster describes the plan's devices")
        predicted = None
    ranks = read_measured(directory)
    absent = sorted({device for stage in plan.stages for device in stage.devices} - {rank.device for rank in ranks})
    if absent:
        shown = ", ".join(absent[:4]) + (f" and {len(absent) - 4} more" if len(absent) > 4 else "")
        missing.append(f"measured/: {shown} have written nothing; ranks write after some seconds of training and when they end")
    elif any(not rank.exchanges and len(ranks) > 1 for rank in ranks):
        missing.append("measured/: no exchanges were counted; a rank's second step is")
    return plan, cluster, predicted, ranks


def _conclusion(directory: RunDirectory, summary: RunSummary, predicted: float | None, comparison: Comparison) -> str:
    if summary.step_seconds is None or predicted is None or comparison.differs_most is None:
        return ""
    ratio = summary.step_seconds / predicted
    if 0.9 <= ratio <= 1.1:
        agree = f"Prediction and reality agree: a step took {ratio - 1:+.0%} against the prediction."
        return agree + _part_apart(comparison.differs_most, summary.step_seconds)
    times = f"{ratio:.2g}" if ratio < 99.5 else "over 100"
    how = f"{times} times as long as predicted" if ratio >= 1 else f"{ratio:.0%} of the time predicted"
    calibration = directory.path / "calibration.json"
    differs = f"{comparison.differs_most.sentence} {comparison.differs_most.advice}".rstrip()
    advice = f" To plan with what was measured: `atoll plan … --calibration {calibration}`." if calibration.exists() else ""
    return f"A step took {how}. {differs}{advice}"


def _part_apart(most: Difference, step_seconds: float) -> str:
    """The part that differs most, where others make up for more than a tenth of the step."""
    measured, predicted = most.seconds.measured or 0.0, most.seconds.predicted or 0.0
    if abs(measured - predicted) <= 0.1 * step_seconds:
        return ""
    figures = f"{format_seconds(measured)}, predicted {format_seconds(predicted)}"
    return f" Its parts were predicted less well, {most.what} least: {figures}."


def _sections(found: Comparison) -> tuple[ReportSection, ...]:
    return (
        ReportSection(facts={"breakdown": found.breakdown}, tables=_breakdown_table(found), brief=True),
        ReportSection(facts={"stages": found.stages}, tables=_stages_table(found)),
        ReportSection(facts={"collectives": found.collectives}, tables=_collectives_table(found)),
        ReportSection(facts={"links": found.links, "link_bytes": found.link_bytes}, tables=_links_table(found)),
        ReportSection(facts={"memory_bytes": found.memory_bytes}, tables=_memory_table(found)),
        ReportSection(facts={"differs_most": found.differs_most}),
    )


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> tuple[ReportTable, ...]:
    return (ReportTable(title=title, columns=columns, rows=tuple(rows)),) if rows else ()


def _rows(rows: dict[str, Compared], form: Callable[[float], str] = format_seconds) -> list[tuple[str, ...]]:
    return [(name, *figures(row, form)) for name, row in rows.items()]


def _breakdown_table(found: Comparison) -> tuple[ReportTable, ...]:
    told = {name: row for name, row in found.breakdown.items() if row.measured or row.predicted}
    return _table("A step, on the busiest device", ("", "measured", "predicted", ""), _rows(told))


def _stages_table(found: Comparison) -> tuple[ReportTable, ...]:
    if all(stage.forward_seconds.measured is None for stage in found.stages):
        return ()
    columns = ("stage", "samples", "forward", "predicted", "", "backward", "predicted", "", "waiting", "predicted")
    rows: list[tuple[str, ...]] = []
    for stage in found.stages:
        size = f"{stage.micro_batches} × {stage.micro_batch_samples}"
        both = (*figures(stage.forward_seconds), *figures(stage.backward_seconds))
        rows.append((str(stage.stage), size, *both, *figures(stage.wait_seconds)[:2]))
    return _table("Stages: a micro-batch forward and backward, and waiting in a step", columns, rows)


def _collectives_table(found: Comparison) -> tuple[ReportTable, ...]:
    columns = ("", "", "devices", "calls", "bytes", "measured", "predicted", "", "not hidden")
    rows: list[tuple[str, ...]] = []
    for row in found.collectives:
        exposed = "" if row.exposed_seconds is None else format_seconds(row.exposed_seconds)
        sizes = (str(len(row.devices)), f"{row.calls:,}", format_bytes(row.bytes))
        rows.append((row.what, row.kind.replace("_", "-"), *sizes, *figures(row.seconds), exposed))
    return _table("Collectives of a step", columns, rows)


def _links_table(found: Comparison) -> tuple[ReportTable, ...]:
    rows = [(link.name, *figures(link.bytes, format_bytes), *figures(link.seconds)) for link in found.links]
    return _table("Links, a step", ("", "bytes", "predicted", "", "busy", "predicted", ""), rows)


def _memory_table(found: Comparison) -> tuple[ReportTable, ...]:
    rows = _rows(dict(list(found.memory_bytes.items())[:_MOST_DEVICES]), format_bytes)
    if len(found.memory_bytes) > _MOST_DEVICES:
        rows.append((f"… and {len(found.memory_bytes) - _MOST_DEVICES} more", "", "", ""))
    return _table("Memory at the peak (on a CPU, of the whole process)", ("", "measured", "predicted", ""), rows)


class _Comparer:
    """Lays the pieces of a step side by side, with what is there."""

    def __init__(self, plan: Plan, cluster: Cluster | None, predicted: Cost | None, ranks: Sequence[RankMeasured]) -> None:
        self.plan, self.cluster, self.predicted, self.ranks = plan, cluster, predicted, ranks
        self.devices = Layout(plan).devices
        whole = len({rank.device for rank in ranks}) == len(self.devices)
        self.syncs = sync_seconds(ranks) if whole else []
        self.carried = link_bytes(cluster, plan, ranks) if whole else {}
        self.agreeing = min((rank.seconds["agree"] for rank in ranks), default=0.0)  # what the exchange itself takes

    def comparison(self, measured_step: float | None) -> Comparison:
        """Everything that can be compared."""
        breakdown, collectives = self._breakdown(), self._collectives()
        inside = sum(row.calls for row in collectives if row.what == _INSIDE)
        return Comparison(
            breakdown=breakdown,
            stages=[self._stage(s) for s in range(len(self.plan.stages))],
            collectives=collectives,
            links=self._links(),
            link_bytes=self.carried,
            memory_bytes=self._memory(),
            differs_most=_most(breakdown, measured_step, inside),
        )

    def _exposed(self, rank: RankMeasured) -> float:
        return sum(sync.exposed_seconds for sync in self.syncs if rank.rank in sync.ranks)

    def _waited(self, rank: RankMeasured) -> float:
        """Seconds of a step that a rank waited for others: for what they send, and where all meet, beyond what the exchange itself took."""
        meeting = max(0.0, rank.seconds["agree"] - self.agreeing) + max(0.0, rank.seconds["synchronise"] - self._exposed(rank))
        return rank.seconds["receive"] + meeting

    def _breakdown(self) -> dict[str, Compared]:
        """The step of the rank that computes longest, by what it was spent on."""
        expected = self.predicted.breakdown if self.predicted is not None else None

        def compared(measured: float, *names: str) -> Compared:
            return Compared(measured=measured, predicted=sum(expected.get(name, 0.0) for name in names) if expected is not None else None)

        if not self.ranks:
            return {}
        busiest = max(self.ranks, key=lambda rank: rank.seconds["forward"] + rank.seconds["backward"])
        seconds = busiest.seconds
        return {
            "compute": compared(seconds["forward"] + seconds["backward"], *_COMPUTE),
            "waiting": compared(self._waited(busiest), "bubble", "transfer", "jitter"),
            "synchronise": compared(min(seconds["synchronise"], self._exposed(busiest)), "sync"),
            "sending": compared(seconds["send"]),
            "optimizer": compared(seconds["optimizer"], "optimizer"),
            "data": compared(seconds["data"]),
            "other": compared(seconds["other"] + self.agreeing, "overhead"),
        }

    def _stage(self, s: int) -> StageReport:
        price = self.predicted.stages[s] if self.predicted is not None else None
        own = [(rank, stage) for rank in self.ranks for stage in rank.stages if stage.stage == s and stage.samples]
        slowest = max((stage for _, stage in own), key=lambda stage: stage.forward_seconds + stage.backward_seconds, default=None)
        forward, backward = (
            Compared(measured=getattr(slowest, name, None), predicted=getattr(price, name, None))
            for name in ("forward_seconds", "backward_seconds")
        )
        waited = median(self._waited(rank) for rank, _ in own) if own else None
        return StageReport(
            stage=s,
            devices=list(self.plan.stages[s].devices),
            micro_batch_samples=slowest.samples if slowest else 0,
            micro_batches=slowest.micro_batches if slowest else 0,
            forward_seconds=forward,
            backward_seconds=backward,
            wait_seconds=Compared(measured=waited, predicted=self._predicted_wait(s)),
        )

    def _predicted_wait(self, s: int) -> float | None:
        """What a stage's busiest replica does not work, of what is left of the step after synchronisation and the optimizer."""
        if self.predicted is None:
            return None
        rest = sum(self.predicted.breakdown.get(name, 0.0) for name in ("sync", "optimizer", "overhead"))
        wait = self.predicted.step_seconds - rest - self.predicted.stages[s].busy_seconds
        return wait if wait > 1e-9 * self.predicted.step_seconds else 0.0

    def _collectives(self) -> list[CollectiveReport]:
        rows = []
        for sync in self.syncs:
            price = sum(self.predicted.stages[s].sync_seconds for s in sync.stages) if self.predicted is not None and sync.stages else None
            of = f"stage {' and '.join(map(str, sync.stages))}" if sync.stages else "shared weights"
            rows.append(
                CollectiveReport(
                    what=f"gradients of {of}",
                    kind="all_reduce",
                    devices=[self.devices[number] for number in sync.ranks],
                    calls=sync.buckets,
                    bytes=sync.bytes,
                    seconds=Compared(measured=sync.seconds, predicted=price),
                    exposed_seconds=sync.exposed_seconds,
                )
            )
        others = [self._other_collective(exchange) for exchange in distinct_exchanges(self.ranks) if exchange.kind != "send"]
        return rows + [row for row in others if row is not None]

    def _other_collective(self, exchange: Exchange) -> CollectiveReport | None:
        """What a group exchanges beside its gradients' buckets; only the last exchange of a step was timed by itself."""
        own = [sync for sync in self.syncs if sync.ranks == exchange.ranks and exchange.kind == "all_reduce"]
        calls, nbytes = exchange.calls - sum(sync.buckets for sync in own), exchange.bytes - sum(sync.bytes for sync in own)
        if calls <= 0 or nbytes <= 0:
            return None
        last = exchange.kind == "all_reduce" and len(exchange.ranks) == len(self.devices) and calls == 1
        return CollectiveReport(
            what="loss and norm" if last else _INSIDE,
            kind=exchange.kind,
            devices=[self.devices[number] for number in exchange.ranks],
            calls=calls,
            bytes=nbytes,
            seconds=Compared(measured=self.agreeing if last else None),
        )

    def _links(self) -> list[LinkReport]:
        expected = self.predicted.link_bytes if self.predicted is not None else {}
        busy, planned = self._busy_links(), self._planned_busy_links()
        return [
            LinkReport(
                name=name,
                bytes=Compared(measured=self.carried.get(name), predicted=expected.get(name)),
                seconds=Compared(measured=busy.get(name), predicted=planned.get(name)),
            )
            for name in sorted(self.carried.keys() | expected.keys())
        ]

    def _busy_links(self) -> dict[str, float]:
        """Seconds of a step that transfers and synchronisation took on each link; where several go at once, all are counted."""
        calls = {exchange.ranks: exchange.calls for exchange in distinct_exchanges(self.ranks) if exchange.kind == "send"}
        busy: dict[str, float] = defaultdict(float)
        for (sender, receiver), (seconds, _) in transfer_seconds(self.ranks, self.plan).items():
            busy[link_name(self.cluster, self.devices[sender], self.devices[receiver])] += seconds * calls[sender, receiver]
        for sync in self.syncs:
            busy[self._slowest_link([self.devices[number] for number in sync.ranks])] += sync.seconds
        return busy

    def _planned_busy_links(self) -> dict[str, float]:
        busy: dict[str, float] = defaultdict(float)
        for s, price in enumerate(self.predicted.stages if self.predicted is not None else ()):
            stage = self.plan.stages[s]
            if s + 1 < len(self.plan.stages):
                ends = stage.replicas[0].devices[0], self.plan.stages[s + 1].replicas[0].devices[0]
                if ends[0] != ends[1]:
                    busy[link_name(self.cluster, *ends)] += 2 * self.plan.micro_batches * price.transfer_seconds  # there and back
            if price.sync_seconds:
                busy[self._slowest_link(list(stage.devices))] += price.sync_seconds
        return busy

    def _slowest_link(self, names: Sequence[str]) -> str:
        """The link that a collective of these devices waits for: the slowest between any two."""
        pairs, cluster = list(combinations(names, 2)), self.cluster
        if cluster is None:
            return link_name(cluster, *pairs[0])
        return link_name(cluster, *min(pairs, key=lambda pair: cluster.link_between(*map(cluster.device, pair)).bytes_per_s))

    def _memory(self) -> dict[str, Compared]:
        measured = {rank.device: rank.peak_memory_bytes for rank in self.ranks}
        expected = {device: use.total_bytes for device, use in self.predicted.memory.items()} if self.predicted is not None else {}
        return {
            device: Compared(measured=measured.get(device), predicted=expected.get(device))
            for device in self.devices
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
    advice = ""
    if row.measured > row.predicted and row.measured - row.predicted > 0.05 * measured_step:
        advice = _ADVICE[what]
        if what == "compute" and inside:
            advice += f" {inside} exchanges inside forward and backward are part of it: slow links make sharding and tensor splits dear."
    return Difference(what=what, seconds=row, sentence=sentence, advice=advice)
