"""Evaluation of a whole model on one device, and when a job wants it: what a run in one process does, and a swarm from its checkpoints."""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from atoll.blame import users_code
from atoll.data import Batch, Dataset, to_device
from atoll.errors import AtollError, JobError, JobFailedError
from atoll.events import Evaluated
from atoll.job import Job, LossFunction, LossValue, read_loss
from atoll.runtime.batch_loader import BatchLoader
from atoll.runtime.nonfinite import checked_weight

if TYPE_CHECKING:  # what captures models takes seconds to load, and a coordinator that has others evaluate does without it
    from atoll.runtime.stage.compilation import Compiler
    from atoll.runtime.whole_program import Divided

__all__ = ["EvaluationSums", "ModelEvaluator", "averaged", "evaluated_functions", "evaluates_after", "loader_for"]


def evaluates_after(job: Job, step: int, steps: int) -> bool:
    """Whether a job of so many steps wants to know after this one."""
    if job.eval_data is None:
        return False
    return step == steps or (job.eval_every is not None and step % job.eval_every == 0)


def evaluated_functions(job: Job) -> dict[str, LossFunction]:
    """The evaluation loss, under an empty name, and the metrics."""
    if len(job.turns) > 1 and job.eval_loss is None:
        raise JobError("Job: eval_loss: there are several losses: say which to evaluate, and give eval_data")
    return {"": job.eval_loss or job.loss, **job.metrics}


def loader_for(job: Job, dataset: Any, before: BatchLoader | None, lock: AbstractContextManager[Any] | None = None) -> BatchLoader:
    """What loads data to evaluate on: the same as before, with its workers, for the same data."""
    if before is not None:
        if before.samples.dataset is dataset:
            return before
        before.close()
    return BatchLoader(job.evaluation_samples(dataset), job.num_workers, lock)


def averaged(name: str, why: str = "what it is a mean over is not known") -> str:
    """In words, that pieces of the evaluation data may not add up."""
    what = f"metrics[{name!r}]" if name else "the loss"
    return f"{what} is averaged over pieces of the evaluation data, by samples: {why}; return (total, weight) to be exact"


