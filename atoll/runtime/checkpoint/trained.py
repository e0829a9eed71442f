"""What a run has trained, as an ordinary module and optimizer in one process: from its checkpoint, or from what its ranks gathered."""

from pathlib import Path

import torch
from torch import nn

from atoll.errors import CheckpointError
from atoll.job import Job
from atoll.model_identity import identify, tied_names
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.loading import load_from
from atoll.runtime.checkpoint.local_shard import LocalShard, whole_shards
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.turns import optimizer_names

__all__ = ["held_tensors", "load_trained"]


def held_tensors(model: nn.Module) -> list[LocalShard]:
    """As `StageExecutor.shards`, of a model that is not cut: parameters and persistent buffers, each under its first name.

    Asked anew for every save: a model may put another tensor in a buffer's place.
    """
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers(remove_duplicate=False))
    names = [name for name in model.state_dict() if name not in parameters and name not in tied_names(model)]
    for name in names:
        if name not in buffers:
            raise CheckpointError(f"{name!r}: state that is neither a parameter nor a buffer cannot be saved; register it as a buffer")
    return whole_shards(parameters | {name: buffers[name] for name in names})


def load_trained(job: Job, run: Path, step: int | None = None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Model and (first) optimizer as the run's last checkpoint, or that of a step, has them, whichever mode and plan wrote it."""
    model = job.build_model("cpu")
    optimizers = list(job.build_optimizers(model).values())
    name = optimizer_names(optimizers)
    identity = RunIdentity.of(identify(model), job=job.name, optimizer=name, seed=job.seed, batch_size=job.batch_size)
    if load_from(CheckpointRanks(None), run / "checkpoints", identity, held_tensors(model), optimizers, step) is None:
        raise CheckpointError(f"{run}: no checkpoint there; a run saves at its end, and while it trains")
    return model, optimizers[0]
