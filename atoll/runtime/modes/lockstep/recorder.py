"""What a rank measures: when it computed, waited and exchanged, for reports, traces and calibration.

The hot path is two reads of a clock and one append an action. Everything else is worked out when somebody wants to know. Exchanges,
whoever starts them (buckets, FSDP2, tensors, experts, sends), are counted where PyTorch dispatches them; all steps exchange the same, so
one is counted: it alone pays for being looked at.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.cost import Cost
from atoll.graph import Graph
from atoll.runtime.modes.lockstep.calibration import calibrate
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.measurement import (
    Bucket,
    Exchange,
    MeasuredSpan,
    MeasuredStep,
    RankMeasured,
    StageMeasured,
    executed_spans,
    read_measured,
    write_measured,
)
from atoll.runtime.modes.lockstep.schedule import Action, Schedule
from atoll.runtime.modes.lockstep.trace import chrome_trace, predict, table
from atoll.runtime.peak import peak_memory_bytes
from atoll.runtime.run_directory import RunDirectory

__all__ = ["ExchangeCounter", "MeasuredFile", "Recorder", "counted"]

_KEPT_STEPS = 20  # span by span
_KEPT_PARTS = 1000  # steps of which it is known what they were spent on
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
_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}
_SECOND = ("reduce_scatter", "all_to_all")  # their whole is what goes in, the second argument; that of the others the first
_PLAN = "plan.txt"  # beside what ranks measured: the plan they measured it under
_FIRST_SECONDS, _MOST_SECONDS = 2.0, 30.0  # until the file is written anew; twice as long each time


class _Marks(NamedTuple):
    """A step as it was recorded; marks are times of the host, or events of an accelerator."""

    step: int
    began: float
    origin: Any
    rows: list[tuple[str, int, int, Any, Any]]
    seconds: float


class Recorder:
    """What one rank did, step by step."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._on_host = device, device.type == "cpu"
        self.now: Callable[[], Any] = time.perf_counter if self._on_host else _event_recorder(device.type)
        self._recent: deque[_Marks] = deque()
        self._rows: list[tuple[str, int, int, Any, Any]] = []
        self._began, self._origin = 0.0, None
        self._totals: dict[str, float] = {}  # by part, of steps that are no longer kept
        self._earlier: deque[tuple[int, float, dict[str, float]]] = deque(maxlen=_KEPT_PARTS)  # of the last of them: step, seconds, parts
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
            passed = self._resolved(self._recent.popleft())
            self._earlier.append((passed.step, passed.seconds, _parts(passed)))
            _add(self._totals, passed)

    def _resolved(self, marks: _Marks) -> MeasuredStep:
        if self._on_host:
            rows = [(kind, stage, index, begin - marks.began, end - marks.began) for kind, stage, index, begin, end in marks.rows]
        else:
            since = marks.origin.elapsed_time  # in milliseconds
            rows = [(kind, stage, index, since(begin) / 1e3, since(end) / 1e3) for kind, stage, index, begin, end in marks.rows]
        unix = time.time() - time.perf_counter() + marks.began
        spans = tuple(MeasuredSpan(*row) for row in rows)
        return MeasuredStep(step=marks.step, unix_seconds=unix, seconds=marks.seconds, spans=spans)

    def measured(self, layout: Layout, rank: int, buckets: Sequence[Bucket]) -> RankMeasured:
        """Everything so far; at least one step must have ended."""
        recent = [self._resolved(marks) for marks in self._recent]
        unusual = {self.first_step, self.counted_step}
        typical = _typical(recent, unusual)
        spent = [(seconds, parts) for number, seconds, parts in self._earlier if number not in unusual]
        spent += [(step.seconds, _parts(step)) for step in typical]
        totals = self._totals.copy()
        for step in recent:
            _add(totals, step)
        return RankMeasured(
            rank=rank,
            device=layout.devices[rank],
            accelerator=self._device.type,
            threads=torch.get_num_threads(),
            first_step=self.first_step,
            steps=self.steps,
            step_seconds=median(seconds for seconds, _ in spent),
            seconds=_typical_parts(spent),
            total_seconds=dict(totals),
            stages=_stages(layout, rank, typical),
            exchanges=self.exchanges,
            buckets=tuple(buckets),
            peak_memory_bytes=peak_memory_bytes(self._device),
            recent=tuple(_last(recent)),
        )


def _event_recorder(device_type: str) -> Callable[[], Any]:
    """An accelerator works behind the host, so its own events tell the time; they are read when they have long passed."""

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


def _add(totals: dict[str, float], step: MeasuredStep) -> None:
    for part, seconds in _parts(step).items():
        totals[part] = totals.get(part, 0.0) + seconds


def _typical_parts(spent: Sequence[tuple[float, dict[str, float]]]) -> dict[str, float]:
    """What a step was spent on, averaged over the fifth of them whose length is in the middle, so that the parts add up to the median."""
    ordered = sorted(spent, key=lambda step: step[0])
    outside = 2 * len(ordered) // 5
    rows = [parts for _, parts in ordered[outside : len(ordered) - outside]]
    return {part: fmean(row[part] for row in rows) for part in rows[0]}


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


