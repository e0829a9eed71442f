"""Masked aggregation: the sum of sites' updates, without any being seen (after Bonawitz et al., "Practical secure aggregation", 2017).

One session makes one sum. Every site adds to its numbers a mask of its own and, for each other site, one that both know, which one of them
adds and the other takes away. Both secrets behind a site's masks are shared among all sites, `quorum` of which can put one together again.

    every site     keys()                     → MaskKeys, to all                  public keys, weight
    every site     share(roster)              → SealedShares, one for each other
    every site     mask(participants, boxes)  → MaskedUpdate, to whoever adds up  those whose boxes all others have
    every site     reveal(included)           → RevealedShares, to whoever adds up
    whoever adds   unmask(…)                  → the sum of those included, exactly

`included` are those whose MaskedUpdate is there. Of them sites reveal shares of the own mask, of the other participants shares of the key
behind the common masks; never both of one site, and once in a session, so no one can have a site's every mask taken away.

There is no I/O here: whoever runs it agrees on roster, participants and included, and takes every message from the site it names.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch

from atoll.errors import AtollError
from atoll.privacy.fixed_point import dequantise, packed_bytes, ring_bits, split_pieces, unpack
from atoll.privacy.mask_stream import add_stream, common_secret, derive, public_key_of
from atoll.privacy.secret_sharing import join_shares

__all__ = [
    "HideFrom",
    "MaskKeys",
    "MaskTerms",
    "MaskedUpdate",
    "Roster",
    "RevealedShares",
    "SealedShares",
    "Unmasked",
    "common_seed",
    "own_seed",
    "seed_digest",
    "unmask",
]

HideFrom: TypeAlias = Literal["sites", "relay"]
"""From whom a single update is hidden: from the other sites too, or only from whoever carries updates or adds them up."""


class MaskTerms(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all sites must agree on before a session. Its name is unique over the run: the round's position and how often it was named."""

    session: str
    sites: tuple[str, ...]  # that may take part
    quorum: int
    bits: int
    elements: int
    hide_from: HideFrom = "sites"

    def __post_init__(self) -> None:
        sites = len(self.sites)
        if len(set(self.sites)) != sites or self.elements < 1:
            raise AtollError(
                f"a masked sum is of one or more elements of sites with names of their own, got {self.elements} of {self.sites}"
            )
        if sites < self.least:
            if self.hide_from == "relay":
                raise AtollError(
                    "a masked sum of one site is its update: there must be two sites, or three to hide updates from one another"
                )
            raise AtollError(
                f"masking hides nothing from the other of {sites} sites: who knows the sum and its own update has the other's as the "
                'difference. Use three or more sites, or hide_from="relay" where updates are to be kept only from whoever carries them or '
                "adds them up; noise (differential privacy) hides an update from the other site too"
            )
        if not sites // 2 < self.quorum <= sites:
            raise AtollError(
                f"a quorum of {self.quorum} of {sites} sites: it must be more than half of them, or two groups could be asked for "
                "different shares and a site's update be put together from both"
            )
        ring_bits(self.bits, sites)

    @property
    def least(self) -> int:
        """How many updates a sum must be of, so that it tells nobody a single one."""
        return 3 if self.hide_from == "sites" else 2

    @property
    def width(self) -> int:
        """The bits of a number that travels."""
        return ring_bits(self.bits, len(self.sites))

    def check_enough(self, names: Sequence[str], what: str) -> None:
        """AtollError where these are too few for a sum, or not all of them sites of it."""
        strangers = sorted(set(names) - set(self.sites))
        if strangers or len(set(names)) != len(names):
            raise AtollError(
                f"{what} of session {self.session}: {', '.join(strangers) or 'a site twice'} cannot be among {', '.join(self.sites)}"
            )
        needed = max(self.least, self.quorum)
        if len(names) < needed:
            why = "a sum of fewer would tell a site the other's update" if self.least > self.quorum else "the quorum"
            raise AtollError(f"{what} of session {self.session}: {len(names)} of {len(self.sites)} sites, and it takes {needed} ({why})")


class MaskKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's public keys for one session, its weight, and a digest of the seed of its own mask."""

    session: str
    site: str
    weight: float  # tokens
    sealing_key: bytes
    masking_key: bytes
    seed_digest: bytes


class SealedShares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One site's shares for another, which only that one can read."""

    session: str
    sender: str
    receiver: str
    box: bytes


class MaskedUpdate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A site's numbers under its masks, packed: (bytes,) of uint8."""

    session: str
    site: str
    roster: bytes  # its digest
    participants: tuple[str, ...]
    packed: torch.Tensor


