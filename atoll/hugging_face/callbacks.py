"""Callbacks of a `transformers.Trainer`, told of a run's events by the names they know."""

import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from atoll.callbacks import Callback, RunHandle
from atoll.errors import JobError
from atoll.events import AnyEvent, CheckpointSaved, Evaluated, RunFinished, RunStarted, StepFinished, StopTraining
from atoll.hugging_face.arguments import word
from atoll.hugging_face.evaluation import MetricsOnOneDevice

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

__all__ = ["carried_callbacks", "observer_of", "refused_callbacks"]

_ATOLLS_OWN = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback", "NotebookProgressCallback")  # what Atoll does itself
_NEVER_CALLED = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")  # within a step, which may be anywhere


def carried_callbacks(trainer: "Trainer") -> "list[TrainerCallback]":
    """Those of the Trainer's callbacks that do not show progress or decide when to log, evaluate and save."""
    return [callback for callback in trainer.callback_handler.callbacks if type(callback).__name__ not in _ATOLLS_OWN]


def refused_callbacks(trainer: "Trainer") -> Iterator[tuple[str, str]]:
    """Callbacks that wait for what nobody tells them."""
    from transformers import TrainerCallback

    for callback in carried_callbacks(trainer):
        for name in _NEVER_CALLED:
            if getattr(type(callback), name) is not getattr(TrainerCallback, name):
                kind = type(callback).__name__
                yield "callbacks", f"{kind}.{name} would never be called: callbacks hear of whole steps; use on_step_end, or leave it out"


def observer_of(trainer: "Trainer", steps: int, steps_of_epoch: int, eval_every: int | None) -> Callback:
    """What tells the Trainer's callbacks; it takes the run only where it must ask something of it, which a swarm cannot answer."""
    observer = _Observer(trainer, steps, steps_of_epoch, eval_every)
    evaluates = eval_every is not None and (trainer.compute_metrics is not None or trainer.args.metric_for_best_model is not None)
    return (
        _EvaluationObserver(observer, MetricsOnOneDevice(trainer) if trainer.compute_metrics is not None else None)
        if evaluates
        else observer
    )