@contextmanager
def counted(recorder: Recorder, step: int, *, is_last: bool) -> Iterator[None]:
    """Counts the exchanges inside if this is the rank's second step (the first may set things up), or its only one."""
    if recorder.counted_step >= 0 or not (recorder.steps == 1 or is_last):
        yield
        return
    counter = ExchangeCounter()
    with counter:
        yield
    recorder.exchanges, recorder.counted_step = counter.exchanges(), step


class ExchangeCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`, counts what this rank exchanges; `exchanges` says it, with the ranks of the whole run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: tuple[Any, ...]) -> None:
        kind = _KINDS.get(operator)
        if kind is None:  # receives are counted by those who send
            return
        boxed = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
        whole = args[1] if kind in _SECOND else args[0]
        if kind == "send":
            ranks = (dist.get_rank(), ranks[args[2]])
        calls, nbytes = self._counted.get((kind, ranks), (0, 0))
        self._counted[kind, ranks] = (calls + 1, nbytes + _bytes(whole))

    def exchanges(self) -> tuple[Exchange, ...]:
        """What was counted."""
        return tuple(
            Exchange(kind=kind, ranks=ranks, calls=calls, bytes=nbytes) for (kind, ranks), (calls, nbytes) in sorted(self._counted.items())
        )


def _bytes(value: Tensor | Iterable[Any]) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else sum(_bytes(item) for item in value)


def action_seconds(predicted: Cost, action: Action) -> float:
    """What an action was predicted to take, on its stage's slowest replica."""
    match action.kind:
        case "F":
            return predicted.stages[action.stage].forward_seconds
        case "B":
            return predicted.stages[action.stage].backward_seconds
        case "SF" | "SB":
            return predicted.stages[action.stage - (action.kind == "SB")].transfer_seconds
        case "G":
            return predicted.stages[action.stage].sync_seconds
        case "O":
            return predicted.breakdown.get("optimizer", 0.0)
        case _:
            return 0.0  # a receive lasts as long as its send


class MeasuredFile:
    """One rank's measurements on disk, a few seconds old at most when the rank is killed. A disk that is full ends no run."""

    def __init__(
        self, directory: RunDirectory, layout: Layout, rank: int, schedule: Schedule, recorder: Recorder, buckets: Sequence[Bucket]
    ) -> None:
        self._directory, self._layout, self._rank, self._recorder, self._buckets = directory, layout, rank, recorder, buckets
        self._pause, self._due = _FIRST_SECONDS, time.perf_counter() + _FIRST_SECONDS
        if rank == 0:
            with suppress(OSError):
                self._begin(schedule)

    def _begin(self, schedule: Schedule) -> None:
        """Say what the schedule is; what was measured and predicted of another plan that the run had before is no longer true."""
        plan = str(self._layout.plan)
        before = self._directory.measured / _PLAN
        if not before.exists() or before.read_text(encoding="utf-8") != plan:
            for path in self._directory.measured.glob("rank-*.json"):
                path.unlink(missing_ok=True)
            self._directory.forget("trace.json", "predicted-trace.json")
            self._directory.write(f"measured/{_PLAN}", plan)
        grid = "".join(f"# {line}\n" for line in table(schedule).splitlines())
        self._directory.write("schedule.txt", f"{grid}\n{schedule}\n")
        if self._directory.predicted.exists():
            predicted = msgspec.json.decode(self._directory.predicted.read_bytes(), type=Cost)
            if len(predicted.stages) == len(self._layout.plan.stages):  # else it was made for a plan before this one
                spans = predict(schedule, lambda worker, action: action_seconds(predicted, action))
                self._directory.write("predicted-trace.json", msgspec.json.encode(chrome_trace(spans)))

    def after_step(self) -> None:
        """Write if it is time to."""
        if time.perf_counter() >= self._due:
            self.write()
            self._pause = min(2 * self._pause, _MOST_SECONDS)
            self._due = time.perf_counter() + self._pause

    def write(self) -> None:
        """Write now."""
        if self._recorder.steps:
            measured = self._recorder.measured(self._layout, self._rank, self._buckets)
            with suppress(OSError):
                write_measured(self._directory, measured)

    def conclude(self, graph: Graph) -> None:
        """Once all ranks have written: the executed trace, and the calibration that the next plan may begin with."""
        ranks = read_measured(self._directory)
        if len(ranks) < self._layout.world_size:  # no step was made, or a disk was full; the report says who is missing
            return
        names = {rank.rank: f"rank {rank.rank} {rank.device}" for rank in ranks}
        with suppress(OSError):
            self._directory.write("trace.json", msgspec.json.encode(chrome_trace(executed_spans(ranks), names)))
            cluster = self._directory.load_cluster()
            if cluster is not None and cluster.name == self._layout.plan.cluster:
                self._directory.write("calibration.json", calibrate(graph, cluster, self._layout.plan, ranks).to_json())
