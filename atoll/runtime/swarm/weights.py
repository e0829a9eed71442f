"""Weights: the whole model from the stages' stored states, as a checkpoint that `atoll export` and every other mode read."""

from collections.abc import Sequence

import torch
from torch import Tensor

from atoll.job import Job
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.stage.holding import Holding
from atoll.runtime.swarm.files import Key, States
from atoll.runtime.swarm.packing import unpack

__all__ = ["save_weights", "whole_state"]


async def whole_state(states: States, keys: Sequence[Key]) -> dict[str, Tensor] | None:
    """Parameters and buffers of all stages; None where one is not stored whole."""
    tensors: dict[str, Tensor] = {}
    for key in keys:
        packed = await states.read(key)
        if packed is None:
            return None
        saved = unpack(packed)
        tensors |= saved["parameters"] | saved["buffers"]
    return tensors


def save_weights(directory: RunDirectory, job: Job, tensors: dict[str, Tensor], step: int) -> None:
    """As the run's checkpoint after so many steps."""
    from atoll.runtime.checkpoint import Checkpointer, Held, RunIdentity  # takes seconds to load, and only the end of a run needs it

    persistent = job.build_model("cpu").state_dict()
    rest = {name: value for name, value in persistent.items() if name not in tensors}
    own = {name: value for name, value in tensors.items() if name in persistent}
    held = [Held(Holding(name=name, shape=tuple(value.shape)), value) for name, value in (own | rest).items()]
    identity = RunIdentity(
        job=job.name,
        optimizer=type(job.build_optimizer([torch.nn.Parameter(torch.zeros(1))])).__name__,
        seed=job.seed,
        batch_size=job.batch_size,
        plan=str(directory.plan()),
    )
    with Checkpointer(directory.checkpoints, None, identity=identity) as checkpoints:
        checkpoints.save(step, held, final=True)
