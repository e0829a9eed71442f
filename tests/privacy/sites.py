"""Sites that make a masked sum among them, with secrets from a seed, and a record of every message."""

import random
from collections.abc import Callable, Sequence

import torch

from atoll.privacy.masked_sum import MaskedUpdate, MaskKeys, MaskTerms, RevealedShares, Roster, SealedShares
from atoll.privacy.masking_site import MaskingSite, RevealLedger


def seeded(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def make_terms(sites: int, elements: int, bits: int = 8, quorum: int | None = None, **changed: object) -> MaskTerms:
    names = tuple(f"s{number}" for number in range(sites))
    quorum = sites // 2 + 1 if quorum is None else quorum
    return MaskTerms(**{"session": "round 3.1", "sites": names, "quorum": quorum, "bits": bits, "elements": elements, **changed})


def numbers_of(terms: MaskTerms, seed: int) -> dict[str, torch.Tensor]:
    """What each site has, over the whole range."""
    most = 2 ** (terms.bits - 1) - 1
    made = torch.Generator().manual_seed(seed)
    return {site: torch.randint(-most, most + 1, (terms.elements,), generator=made, dtype=torch.int32) for site in terms.sites}


class Session:
    """One sum, message by message; whoever is not in a step has dropped out before it."""

    def __init__(self, terms: MaskTerms, seed: int = 0, began: Sequence[str] | None = None) -> None:
        self.terms = terms
        self.ledgers = {site: RevealLedger() for site in terms.sites}
        began = terms.sites if began is None else began
        self.sites = {
            site: MaskingSite(terms, site, 100.0 * (number + 1), f"{site}.1", self.ledgers[site], seeded(1000 * seed + number))
            for number, site in enumerate(terms.sites)
            if site in began
        }
        self.keys: list[MaskKeys] = [site.keys() for site in self.sites.values()]
        self.boxes: list[SealedShares] = []
        self.masked: dict[str, MaskedUpdate] = {}
        self.revealed: list[RevealedShares] = []
        self.participants: tuple[str, ...] = ()

    @property
    def roster(self) -> Roster:
        return Roster(self.terms, self.keys)

    def share(self, who: Sequence[str] | None = None) -> None:
        self.participants = tuple(self.sites) if who is None else tuple(who)
        for name in self.participants:
            self.boxes += self.sites[name].share(self.keys)

    def mask(self, numbers: dict[str, torch.Tensor], who: Sequence[str] | None = None) -> None:
        for name in self.participants if who is None else who:
            boxes = [box for box in self.boxes if box.receiver == name]
            self.masked[name] = self.sites[name].mask(self.participants, boxes, numbers[name])

    def reveal(self, included: Sequence[str], who: Sequence[str] | None = None) -> None:
        self.revealed += [self.sites[name].reveal(included) for name in (included if who is None else who)]
