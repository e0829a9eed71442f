"""A site's part in one masked sum: its secrets, which are made for the session and nothing else, and what it says and refuses to say."""

import hashlib
import os
from collections.abc import Callable, Sequence

import numpy as np
import torch
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from atoll.errors import AtollError
from atoll.privacy.fixed_point import Words, pack, packed_bytes, split_pieces
from atoll.privacy.mask_stream import Purpose, add_stream, common_secret, derive, public_key_of
from atoll.privacy.masked_sum import (
    MaskedUpdate,
    MaskKeys,
    MaskTerms,
    RevealedShares,
    Roster,
    SealedShares,
    common_seed,
    own_seed,
    seed_digest,
)
from atoll.privacy.secret_sharing import SECRET_BYTES, SHARE_BYTES, split_secret

__all__ = ["MaskingSite", "RevealLedger"]

_NONCE = bytes(12)  # every key seals one box


class RevealLedger:
    """In which sum a site let each of its updates be: two sums that differ by one site would tell that site's update.

    One for all sessions of a site's process. Keep the last rounds' names: `forget` those that are over.
    """

    def __init__(self) -> None:
        self._sums: dict[str, frozenset[str]] = {}

    def enter(self, update: str, included: Sequence[str]) -> None:
        """AtollError where the update was in a sum of others already."""
        before = self._sums.setdefault(update, frozenset(included))
        if before != frozenset(included):
            raise AtollError(
                f"update {update} was in a sum of {', '.join(sorted(before))}, and is now to be in one of {', '.join(sorted(included))}: "
                "what the sums differ by would tell a single site's update; make a new update"
            )

    def forget(self, update: str) -> None:
        """The round it was in is over: nobody asks for it any more."""
        self._sums.pop(update, None)


