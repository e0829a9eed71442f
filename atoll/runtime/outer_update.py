"""The outer update of sites that train together: what a site sends at a round's border, and what all of them make of it.

    d = (g − θ) + β·e;  q = Q(d);  e = d − Q⁻¹(q);  Δ = Σ w·Q⁻¹(q)/Σ w;  b = μ·b + Δ;  g −= η·(Δ + μ·b);  θ ← g + (θ_now − θ_sent)

g and b (`OuterState`) are the same at all sites to the bit, since all make them of the same bytes by the same operators, each of which is
correctly rounded on its own: none fuses a product and a sum, in any processor's code. θ, e and the optimizer inside belong to one site.

A site's border and its round's end are different moments when an exchange overlaps computing: what it trains meanwhile, θ_now − θ_sent, is
kept (`carry_over`). Where the round was made without a site's update, its progress counts from the g before, so that nothing is lost.

Everything is a flat tensor, or one shard of it: nothing here knows of sites, links or time.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import torch

from atoll.codec.base import Codec, Encoded
from atoll.codec.registry import decode
from atoll.errors import AtollError

__all__ = ["Border", "OuterState", "OuterTerms", "carry_over", "outer_step", "reach_border", "weighted_mean"]


class OuterTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers of an outer update. All sites must use the same ones in a round; with η = 1 and μ = 0 the sites' weights are averaged."""

    learning_rate: float = 1.0  # η
    momentum: float = 0.0  # μ, Nesterov's
    feedback: float = 1.0  # β: how much of what a codec left out is sent the next time

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise AtollError(f"the outer learning rate must be positive, got {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise AtollError(f"the outer momentum is at least 0 and less than 1, got {self.momentum}")
        if not 0 <= self.feedback <= 1:
            raise AtollError(f"the decay of the error feedback is between 0 and 1, got {self.feedback}")


class OuterState(NamedTuple):
    """What all sites have in common after a round: shape (elements,) each."""

    weights: torch.Tensor  # g
    momentum: torch.Tensor  # b

    @classmethod
    def beginning(cls, weights: torch.Tensor) -> "OuterState":
        """Before the first round; the weights are copied."""
        return cls(weights.detach().clone(), torch.zeros_like(weights))


class Border(NamedTuple):
    """What a site has when it reaches a round's border."""

    update: Encoded  # q, which travels
    sent: torch.Tensor  # θ then: from here progress counts where the update is part of the round
    residual: torch.Tensor  # e from then on where the update is part of the round; otherwise e stays as it was


def reach_border(state: OuterState, weights: torch.Tensor, residual: torch.Tensor | None, codec: Codec, feedback: float) -> Border:
    """The update of a site whose weights are θ, with what its codec left out before; changes none of its arguments.

    Gradients that are exchanged every step are sent by the same rule: give a state of zeros and −gradient as weights.
    """
    with torch.no_grad():
        total = state.weights - weights
        if residual is not None:
            total += residual * feedback
        update = codec.encode(total)
        return Border(update, weights.detach().clone(), total - decode(update).to(total.device))


def weighted_mean(updates: Sequence[tuple[float, torch.Tensor]], out: torch.Tensor | None = None) -> torch.Tensor:
    """Δ of (weight, decoded update) pairs, written into `out` if given; all sites must name them in the same order.

    Each update is multiplied by its share of the weights, a number that is computed in double precision, and they are added one by one.
    """
    whole = math.fsum(weight for weight, _ in updates)
    if not updates or not all(0 <= weight < math.inf for weight, _ in updates) or not 0 < whole < math.inf:
        raise AtollError(f"updates of the weights {[weight for weight, _ in updates]} have no mean")
    with torch.no_grad():
        total = torch.empty_like(updates[0][1]) if out is None else out
        for number, (weight, update) in enumerate(updates):
            if update.shape != total.shape or update.dtype != total.dtype:
                raise AtollError(
                    f"an update {list(update.shape)} of {update.dtype} cannot be added to {list(total.shape)} of {total.dtype}"
                )
            if number == 0:
                torch.mul(update, weight / whole, out=total)
            else:
                total += update * (weight / whole)
        return total


def outer_step(state: OuterState, mean: torch.Tensor, terms: OuterTerms) -> OuterState:
    """The state after the round, in place of the one before it: keep a copy of what is needed. `mean` is Δ."""
    weights, momentum = state
    with torch.no_grad():
        momentum.mul_(terms.momentum).add_(mean)
        step = momentum * terms.momentum
        weights.sub_(step.add_(mean).mul_(terms.learning_rate))
    return state


def carry_over(after: OuterState, weights: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """θ after the round: the new g with the progress since `base`: `Border.sent`, or the g before where the update was left out.

    Where there was no progress the result is g, bit for bit.
    """
    with torch.no_grad():
        return after.weights + (weights - base)
