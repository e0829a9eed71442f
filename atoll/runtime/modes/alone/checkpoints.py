"""What a run in one process continues from: the checkpoints every other mode reads and writes too."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from atoll.errors import CheckpointError
from atoll.events import CheckpointFailed, CheckpointIntervalChosen, CheckpointSaved
from atoll.job import Job
from atoll.plan.modes.alone import ALONE
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.loading import Loaded
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.checkpoint.safetensors_file import dtype_name
from atoll.runtime.checkpoint.save_policy import SavePolicy
from atoll.runtime.run_directory import RunDirectory, RunSettings, run_lock
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.state import model_config, tied_names

__all__ = ["LocalCheckpoints", "opened_run"]


@contextmanager
def opened_run(path: Path, *, resume: bool, checkpoint_every: int | None) -> Iterator[tuple[RunDirectory, RunSettings]]:
    """A new run's directory, or that of a run to go on with, held by this process until it leaves."""
    directory = RunDirectory(path)
    settings = RunSettings(
        script=str(Path(sys.argv[0]).resolve()), arguments=tuple(sys.argv[1:]), mode=ALONE.name, checkpoint_every=checkpoint_every
    )
    if resume:
        before = directory.settings()  # an error where there is no run to go on with
        every = checkpoint_every if checkpoint_every is not None else before.checkpoint_every
        settings = msgspec.structs.replace(settings, checkpoint_every=every, keep_last=before.keep_last)
    else:
        directory.check_new()
    with run_lock(path):
        if resume:
            directory.write_settings(settings)
        else:
            directory.create(settings)
        yield directory, settings


class LocalCheckpoints:
    """The checkpoints of a model and an optimizer that are whole in this process."""

    def __init__(
        self, directory: RunDirectory, settings: RunSettings, job: Job, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> None:
        self._every, self._model, self._optimizer = settings.checkpoint_every, model, optimizer
        for held in held_tensors(model):
            dtype_name(held.tensor.dtype, f"{held.name!r}")  # what cannot be saved is refused before it is trained
        identity = RunIdentity(
            job=job.name,
            optimizer=type(optimizer).__name__,
            seed=job.seed,
            batch_size=job.batch_size,
            tied=tied_names(model),
            model_config=model_config(model),
        )
        self._checkpoints = Checkpointer(directory.checkpoints, identity=identity, keep_last=settings.keep_last)
        self._policy: SavePolicy | None = None

    def load(self) -> Loaded | None:
        """Fill model and optimizer from the checkpoint to go on from; None where there is none."""
        return self._checkpoints.load(held_tensors(self._model), optimizers=[self._optimizer])

    def begin(self, step: int, moment: float) -> None:
        """Training goes on after `step` steps."""
        self._policy = SavePolicy(self._every, step=step, moment=moment)

    def due(self, step: int, moment: float) -> bool:
        """Whether to save after this step."""
        assert self._policy is not None
        return self._policy.due(step, moment)

    def save(self, step: int, extra: dict[str, Any], *, final: bool = False) -> None:
        """Save the state after `step` steps; `final` comes back when it is in place, or raises `JobFailedError`."""
        assert self._policy is not None
        self._policy.begun(step)
        self._checkpoints.save(step, held_tensors(self._model), optimizers=[self._optimizer], extra=extra, final=final)

    def ended(self, moment: float) -> list[CheckpointSaved | CheckpointFailed]:
        """What became of saves since the last call."""
        outcomes = self._checkpoints.finished()
        for outcome in outcomes:
            if self._policy is not None:
                self._policy.ended(outcome.seconds)
        return [outcome.event(moment) for outcome in outcomes]

    def decision(self, step: int, moment: float) -> CheckpointIntervalChosen | None:
        """How often to save from now on, where a save that ended says so."""
        return self._policy.decision(step, moment) if self._policy is not None else None

    def close(self) -> None:
        """Wait for a save under way."""
        self._checkpoints.wait()


def held_tensors(model: nn.Module) -> list[LocalShard]:
    """Parameters and persistent buffers, each under its first name; the optimizer knows parameters as these very objects.

    Asked anew for every save: a model may put another tensor in a buffer's place.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers(remove_duplicate=False))
    names = [name for name in model.state_dict() if name not in parameters and name not in tied_names(model)]
    for name in names:
        if name not in buffers:
            raise CheckpointError(f"{name!r}: state that is neither a parameter nor a buffer cannot be saved; register it as a buffer")
    found = parameters | {name: buffers[name] for name in names}
    return [LocalShard(ShardSpec(name=name, shape=tuple(value.shape)), value) for name, value in found.items()]
