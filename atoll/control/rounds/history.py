"""What the journal of rounds adds up to: which rounds led to the present state, and which of every site's steps are in it."""

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from atoll.control.journal import Epoch, Term
from atoll.control.rounds.messages import Offer, Position, RoundCommitted, RoundRecord, SiteJoined

__all__ = ["RoundHistory"]


class RoundHistory(msgspec.Struct):
    """Built record by record, as they become durable."""

    term: int = 0
    epoch: int = -1
    round: int = 0
    origins: dict[int, Epoch] = msgspec.field(default_factory=dict)
    commits: dict[Position, RoundCommitted] = msgspec.field(default_factory=dict)
    named: dict[str, Offer] = msgspec.field(default_factory=dict)  # the last update of each site that is part of the present state
    joined: list[SiteJoined] = msgspec.field(default_factory=list)

    @classmethod
    def of(cls, records: Iterable[RoundRecord]) -> "RoundHistory":
        """Reads a journal from its beginning."""
        history = cls()
        for record in records:
            history.add(record)
        return history

    def add(self, record: RoundRecord) -> None:
        """The next record."""
        if isinstance(record, Term):
            self.term = max(self.term, record.term)
        elif isinstance(record, Epoch):
            self.origins[record.epoch] = record
            self.epoch, self.round = record.epoch, record.version
            self.named = {}
            for commit in self._before(record.from_epoch, record.version):
                for offer in commit.named:
                    self.named.setdefault(offer.update.site, offer)
        elif isinstance(record, SiteJoined):
            self.joined.append(record)
        else:
            self.commits[record.epoch, record.round] = record
            self.round = record.round + 1
            self.named.update((offer.update.site, offer) for offer in record.named)

    @property
    def position(self) -> Position:
        """Of the state all sites should have."""
        return self.epoch, self.round

    @property
    def last(self) -> RoundCommitted | None:
        """The round that led to it; None before the first."""
        return next(self._before(*self.position), None)

    def recent(self, count: int) -> Sequence[RoundCommitted]:
        """The last rounds of this epoch, oldest first."""
        first = max(self.origins[self.epoch].version, self.round - count)
        return [self.commits[self.epoch, number] for number in range(first, self.round)]

    def leads_here(self, position: Position) -> bool:
        """Whether rounds led from the state of a position to the present one, or it is the present one."""
        epoch, last = self.epoch, self.round
        while position[0] != epoch:
            last = min(last, self.origins[epoch].version)
            if last == 0:
                return position[1] == 0
            epoch = self.origins[epoch].from_epoch
        return self.origins[epoch].version <= position[1] <= last

    def first_unnamed(self, site: str) -> int:
        """The site's first step that is not in the present state."""
        offer = self.named.get(site)
        return 0 if offer is None else offer.last

    def named_at(self, position: Position) -> dict[str, Offer]:
        """The last update of each site that is part of the state of a position."""
        named: dict[str, Offer] = {}
        for commit in self._before(*position):
            for offer in commit.named:
                named.setdefault(offer.update.site, offer)
        return named

    def _before(self, epoch: int, round: int) -> Iterator[RoundCommitted]:
        """The rounds that led to a position, newest first."""
        while round:
            origin = self.origins[epoch]
            for number in range(round - 1, origin.version - 1, -1):
                yield self.commits[epoch, number]
            epoch, round = origin.from_epoch, origin.version
