"""What clipped and noised updates have cost in privacy: (ε, δ), as `dp-accounting` computes it.

What is protected is a site's whole update: whoever sees all that a site sent can hardly tell it from a site that sent nothing but noise
(`neighbours="left out"`), or one whose updates were any others of the norm (`"replaced"`: twice as far apart). No sampling is counted
on: a site is in every round it sends an update for.
"""

import math
from typing import Literal, TypeAlias

import msgspec

from atoll.errors import AtollError

__all__ = ["Accountant", "Neighbours", "PrivacySpent", "epsilon_of", "privacy_spent"]

Accountant: TypeAlias = Literal["rdp", "pld"]
"""Rényi divergences, an upper bound that is quick; or the privacy loss distribution, which is exact but for rounding up."""

Neighbours: TypeAlias = Literal["left out", "replaced"]

_NO_PRIVACY = 200.0


class PrivacySpent(msgspec.Struct, frozen=True, kw_only=True):
    """For reports: all updates of one site over a run."""

    epsilon_rdp: float
    epsilon_pld: float | None  # None where the bound is so large that it is no privacy, and the distribution needs all memory there is
    delta: float
    noise_multiplier: float
    updates: int
    neighbours: Neighbours


def epsilon_of(multiplier: float, updates: int, delta: float, accountant: Accountant, neighbours: Neighbours = "left out") -> float:
    """ε for δ of so many updates, each noised by `multiplier` times the norm it was clipped to; without noise it is infinite."""
    if not (multiplier >= 0 and updates >= 0 and 0 < delta < 1):
        raise AtollError(f"privacy is of a multiplier of 0 or more, updates, and a δ between 0 and 1; got {multiplier}, {updates}, {delta}")
    if not updates or not multiplier:
        return math.inf if updates else 0.0
    try:
        from dp_accounting import GaussianDpEvent, SelfComposedDpEvent
        from dp_accounting.pld import PLDAccountant
        from dp_accounting.rdp import RdpAccountant
    except ImportError as error:
        raise AtollError(f"ε is computed by dp-accounting, which cannot be loaded ({error}); pip install 'atoll[privacy]'") from None
    apart = 2.0 if neighbours == "replaced" else 1.0
    event = SelfComposedDpEvent(GaussianDpEvent(multiplier / apart), updates)
    chosen = RdpAccountant() if accountant == "rdp" else PLDAccountant()
    return float(chosen.compose(event).get_epsilon(delta))


def privacy_spent(multiplier: float, updates: int, delta: float, neighbours: Neighbours = "left out") -> PrivacySpent:
    """Both accountants' ε, for a report."""
    bound = epsilon_of(multiplier, updates, delta, "rdp", neighbours)
    return PrivacySpent(
        epsilon_rdp=bound,
        epsilon_pld=epsilon_of(multiplier, updates, delta, "pld", neighbours) if bound < _NO_PRIVACY else None,
        delta=delta,
        noise_multiplier=multiplier,
        updates=updates,
        neighbours=neighbours,
    )
