"""What is evaluated of a collaboration: each part by itself, and all of it in one event."""

from collections.abc import Mapping

import torch
from torch import nn

from atoll.collaboration import Collaboration
from atoll.data import Dataset
from atoll.events import Evaluated
from atoll.runtime.evaluation import ModelEvaluator

__all__ = ["PartEvaluator", "joined_evaluations"]


class PartEvaluator:
    """Evaluates one part by itself, as its `eval_loss` and `metrics` say."""

    def __init__(self, job: Collaboration, name: str, model: nn.Module, device: torch.device, dataset: Dataset) -> None:
        self.dataset = dataset
        self._model, self._trains = model, job.parts[name].trains
        self._evaluator = ModelEvaluator(job.part_jobs[name], model, device, dataset)

    def run(self, step: int) -> Evaluated:
        """After so many steps; `at_seconds` is the caller's to set."""
        found = self._evaluator.run(step)
        self._model.train(self._trains)
        return found

    def close(self) -> None:
        """Ends the processes that load its data."""
        self._evaluator.close()


def joined_evaluations(found: Mapping[str, Evaluated]) -> Evaluated:
    """The loss is the sum of the parts' losses; where several have one, each is a metric too. Metrics begin with their part's name."""
    losses = {name: one.loss for name, one in found.items()}
    metrics = {f"{name}.{metric}": value for name, one in found.items() for metric, value in one.metrics.items()}
    if len(losses) > 1:
        metrics |= {f"{name}.loss": loss for name, loss in losses.items()}
    known = [loss for loss in losses.values() if loss is not None]
    first = next(iter(found.values()))
    return Evaluated(
        at_seconds=0.0,
        step=first.step,
        loss=sum(known) if len(known) == len(losses) else None,
        metrics=metrics,
        samples=first.samples,
        seconds=sum(one.seconds for one in found.values()),
        notes=tuple(f"{name}: {note}" for name, one in found.items() for note in one.notes),
    )
