"""Trace: when every action of a schedule began and ended, predicted or executed, in the form that Chrome and Perfetto show.

A process of the trace is a worker (predicted) or a rank (executed); it has a row each for what it computes, sends, receives and
synchronises. Both kinds of trace are `TraceSpan`s, so they can be laid over each other.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from atoll.errors import ScheduleError
from atoll.runtime.modes.lockstep.schedule import Action, Schedule

__all__ = ["TraceSpan", "chrome_trace", "predict", "step_seconds", "table"]

_ROWS = ("compute", "send", "receive", "synchronise")
_ROW_OF = {"F": "compute", "B": "compute", "O": "compute", "SF": "send", "SB": "send", "RF": "receive", "RB": "receive", "G": "synchronise"}


class TraceSpan(msgspec.Struct, frozen=True, order=True):
    """An action and when it happened, in seconds from the beginning of the trace."""

    process: int  # worker of a predicted trace, rank of an executed one
    action: Action
    begin_seconds: float
    end_seconds: float


def step_seconds(spans: Iterable[TraceSpan]) -> float:
    """When the last of the spans ends."""
    return max((span.end_seconds for span in spans), default=0.0)


def predict(schedule: Schedule, seconds_of: Callable[[int, Action], float]) -> list[TraceSpan]:
    """When everything happens if `seconds_of(worker, action)` is what actions take; the schedule must pass `check`.

    A worker computes its actions in order, each when its input is there. Transfers between two workers follow each other, activations and
    gradients apart, beside what is computed; a receive is shown from when both ends are ready. Synchronisation begins when the last replica
    is there and goes on beside further backwards; the optimizer waits for it.
    """
    return _Prediction(schedule, seconds_of).spans()


class _Prediction:
    def __init__(self, schedule: Schedule, seconds_of: Callable[[int, Action], float]) -> None:
        self.schedule, self.seconds_of = schedule, seconds_of
        self.where = {action: worker for worker, row in enumerate(schedule.actions) for action in row if action.computes or action.receives}
        self.free = [0.0] * len(schedule)  # when each worker ends what it computed so far
        self.made: list[TraceSpan] = []
        self.transfers: dict[Action, TraceSpan] = {}  # by their receive
        self.channel_free: dict[tuple[int, int, str], float] = {}
        self.posted: dict[Action, float] = {}
        self.reached: dict[int, list[tuple[int, float]]] = {}  # of each stage's synchronisation: worker and time

    def spans(self) -> list[TraceSpan]:
        position = [0] * len(self.schedule)
        able = list(range(len(self.schedule)))
        waiting: dict[Action, int] = {}  # by the receive that is waited for
        while able:
            worker = able.pop()
            row = self.schedule[worker]
            while position[worker] < len(row):
                action = row[position[worker]]
                needed = self._needed(action)
                if needed is not None and needed not in self.transfers:
                    waiting[needed] = worker
                    break
                self._do(worker, action, needed)
                position[worker] += 1
                if action.sends and action.received_as in waiting:
                    able.append(waiting.pop(action.received_as))
        if any(at < len(row) for at, row in zip(position, self.schedule.actions, strict=True)):
            raise ScheduleError("the schedule would wait for ever, so it has no prediction; check() says why")
        self._synchronise()
        return sorted(self.made, key=lambda span: (span.begin_seconds, span.process, span.end_seconds, span.action))

    def _needed(self, action: Action) -> Action | None:
        """The receive that a forward or a backward waits for."""
        if not action.computes:
            return None
        receive = Action("RF" if action.kind == "F" else "RB", action.stage, action.micro_batch)
        return receive if receive in self.where else None

    def _do(self, worker: int, action: Action, needed: Action | None) -> None:
        now = self.free[worker]
        if action.computes:
            begin = max(now, self.transfers[needed].end_seconds) if needed else now
            self.free[worker] = begin + self.seconds_of(worker, action)
            self.made.append(TraceSpan(worker, action, begin, self.free[worker]))
            if needed:
                transfer, posted = self.transfers[needed], self.posted[needed]
                both = max(posted, transfer.begin_seconds)
                self.made.append(TraceSpan(worker, needed, both, max(both, transfer.end_seconds)))
        elif action.sends:
            receive = action.received_as
            channel = (worker, self.where[receive], action.kind)
            begin = max(now, self.channel_free.get(channel, 0.0))
            self.channel_free[channel] = begin + self.seconds_of(worker, action)
            self.transfers[receive] = TraceSpan(worker, action, begin, self.channel_free[channel])
            self.made.append(self.transfers[receive])
        elif action.receives:
            self.posted[action] = now
        elif action.kind == "G":
            self.reached.setdefault(action.stage, []).append((worker, now))

    def _synchronise(self) -> None:
        ready = list(self.free)  # for the optimizer
        for stage, arrivals in sorted(self.reached.items()):
            action = Action("G", stage)
            begin = max(time for _, time in arrivals)
            end = begin + max(self.seconds_of(worker, action) for worker, _ in arrivals)
            for worker, _ in arrivals:
                self.made.append(TraceSpan(worker, action, begin, end))
                ready[worker] = max(ready[worker], end)
        for worker, row in enumerate(self.schedule.actions):
            if Action("O") in row:
                self.made.append(TraceSpan(worker, Action("O"), ready[worker], ready[worker] + self.seconds_of(worker, Action("O"))))


def chrome_trace(spans: Iterable[TraceSpan], process_names: Mapping[int, str] | None = None) -> dict[str, Any]:
    """The spans as Chrome's trace JSON, for ui.perfetto.dev or chrome://tracing; times are kept to the nanosecond.

    Processes are called `worker N` unless named. Spans of a row that overlap get further rows, since slices of one row must nest.
    """
    names = process_names or {}
    rows: dict[tuple[int, int, int], int] = {}  # process, row, further row → thread id
    ends: dict[tuple[int, int], list[int]] = {}
    slices = []
    for begin, end, span in sorted((round(s.begin_seconds * 1e9), round(s.end_seconds * 1e9), s) for s in spans):
        row = _ROWS.index(_ROW_OF[span.action.kind])
        taken = ends.setdefault((span.process, row), [])
        further = next((i for i, last in enumerate(taken) if last <= begin), len(taken))
        taken[further : further + 1] = [end]
        thread = rows.setdefault((span.process, row, further), len(rows) + 1)
        slices.append(_slice(span, begin, end, thread))
    return {"displayTimeUnit": "ms", "traceEvents": [*_names(rows, names), *slices]}


def _slice(span: TraceSpan, begin: int, end: int, thread: int) -> dict[str, Any]:
    action = span.action
    numbers = {"stage": action.stage, "micro_batch": action.micro_batch}
    return {
        "name": str(action),
        "cat": _ROW_OF[action.kind],
        "ph": "X",
        "ts": begin / 1000,
        "dur": (end - begin) / 1000,
        "pid": span.process + 1,  # 0 is the idle process to Perfetto
        "tid": thread,
        "args": {name: number for name, number in numbers.items() if number >= 0},
    }


def _names(rows: Mapping[tuple[int, int, int], int], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The events that name and order processes and their rows."""
    events: list[dict[str, Any]] = []
    for process in sorted({process for process, _, _ in rows}):
        head = {"ph": "M", "ts": 0, "pid": process + 1, "tid": 0}
        events.append({**head, "name": "process_name", "args": {"name": names.get(process, f"worker {process}")}})
        events.append({**head, "name": "process_sort_index", "args": {"sort_index": process}})
    for (process, row, further), thread in sorted(rows.items()):
        head = {"ph": "M", "ts": 0, "pid": process + 1, "tid": thread}
        name = _ROWS[row] if not further else f"{_ROWS[row]} {further + 1}"
        events.append({**head, "name": "thread_name", "args": {"name": name}})
        events.append({**head, "name": "thread_sort_index", "args": {"sort_index": row * 1000 + further}})
    return events


def table(schedule: Schedule, most_columns: int = 60) -> str:
    """A grid for people: a row for each worker, a column for each unit of time, every forward and backward taking one."""
    spans = [span for span in predict(schedule, lambda _, action: float(action.computes)) if span.action.computes]
    columns = round(step_seconds(spans))
    shown = min(columns, most_columns)
    cells = [["·"] * shown for _ in range(len(schedule))]
    for span in spans:
        if span.begin_seconds < shown:
            cells[span.process][round(span.begin_seconds)] = str(span.action)
    width = max((len(cell) for row in cells for cell in row), default=1)
    head = len(f"worker {len(schedule) - 1}")
    lines = [f"{f'worker {worker}':<{head}}  {' '.join(f'{cell:<{width}}' for cell in row)}".rstrip() for worker, row in enumerate(cells)]
    return "\n".join([*lines, *([f"… and {columns - shown} more columns"] if columns > shown else [])])