class RevealedShares(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one site gives so that the masks of a sum can be taken away: of those included, and of the other participants."""

    session: str
    site: str
    included: tuple[str, ...]
    seeds: dict[str, bytes]
    keys: dict[str, bytes]


class Roster:
    """The keys of all who begin a session, the same at all of them: checked, in the order of the sites."""

    def __init__(self, terms: MaskTerms, keys: Sequence[MaskKeys]) -> None:
        terms.check_enough([each.site for each in keys], "keys")
        for each in keys:
            if each.session != terms.session:
                raise AtollError(f"{each.site} gave keys of session {each.session}, and this is {terms.session}")
            if not 0 < each.weight < math.inf:
                raise AtollError(f"{each.site}: an update of weight {each.weight} cannot be added to others")
            if not len(each.sealing_key) == len(each.masking_key) == len(each.seed_digest) == 32:
                raise AtollError(f"{each.site} gave keys that are none")
        self.terms = terms
        self.keys = {site: each for site in terms.sites for each in keys if each.site == site}
        self.digest = hashlib.sha256(msgspec.msgpack.encode((terms, tuple(self.keys.values())))).digest()
        self.largest_weight = max(each.weight for each in keys)

    def share(self, site: str) -> float:
        """What a site's update is multiplied by before it is made whole numbers: its weight over the largest."""
        return self.keys[site].weight / self.largest_weight

    def number(self, site: str) -> int:
        """Which holder of shares a site is, from 1 on."""
        return list(self.keys).index(site) + 1


def seed_digest(session: str, site: str, seed: bytes) -> bytes:
    """By which a seed that was put together again is known to be the right one."""
    return hashlib.sha256(msgspec.msgpack.encode(("mask seed", session, site, seed))).digest()


def own_seed(roster: Roster, site: str, seed: bytes) -> bytes:
    """Of a site's own mask."""
    return derive(seed, ("own mask", roster.digest, site))


def common_seed(roster: Roster, site: str, private: bytes, other: str) -> tuple[bytes, int]:
    """(the seed of the mask that two sites have in common, whether `site` adds it (1) or takes it away (-1)), from the key of `site`."""
    first, second = (site, other) if roster.number(site) < roster.number(other) else (other, site)
    secret = common_secret(private, roster.keys[other].masking_key, other)
    return derive(secret, ("common mask", roster.digest, first, second)), 1 if site == first else -1


class Unmasked(NamedTuple):
    """A sum: of whom, as whole numbers (int32, (elements,)), and what those weigh together."""

    included: tuple[str, ...]
    sums: torch.Tensor
    weight: float

    def mean(self, roster: Roster, limits: torch.Tensor) -> torch.Tensor:
        """The weighted mean of the updates in fp32: the same at all sites, to the bit."""
        return dequantise(self.sums, limits, roster.terms.bits, roster.largest_weight / self.weight)


def unmask(roster: Roster, participants: Sequence[str], masked: Sequence[MaskedUpdate], revealed: Sequence[RevealedShares]) -> Unmasked:
    """The sum of the updates given. AtollError says what is missing or wrong, and whose it is."""
    terms, included = roster.terms, tuple(site for site in roster.keys if site in {each.site for each in masked})
    terms.check_enough([each.site for each in masked], "updates")
    participants = tuple(site for site in roster.keys if site in participants)
    for each in masked:
        _check_update(each, roster, participants)
    shares = {each.site: each for each in revealed if each.session == terms.session and tuple(each.included) == included}
    if len(shares) < terms.quorum:
        raise AtollError(f"session {terms.session}: {len(shares)} sites gave shares for this sum, and it takes {terms.quorum}")
    masks = _masks_of(roster, included, [site for site in participants if site not in included], shares)
    sums = np.zeros(terms.elements, dtype=np.int32)
    ring, most = 1 << terms.width, len(included) * (2 ** (terms.bits - 1) - 1)
    for number, (values, place) in enumerate(split_pieces(terms.elements, terms.width)):
        total = np.zeros(values.stop - values.start, dtype=np.uint32)
        for each in masked:
            total += unpack(each.packed.numpy()[place].data, len(total), terms.width)
        for seed, sign in masks:
            add_stream(total, number, terms.width, seed, -sign)
        centred = (total & (ring - 1)).astype(np.int32)
        centred[centred >= ring // 2] -= ring
        if len(centred) and np.abs(centred).max() > most:
            raise AtollError(f"session {terms.session}: the sum is beyond what {len(included)} updates add up to: one was masked otherwise")
        sums[values] = centred
    return Unmasked(included, torch.from_numpy(sums), math.fsum(roster.keys[site].weight for site in included))


def _check_update(update: MaskedUpdate, roster: Roster, participants: tuple[str, ...]) -> None:
    terms, size = roster.terms, packed_bytes(roster.terms.elements, roster.terms.width)
    if update.session != terms.session or update.roster != roster.digest or update.participants != participants:
        raise AtollError(f"{update.site} masked its update for another session, or with other keys or participants than the others")
    if update.site not in participants or update.packed.shape != (size,) or update.packed.dtype != torch.uint8:
        raise AtollError(f"{update.site}: a masked update here is {size} bytes of a participant, got {list(update.packed.shape)}")


def _masks_of(
    roster: Roster, included: Sequence[str], dropped: Sequence[str], shares: Mapping[str, RevealedShares]
) -> list[tuple[bytes, int]]:
    """The seeds and signs of all masks that are left in the sum of those included."""
    masks = []
    for site in included:
        seed = _joined(roster, site, {who: each.seeds for who, each in shares.items()})
        if seed_digest(roster.terms.session, site, seed) != roster.keys[site].seed_digest:
            raise AtollError(f"the shares of {site}'s seed give another one: one of {', '.join(sorted(shares))} gave a wrong share")
        masks.append((own_seed(roster, site, seed), 1))
    for site in dropped:
        key = _joined(roster, site, {who: each.keys for who, each in shares.items()})
        if public_key_of(key) != roster.keys[site].masking_key:
            raise AtollError(f"the shares of {site}'s key give another one: one of {', '.join(sorted(shares))} gave a wrong share")
        for other in included:
            seed, sign = common_seed(roster, site, key, other)
            masks.append((seed, -sign))  # as the other applied it
    return masks


def _joined(roster: Roster, site: str, given: Mapping[str, Mapping[str, bytes]]) -> bytes:
    shares = {roster.number(who): found[site] for who, found in given.items() if site in found and who in roster.keys}
    try:
        return join_shares(shares, roster.terms.quorum)
    except AtollError as error:
        raise AtollError(f"session {roster.terms.session}: the secret of {site} cannot be put together: {error}") from None
