"""Progress: a run's events as a line that moves on a terminal, or as plain lines where there is none (files, CI, pipes)."""

from collections.abc import Iterable
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from atoll.events import AnyEvent, CheckpointFailed, Evaluated, NonFinite, RunFinished, RunStarted, StepFinished
from atoll.units import format_bytes, format_clock, format_count, plural

__all__ = ["Progress"]

_PLAIN_LINE_SECONDS = 5.0  # between two plain lines
_REDRAW_SECONDS = 0.1  # between two drawings of the line that moves
_SMOOTHING = 0.9  # of the loss shown
_RATE_STEPS = 20  # over how many last steps samples/s is taken
_STEPS_TO_TELL = 3  # how many were made before the time left is told: the first takes as long as starting does, and says nothing


class Progress:
    """An observer that shows a run: step, loss, samples/s, memory and time left. It reads no clock: events carry their time."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True, highlight=False)
        self._live: Live | None = None
        self._run: RunStarted | None = None
        self._shown_at = float("-inf")
        self._forget()

    def _forget(self) -> None:
        """Nothing was made yet since the run was started; a resumed run has made steps before."""
        self._first_loss: float | None = None
        self._loss: float | None = None
        self._recent: list[StepFinished] = []
        self._first_at = 0.0  # when the first step was made
        self._first_step = 0  # the earliest: going back to a checkpoint may lead to one before the first that was made
        self._seen = 0  # steps, those made twice counted twice
        self._samples = 0
        self._later_samples = 0  # those of the steps after the first
        self._later_seconds = 0.0

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
            case Evaluated():
                metrics = "".join(f"  {name} {_number(value, '.4g')}" for name, value in event.metrics.items())
                self._say(f"step {event.step}: evaluation loss {_number(event.loss, '.4f')}{metrics}")
            case CheckpointFailed():
                self._say(f"step {event.step}: the checkpoint could not be saved: {event.message}")
            case NonFinite():
                self._say(f"step {event.step}: the {event.what} is {event.value}")
            case RunFinished():
                self._stop_live()
                began = self._run.at_seconds if self._run is not None else event.at_seconds
                now = max(0, event.steps - self._first_step + 1) if self._seen else 0
                self._say(_summary(event, self._first_loss, now, self._rate(event, event.at_seconds - began)))

    def recall(self, events: Iterable[AnyEvent]) -> None:
        """Counts, and shows nothing of, what others in this one's place have shown since the run was started."""
        self._forget()
        for event in events:
            if isinstance(event, StepFinished):
                self._count(event)

    def _start(self, event: RunStarted) -> None:
        self._run = event
        self._say(
            f"{event.name}: {format_count(event.parameters)} parameters, {plural(event.steps, 'step')} of "
            f"{plural(event.batch_size, 'sample')}, {event.precision}" + (f" on {', '.join(event.devices)}" if event.devices else "")
        )
        if self.console.is_terminal:
            self._live = Live(console=self.console, transient=True, auto_refresh=False)
            self._live.start()

    def _count(self, event: StepFinished) -> None:
        self._first_step = min(self._first_step, event.step) if self._seen else event.step
        self._first_loss = event.loss if self._first_loss is None else self._first_loss
        self._loss = event.loss if self._loss is None else _SMOOTHING * self._loss + (1 - _SMOOTHING) * event.loss
        self._first_at = self._first_at if self._seen else event.at_seconds
        if self._seen:
            self._later_samples, self._later_seconds = self._later_samples + event.samples, self._later_seconds + event.seconds
        self._seen, self._samples = self._seen + 1, self._samples + event.samples
        self._recent = [*(self._recent[1 - _RATE_STEPS :] if self._seen > 2 else []), event]  # without the first, once there are others

    def _step(self, event: StepFinished) -> None:
        self._count(event)
        if not event.applied:
            self._say(f"step {event.step}: fp16 gradients overflowed; step skipped, loss scale lowered")
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

    def _cells(self, event: StepFinished) -> list[str]:
        memory = [f"memory {format_bytes(event.memory_bytes)}"] if event.memory_bytes is not None else []
        return [f"step {event.step}/{self._steps}", f"loss {self._loss:.4f}", *self._speed(), *memory, *self._left(event)]

    def _speed(self) -> list[str]:
        """A swarm's first step lasts from the start of its coordinator, so it tells no speed."""
        seconds = sum(step.seconds for step in self._recent)
        if not seconds or (self._seen == 1 and self._run is not None and self._run.mode == "swarm"):
            return []
        return [_rate(sum(step.samples for step in self._recent) / seconds)]

    def _rate(self, event: RunFinished, seconds: float) -> float | None:
        """Of what was made now, in so many seconds, in samples a second; of a swarm as the report counts it, without its starting."""
        if self._run is not None and self._run.mode == "swarm":
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
        table = Table.grid(padding=(0, 2))
        table.add_row(ProgressBar(self._steps, event.step, width=24), *self._cells(event))
        return table

    def _say(self, line: str) -> None:
        self.console.print(line if self.console.encoding.startswith("utf") else line.replace("→", "->"), markup=False)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _summary(event: RunFinished, first_loss: float | None, now: int, samples_per_s: float | None) -> str:
    """The run in one sentence. The last `now` steps were made since it was started, at that rate, the others before."""
    how = {"done": "done", "stopped": "stopped by a callback", "interrupted": "interrupted", "failed": "failed"}[event.reason]
    if event.steps and not now:
        return f"{how}: {'all ' if event.steps > 1 else ''}{plural(event.steps, 'step')} had been made before"
    first = f"{first_loss:.4f} → " if first_loss is not None and now > 1 else ""
    loss = f", loss {first}{event.loss:.4f}" if event.loss is not None else ""
    rate = f", {_rate(samples_per_s)}" if samples_per_s else ""
    why = f" ({event.message})" if event.message and event.reason != "failed" else ""  # the error that is raised says it
    steps = plural(event.steps, "step") + ("" if now == event.steps else f", {now:,} of them now,")
    return f"{how}: {steps} in {format_clock(event.seconds)}{loss}{rate}{why}"


def _number(value: float | None, form: str) -> str:
    return "not finite" if value is None else format(value, form)


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f} samples/s" if samples_per_s >= 100 else f"{samples_per_s:.3g} samples/s"