class MaskingSite:
    """One site in one session. Everything may be asked for again, as messages are lost, and then it is the same; nothing may be asked for
    otherwise. `update` names what is masked, for the ledger. A site whose process ended begins another session: secrets are kept nowhere.
    """

    def __init__(
        self,
        terms: MaskTerms,
        site: str,
        weight: float,
        update: str,
        ledger: RevealLedger,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if site not in terms.sites:
            raise AtollError(f"{site} is none of the sites of session {terms.session}: {', '.join(terms.sites)}")
        self.terms, self.site = terms, site
        self._weight, self._update, self._ledger, self._random = weight, update, ledger, random
        self._sealing_key, self._masking_key, self._seed = random(SECRET_BYTES), random(SECRET_BYTES), random(SECRET_BYTES)
        self._roster: Roster | None = None
        self._boxes: tuple[SealedShares, ...] = ()
        self._key_shares: dict[str, bytes] = {}  # that this site holds, by whose secret it is
        self._seed_shares: dict[str, bytes] = {}
        self._masked: tuple[bytes, MaskedUpdate] | None = None
        self._included: tuple[str, ...] | None = None

    def keys(self) -> MaskKeys:
        """What the others must know of this site."""
        return MaskKeys(
            session=self.terms.session,
            site=self.site,
            weight=self._weight,
            sealing_key=public_key_of(self._sealing_key),
            masking_key=public_key_of(self._masking_key),
            seed_digest=seed_digest(self.terms.session, self.site, self._seed),
        )

    def share(self, keys: Sequence[MaskKeys]) -> tuple[SealedShares, ...]:
        """This site's shares for each of the others whose keys are given, its own among them."""
        roster = Roster(self.terms, keys)
        if roster.keys.get(self.site) != self.keys():
            raise AtollError(f"session {self.terms.session}: the keys of {self.site} are not among those given, or not as it made them")
        if self._roster is None:
            self._roster, self._boxes = roster, self._seal(roster)
        elif self._roster.digest != roster.digest:
            raise AtollError(f"session {self.terms.session}: {self.site} shared its secrets among others already; begin another session")
        return self._boxes

    @property
    def roster(self) -> Roster:
        """What `share` was given."""
        if self._roster is None:
            raise AtollError(f"session {self.terms.session}: {self.site} has not shared its secrets yet")
        return self._roster

    def _seal(self, roster: Roster) -> tuple[SealedShares, ...]:
        holders = list(roster.keys)
        key_shares = split_secret(self._masking_key, self.terms.quorum, len(holders), self._random)
        seed_shares = split_secret(self._seed, self.terms.quorum, len(holders), self._random)
        boxes = []
        for holder, key_share, share in zip(holders, key_shares, seed_shares, strict=True):
            if holder == self.site:
                self._key_shares[holder], self._seed_shares[holder] = key_share, share
                continue
            cipher = ChaCha20Poly1305(self._box_key(roster, holder, sender=self.site, receiver=holder))
            box = cipher.encrypt(_NONCE, key_share + share, roster.digest)
            boxes.append(SealedShares(session=self.terms.session, sender=self.site, receiver=holder, box=box))
        return tuple(boxes)

    def _box_key(self, roster: Roster, other: str, *, sender: str, receiver: str) -> bytes:
        purpose: Purpose = ("shares", roster.digest, sender, receiver)
        return derive(common_secret(self._sealing_key, roster.keys[other].sealing_key, other), purpose)

    def mask(self, participants: Sequence[str], boxes: Sequence[SealedShares], numbers: torch.Tensor) -> MaskedUpdate:
        """This site's numbers (`quantise`, int32) under its masks. `boxes` are those the other participants made for this site."""
        who = tuple(site for site in self.roster.keys if site in participants)
        self.terms.check_enough(participants, "participants")
        if self.site not in who or len(who) != len(participants):
            raise AtollError(f"session {self.terms.session}: participants are of those who shared secrets, {self.site} among them")
        digest = hashlib.sha256(numbers.numpy().tobytes() + repr(who).encode()).digest()
        if self._masked is None:
            self._check_numbers(numbers)
            self._open(who, boxes)
            self._masked = digest, self._apply(who, numbers)
        elif self._masked[0] != digest:
            raise AtollError(
                f"session {self.terms.session}: {self.site} masked other numbers, or for other participants, with its seeds already: "
                "the same masks twice would tell the difference; begin another session"
            )
        return self._masked[1]

    def _check_numbers(self, numbers: torch.Tensor) -> None:
        most = 2 ** (self.terms.bits - 1) - 1
        if numbers.shape != (self.terms.elements,) or numbers.dtype != torch.int32:
            raise AtollError(f"{self.terms.elements} int32 numbers are masked here, got {list(numbers.shape)} of {numbers.dtype}")
        if int(numbers.amax()) > most or int(numbers.amin()) < -most:
            raise AtollError(f"numbers to be masked lie between {-most} and {most}; quantise with {self.terms.bits} bits")

    def _open(self, participants: Sequence[str], boxes: Sequence[SealedShares]) -> None:
        found = {box.sender: box for box in boxes if (box.session, box.receiver) == (self.terms.session, self.site)}
        missing = [site for site in participants if site != self.site and site not in found]
        if missing:
            raise AtollError(
                f"session {self.terms.session}: no shares of {', '.join(missing)} for {self.site}, so they are no participants"
            )
        for site in participants:
            if site == self.site:
                continue
            try:
                cipher = ChaCha20Poly1305(self._box_key(self.roster, site, sender=site, receiver=self.site))
                shares = cipher.decrypt(_NONCE, found[site].box, self.roster.digest)
            except InvalidTag:
                raise AtollError(f"the shares of {site} for {self.site} were changed, or {site} was told other keys than we were") from None
            if len(shares) != 2 * SHARE_BYTES:
                raise AtollError(f"the shares of {site} for {self.site} are none")
            self._key_shares[site], self._seed_shares[site] = shares[:SHARE_BYTES], shares[SHARE_BYTES:]

    def _apply(self, participants: tuple[str, ...], numbers: torch.Tensor) -> MaskedUpdate:
        roster, width, elements = self.roster, self.terms.width, self.terms.elements
        masks = [(own_seed(roster, self.site, self._seed), 1)]
        masks += [common_seed(roster, self.site, self._masking_key, other) for other in participants if other != self.site]
        packed = torch.empty(packed_bytes(elements, width), dtype=torch.uint8)
        for number, (values, place) in enumerate(split_pieces(elements, width)):
            words: Words = numbers.numpy()[values].astype(np.uint32)  # two's complement, of which the ring's bits count
            words &= np.uint32((1 << width) - 1)
            for seed, sign in masks:
                add_stream(words, number, width, seed, sign)
            packed.numpy()[place] = np.frombuffer(pack(words, width), dtype=np.uint8)
        session = self.terms.session
        return MaskedUpdate(session=session, site=self.site, roster=roster.digest, participants=participants, packed=packed)

    def reveal(self, included: Sequence[str]) -> RevealedShares:
        """The shares this site holds that the sum of those included needs."""
        if self._masked is None:
            raise AtollError(f"session {self.terms.session}: {self.site} has not masked its update yet")
        participants = self._masked[1].participants
        who = tuple(site for site in participants if site in included)
        self.terms.check_enough(included, "the sum")
        if self.site not in who or len(who) != len(included):
            raise AtollError(f"session {self.terms.session}: a sum is of participants ({', '.join(participants)}), {self.site} among them")
        if self._included not in (None, who):
            raise AtollError(
                f"session {self.terms.session}: {self.site} gave its shares for a sum of {', '.join(self._included or ())} already; "
                f"shares for one of {', '.join(who)} would lay a single update bare"
            )
        self._ledger.enter(self._update, who)
        self._included = who
        return RevealedShares(
            session=self.terms.session,
            site=self.site,
            included=who,
            seeds={site: self._seed_shares[site] for site in who},
            keys={site: self._key_shares[site] for site in participants if site not in who},
        )
