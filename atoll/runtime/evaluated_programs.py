"""The programs of what a job evaluates, in evaluation mode, for pieces of the evaluation data whose results add up."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from atoll.data import Batch, Dataset, Samples
from atoll.data.stream import is_stream
from atoll.errors import AtollError
from atoll.graph.capture import Captured, capture_program
from atoll.graph.graph import Precision
from atoll.job import Job, LossFunction
from atoll.runtime.evaluation import evaluated_functions

__all__ = ["EvaluatedPrograms", "capture_evaluated", "capture_function"]

EvaluatedPrograms: TypeAlias = Mapping[str, Captured | AtollError]
"""Of the evaluation loss, whose name is empty, and of the metrics: the program of each, or why it has none."""


@dataclass(frozen=True)
class _Measured:
    """A function of the model to capture: the evaluation loss, or a metric."""

    name: str
    model: nn.Module | Callable[[], nn.Module]
    loss: LossFunction
    precision: Precision
    job: Job
    samples: Samples

    @property
    def batch_size(self) -> int:
        """What a sum is the sum over."""
        return self.job.batch_size

    @property
    def dynamic(self) -> Mapping[str, int | Sequence[int]]:
        """Dimensions that are declared to vary."""
        return self.job.dynamic

    def example_batch(self, samples: int) -> Batch:
        """As many samples of the evaluation data, collated."""
        return self.samples.at(range(samples))

    def more_examples(self, samples: int) -> list[Batch]:
        """Batches of the samples that follow, and of the last ones where they can be chosen: such data is often sorted by length."""
        starts = [*range(samples, 4 * samples, samples)]
        if not is_stream(self.samples.dataset) and self.samples.length > samples:
            starts.append(self.samples.length - samples)
        return [self.samples.at(range(start, start + samples)) for start in starts]


def capture_evaluated(job: Job, dataset: Dataset | None = None) -> "EvaluatedPrograms":
    """The programs of what is evaluated, on this data or the job's: the loss, under an empty name, and metrics. None without data.

    What cannot be captured has the reason in the place of its program.
    """
    dataset = dataset if dataset is not None else job.eval_dataset
    return (
        {name: _captured(job, name, function, dataset) for name, function in evaluated_functions(job).items()}
        if dataset is not None
        else {}
    )


def _captured(job: Job, name: str, function: LossFunction, dataset: Dataset) -> Captured | AtollError:
    try:
        return capture_function(job, name, function, dataset)
    except AtollError as error:
        return error


def capture_function(job: Job, name: str, function: LossFunction, dataset: Dataset) -> Captured:
    """The program of one of them, for pieces of the data."""
    known = name or ("eval_loss" if job.eval_loss else "loss")
    measured = _Measured(f"{job.name}: {known}", job.model, function, job.precision, job, job.evaluation_samples(dataset))
    return capture_program(measured, training=False, divided=True)
