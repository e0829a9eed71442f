"""Clipping: one factor for all stages, from the norms they report; and which steps must not be made."""

import math
from collections.abc import Sequence
from typing import Literal

__all__ = ["clip_coefficient", "clip_or_skip", "why_refused"]

NORM_MARGIN = 1e-6  # what `torch.nn.utils.clip_grad_norm_` adds to the norm, so that a clipped run equals a single process's


def clip_or_skip(norms_squared: Sequence[float], weight: float, max_norm: float | None) -> tuple[float, bool]:
    """(what gradients are multiplied by, whether the step is skipped). Norms are of undivided sums; `weight` is what they are divided by.

    With `max_norm` the factor is the one of `torch.nn.utils.clip_grad_norm_`. A gradient that is not finite makes the whole step one that
    changes nothing: on every stage alike, since the commit says so.
    """
    total = math.fsum(norms_squared) if all(map(math.isfinite, norms_squared)) else math.inf
    if not math.isfinite(total) or weight == 0:
        return 0.0, True
    norm = math.sqrt(total) / abs(weight)
    return clip_coefficient(norm, max_norm), False


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What a gradient of this norm is multiplied by so that its norm is at most `max_norm`, as `torch.nn.utils.clip_grad_norm_` does."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + NORM_MARGIN))


def why_refused(
    loss: float, weight: float, norms_squared: Sequence[float], skips_overflows: bool
) -> tuple[Literal["loss", "gradient", "weight"], float] | None:
    """(which number of a step must not be as it is, the number), or None where the step may be made: as a single process decides it.

    `loss` and `weight` are totals. A gradient that is not finite is ordinary where overflows are skipped (fp16), and nowhere else.
    """
    if not (math.isfinite(weight) and weight > 0):
        return "weight", weight
    if not math.isfinite(loss):
        return "loss", loss / weight
    bad = [norm for norm in norms_squared if not math.isfinite(norm)]
    return ("gradient", bad[0]) if bad and not skips_overflows else None
