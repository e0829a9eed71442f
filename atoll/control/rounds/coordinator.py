"""The coordinator of rounds: who speaks for each site, which updates make up a round, and when it is decided.

Rules, by the numbers of docs/islands.md. It repeats where the run stands to everybody until it changes, so no message is needed to arrive;
nothing is said of a round before its record is durable.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from atoll.control.journal import Epoch, FencedError, Term
from atoll.control.rounds.history import RoundHistory
from atoll.control.rounds.messages import (
    Holding,
    Offer,
    RoundAnnounce,
    RoundCommitted,
    RoundId,
    RoundRecord,
    RoundSettings,
    RoundTerms,
    RoundView,
    SiteBeat,
    SiteJoined,
    SitePlace,
    UpdateId,
)
from atoll.control.rounds.site import RoundJournal
from atoll.control.world import SwarmProcess
from atoll.events import RoundFinished, SiteRound

__all__ = ["RoundCoordinator"]

_TICK = object()
_TERM_BITS = 32  # incarnations of a term are below this power of two


class _Place(msgspec.Struct):
    """A site's gateway: who it is, and what it said last."""

    beat: SiteBeat
    incarnation: int
    heard_at: float


class RoundCoordinator:
    """One process; another may take over through the journal at any time. `choose` says how the round after those is to be made,
    `is_over` whether none is, though fewer were made than the settings allow, `joining` which sites take part from then on, and
    `gives_states` which sites' states others may have.
    """

    def __init__(
        self,
        node: SwarmProcess,
        journal: RoundJournal,
        settings: RoundSettings,
        choose: Callable[[RoundHistory], RoundTerms],
        is_over: Callable[[RoundHistory], bool] = lambda history: False,
        joining: Callable[[RoundHistory], Iterable[SiteJoined]] = lambda history: (),
        gives_states: Callable[[str], bool] = lambda site: True,
    ) -> None:
        self.node, self.journal, self.settings = node, journal, settings
        self.history = RoundHistory()
        self.term = self.seq = 0
        self.finished = self.deposed = False
        self.places: dict[str, _Place] = {}
        self.terms = RoundTerms(0.0)
        self.offers: dict[str, Offer] = {}  # of the round under way, by site
        self.named: tuple[Offer, ...] = ()
        self.id: RoundId | None = None
        self._choose, self._is_over, self._joining, self._gives_states = choose, is_over, joining, gives_states
        self._processes: dict[str, tuple[str, int]] = {}  # everybody who was ever heard: site and newest nonce
        self._incarnations = 0
        self._barred: set[str] = set()  # sites whose update could not be had in this round
        self._quorum_at: float | None = None  # since when there are enough offers, or enough who hold what is named
        self._named_at = 0.0
        self._here_at = 0.0  # when somebody last had the present state

    async def run(self) -> None:
        """Until the last round, or until another coordinator has taken over."""
        try:
            await self._take_over()
            self.node.clock.spawn(self._tick())
            listening_until = self.node.clock.now() + self.settings.listen_seconds
            waiting_until = self.node.clock.now() + (0.0 if self.history.commits else self.settings.start_seconds)
            while True:
                message = await self.node.inbox.take()
                now = self.node.clock.now()
                if isinstance(message, SiteBeat):
                    self._hear(message, now)
                elif message is _TICK:
                    self._announce()
                if len(self._live(now)) >= self.settings.sites or self.history.commits:
                    waiting_until = now
                if now >= max(listening_until, waiting_until) and not self.finished:
                    await self._decide(now)
        except FencedError:
            self.finished = self.deposed = True

    async def _take_over(self) -> None:
        records = await self.journal.read()
        self.term = RoundHistory.of(records).term + 1
        await self._write(Term(self.term))
        self.history = RoundHistory.of(await self._read_again(records))
        if self.history.epoch < 0:
            await self._write(Epoch(0, 0, 0))
        self._open_round()

    async def _read_again(self, records: Sequence[RoundRecord]) -> Sequence[RoundRecord]:
        """With what the coordinator before has written while this one did not have its term yet."""
        return await self.journal.read()

    async def _tick(self) -> None:
        while not self.deposed:
            self.node.inbox.put(_TICK)
            await self.node.clock.sleep(self.settings.heartbeat_seconds)

    async def _write(self, record: RoundRecord) -> None:
        """Rule 2: durable first."""
        await self.journal.append(self.term, record)
        self.history.add(record)

    def end(self) -> None:
        """No round follows: the run ends with the state that all sites should have now."""
        self.finished = True
        self._announce()

    # ---- who is there

    def _hear(self, beat: SiteBeat, now: float) -> None:
        """Rule 3."""
        known = self._processes.get(beat.process)
        if known is not None and known[1] > beat.nonce:
            return
        self._processes[beat.process] = (beat.site, beat.nonce)
        place = self.places.get(beat.site)
        if place is None or self._replaces(beat, place, now):
            self._incarnations += 1
            self.places[beat.site] = _Place(beat, (self.term << _TERM_BITS) + self._incarnations, now)
        elif (beat.process, beat.nonce) == (place.beat.process, place.beat.nonce) and beat.count > place.beat.count:
            place.beat, place.heard_at = beat, now
        else:
            return
        self._consider(beat)

    def _replaces(self, beat: SiteBeat, place: _Place, now: float) -> bool:
        """Whether whoever is heard becomes the site's gateway: started again, or another where the one before is silent."""
        if beat.process == place.beat.process:
            return beat.nonce > place.beat.nonce
        return not self.is_live(place, now)

    def is_live(self, place: _Place, now: float) -> bool:
        """Whether a site was heard of late."""
        return now - place.heard_at <= self.settings.silent_beats * self.settings.heartbeat_seconds

    def _consider(self, beat: SiteBeat) -> None:
        """Rule 5: an update of the present state, and of the steps that follow those already in it."""
        offer = beat.offer
        if offer is not None and self.id is None and self._is_of_this_round(offer) and self._follows(offer) and self._knows_all(offer):
            self.offers[beat.site] = offer

    def _is_of_this_round(self, offer: Offer) -> bool:
        return (offer.epoch, offer.round) == self.history.position

    def _follows(self, offer: Offer) -> bool:
        return offer.first == self.history.first_unnamed(offer.update.site)

    def _knows_all(self, offer: Offer) -> bool:
        """Rule 11: who made it knew whose samples its steps have."""
        return offer.joined == len(self.history.joined)

    def _live(self, now: float) -> list[_Place]:
        return [self.places[site] for site in sorted(self.places) if self.is_live(self.places[site], now)]

    # ---- what is decided

    async def _decide(self, now: float) -> None:
        live = self._live(now)
        here = [place for place in live if place.beat.position == self.history.position]
        if here and all(place.beat.done for place in live) and len(here) == len(live):
            self.finished = True  # nobody has anything for another round
            self._announce()
            return
        if here:
            self._here_at = now
        elif now - self._here_at > self.settings.lost_seconds:
            await self._go_back(live)
            return
        for site in [site for site, offer in self.offers.items() if not _holders(offer.update, live)]:
            del self.offers[site]  # nobody has it any more
        if self.id is None:
            self._collect(live, here, now)
        elif any(self.offers.get(offer.update.site) != offer for offer in self.named):
            self._collect_again()
        else:
            await self._gather(here, now)

    def _collect(self, live: list[_Place], here: list[_Place], now: float) -> None:
        """Rule 6: with a quorum of updates, when all have come or the grace time is over."""
        offers = [self.offers[site] for site in sorted(self.offers.keys() - self._barred)]
        if len(offers) < self.settings.quorum:
            self._quorum_at = None
            if len(self.offers) >= self.settings.quorum:
                self._barred.clear()  # rather somebody doubtful than no round
            return
        self._quorum_at = now if self._quorum_at is None else self._quorum_at
        waiting = any(place.beat.site not in self.offers for place in live if self._is_waited_for(place, here))
        if not waiting or now - self._quorum_at >= self.settings.grace_seconds:
            self.seq += 1
            self.id, self.named = (self.term, self.seq), tuple(offers)
            self._named_at, self._quorum_at = now, None
            self._announce()

    def _is_waited_for(self, place: _Place, here: list[_Place]) -> bool:
        return not place.beat.done and (place in here or self._is_close(place))

    def _is_close(self, place: _Place) -> bool:
        """Whether a site is behind by so little that it comes by the updates of the last rounds."""
        return place.beat.position in [(commit.epoch, commit.round) for commit in self.history.recent(self.settings.recent)]

    async def _gather(self, here: list[_Place], now: float) -> None:
        """Rule 7: the round is decided when a quorum holds all of it and the others had their time."""
        reports = [place for place in here if place.beat.gathered == self.id]
        digests = Counter(place.beat.digest for place in reports)
        digest = min(digests, key=lambda each: (-digests[each], each), default="")
        if self._is_held(digests[digest]):
            self._quorum_at = now if self._quorum_at is None else self._quorum_at
            if len(reports) == len(here) or now - self._quorum_at >= self.settings.grace_seconds:
                await self._commit(digest)
        elif now - self._named_at > self.settings.exchange_seconds:
            lacking = Counter(offer.update.site for offer in self.named for place in here if offer.update not in _held(place))
            if lacking:
                self._barred.add(min(lacking, key=lambda site: (-lacking[site], site)))
            self._collect_again()

    def _is_held(self, reports: int) -> bool:
        return reports >= self.settings.quorum

    async def _commit(self, digest: str) -> None:
        assert self.id is not None
        epoch, round = self.history.position
        await self._commit_durably(RoundCommitted(epoch, round, self.id, self.named, self.terms, digest))

    async def _commit_durably(self, record: RoundCommitted) -> None:
        await self._write(record)
        for joined in self._joining(self.history):
            await self._write(joined)
        self._open_round()
        self._announce()
        self.node.emit(self._finished(record))

    def _finished(self, record: RoundCommitted) -> RoundFinished:
        sites = tuple(
            SiteRound(site=offer.update.site, steps=offer.last - offer.first, weight=offer.weight, losses=offer.losses)
            for offer in record.named
        )
        missing = tuple(
            place.beat.site for place in self._live(self.node.clock.now()) if place.beat.site not in {one.site for one in sites}
        )
        return RoundFinished(epoch=record.epoch, round=record.round + 1, rounds=self.settings.rounds, sites=sites, missing=missing)

    def _collect_again(self) -> None:
        """What was named is no round; the updates that are there may be of the next naming."""
        self.seq += 1
        self.id, self.named, self._quorum_at = None, (), None
        self._announce()

    def _open_round(self) -> None:
        self.seq += 1
        self.id, self.named, self._quorum_at = None, (), None
        self.offers.clear()
        self._barred.clear()
        self.terms = self._choose(self.history)
        self._here_at = self.node.clock.now()
        self.finished = self.history.round >= self.settings.rounds or self._is_over(self.history)

    async def _go_back(self, live: Iterable[_Place]) -> None:
        """Rule 9: nobody has the present state nor can make it; the newest one on the way to it that somebody has is everybody's."""
        there = [place.beat.position for place in live if place.beat.position is not None]
        positions = [position for position in there if self.history.leads_here(position)]
        from_epoch, version = max(positions, key=lambda position: (position[1], position[0]), default=(0, 0))
        await self._write(Epoch(self.history.epoch + 1, version, from_epoch if version else 0))
        self._open_round()
        self._announce()

    # ---- what is said

    def _announce(self) -> None:
        view = self._view()
        for process, (site, nonce) in self._processes.items():
            place = self.places.get(site)
            mine = place is not None and (place.beat.process, place.beat.nonce) == (process, nonce)
            incarnation = place.incarnation if place is not None and mine else 0
            self.node.transport.send(process, RoundAnnounce(view, SitePlace(nonce, incarnation, self.history.named.get(site))))

    def _view(self) -> RoundView:
        history, now = self.history, self.node.clock.now()
        live = self._live(now)
        offers = self.named or tuple(self.offers[site] for site in sorted(self.offers))
        recent = tuple(history.recent(self.settings.recent))
        wanted = [*offers, *(offer for commit in recent for offer in commit.named)]
        return RoundView(
            order=(self.term, self.seq),
            epoch=history.epoch,
            round=history.round,
            origin=history.origins[history.epoch],
            terms=self.terms,
            offers=offers,
            id=self.id,
            recent=recent,
            holdings=tuple(Holding(offer.update, _holders(offer.update, live)) for offer in wanted),
            donors=tuple(
                place.beat.process for place in live if place.beat.position == history.position and self._gives_states(place.beat.site)
            ),
            finished=self.finished,
        )


def _held(place: _Place) -> frozenset[UpdateId]:
    """The updates a site's gateway has all of, its own one included."""
    own = place.beat.offer
    return place.beat.holds if own is None else place.beat.holds | {own.update}


def _holders(update: UpdateId, live: Iterable[_Place]) -> tuple[str, ...]:
    return tuple(place.beat.process for place in live if update in _held(place))
