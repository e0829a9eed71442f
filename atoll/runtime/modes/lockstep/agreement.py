"""Agreement: before the first step every rank says what it is about to train; what must be the same and is not is an error that names it.

Scripts can differ between ranks without anybody noticing: a seed made from the rank, weights drawn without the seed, data that one host has
not got in full. Each would train on, with numbers that belong to no job.
"""

import hashlib

import msgspec
import torch
import torch.distributed as dist
from torch import nn

from atoll.errors import JobError
from atoll.job import Job
from atoll.runtime.checkpoint.exchange import CheckpointRanks

__all__ = ["Said", "agree", "difference", "digest_of_weights"]

_SAMPLED = 64  # numbers of each tensor that are compared


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank says of its job. All but `callbacks` must be the same on every rank."""

    steps: int
    batch_size: int
    seed: int
    samples: int
    precision: str
    max_grad_norm: float | None
    eval_every: int | None
    optimizer: str
    weights: str  # digest of the weights it starts from
    callbacks: bool


_WORDS = {
    "steps": "steps",
    "batch_size": "batch_size",
    "seed": "seed",
    "samples": "the length of its data",
    "precision": "precision",
    "max_grad_norm": "max_grad_norm",
    "eval_every": "eval_every",
    "optimizer": "the optimizer's settings",
    "weights": "the weights the model starts from",
}


def digest_of_weights(model: nn.Module) -> str:
    """Of some numbers of every parameter and buffer, bit for bit."""
    digest = hashlib.sha256()
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        flat = value.detach().reshape(-1)
        chosen = flat[:: max(1, flat.numel() // _SAMPLED)][: 2 * _SAMPLED].contiguous()
        digest.update(name.encode() + str(tuple(value.shape)).encode() + chosen.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def difference(said: list[Said]) -> str | None:
    """The first thing on which ranks do not agree, in words; None when they do."""
    for field, words in _WORDS.items():
        first = getattr(said[0], field)
        for rank, other in enumerate(said):
            value = getattr(other, field)
            if value != first:
                values = "" if field == "weights" else f": {first} on rank 0, {value} on rank {rank}"
                advice = (
                    "give Job a callable that builds the model; it is called with the job's seed on every rank"
                    if field == "weights"
                    else "every process must run the same job"
                )
                return f"ranks 0 and {rank} do not train the same job: they differ in {words}{values}; {advice}"
    return None


def agree(job: Job, weights: str) -> bool:
    """Compare with all other ranks; whether any of them has callbacks that could ask to stop."""
    probe = job.build_optimizer([nn.Parameter(torch.zeros(2, 2))])
    own = Said(
        steps=job.total_steps,
        batch_size=job.batch_size,
        seed=job.seed,
        samples=job.samples.length,
        precision=job.precision,
        max_grad_norm=job.max_grad_norm,
        eval_every=job.eval_every,
        optimizer=f"{type(probe).__name__}{ {key: value for key, value in sorted(probe.defaults.items()) if not callable(value)} }",
        weights=weights,
        callbacks=bool(job.callbacks),
    )
    said = CheckpointRanks(dist.group.WORLD).gather(own, Said)
    wrong = difference(said)
    if wrong is not None:
        raise JobError(wrong)
    return any(rank.callbacks for rank in said)