class _Observer:
    """Calls a Trainer's callbacks: on_train_begin, on_epoch_begin, on_step_begin, on_step_end, on_epoch_end, on_log, on_evaluate, on_save,
    on_train_end. A callback that sets `control.should_training_stop` stops the run after the step.
    """

    def __init__(self, trainer: "Trainer", steps: int, steps_of_epoch: int, eval_every: int | None) -> None:
        self.trainer, self._callbacks = trainer, carried_callbacks(trainer)
        self._steps, self._steps_of_epoch = steps, steps_of_epoch
        self._evaluates_by_steps = eval_every if word(trainer.args.eval_strategy) == "steps" else None
        self._unlogged: list[float] = []  # losses since the last log
        self._losses = (0, 0.0)  # how many, and their sum
        self._epoch_ends = False  # once the evaluation of this step is made
        self.in_place = False  # the Trainer's model is what is trained
        self._told: set[str] = set()
        state = trainer.state
        state.max_steps, state.num_train_epochs = steps, -(-steps // steps_of_epoch)
        state.train_batch_size = trainer.args.per_device_train_batch_size
        state.compute_steps(trainer.args, steps)  # type: ignore[no-untyped-call]

    def __call__(self, event: AnyEvent) -> None:
        """Told of everything."""
        match event:
            case RunStarted():
                self.in_place = event.in_place
                self.trainer.control.should_training_stop = False
                self.call("on_train_begin")
            case StepFinished():
                self._step(event)
            case Evaluated():
                self.evaluated({"eval_loss": event.loss, **{f"eval_{name}": value for name, value in event.metrics.items()}})
            case CheckpointSaved():
                self.call("on_save")
            case RunFinished():
                self._finish(event)
                return
            case _:
                return
        self.stop_if_asked()

    def stop_if_asked(self) -> None:
        """Ends the run after this step where a callback wants that."""
        if self.trainer.control.should_training_stop:
            self._end_epoch_if_due(always=self.trainer.state.global_step % self._steps_of_epoch != 0)
            raise StopTraining

    def _step(self, event: StepFinished) -> None:
        """A step is told of once it is made: what begins with it is told just before its end."""
        state = self.trainer.state
        if (event.step - 1) % self._steps_of_epoch == 0:
            self.call("on_epoch_begin")
        self.call("on_step_begin")
        state.global_step, state.epoch = event.step, event.step / self._steps_of_epoch
        self._unlogged.append(event.loss)
        self._losses = self._losses[0] + 1, self._losses[1] + event.loss
        self._about = {"learning_rate": event.learning_rate}
        if event.gradient_norm is not None:
            self._about["grad_norm"] = event.gradient_norm
        asked = self.call("on_step_end")
        args = self.trainer.args
        due = word(args.logging_strategy) == "steps" and event.step % max(1, int(state.logging_steps)) == 0
        if due or asked or (event.step == 1 and args.logging_first_step):
            self._log_losses()
        every = self._evaluates_by_steps
        self._epoch_ends = event.step % self._steps_of_epoch == 0 or event.step == self._steps
        if every is None or not (event.step % every == 0 or event.step == self._steps):
            self._end_epoch_if_due()

    def _end_epoch_if_due(self, always: bool = False) -> None:
        if self._epoch_ends or always:
            self._epoch_ends = False
            if self.call("on_epoch_end") or word(self.trainer.args.logging_strategy) == "epoch":
                self._log_losses()

    def evaluated(self, metrics: Mapping[str, float | None]) -> None:
        """Tells of an evaluation."""
        state = self.trainer.state
        found: dict[str, Any] = {name: value for name, value in metrics.items() if value is not None} | {"epoch": state.epoch}
        self._log(found)
        self.call("on_evaluate", metrics=found)
        self.note_best(found)
        self._end_epoch_if_due()

    def note_best(self, metrics: Mapping[str, Any]) -> None:
        """What `metric_for_best_model` has been at its best, as the Trainer's state has it."""
        name, state = self.trainer.args.metric_for_best_model, self.trainer.state
        if name is None:
            return
        name = name if name.startswith("eval_") else f"eval_{name}"
        if name not in metrics:
            raise JobError(f"from_trainer: metric_for_best_model: {name!r} is not evaluated; there is {', '.join(metrics)}")
        value, greater = float(metrics[name]), self.trainer.args.greater_is_better
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric, state.best_global_step = value, state.global_step

    def _finish(self, event: RunFinished) -> None:
        if event.reason == "failed":
            return
        count, total = self._losses
        rate = count / event.seconds if event.seconds else 0.0
        figures = {"train_runtime": event.seconds, "train_steps_per_second": rate}
        self._log({**figures, "train_loss": total / max(count, 1), "epoch": self.trainer.state.epoch})
        self.call("on_train_end")

    def _log_losses(self) -> None:
        if self._unlogged:
            loss = sum(self._unlogged) / len(self._unlogged)
            self._unlogged = []
            self._log({"loss": loss, **self._about, "epoch": self.trainer.state.epoch})

    def _log(self, logs: dict[str, Any]) -> None:
        self.trainer.state.log_history.append({**logs, "step": self.trainer.state.global_step})
        self.call("on_log", logs=logs)

    def call(self, name: str, **more: Any) -> bool:
        """Call that method of all callbacks; whether one of them wants a log now."""
        trainer, control = self.trainer, self.trainer.control
        given = {"model": trainer.model if self.in_place else None, "processing_class": trainer.processing_class}
        given |= {"optimizer": None, "lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None}
        for callback in self._callbacks:
            changed = getattr(callback, name)(trainer.args, trainer.state, control, **given, **more)
            control = changed if changed is not None else control
        asked, control.should_log = control.should_log, False
        trainer.control = control
        for wish in ("should_evaluate", "should_save", "should_epoch_stop"):
            if getattr(control, wish):
                self._tell(wish)
                setattr(control, wish, False)
        return bool(asked)

    def _tell(self, wish: str) -> None:
        if wish not in self._told:
            self._told.add(wish)
            warnings.warn(
                f"from_trainer: a callback sets control.{wish}, which has no effect: evaluations and checkpoints have a schedule",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint: the Trainer's state, and what callbacks remember that can say so (EarlyStoppingCallback)."""
        state = self.trainer.state
        kept = {name: getattr(state, name) for name in ("global_step", "epoch", "best_metric", "best_global_step", "log_history")}
        return {"state": kept, "callbacks": [getattr(callback, "state", dict)() for callback in self._callbacks]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        for name, value in saved["state"].items():
            setattr(self.trainer.state, name, value)
        for callback, remembered in zip(self._callbacks, saved["callbacks"], strict=False):
            for name, value in remembered.get("attributes", {}).items():
                setattr(callback, name, value)


class _EvaluationObserver:
    """The same, for a Trainer that computes metrics or keeps the best checkpoint: it asks the run for its weights and for a checkpoint."""

    def __init__(self, observer: _Observer, metrics: MetricsOnOneDevice | None) -> None:
        self._observer, self._metrics = observer, metrics
        self._best: dict[str, Tensor] | None = None  # weights, where they are all in this process

    def __call__(self, event: AnyEvent, run: RunHandle) -> None:
        """Told of everything, with the run."""
        if not isinstance(event, Evaluated):
            self._observer(event)
            if isinstance(event, RunFinished) and event.reason != "failed":
                self._load_best()
            return
        found: dict[str, float | None] = {"eval_loss": event.loss}
        if self._metrics is not None:
            weights = _model(self._observer.trainer).state_dict() if self._observer.in_place else run.snapshot().model
            found = dict(self._metrics(weights))
            run.log(**{name: value for name, value in found.items() if value is not None})
        state = self._observer.trainer.state
        before = state.best_global_step
        self._observer.evaluated(found)
        if state.best_global_step != before:
            self._keep_best(run)
        self._observer.stop_if_asked()

    def _keep_best(self, run: RunHandle) -> None:
        args = self._observer.trainer.args
        if not args.load_best_model_at_end and word(args.save_strategy) != "best":
            return
        if self._observer.in_place and args.load_best_model_at_end:
            self._best = {name: value.detach().to("cpu", copy=True) for name, value in _model(self._observer.trainer).state_dict().items()}
        try:
            run.keep("best")
        except JobError:
            if self._best is None:  # nowhere to save, and nothing kept
                raise

    def _load_best(self) -> None:
        trainer = self._observer.trainer
        if not trainer.args.load_best_model_at_end or trainer.state.best_global_step is None:
            return
        if self._best is not None:
            _model(trainer).load_state_dict(self._best)
        else:
            step = trainer.state.best_global_step
            warnings.warn(
                f"load_best_model_at_end: step {step} was best; `atoll export RUN --to DIR --best` writes its weights", stacklevel=2
            )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return self._observer.state_dict()

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """What `state_dict` gave."""
        self._observer.load_state_dict(saved)


def _model(trainer: "Trainer") -> nn.Module:
    assert isinstance(trainer.model, nn.Module)
    return trainer.model
