"""Callbacks that do more than listen: what they may ask of a run, and those that most people want.

A callback is called with every event. One that takes a second argument gets the run too:

```python
def sample(event, run):
    if isinstance(event, atoll.events.Evaluated):
        model = run.snapshot().load_into(build())          # whole, on the CPU, whatever plan trains it
        run.log(perplexity=math.exp(event.loss))           # an event like any other

Job(…, callbacks=[sample, atoll.BestCheckpoint("accuracy", mode="max"), atoll.EarlyStopping(patience=3)])
```

What a callback remembers is saved with the run's checkpoints where it has `state_dict` and `load_state_dict`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, cast

from atoll.errors import JobError
from atoll.events import AnyEvent, Evaluated, Logged, Observer, StopTraining

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "BestCheckpoint",
    "Callback",
    "EarlyStopping",
    "RunHandle",
    "Snapshot",
    "callback_states",
    "listeners",
    "logged",
    "restore_callbacks",
    "takes_run",
    "with_run",
]

M = TypeVar("M", bound="nn.Module")


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A run's weights and optimizer after a step: copies, whole, on the CPU."""

    step: int
    model: "dict[str, Tensor]"  # as `state_dict` has it
    optimizer: dict[str, dict[str, Any]]  # by a parameter's name: moments, counters and what else is kept of it

    @property
    def ema(self) -> "dict[str, Tensor]":
        """The weights with averages in the place of those that have one: `model` of a job without `ema_decay`."""
        return self.model | {name: state["ema"] for name, state in self.optimizer.items() if "ema" in state}

    def load_into(self, model: M) -> M:
        """Give a module of the job's kind these weights; returns it."""
        model.load_state_dict(self.model)
        return model


class RunHandle(Protocol):
    """What a callback may ask of the run while it is told of a step or an evaluation."""

    @property
    def step(self) -> int:
        """Steps made."""

    def snapshot(self) -> Snapshot:
        """Weights and optimizer, brought together from all ranks; they take part while the callback waits."""

    def log(self, **numbers: float) -> None:
        """Numbers by name, as a `Logged` event: in events.jsonl, in the report, for other callbacks."""

    def keep(self, name: str = "best") -> None:
        """Save a checkpoint of this step and keep it under that name until another one is kept under it; `keep_last` passes it over."""


Callback: TypeAlias = Observer | Callable[[AnyEvent, RunHandle], None]


def takes_run(callback: Callable[..., None]) -> bool:
    """Whether it must be called with an event and the run."""
    try:
        signature = inspect.signature(callback)
    except (TypeError, ValueError):
        return False  # some built-in callables do not tell
    return not _takes(signature, 1) and _takes(signature, 2)


def _takes(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def logged(at_seconds: float, step: int, numbers: Mapping[str, Any]) -> Logged:
    """What `RunHandle.log` was given, as an event. JobError for what is not a number."""
    found: dict[str, float] = {}
    for name, value in numbers.items():
        try:
            found[name] = float(value)
        except (TypeError, ValueError) as error:
            raise JobError(f"run.log: {name} must be a number, got {value!r}") from error
    return Logged(at_seconds=at_seconds, step=step, numbers=found)


class _WithRun:
    """A callback with its second argument."""

    def __init__(self, callback: Callable[..., None], run: RunHandle) -> None:
        self._callback, self._run = callback, run
        self.__name__ = self.__qualname__ = str(getattr(callback, "__qualname__", None) or type(callback).__name__)

    def __call__(self, event: AnyEvent) -> None:
        self._callback(event, self._run)


def with_run(callback: Callback, run: RunHandle) -> Observer:
    """It as something to be called with an event alone."""
    return _WithRun(callback, run) if takes_run(callback) else cast(Observer, callback)


def listeners(callbacks: Sequence[Callback]) -> list[Observer]:
    """Those that are called with an event alone, for a mode that has refused the others."""
    return [cast(Observer, callback) for callback in callbacks if not takes_run(callback)]


def callback_states(callbacks: Sequence[Callback]) -> dict[str, Any]:
    """What callbacks remember, for a checkpoint."""
    kept = {_key(i, callback): callback for i, callback in enumerate(callbacks) if hasattr(callback, "state_dict")}
    return {key: callback.state_dict() for key, callback in kept.items()}


def restore_callbacks(callbacks: Sequence[Callback], states: Mapping[str, Any]) -> None:
    """Remind them of what a checkpoint has; one that was not there then begins anew."""
    for i, callback in enumerate(callbacks):
        if _key(i, callback) in states and hasattr(callback, "load_state_dict"):
            callback.load_state_dict(states[_key(i, callback)])


def _key(index: int, callback: object) -> str:
    return f"{index}: {type(callback).__name__}"


@dataclass
class _Watched:
    """The best of what an evaluation says."""

    metric: str = "loss"
    """What is compared: `"loss"`, or one of the job's metrics."""
    mode: Literal["min", "max"] = "min"
    """Which is better."""
    best: float | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise JobError(f"{type(self).__name__}: mode must be 'min' or 'max', got {self.mode!r}")

    def improves(self, event: Evaluated, by: float = 0.0) -> bool:
        """Whether the evaluation is better than all before, which is then remembered. What is not finite never is."""
        values = {"loss": event.loss, **event.metrics}
        if self.metric not in values:
            raise JobError(f"{type(self).__name__}: {self.metric!r} is not evaluated; there is {', '.join(values)}")
        value = values[self.metric]
        if value is None or not math.isfinite(value):
            return False
        gain = math.inf if self.best is None else self.best - value if self.mode == "min" else value - self.best
        if gain > by:
            self.best = value
            return True
        return False

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self.best = state["best"]


@dataclass
class BestCheckpoint(_Watched):
    """Keeps the checkpoint of the best evaluation so far, which `keep_last` never deletes; `atoll export --best` writes it."""

    def __call__(self, event: AnyEvent, run: RunHandle) -> None:
        """At every evaluation."""
        if isinstance(event, Evaluated) and self.improves(event):
            run.keep("best")


@dataclass
class EarlyStopping(_Watched):
    """Stops the run when `patience` evaluations in a row have not improved by more than `min_delta`."""

    patience: int = 3
    min_delta: float = 0.0
    waited: int = field(default=0, init=False)

    def __call__(self, event: AnyEvent) -> None:
        """At every evaluation."""
        if not isinstance(event, Evaluated):
            return
        self.waited = 0 if self.improves(event, self.min_delta) else self.waited + 1
        if self.waited >= self.patience:
            raise StopTraining

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"best": self.best, "waited": self.waited}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self.best, self.waited = state["best"], int(state["waited"])
