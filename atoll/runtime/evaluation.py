"""Evaluation of a whole model on one device, and when a job wants it: what a run in one process does, and a swarm from its checkpoints."""

import math
import time
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from atoll.blame import users_code
from atoll.data import to_device
from atoll.errors import JobFailedError
from atoll.events import Evaluated
from atoll.job import Job, LossFunction, LossValue, read_loss
from atoll.runtime.batch_loader import BatchLoader
from atoll.runtime.nonfinite import checked_weight

__all__ = ["evaluate", "evaluates_after", "loader_for"]


def evaluates_after(job: Job, step: int, steps: int) -> bool:
    """Whether a job of so many steps wants to know after this one."""
    if job.eval_data is None:
        return False
    return step == steps or (job.eval_every is not None and step % job.eval_every == 0)


def loader_for(job: Job, dataset: Any, before: BatchLoader | None, lock: AbstractContextManager[Any] | None = None) -> BatchLoader:
    """What loads data to evaluate on: the same as before, with its workers, for the same data."""
    if before is not None:
        if before.samples.dataset is dataset:
            return before
        before.close()
    return BatchLoader(job.evaluation_samples(dataset), job.num_workers, lock)


@torch.no_grad()
def evaluate(job: Job, model: nn.Module, device: torch.device, step: int, loader: BatchLoader) -> Evaluated:
    """The losses and metrics of a model after `step` steps, over all that the loader has. The model is in training mode afterwards;
    `at_seconds` is the caller's to set.
    """
    began = time.perf_counter()
    functions: dict[str, LossFunction] = {"": job.eval_loss or job.loss, **job.metrics}
    sums = {name: [0.0, 0.0] for name in functions}
    samples, length = loader.samples, loader.samples.length
    pieces = [range(start, min(start + samples.batch_size, length)) for start in range(0, length, samples.batch_size)]
    batches = loader.batches(map(samples.request, pieces))
    model.eval()
    for indices in pieces:
        with users_code(f"evaluation after step {step}: loading samples {indices[0]} to {indices[-1]}", JobFailedError):
            batch = to_device(next(batches).batch, device)
        for name, function in functions.items():
            value, weight = _measured(job, model, device, step, name, function, batch)
            amount = len(indices) if weight is None else float(weight)
            sums[name][0] += float(value) * (amount if weight is None else 1.0)
            sums[name][1] += amount
    model.train()
    means = {name: _finite(total / checked_weight(f"evaluation {name}".strip(), amount)) for name, (total, amount) in sums.items()}
    loss = means.pop("")
    return Evaluated(at_seconds=0.0, step=step, loss=loss, metrics=means, samples=length, seconds=time.perf_counter() - began)


def _measured(job: Job, model: nn.Module, device: torch.device, step: int, name: str, function: LossFunction, batch: Any) -> LossValue:
    """What the evaluation loss (its name is empty) or a metric says of a batch; here a plain number will do."""
    known = f"metrics[{name!r}]" if name else "eval_loss" if job.eval_loss else "loss"
    with job.autocast(device), users_code(f"evaluation after step {step}: {known}", JobFailedError):
        result: object = function(model, batch)
    return read_loss(torch.tensor(float(result)) if isinstance(result, (int, float)) else result, known)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
