"""When to save: after every so many steps as told, or by what saving was measured to cost and how often something fails."""

from atoll.events import CheckpointIntervalChosen
from atoll.plan.checkpoint_interval import CheckpointInterval, checkpoint_interval

__all__ = ["SavePolicy"]

_MARKED = 1.5  # another interval is told where it is so many times the one before, or less than that part of it


class SavePolicy:
    """Says after which steps to save. `moment` is the caller's own time in seconds.

    Where ranks save together one of them is asked and tells the others, since their clocks differ; `ask_again` says when next.
    """

    def __init__(self, every: int | None, *, step: int, moment: float, failures_per_hour: float | None = None) -> None:
        self.every, self.failures_per_hour = every, failures_per_hour
        self._save_seconds = 0.0  # that the last one took; not known before the first
        self._began, self._saved_at, self._saving = (step, moment), step, False
        self._told: int | None = None  # the interval, in steps, that was last told

    def begun(self, step: int) -> None:
        """A save of that step is under way."""
        self._saved_at, self._saving = step, True

    def ended(self, seconds: float) -> None:
        """It took so long, whatever became of it."""
        self._save_seconds, self._saving = seconds, False

    def due(self, step: int, moment: float) -> bool:
        """Whether to save after this step."""
        if self.every is not None:
            return step % self.every == 0
        return not self._saving and step >= self._saved_at + self._steps(step, moment)

    def ask_again(self, step: int, moment: float) -> int:
        """The step after which `due` may hold next. It is looked at while speeds may still be learnt, so at most at twice the steps."""
        if self.every is not None:
            return step - step % self.every + self.every
        made = step - self._began[0]
        return max(step + 1, min(self._saved_at + self._steps(step, moment), step + made))

    def decision(self, step: int, moment: float) -> CheckpointIntervalChosen | None:
        """How often it saves from now on, where that is markedly another interval than was last told."""
        if self.every is not None:
            return None
        chosen = self._interval(step, moment)
        if self._told is not None and 1 / _MARKED < chosen.steps / self._told < _MARKED:
            return None
        self._told = chosen.steps
        return CheckpointIntervalChosen(at_seconds=moment, steps=chosen.steps, reason=chosen.reason)

    def _steps(self, step: int, moment: float) -> int:
        return self._interval(step, moment).steps

    def _interval(self, step: int, moment: float) -> CheckpointInterval:
        made = max(step - self._began[0], 1)
        return checkpoint_interval(self._save_seconds, self.failures_per_hour, (moment - self._began[1]) / made)
