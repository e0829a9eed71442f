"""Measuring: when a rank computed, waited and exchanged, kept for the last steps and written to the run's directory for reports.

The hot path is two reads of a clock and one append an action. Everything else is worked out when somebody wants to know.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from atoll.errors import JobError
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.schedule import Action
from atoll.runtime.modes.lockstep.trace import TraceSpan
from atoll.runtime.run_directory import RunDirectory

__all__ = [
    "Bucket",
    "Exchange",
    "MeasuredSpan",
    "MeasuredStep",
    "RankMeasured",
    "Recorder",
    "StageMeasured",
    "executed_spans",
    "read_measured",
    "write_measured",
]

_KEPT_STEPS = 20
_WRITTEN_SPANS = 20_000  # at most, so that a file stays small
_PARTS = {
    "F": "forward",
    "B": "backward",
    "RF": "receive",
    "RB": "receive",
    "SF": "send",
    "SB": "send",
    "P": "send",
    "D": "data",
    "S": "synchronise",
    "A": "agree",
    "O": "optimizer",
}
"""What a span's kind counts as. Beside the schedule's own: P posts a receive, D reads data, S waits for gradients, A agrees on loss and
norm."""


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
    """What one rank measured: medians over its last steps, sums over all."""

    format: int = 1
    rank: int
    device: str
    accelerator: str  # PyTorch's name of what it computed on
    threads: int  # that computed, on a CPU
    first_step: int  # of this process: a resumed run begins later
    steps: int  # measured
    step_seconds: float  # median
    seconds: dict[str, float]  # of a median step, by part; "other" is what is left
    total_seconds: dict[str, float]  # of all steps
    stages: tuple[StageMeasured, ...]
    exchanges: tuple[Exchange, ...]  # of one step
    buckets: tuple[Bucket, ...]
    peak_memory_bytes: int | None
    recent: tuple[MeasuredStep, ...]


class _Marks(NamedTuple):
    """A step as it was recorded; marks are times of the host, or events of an accelerator."""

    step: int
    began: float
    origin: Any
    rows: list[tuple[str, int, int, Any, Any]]
    seconds: float


class Recorder:
    """What one rank did, step by step."""

    def __init__(self, device_type: str = "cpu") -> None:
        self._on_host = device_type == "cpu"
        self.now: Callable[[], Any] = time.perf_counter if self._on_host else _event_recorder(device_type)
        self._recent: deque[_Marks] = deque()
        self._rows: list[tuple[str, int, int, Any, Any]] = []
        self._began, self._origin = 0.0, None
        self._totals = dict.fromkeys((*_PARTS.values(), "other"), 0.0)  # of steps that are no longer kept
        self.steps, self.first_step = 0, 0
        self.exchanges: tuple[Exchange, ...] = ()
        self.counted_step = -1  # the one that was looked at, which took longer

    def begin(self) -> None:
        """A step begins."""
        self._rows = []
        self._began = time.perf_counter()
        self._origin = self.now()

    def add(self, kind: str, stage: int, index: int, begin: Any) -> None:
        """Something that began at `begin` (which `now` gave) has just ended."""
        self._rows.append((kind, stage, index, begin, self.now()))

    def end(self, step: int, seconds: float) -> None:
        """The step has ended."""
        self._recent.append(_Marks(step, self._began, self._origin, self._rows, seconds))
        self.steps += 1
        self.first_step = self.first_step or step
        if len(self._recent) > _KEPT_STEPS:
            self._forget(self._recent.popleft())

    def _forget(self, marks: _Marks) -> None:
        """Keep a step's sums alone."""
        if not self._on_host:
            self._add_parts(_parts(self._resolved(marks)))
            return
        parts, named = dict.fromkeys(_PARTS.values(), 0.0), _PARTS
        for kind, _, _, begin, end in marks.rows:
            if kind in named:
                parts[named[kind]] += end - begin
        self._add_parts(parts | {"other": max(0.0, marks.seconds - sum(parts.values()))})

    def _add_parts(self, parts: Mapping[str, float]) -> None:
        for part, seconds in parts.items():
            self._totals[part] += seconds

    def _resolved(self, marks: _Marks) -> MeasuredStep:
        if self._on_host:
            rows = [(kind, stage, index, begin - marks.began, end - marks.began) for kind, stage, index, begin, end in marks.rows]
        else:
            since = marks.origin.elapsed_time  # in milliseconds
            rows = [(kind, stage, index, since(begin) / 1e3, since(end) / 1e3) for kind, stage, index, begin, end in marks.rows]
        unix = time.time() - time.perf_counter() + marks.began
        spans = tuple(MeasuredSpan(*row) for row in rows)
        return MeasuredStep(step=marks.step, unix_seconds=unix, seconds=marks.seconds, spans=spans)

    def measured(
        self, layout: Layout, rank: int, *, accelerator: str, threads: int, buckets: Sequence[Bucket], memory: int | None
    ) -> RankMeasured:
        """Everything so far; at least one step must have ended."""
        recent = [self._resolved(marks) for marks in self._recent]
        typical = _typical(recent, {self.first_step, self.counted_step})
        totals = Counter(self._totals)
        for step in recent:
            totals.update(_parts(step))
        return RankMeasured(
            rank=rank,
            device=layout.devices[rank],
            accelerator=accelerator,
            threads=threads,
            first_step=self.first_step,
            steps=self.steps,
            step_seconds=median(step.seconds for step in typical),
            seconds=_median_parts(typical),
            total_seconds=dict(totals),
            stages=_stages(layout, rank, typical),
            exchanges=self.exchanges,
            buckets=tuple(buckets),
            peak_memory_bytes=memory,
            recent=tuple(_last(recent)),
        )


