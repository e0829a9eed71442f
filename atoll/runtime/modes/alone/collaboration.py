"""Parts that learn from one another in one process: the reference for parts at different sites.

What crosses goes through its codec here too, so that a step is the same numbers wherever the parts are.
"""

import math
from typing import Any

import torch
from torch import Tensor

from atoll.collaboration import Collaboration
from atoll.data import Dataset, to_device
from atoll.events import Evaluated
from atoll.runtime.executor import Update
from atoll.runtime.modes.alone.trainer import AloneTrainer, TakenTurn
from atoll.runtime.part_evaluation import PartEvaluator, joined_evaluations
from atoll.runtime.part_executor import PartExecutor, added, crossed

__all__ = ["CollaborationTrainer"]


class CollaborationTrainer(AloneTrainer):
    """All parts on one device. In a step all compute with the weights of the step before, then all make their steps."""

    job: Collaboration

    def __init__(self, job: Collaboration, device: torch.device, *rest: Any) -> None:
        super().__init__(job, device, *rest)
        self.executors = {name: PartExecutor(job, name, self.model.get_submodule(name), device) for name in job.order}
        self.evaluators: dict[str, PartEvaluator] = {}

    def take_turns(self, step: int) -> list[TakenTurn]:
        """Every part forward, in the order of what they send; backward the other way round; then their optimizers."""
        batch = to_device(self._next_batch(step), self.device)
        for turn in self.turns:
            turn.optimizer.zero_grad()
        received: dict[str, Tensor | None] = {}
        for executor in self.executors.values():
            for sent, value in executor.forward(step, batch, {wanted: received[wanted] for wanted in executor.part.wanted}).items():
                received[sent] = crossed(sent, value, executor.part.codecs[sent])
            if executor.loss is not None and not math.isfinite(executor.loss.value):
                self._not_finite(step, "loss", executor.loss.value)
        taught = self._backward(step)
        made = []
        for turn in self.turns:
            norm = self._clip(step, turn, overflowed=False)
            own = self.executors[turn.name].loss
            loss = own.value if own is not None else taught.get(turn.name)
            weight = own.weight if own is not None else float(self.job.batch_size)
            made.append(TakenTurn(loss, weight, norm, turn.updater.apply(Update(step))))
        return made

    def _backward(self, step: int) -> dict[str, float]:
        """The losses of gradients that train parts without a loss of their own."""
        gradients: dict[str, list[Tensor]] = {}
        taught: dict[str, float] = {}
        for name in reversed(self.job.order):
            executor = self.executors[name]
            if not executor.part.trains:
                continue
            returned = {sent: added(gradients[sent]) for sent in executor.returns}
            for wanted, (gradient, loss) in executor.backward(step, returned).items():
                sender = self.job.senders[wanted]
                gradients.setdefault(wanted, []).append(crossed(wanted, gradient, self.job.parts[sender].codecs[wanted]))
                if loss is not None:
                    taught[sender] = taught.get(sender, 0.0) + loss
        return taught

    def close(self) -> None:
        """End the processes that load data."""
        super().close()
        for evaluator in self.evaluators.values():
            evaluator.close()

    def _evaluated(self, dataset: Dataset) -> Evaluated:
        found = {}
        for name, part in self.job.parts.items():
            if part.is_evaluated:
                if name not in self.evaluators or self.evaluators[name].dataset is not dataset:
                    self.evaluators[name] = PartEvaluator(self.job, name, self.model.get_submodule(name), self.device, dataset)
                found[name] = self.evaluators[name].run(len(self.losses))
        return joined_evaluations(found)
