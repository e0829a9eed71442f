"""What the updates of a round add up to: their weighted mean, without those that are far too large; clipped or trimmed where asked for.

All sites must find the same bits, on whatever processors and threads: norms are of whole numbers, whose sums depend on no order.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec
import torch
from torch import Tensor

from atoll.codec.registry import decode
from atoll.control.rounds.messages import Offer
from atoll.errors import JobError
from atoll.plan.modes.islands import IslandsOptions
from atoll.privacy.robust import clip_to_median, judge_norms, trimmed_mean
from atoll.runtime.modes.islands.chunks import ChunkForm, unpacked
from atoll.runtime.outer_update import weighted_mean

__all__ = ["MEAN", "Aggregation", "RoundSum", "aggregate", "aggregation_of", "steady_squared_norm"]

_BITS = 20  # of each number of an update, over the largest of its piece, for its norm
_PIECE = 1 << 18  # numbers whose squares add up below 2^63
_COMPARED = 3  # updates, of which one can be told to be too large
_TOO_LARGE = 30.0  # times the median: honest ones, of one step of two samples, were seen 14 apart


class Aggregation(msgspec.Struct, frozen=True):
    """How updates are joined."""

    how: Literal["mean", "clipped", "trimmed"] = "mean"
    trim: int = 0  # so many of the smallest, and of the largest, of every number are left out

    @property
    def reasons(self) -> tuple[str, ...]:
        """For people, where it is not the mean."""
        if self.how == "clipped":
            return ("no update counts for more than the one with the median norm",)
        smallest = "the smallest and the largest" if self.trim == 1 else f"the {self.trim} smallest and the {self.trim} largest"
        return (f"of every number {smallest} of all updates are left out",) if self.how == "trimmed" else ()


MEAN = Aggregation()


class RoundSum(NamedTuple):
    """Δ, and why updates are not in it, by site."""

    mean: Tensor
    refused: dict[str, str]


def aggregation_of(options: IslandsOptions, sites: int) -> Aggregation:
    """As asked for; JobError where so many sites cannot do that."""
    how, trim = options.outer_aggregation, options.outer_trim
    if how != "trimmed":
        if trim is not None:
            raise JobError(f"--outer-trim {trim}: --outer-aggregation {how} leaves nothing out; give --outer-aggregation trimmed")
        return Aggregation(how)
    trim = 1 if trim is None else trim
    if sites <= 2 * trim:
        raise JobError(
            f"--outer-aggregation trimmed: to leave out {trim} of the smallest and of the largest takes {2 * trim + 1} sites, "
            f"and there are {sites}"
        )
    if options.quorum is not None and options.quorum <= 2 * trim:
        raise JobError(f"--quorum {options.quorum}: --outer-aggregation trimmed takes {2 * trim + 1} updates for a round")
    return Aggregation(how, trim)


def aggregate(updates: Sequence[tuple[Offer, Sequence[Any]]], form: ChunkForm, terms: Aggregation) -> RoundSum:
    """Of (what was offered, its chunks), which have the form and are finite."""
    norms = _norms(updates) if len(updates) >= _COMPARED or terms.how == "clipped" else {}
    steps = {offer.update.site: offer.last - offer.first for offer, _ in updates}
    refused = judge_norms(norms, steps=steps, too_large=_TOO_LARGE)
    kept = [(offer, chunks) for offer, chunks in updates if offer.update.site not in refused]
    factors = clip_to_median({site: norm for site, norm in norms.items() if site not in refused}) if terms.how == "clipped" else {}
    trim = max(0, terms.trim - len(refused))  # who is refused is one of those that may send anything
    mean = torch.empty(form.elements)
    for number, out in enumerate(form.parts(mean)):
        rows = {offer.update.site: decode(unpacked(chunks[number])) for offer, chunks in kept}
        if trim:
            out.copy_(trimmed_mean(rows, {offer.update.site: offer.weight for offer, _ in kept}, trim))
            continue
        for site, factor in factors.items():
            if factor != 1.0:
                rows[site] = rows[site] * factor
        weighted_mean([(offer.weight, rows[offer.update.site]) for offer, _ in kept], out)
    return RoundSum(mean, refused)


def _norms(updates: Sequence[tuple[Offer, Sequence[Any]]]) -> dict[str, float]:
    def norm(chunks: Sequence[Any]) -> float:
        return math.sqrt(math.fsum(steady_squared_norm(decode(unpacked(chunk))) for chunk in chunks))

    return {offer.update.site: norm(chunks) for offer, chunks in updates}


def steady_squared_norm(values: Tensor) -> float:
    """The square of the norm of finite numbers, to about one in a million: the same to the bit in any order of adding."""
    found = []
    for piece in torch.split(values.detach().reshape(-1), _PIECE):
        peak = float(piece.abs().max()) if piece.numel() else 0.0
        if peak == 0.0:
            continue
        shift = _BITS - math.frexp(peak)[1]
        whole = torch.round(torch.ldexp(piece.double(), torch.tensor(shift))).to(torch.int64)
        found.append(math.ldexp(int((whole * whole).sum()), -2 * shift))
    return math.fsum(found)
