"""Evaluation of what cannot be captured: by the user's own code, on rank 0, with the weights of all ranks."""

from collections.abc import Callable, Mapping

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from atoll.cluster.memory import host_memory
from atoll.data import Dataset
from atoll.errors import JobError
from atoll.job import Job
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.evaluation import ModelEvaluator

__all__ = ["EvaluatedWhole", "WholeModel"]


class EvaluatedWhole(msgspec.Struct, frozen=True):
    """What rank 0 found."""

    means: dict[str, float | None]
    notes: list[str]


class WholeModel:
    """Rank 0 evaluates, the others wait for it."""

    def __init__(self, job: Job, reasons: Mapping[str, str], parameters: int, rank: int, gather: Callable[[], dict[str, Tensor]]) -> None:
        """`reasons` has the functions' names and why they were not captured; `gather` is called by all ranks together, and rank 0 gets
        the weights. JobError where they would not fit there."""
        self._job, self._names, self._rank, self._gather = job, list(reasons), rank, gather
        self._evaluator: ModelEvaluator | None = None
        self.notes = [f"{_words(name)} is evaluated by rank 0 alone, with the whole model: {reason}" for name, reason in reasons.items()]
        if job.eval_ema:
            raise JobError(f"Job: eval_ema: {_words(self._names[0])} cannot be captured, so it is evaluated without averages; leave it out")
        if rank == 0 and 8.0 * parameters > host_memory().available_bytes:  # what is gathered, and the model
            raise JobError(
                f"{self.notes[0]}; that does not fit into the memory of rank 0. Leave it out, or evaluate what `atoll export` writes"
            )

    def run(self, step: int, dataset: Dataset) -> EvaluatedWhole:
        """The means of all samples, and what there is to say of them. All ranks call it together."""
        weights, found, notes = self._gather(), dict[str, float | None](), list[str]()
        if self._rank == 0:
            if self._evaluator is None or self._evaluator.dataset is not dataset:
                self.close()
                self._evaluator = ModelEvaluator(self._job, self._job.build_model("cpu"), torch.device("cpu"), dataset, only=self._names)
            self._evaluator.model.load_state_dict(weights, strict=False)
            evaluated = self._evaluator.run(step)
            found, notes = {"": evaluated.loss, **evaluated.metrics}, list(evaluated.notes)
        said = CheckpointRanks(dist.group.WORLD).gather(
            EvaluatedWhole({name: found.get(name) for name in self._names}, notes), EvaluatedWhole
        )
        return said[0]

    def close(self) -> None:
        """Ends the processes that load its data."""
        if self._evaluator is not None:
            self._evaluator.close()


def _words(name: str) -> str:
    return f"metrics[{name!r}]" if name else "the evaluation loss"