class EvaluationSums:
    """What pieces of the evaluation data add up to: a total and a weight for each term of a loss or metric, in that order."""

    def __init__(self, sums: Tensor) -> None:
        self.sums = sums

    @classmethod
    def of_terms(cls, terms: int) -> "EvaluationSums":
        """Of nothing yet."""
        return cls(torch.zeros(2 * terms, dtype=torch.float64))

    def add(self, found: LossValue, samples: int) -> None:
        """One piece more."""
        weight = float(samples) if found.weight is None else found.weight
        total = found.value.detach() * (weight if found.weight is None else 1.0)
        both = [torch.as_tensor(value, dtype=torch.float64).reshape(-1).cpu() for value in (total, weight)]
        self.sums += torch.cat(both)

    @property
    def weights(self) -> Tensor:
        """One of each term."""
        return self.sums[len(self.sums) // 2 :]

    def mean(self) -> float | None:
        """The sum of the terms, each divided by its weight; None where that is no number."""
        totals, weights = self.sums.tensor_split(2)
        value = float((totals / weights).sum())
        return value if math.isfinite(value) else None


def _counted(value: LossValue, weight: float) -> LossValue:
    """A mean over what counts as a total with its weight; where nothing counts it is no number."""
    return LossValue(value.value * weight if weight else torch.zeros(()), weight)


class ModelEvaluator:
    """The losses and metrics of a whole model on one device. Pieces add up to what the whole evaluation data would give at once.

    What is no mean over samples is captured for that, when the data is first divided. Where it cannot be, the mean of its pieces' values is
    taken, by samples, and the first evaluation says so.
    """

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        device: torch.device,
        dataset: Dataset,
        compiler: "Compiler | None" = None,
        only: Sequence[str] = (),
    ) -> None:
        """Of `only` these functions, by their names, where some are given."""
        self._job, self.model, self._device, self.dataset = job, model, device, dataset
        self._functions, self._compiler = evaluated_functions(job), compiler
        if only:
            self._functions = {name: self._functions[name] for name in only}
        if compiler is not None:
            self._functions = {name: compiler.function(function) for name, function in self._functions.items()}
        self._loader = loader_for(job, dataset, None)
        self._divided: dict[str, Divided] = {}  # how what is evaluated in pieces is computed
        self._notes: list[str] = []  # not told yet

    @torch.no_grad()
    def run(self, step: int) -> Evaluated:
        """After so many steps. The model is in training mode afterwards; `at_seconds` is the caller's to set."""
        began = time.perf_counter()
        samples = self._loader.samples
        size, length = samples.batch_size, samples.length
        self.model.eval()
        measures = {name: self._measure(name, function, step, divided=length > size) for name, function in self._functions.items()}
        sums = {name: EvaluationSums.of_terms(self._terms(name)) for name in measures}
        pieces = [range(start, min(start + size, length)) for start in range(0, length, size)]
        batches = self._loader.batches(map(samples.request, pieces))
        for indices in pieces:
            with users_code(f"evaluation after step {step}: loading samples {indices[0]} to {indices[-1]}", JobFailedError):
                batch = to_device(next(batches).batch, self._device)
            for name, measure in measures.items():
                sums[name].add(measure(indices, batch), len(indices))
        self.model.train()
        for name, found in sums.items():
            checked_weight(f"evaluation {name}".strip(), float(found.weights.min()))
        means = {name: found.mean() for name, found in sums.items()}
        loss = means.pop("", None)
        notes, self._notes = tuple(self._notes), []
        seconds = time.perf_counter() - began
        return Evaluated(at_seconds=0.0, step=step, loss=loss, metrics=means, samples=length, seconds=seconds, notes=notes)

    def close(self) -> None:
        """Ends the processes that load its data."""
        self._loader.close()

    def _measure(self, name: str, function: LossFunction, step: int, *, divided: bool) -> "Callable[[range, Batch], LossValue]":
        """What says something of a piece: the user's own code, or the program whose results add up."""
        if divided and name not in self._divided:
            self._divided[name] = self._found(step, name, function)
        found = self._divided.get(name)
        if found is None or (found.program is None and found.counts is None):
            return lambda indices, batch: self._eagerly(step, name, function, batch)
        if found.counts is not None:
            counts = found.counts
            return lambda indices, batch: _counted(self._eagerly(step, name, function, batch), counts.of(batch))
        from atoll.runtime.executor import LossScale, Updater, WorkItem
        from atoll.runtime.whole_program import WholeProgram

        assert found.program is not None
        nothing = Updater([], None, None, LossScale(False), steps=self._job.total_steps)
        program = WholeProgram(self._job, found.program, self.model, self._device, nothing, self._compiler)
        return lambda indices, batch: program.evaluate(WorkItem(0, step, 0, indices.start, len(indices)), batch)

    def _terms(self, name: str) -> int:
        found = self._divided.get(name)
        return 1 if found is None or found.program is None else found.program.loss_form.terms

    def _found(self, step: int, name: str, function: LossFunction) -> "Divided":
        from atoll.runtime.evaluated_programs import capture_function
        from atoll.runtime.whole_program import Divided

        samples = self._loader.samples
        with users_code(f"evaluation after step {step}: loading its first samples", JobFailedError):
            batch = to_device(samples.at(range(min(samples.length, 2))), self._device)
        if self._eagerly(step, name, function, batch).weight is not None:
            return Divided()
        try:
            with torch.enable_grad():
                captured = capture_function(self._job, name, evaluated_functions(self._job)[name], self.dataset)
        except AtollError as error:
            self._notes.append(averaged(name, f"it could not be captured ({error})"))
            return Divided()
        if captured.loss_form.kind == "unknown":
            self._notes.append(averaged(name))
        return Divided.of(captured)

    def _eagerly(self, step: int, name: str, function: LossFunction, batch: Any) -> LossValue:
        """What the evaluation loss (its name is empty) or a metric says of a batch; here a plain number will do."""
        known = f"metrics[{name!r}]" if name else "eval_loss" if self._job.eval_loss else "loss"
        with self._job.autocast(self._device), users_code(f"evaluation after step {step}: {known}", JobFailedError):
            result: object = function(self.model, batch)
        return read_loss(torch.tensor(float(result)) if isinstance(result, (int, float)) else result, known)