def _event_recorder(device_type: str) -> Callable[[], Any]:
    """An accelerator works behind the host, so its own events tell the time; they are read when they have long passed."""
    import torch  # reports are read without it

    def now() -> Any:
        event = torch.Event(device=device_type, enable_timing=True)
        event.record()
        return event

    return now


def _typical(steps: Sequence[MeasuredStep], unusual: set[int]) -> list[MeasuredStep]:
    """The steps that stand for all: not the first, which warms up, nor the one that was counted, if there are others."""
    return [step for step in steps if step.step not in unusual] or list(steps[-1:])


def _parts(step: MeasuredStep) -> dict[str, float]:
    parts = dict.fromkeys((*_PARTS.values(), "other"), 0.0)
    for span in step.spans:
        part = _PARTS.get(span.kind)
        if part is not None:  # buckets run beside everything else
            parts[part] += span.end_seconds - span.begin_seconds
    parts["other"] = max(0.0, step.seconds - sum(parts.values()))
    return parts


def _median_parts(steps: Sequence[MeasuredStep]) -> dict[str, float]:
    rows = [_parts(step) for step in steps]
    return {part: median(row[part] for row in rows) for part in rows[0]}


def _stages(layout: Layout, rank: int, steps: Sequence[MeasuredStep]) -> tuple[StageMeasured, ...]:
    """Each of the rank's stages, by its most common size of micro-batch."""
    measured = []
    for place in layout.places(rank):
        own = layout.micro_batches_of(place.stage, place.replica)
        sizes = {m: stop - start for m in own for start, stop in [layout.pieces(place.stage, m)[place.lane]]}
        samples = Counter(sizes.values()).most_common(1)[0][0] if sizes else 0
        seconds: dict[str, list[float]] = {"F": [], "B": []}
        for span in (span for step in steps for span in step.spans):
            if span.stage == place.stage and span.kind in seconds and sizes.get(span.index) == samples:
                seconds[span.kind].append(span.end_seconds - span.begin_seconds)
        measured.append(
            StageMeasured(
                stage=place.stage,
                replica=place.replica,
                lane=place.lane,
                tensor=place.tensor,
                samples=samples,
                micro_batches=len(own),
                forward_seconds=median(seconds["F"] or [0.0]),
                backward_seconds=median(seconds["B"] or [0.0]),
            )
        )
    return tuple(measured)


def _last(steps: Sequence[MeasuredStep]) -> Iterable[MeasuredStep]:
    """As many of the last steps as may be written, at least one."""
    kept: list[MeasuredStep] = []
    spans = 0
    for step in reversed(steps):
        spans += len(step.spans)
        if kept and spans > _WRITTEN_SPANS:
            break
        kept.insert(0, step)
    return kept


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
