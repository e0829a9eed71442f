"""Updates that are seen one by one, and do not get to do harm: refused where they cannot be meant, and bounded in what they can do.

Pure functions over decoded updates by their senders' names, in the order of the names given, so that all who are given the same updates
find the same. Masked sums cannot be looked at like this: there a site clips its own update, and is believed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from atoll.errors import AtollError

__all__ = ["Judgement", "clip_to_median", "judge_norms", "judge_updates", "trimmed_mean"]

_ROWS = 1 << 18  # elements that are sorted at once


class Judgement(NamedTuple):
    """Whose updates count, with their norms, and why the others do not."""

    norms: dict[str, float]
    refused: dict[str, str]  # by sender, a sentence that names it


def judge_updates(
    updates: Mapping[str, torch.Tensor],
    shape: Sequence[int],
    dtype: torch.dtype,
    *,
    usual_norm: float | None = None,
    too_large: float = 10.0,
) -> Judgement:
    """Refuses updates of another shape or type, that are not finite, or whose norm is more than `too_large` times what is usual.

    Usual is the median of the norms that are there, the lower of the two in the middle, so that fewer than half of them cannot move it
    beyond the others. Of fewer than three updates only `usual_norm` is a measure, such as the median of the rounds before; without one none
    is too large, as of two who differ nobody can tell which is right.
    """
    norms: dict[str, float] = {}
    refused: dict[str, str] = {}
    for sender, update in updates.items():
        why = _why_no_update(update, tuple(shape), dtype)
        if why is None:
            norms[sender] = float(torch.linalg.vector_norm(update.detach().reshape(-1), dtype=torch.float64))
        else:
            refused[sender] = f"the update of {sender} {why}"
    large = judge_norms(norms, usual_norm=usual_norm, too_large=too_large)
    return Judgement({sender: norm for sender, norm in norms.items() if sender not in large}, refused | large)


def judge_norms(
    norms: Mapping[str, float], *, steps: Mapping[str, int] | None = None, usual_norm: float | None = None, too_large: float = 10.0
) -> dict[str, str]:
    """Whose update is too large, as `judge_updates` says, with the sentence.

    `steps` are those each update is of: what is usual for one of more steps than others is theirs, larger as it has more.
    """
    refused = {}
    for sender, norm in norms.items():
        usual = statistics.median_low(_scaled(norms, steps, sender)) if len(norms) >= 3 else usual_norm
        if usual and norm > too_large * usual:
            refused[sender] = f"the update of {sender} has a norm of {norm:.4g}, {norm / usual:.4g} times what is usual ({usual:.4g})"
    return refused


def _scaled(norms: Mapping[str, float], steps: Mapping[str, int] | None, sender: str) -> list[float]:
    """The norms, as of no fewer steps than the sender's update."""
    if steps is None:
        return list(norms.values())
    return [norm * max(1.0, steps[sender] / steps[other]) for other, norm in norms.items()]


def _why_no_update(update: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> str | None:
    if tuple(update.shape) != shape or update.dtype != dtype:
        return f"is {list(update.shape)} of {update.dtype}, and updates here are {list(shape)} of {dtype}"
    finite = torch.isfinite(update)
    if not bool(finite.all()):
        return f"is not finite: {int((~finite).sum())} of {update.numel()} values are NaN or infinite"
    return None


def clip_to_median(norms: Mapping[str, float]) -> dict[str, float]:
    """What each update is multiplied by so that none is larger than the median: 1 for half of them.

    The lower of the two in the middle, as above: fewer than half of the senders cannot make any update count for more than an honest one's.
    """
    if not norms:
        return {}
    median = statistics.median_low(norms.values())
    return {sender: 1.0 if norm <= median else median / norm for sender, norm in norms.items()}


def trimmed_mean(updates: Mapping[str, torch.Tensor], weights: Mapping[str, float], trim: int) -> torch.Tensor:
    """The weighted mean, element by element, of what is left without the `trim` smallest and the `trim` largest values; in fp32.

    `trim` senders may send anything: every element lies between values of honest ones. Weights say how much what is left counts, not what
    is left out, so that nobody gains by claiming many tokens but among honest values.
    """
    count = len(updates)
    if not trim >= 0 or count <= 2 * trim:
        raise AtollError(f"of {count} updates the {trim} smallest and largest cannot be left out: it takes {2 * trim + 1} or more")
    if any(not 0 < weights[sender] < math.inf for sender in updates):
        raise AtollError(f"updates are weighed by positive numbers, got {dict(weights)}")
    stacked = [update.detach().reshape(-1) for update in updates.values()]
    heavy = torch.tensor([weights[sender] for sender in updates], dtype=torch.float64)
    first = next(iter(updates.values()))
    out = torch.empty(first.numel(), dtype=torch.float32)
    with torch.no_grad():
        for start in range(0, len(out), _ROWS):
            values, order = torch.sort(torch.stack([update[start : start + _ROWS] for update in stacked]), dim=0, stable=True)
            kept, mass = values[trim : count - trim].double(), heavy[order[trim : count - trim]]
            out[start : start + _ROWS] = (_added(kept * mass) / _added(mass)).float()
    return out.view(first.shape)


def _added(rows: torch.Tensor) -> torch.Tensor:
    """Row after row, so that it is the same everywhere."""
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    return total
