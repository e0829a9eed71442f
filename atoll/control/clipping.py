"""Clipping: one factor for all stages, from the norms they report."""

import math
from collections.abc import Sequence

__all__ = ["clip_factor"]


def clip_factor(norms_squared: Sequence[float], weight: float, max_norm: float | None) -> tuple[float, bool]:
    """(what gradients are multiplied by, whether the step is skipped). Norms are of undivided sums; `weight` is what they are divided by.

    A gradient that is not finite makes the whole step one that changes nothing: on every stage alike, since the commit says so.
    """
    total = math.fsum(norms_squared) if all(map(math.isfinite, norms_squared)) else math.inf
    if not math.isfinite(total) or weight == 0:
        return 0.0, True
    norm = math.sqrt(total) / abs(weight)
    if max_norm is None or norm <= max_norm:
        return 1.0, False
    return max_norm / norm, False
