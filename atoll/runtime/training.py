"""Training: a run under way, whatever mode, one step after another. `Job.run` is a loop over it; so is a loop of the user's own."""

from typing import Literal, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from atoll.data import Dataset
from atoll.events import Evaluated
from atoll.job import RunResult

__all__ = ["CALLS", "STEP", "Reason", "Training", "train"]

Reason: TypeAlias = Literal["done", "stopped", "interrupted"]
STEP = "make a step"
CALLS = (STEP, "evaluate", "save", "take the state_dict", "end the run")
"""What processes do together, in words."""


class Training(Protocol):
    """What every process of a run does together: each calls the same methods in the same order, and gets the same numbers.

    Whatever ends it, the weights are those after a whole step.
    """

    @property
    def losses(self) -> list[float]:
        """Of all steps, those before this process began included."""

    @property
    def evaluations(self) -> list[Evaluated]:
        """Since this process began."""

    @property
    def reason(self) -> Reason | None:
        """Why no step follows; None while one does."""

    @property
    def model(self) -> nn.Module | None:
        """The module that is trained, if it is whole and in this process."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what this process has of the model."""

    def step(self) -> None:
        """Make the next step; tell of it; evaluate and save if that is due."""

    def stop(self) -> None:
        """Let no other step follow the next one. One process may ask for all."""

    def evaluate(self, dataset: Dataset) -> Evaluated:
        """Loss and metrics of the weights as they are, told to all who listen."""

    def save(self) -> None:
        """Save a checkpoint of the last step, if the run has a directory."""

    def save_last(self) -> None:
        """Save the checkpoint that the run ends with; it is in place, or an error is raised, when this returns."""

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's, copied to the CPU of the first process; the others get none of it."""

    def bring_model(self) -> None:
        """Before the run ends, where nothing is saved that `result` could read the model from: let it have it all the same."""

    def result(self) -> RunResult:
        """What the run leaves behind, once it has ended."""

    def together(self, call: str) -> None:
        """Before one of the above in a loop that is not Atoll's: JobFailedError where another process makes another call."""


def train(training: Training) -> None:
    """All steps that are left."""
    while training.reason is None:
        training.step()
