"""Progress: a run's events as people see them: a line each for what matters, and a progress line that moves on a terminal, or plain lines
now and then where there is none (files, CI, pipes)."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from atoll.events import AnyEvent, CheckpointSaved, CoordinatorStarted, RunFinished, RunStarted, StageLost, StepFinished, WorkerFailed
from atoll.plan.modes import starts_in_first_step
from atoll.units import format_bytes, format_clock, plural
from atoll.watch.describe import describe_event, importance

__all__ = ["Progress"]

_PLAIN_LINE_SECONDS = 5.0  # between two plain lines
_REDRAW_SECONDS = 0.1  # between two drawings of the line that moves
_SHORTEST_BAR = 4  # characters; where there is no room for it there is none
_RATE_STEPS = 20  # over how many last steps samples/s is taken
_STEPS_TO_TELL = 3  # how many were made before the time left is told: the first takes as long as starting does, and says nothing


class Progress:
    """An observer that shows a run: step, loss, samples/s, memory and time left, and a line for every event that people should see; with
    `quiet` only warnings and how it ended. It reads no clock: events carry their time.
    """

    def __init__(self, console: Console | None = None, *, quiet: bool = False, goes_on: str = "") -> None:
        """`goes_on` is what a user calls to go on with an interrupted run."""
        self._goes_on = goes_on
        self.console = console or Console(stderr=True, highlight=False)
        self._quiet = quiet
        self._live: Live | None = None
        self._run: RunStarted | None = None
        self._shown_at = float("-inf")
        self._forget()

    def _forget(self) -> None:
        """Nothing was made yet since the run was started; a resumed run has made steps before."""
        self._first_loss: float | None = None
        self._recent: list[StepFinished] = []
        self._first_at = 0.0  # when the first step was made
        self._first_step = 0  # the earliest: going back to a checkpoint may lead to one before the first that was made
        self._seen = 0  # steps, those made twice counted twice
        self._samples = 0
        self._later_samples = 0  # those of the steps after the first
        self._later_seconds = 0.0
        self._steps_made: set[int] = set()
        self._saved: CheckpointSaved | None = None
        self._coordinators = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop_live()

    def __call__(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self._start(event)
            case StepFinished():
                self._step(event)
            case RunFinished():
                self._stop_live()
                began = self._run.at_seconds if self._run is not None else event.at_seconds
                now = max(0, event.steps - self._first_step + 1) if self._seen else 0
                self._say(_summary(event, self._first_loss, now, self._rate(event, event.at_seconds - began)) + self._kept(event))
                if self._goes_on and event.reason == "interrupted" and self._saved is not None:
                    self._say(f"to go on: {self._goes_on}")
            case StageLost() if not self._seen and self._coordinators == 1:  # a run that was killed is started again
                self._say(f"no worker came back with a later state of stage {event.stage}; all workers continue from step {event.step}")
            case _:
                self._count_other(event)
                if isinstance(event, WorkerFailed):
                    self.console.show_cursor(True)  # a progress line of a process that was killed may have hidden it
                first = isinstance(event, CoordinatorStarted) and self._coordinators == 1
                if not first and importance(event) in (("warning",) if self._quiet else ("warning", "notice")):
                    self._say(describe_event(event))

    def _count_other(self, event: AnyEvent) -> None:
        if isinstance(event, CheckpointSaved):
            self._saved = event
        self._coordinators += isinstance(event, CoordinatorStarted)

    def _kept(self, event: RunFinished) -> str:
        """What was saved and what was lost since the run was started."""
        saved = f"; last checkpoint: step {self._saved.step}" if self._saved is not None else ""
        repeated = self._seen - len(self._steps_made)
        again = f"; {plural(repeated, 'step')} computed again" if repeated else ""
        lost = event.steps - self._saved.step if event.reason in ("failed", "interrupted") and self._saved is not None else 0
        return saved + again + (f"; {plural(lost, 'step')} after it lost" if lost > 0 else "")

    def recall(self, events: Iterable[AnyEvent]) -> None:
        """Counts, and shows nothing of, what others in this one's place have shown since the run was started."""
        self._forget()
        for event in events:
            if isinstance(event, StepFinished):
                self._count(event)
            else:
                self._count_other(event)

    def _start(self, event: RunStarted) -> None:
        self._run = event
        if self._quiet:
            return
        self._say(describe_event(event))
        if self.console.is_terminal:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()

    def _count(self, event: StepFinished) -> None:
        self._steps_made.add(event.step)
        self._first_step = min(self._first_step, event.step) if self._seen else event.step
        self._first_loss = event.loss if self._first_loss is None else self._first_loss
        self._first_at = self._first_at if self._seen else event.at_seconds
        if self._seen:
            self._later_samples, self._later_seconds = self._later_samples + event.samples, self._later_seconds + event.seconds
        self._seen, self._samples = self._seen + 1, self._samples + event.samples
        self._recent = [*(self._recent[1 - _RATE_STEPS :] if self._seen > 2 else []), event]  # without the first, once there are others

    def _step(self, event: StepFinished) -> None:
        self._count(event)
        if self._quiet:
            return
        if not event.applied:
            self._say(describe_event(event))
        pause = _PLAIN_LINE_SECONDS if self._live is None else _REDRAW_SECONDS
        if event.at_seconds - self._shown_at < pause and event.step != self._steps:
            return
        self._shown_at = event.at_seconds
        if self._live is not None:
            self._live.update(self._table(event), refresh=True)
        else:
            self._say("  ".join(self._cells(event)))

    @property
    def _steps(self) -> int:
        return self._run.steps if self._run is not None else 0

    @property
    def _starts_in_first_step(self) -> bool:
        return self._run is not None and starts_in_first_step(self._run.mode)

    def _cells(self, event: StepFinished) -> list[str]:
        memory = [f"memory {format_bytes(event.memory_bytes)}"] if event.memory_bytes is not None else []
        return [f"step {event.step}/{self._steps}", f"loss {event.loss:.4f}", *self._speed(), *memory, *self._left(event)]

    def _speed(self) -> list[str]:
        """A first step that lasts from the start of the run tells no speed."""
        seconds = sum(step.seconds for step in self._recent)
        if not seconds or (self._seen == 1 and self._starts_in_first_step):
            return []
        return [_rate(sum(step.samples for step in self._recent) / seconds)]

    def _rate(self, event: RunFinished, seconds: float) -> float | None:
        """Of what was made now, in so many seconds, in samples a second; as the report counts it, without starting."""
        if self._starts_in_first_step:
            return self._later_samples / self._later_seconds if self._later_seconds else None
        taken = seconds if seconds > 0 and self._seen != event.steps else event.seconds
        return self._samples / taken if taken and self._samples else None

    def _left(self, event: StepFinished) -> list[str]:
        """By what steps took from the first on, evaluations and checkpoints between them included."""
        if self._seen < _STEPS_TO_TELL:
            return []
        each = (event.at_seconds - self._first_at) / (self._seen - 1)
        return [f"left {format_clock((self._steps - event.step) * each)}"]

    def _table(self, event: StepFinished) -> Table:
        """One line of the terminal: the bar is what gives way where it is narrow."""
        cells = self._cells(event)
        room = self.console.width - sum(len(cell) + 2 for cell in cells)
        table = Table.grid(padding=(0, 2))
        for _ in range(len(cells) + (room >= _SHORTEST_BAR)):
            table.add_column(no_wrap=True)
        bar = [ProgressBar(self._steps, event.step, width=min(24, room))] if room >= _SHORTEST_BAR else []
        table.add_row(*bar, *cells)
        return table

    def _say(self, line: str) -> None:
        text = line if self.console.encoding.startswith("utf") else line.replace("→", "->")
        self.console.print(text, markup=False, soft_wrap=not self.console.is_terminal)  # in files a line stays a line

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _summary(event: RunFinished, first_loss: float | None, now: int, samples_per_s: float | None) -> str:
    """The run in one sentence. The last `now` steps were made since it was started, at that rate, the others before."""
    how = {"done": "done", "stopped": "stopped early", "interrupted": "interrupted", "failed": "failed"}[event.reason]
    if event.steps and not now:
        return f"{how}: {'all ' if event.steps > 1 else ''}{plural(event.steps, 'step')} had been made before"
    first = f"{first_loss:.4f} → " if first_loss is not None and now > 1 else ""
    loss = f", loss {first}{event.loss:.4f}" if event.loss is not None else ""
    rate = f", {_rate(samples_per_s)}" if samples_per_s else ""
    why = f" ({event.message})" if event.message and event.reason != "failed" else ""  # the error that is raised says it
    steps = plural(event.steps, "step") + ("" if now == event.steps else f", {now:,} of them now,")
    return f"{how}: {steps} in {format_clock(event.seconds)}{loss}{rate}{why}"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"
