"""Checkpoints of parts: each part's own, in the one format, and that of all parts together, from which any mode goes on."""

import torch
from torch import nn

from atoll.collaboration import Collaboration
from atoll.errors import CheckpointError
from atoll.job import Job
from atoll.model_identity import identify
from atoll.runtime.checkpoint.checkpointer import Checkpointer
from atoll.runtime.checkpoint.directory import steps
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.loading import load_from
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.checkpoint.trained import held_tensors
from atoll.runtime.checkpoint.training_state import restore_training, training_state
from atoll.runtime.executor import LossScale
from atoll.runtime.modes.parts.part_process import part_directory
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.turns import optimizer_names, schedule_of

__all__ = ["divide_checkpoint", "join_checkpoints", "newest_common"]


def newest_common(directory: RunDirectory, job: Collaboration) -> int:
    """The newest step that all parts which train have saved on this machine; 0: there is none."""
    saved = [set(steps(part_directory(directory.path, name).checkpoints)) for name in job.turns]
    return max(set.intersection(*saved), default=0)


class _Whole:
    """All parts in this process, to be filled and saved."""

    def __init__(self, job: Collaboration) -> None:
        self.job, self.model = job, job.build_model("cpu")
        self.optimizers = job.build_optimizers(self.model)
        self.schedules = {name: one.build_scheduler(self.optimizers[name]) for name, one in job.turns.items()}

    @property
    def identity(self) -> RunIdentity:
        """Of all."""
        return _identity(self.job, self.model, list(self.optimizers.values()))

    def part(self, name: str) -> tuple[nn.Module, torch.optim.Optimizer, RunIdentity]:
        """Of one."""
        model, optimizer = self.model.get_submodule(name), self.optimizers[name]
        return model, optimizer, _identity(self.job.turns[name], model, [optimizer])


def _identity(job: Job, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> RunIdentity:
    return RunIdentity.of(identify(model), job=job.name, optimizer=optimizer_names(optimizers), seed=job.seed, batch_size=job.batch_size)


def join_checkpoints(directory: RunDirectory, job: Collaboration, step: int, keep_last: int) -> None:
    """Of the parts' checkpoints of a step, one of all of them, as a run in one process writes it."""
    whole, losses = _Whole(job), [0.0] * step
    if step in steps(directory.checkpoints):
        return
    for name in job.turns:
        model, optimizer, identity = whole.part(name)
        place = part_directory(directory.path, name).checkpoints
        loaded = load_from(CheckpointRanks(None), place, identity, held_tensors(model), [optimizer], step)
        assert loaded is not None, "it is there"
        own = restore_training(loaded.extra, loaded.step, whole.schedules[name], LossScale(False))
        losses = [total + loss for total, loss in zip(losses, own, strict=True)]
    extra = training_state(schedule_of(whole.schedules), LossScale(False), losses)
    checkpointer = Checkpointer(directory.checkpoints, identity=whole.identity, keep_last=keep_last)
    checkpointer.save(step, held_tensors(whole.model), optimizers=list(whole.optimizers.values()), extra=extra, final=True)


def divide_checkpoint(directory: RunDirectory, job: Collaboration, step: int) -> None:
    """Of a checkpoint of all parts, one for each, to go on from. Losses of the steps before are not known by part: the first has them."""
    whole = _Whole(job)
    optimizers, held = list(whole.optimizers.values()), held_tensors(whole.model)
    loaded = load_from(CheckpointRanks(None), directory.checkpoints, whole.identity, held, optimizers, step)
    if loaded is None:
        raise CheckpointError(f"{directory.checkpoints}: no checkpoint of step {step}")
    losses = restore_training(loaded.extra, loaded.step, schedule_of(whole.schedules), LossScale(False))
    for name in job.turns:
        model, optimizer, identity = whole.part(name)
        extra = training_state(whole.schedules[name], LossScale(False), losses)
        place = part_directory(directory.path, name).checkpoints
        place.parent.mkdir(parents=True, exist_ok=True)
        Checkpointer(place, identity=identity).save(step, held_tensors(model), optimizers=[optimizer], extra=extra, final=True)
        losses = [0.0] * step
