"""How a run ends when a number of a step must not be as it is, in the same words whatever runs it."""

import math
from pathlib import Path

from atoll.errors import AtollError, JobError, JobFailedError

__all__ = ["checked_weight", "not_finite", "refused_step"]


def not_finite(step: int, what: str, value: float, checkpoints: Path | None = None) -> JobFailedError:
    """The loss or the gradient of a step is not finite, so the step was not made. `checkpoints` is where the run saves."""
    advice = "lower the learning rate, clip gradients with max_grad_norm, or look for bad samples in the data"
    newest = _newest(checkpoints)
    saved = f" The last checkpoint before it is {newest}." if newest is not None else ""
    weights = f"the weights are still those after step {step - 1}"
    return JobFailedError(f"step {step}: the {what} is {value}; {weights}.{saved} To go on: {advice}")


def _newest(checkpoints: Path | None) -> Path | None:
    """The checkpoint to go on from; the files are read only where there is something to tell."""
    from atoll.runtime.checkpoint.directory import find

    return find(checkpoints, None) if checkpoints is not None else None


def checked_weight(where: str, weight: float) -> float:
    """What a loss is divided by; JobError where that cannot be."""
    if not (math.isfinite(weight) and weight > 0):
        raise _wrong_weight(where, weight)
    return weight


def _wrong_weight(where: str, weight: float) -> JobError:
    return JobError(f"Job: loss: the weights in (total, weight) of {where} add up to {weight}; they must be positive")


def refused_step(step: int, what: str, value: float, checkpoints: Path | None = None) -> AtollError:
    """Either of the two, by what is wrong: "loss", "gradient" or "weight"."""
    return _wrong_weight(f"step {step}", value) if what == "weight" else not_finite(step, what, value, checkpoints)
