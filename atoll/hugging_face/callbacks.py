"""Callbacks of a `transformers.Trainer`, told of a run's events by the names they know."""

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from atoll.events import AnyEvent, CheckpointSaved, Evaluated, RunFinished, RunStarted, StepFinished, StopTraining
from atoll.job import Job
from atoll.script import run_opener

if TYPE_CHECKING:
    from transformers import Trainer, TrainerCallback

__all__ = ["TrainerObserver", "carried_callbacks", "stop_before_training"]

_ATOLLS_OWN = ("DefaultFlowCallback", "ProgressCallback", "PrinterCallback", "NotebookProgressCallback")  # what Atoll does itself


def carried_callbacks(trainer: "Trainer") -> "list[TrainerCallback]":
    """Those of the Trainer's callbacks that do not show progress or decide when to log, evaluate and save."""
    return [callback for callback in trainer.callback_handler.callbacks if type(callback).__name__ not in _ATOLLS_OWN]


class TrainerObserver:
    """An observer that calls a Trainer's callbacks: on_train_begin, on_epoch_begin, on_step_begin, on_step_end, on_epoch_end, on_log,
    on_evaluate, on_save, on_train_end. A callback that sets `control.should_training_stop` stops the run after the step.
    """

    def __init__(self, trainer: "Trainer", callbacks: "Sequence[TrainerCallback]", steps: int, steps_of_epoch: int) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self._steps_of_epoch = steps_of_epoch
        self._losses: list[float] = []  # since the last log
        self._whole = True  # the model is in this process
        self._told: set[str] = set()
        trainer.state.max_steps = steps
        trainer.state.num_train_epochs = -(-steps // steps_of_epoch)
        trainer.state.compute_steps(trainer.args, steps)

    def __call__(self, event: AnyEvent) -> None:
        match event:
            case RunStarted():
                self._whole = len(event.devices) == 1
                self._call("on_train_begin")
            case StepFinished():
                self._step(event)
            case Evaluated():
                metrics = {"eval_loss": event.loss, **{f"eval_{name}": value for name, value in event.metrics.items()}}
                self._log({name: value for name, value in metrics.items() if value is not None} | {"epoch": self._trainer.state.epoch})
                self._call("on_evaluate", metrics=metrics)
            case CheckpointSaved():
                self._call("on_save")
            case RunFinished():
                self._call("on_train_end")
            case _:
                return
        if not isinstance(event, RunFinished) and self._trainer.control.should_training_stop:
            raise StopTraining

    def _step(self, event: StepFinished) -> None:
        """A step is told of once it is made: what begins with it is told just before its end."""
        state, args = self._trainer.state, self._trainer.args
        if (event.step - 1) % self._steps_of_epoch == 0:
            self._call("on_epoch_begin")
        self._call("on_step_begin")
        state.global_step, state.epoch = event.step, event.step / self._steps_of_epoch
        self._losses.append(event.loss)
        self._call("on_step_end")
        ends_epoch = event.step % self._steps_of_epoch == 0
        if ends_epoch:
            self._call("on_epoch_end")
        strategy = str(getattr(args.logging_strategy, "value", args.logging_strategy))
        due = strategy == "steps" and event.step % max(1, int(state.logging_steps)) == 0
        if due or (strategy == "epoch" and ends_epoch) or (event.step == 1 and args.logging_first_step):
            logs = {"loss": sum(self._losses) / len(self._losses), "learning_rate": event.learning_rate, "epoch": state.epoch}
            norm = {"grad_norm": event.gradient_norm} if event.gradient_norm is not None else {}
            self._losses = []
            self._log({**logs, **norm})

    def _log(self, logs: dict[str, Any]) -> None:
        self._trainer.state.log_history.append({**logs, "step": self._trainer.state.global_step})
        self._call("on_log", logs=logs)

    def _call(self, name: str, **more: Any) -> None:
        trainer, control = self._trainer, self._trainer.control
        for callback in self._callbacks:
            given = {"model": trainer.model if self._whole else None, "processing_class": trainer.processing_class}
            changed = getattr(callback, name)(trainer.args, trainer.state, control, **given, optimizer=None, lr_scheduler=None, **more)
            control = changed if changed is not None else control
        trainer.control = control
        for wish in ("should_log", "should_evaluate", "should_save", "should_epoch_stop"):
            if getattr(control, wish):
                self._tell(wish)
                setattr(control, wish, False)

    def _tell(self, wish: str) -> None:
        if wish not in self._told:
            self._told.add(wish)
            warnings.warn(
                f"from_trainer: a callback sets control.{wish}, which has no effect: Atoll logs, evaluates and saves on schedule",
                stacklevel=2,
            )


def stop_before_training(trainer: "Trainer", job: Job) -> None:
    """Under a command that looks for the script's Job, `trainer.train()` is as far as the script goes; otherwise it trains."""
    from transformers import TrainerCallback

    class _Found(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            opener = run_opener()
            if opener is not None:
                opener(job, False)

    trainer.add_callback(_Found())
