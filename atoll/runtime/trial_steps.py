"""Trial steps: what a job's forward, backward and optimizer take on this machine right now, beside others that do the same.

A probe knows operators; what Python, autograd and a busy neighbour add to this very job is found by running it for a second. Nothing of a
trial is kept: it has a model of its own.
"""

import statistics
import time

import msgspec
import torch

from atoll.job import Job, read_loss

__all__ = ["TrialTimes", "run_trial"]

_WARM = 2  # runs that find memory and caches as no later one does
_LEAST, _MOST = 3, 50


class TrialTimes(msgspec.Struct, frozen=True):
    """Seconds of a micro-batch forward and backward, and of the optimizer's step: the medians."""

    compute_seconds: float
    update_seconds: float


def run_trial(job: Job, samples: int, seconds: float) -> TrialTimes:
    """Train a copy of the model on the job's first samples for about so many seconds, a few steps at least."""
    device = torch.device("cpu")
    model, batch = job.build_model(device), job.example_batch(samples)
    optimizer = job.build_optimizer(model.parameters())
    computing: list[float] = []
    updating: list[float] = []
    began = time.perf_counter()
    while len(computing) < _WARM + _LEAST or (time.perf_counter() - began < seconds and len(computing) < _MOST):
        optimizer.zero_grad()
        start = time.perf_counter()
        with job.autocast(device):
            loss = read_loss(job.loss(model, batch))
        torch.autograd.backward(loss.value)
        middle = time.perf_counter()
        optimizer.step()
        computing.append(middle - start)
        updating.append(time.perf_counter() - middle)
    return TrialTimes(statistics.median(computing[_WARM:]), statistics.median(updating[_WARM:]))
