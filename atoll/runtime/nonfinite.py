"""How a run ends when a number of a step must not be as it is, in the same words whatever runs it."""

import math

from atoll.errors import AtollError, JobError, JobFailedError

__all__ = ["checked_weight", "not_finite", "refused_step"]


def not_finite(step: int, what: str, value: float) -> JobFailedError:
    """The loss or the gradient of a step is not finite, so the step was not made."""
    advice = "lower the learning rate, clip gradients with max_grad_norm, or look for bad samples in the data"
    return JobFailedError(f"step {step}: the {what} is {value}; the weights are still those after step {step - 1}. To go on: {advice}")


def checked_weight(where: str, weight: float) -> float:
    """What a loss is divided by; JobError where that cannot be."""
    if not (math.isfinite(weight) and weight > 0):
        raise _wrong_weight(where, weight)
    return weight


def _wrong_weight(where: str, weight: float) -> JobError:
    return JobError(f"Job: loss: the weights in (total, weight) of {where} add up to {weight}; they must be positive")


def refused_step(step: int, what: str, value: float) -> AtollError:
    """Either of the two, by what is wrong: "loss", "gradient" or "weight"."""
    return _wrong_weight(f"step {step}", value) if what == "weight" else not_finite(step, what, value)
