"""A site's gateway: makes the site's update at the round's border, fetches the others', and has the site go on with what they add up to.

Rules, by the numbers of docs/islands.md. Every process of a site runs one; the coordinator says which of them is the gateway, and the
site's training obeys the newest only. It takes messages in turn; what takes time (making an update, summing, changing the state) runs
beside that, one at a time, while the site trains on.
"""

from collections.abc import Coroutine, Sequence
from typing import Any

from atoll.control.journal import Epoch
from atoll.control.rounds.exchange import GlobalFetch, UpdateStore
from atoll.control.rounds.messages import (
    FetchGlobal,
    FetchUpdate,
    GlobalChunk,
    Offer,
    Position,
    RoundAnnounce,
    RoundCommitted,
    RoundId,
    RoundSettings,
    RoundView,
    SiteBeat,
    UpdateChunk,
    UpdateId,
)
from atoll.control.rounds.site import GatewayReplacedError, Kept, SiteTraining
from atoll.control.world import SwarmProcess

__all__ = ["Gateway"]

_TICK = object()
_DONE = object()


class Gateway:
    """One process of a site. After a failure, of it or of all of the site, what the site had trained is in the common state once or not."""

    fetch_type = GlobalFetch

    def __init__(self, node: SwarmProcess, site: str, training: SiteTraining, settings: RoundSettings, coordinators: Sequence[str]) -> None:
        self.node, self.site, self.training, self.settings, self.coordinators = node, site, training, settings, coordinators
        self.incarnation = 0  # 0: another process is the site's gateway
        self.view: RoundView | None = None
        self.named: Offer | None = None  # the site's last update in the state of the view's position
        self.finished = False
        self.store = UpdateStore(settings.chunks)
        self.fetch: GlobalFetch | None = None
        self._sum: tuple[RoundId, Any, str] | None = None  # what a naming's updates add up to
        self._behind: tuple[Position, float] | None = None  # a position whose round is decided, and since when that is known
        self._distrusts: Position | None = None  # a position whose round adds up to something else here than elsewhere
        self._copies: dict[Position, Any] = {}  # states that are given to others
        self._kept_for: tuple[RoundView | None, Offer | None] = (None, None)
        self._border_at: float | None = None  # of the last update, or when the first round began
        self._working = False
        self._beats = 0

    async def run(self) -> None:
        """Until its process is ended: after the last round it still gives to those who are behind."""
        await self.training.restore()
        self.node.clock.spawn(self._tick())
        while True:
            message = await self.node.inbox.take()
            self._handle(message)
            self._act()

    @property
    def lacks_state(self) -> bool:
        """Whether it can only go on with the state of another: nobody has the updates any more that led from its own to the present one."""
        view = self.view
        if self.fetch is None or view is None:
            return False
        position = self.training.position
        return position == self._distrusts or position not in [(commit.epoch, commit.round) for commit in view.recent]

    def wake(self) -> None:
        """The site has something for it: what there is to do is looked at now, not at the next heartbeat."""
        self.node.inbox.put(_DONE)

    async def _tick(self) -> None:
        while True:
            self.node.inbox.put(_TICK)
            await self.node.clock.sleep(self.settings.heartbeat_seconds)

    # ---- what is heard

    def _handle(self, message: Any) -> None:
        if message is _TICK:
            self._beat()
        elif isinstance(message, RoundAnnounce):
            self._follow(message)
        elif isinstance(message, UpdateChunk):
            if self.training.fits(message.payload) and self.store.put(message.update, message.chunk, message.payload, self.training.digest):
                self._beat()
        elif isinstance(message, GlobalChunk):
            if self.fetch is not None and self.training.fits_state(message.payload):
                self.fetch.put(message.position, message.chunk, message.payload, self.node.clock.now())
        elif isinstance(message, FetchUpdate):
            payload = self.store.chunk(message.update, message.chunk)
            if payload is not None:
                self.node.transport.send(message.process, UpdateChunk(message.update, message.chunk, payload))
        elif isinstance(message, FetchGlobal):
            self._give_state(message)

    def _follow(self, announce: RoundAnnounce) -> None:
        """Rule 1: never back to an older word."""
        view = announce.view
        if self._is_outdated(view) or not self._is_mine(announce):
            return
        self.view, self.named = view, announce.yours.named
        if announce.yours.incarnation != self.incarnation:
            self.incarnation = announce.yours.incarnation
            if self.incarnation:
                self.training.claim(self.incarnation)

    def _is_mine(self, announce: RoundAnnounce) -> bool:
        """Rule 3: what a process of this name was told before it was started again is not for this one."""
        return announce.yours.nonce == self.node.nonce

    def _is_outdated(self, view: RoundView) -> bool:
        return self.view is not None and view.order < self.view.order

    def _give_state(self, message: FetchGlobal) -> None:
        """A state that was asked for is kept as long as a site can come from there to the present one by updates."""
        if self.training.position == message.position and message.position not in self._copies:
            self._copies[message.position] = self.training.copy_state()
        copy = self._copies.get(message.position)
        if copy is not None:
            chunk = self.training.read_chunk(copy, message.chunk)
            self.node.transport.send(message.process, GlobalChunk(message.position, message.chunk, chunk))

    # ---- what is done

    def _act(self) -> None:
        view = self.view
        if view is None or not self.incarnation or self._working or self.finished:
            return
        if self._is_ahead(view):
            return
        position = self._relabelled(view, view.origin)
        here = (view.epoch, view.round)
        if view.finished and position == here:
            self.finished = True
            self._beat()
            return
        commit = next((each for each in view.recent if (each.epoch, each.round) == position), None)
        self._keep(view)
        if position == here:
            self.fetch = None
            self._take_part(view)
        elif commit is not None and self._comes_by_updates(view, commit):
            self._catch_up(view, commit)
        else:
            self._fetch_state(view)

    def _is_ahead(self, view: RoundView) -> bool:
        """Rule 1: the site's state was decided later than this word, which is of a coordinator that was replaced and does not know it."""
        position = self.training.position
        return position is not None and position > (view.epoch, view.round)

    def _relabelled(self, view: RoundView, origin: Epoch) -> Position | None:
        """Rule 9: an epoch begins with a state that some have, under the name of an earlier one."""
        position = self.training.position
        if position is not None and position[0] != view.epoch and position == (origin.from_epoch, origin.version):
            try:
                self.training.relabel(self.incarnation, (view.epoch, origin.version))
                position = (view.epoch, origin.version)
            except GatewayReplacedError:
                self.incarnation = 0
        return position

    def _keep(self, view: RoundView) -> None:
        """Forgets what nobody needs any more."""
        own = self.training.offer
        if self._kept_for[0] is view and self._kept_for[1] is own:
            return
        self._kept_for = view, own
        wanted = [*view.offers, *(offer for each in view.recent for offer in each.named)]
        self.store.keep(wanted if own is None or own in wanted else [*wanted, own])
        if own is not None and own.update not in self.store.whole:  # of this process or the gateway before it
            for number in range(self.settings.chunks):
                self.store.put(own.update, number, self.training.offered_chunk(number), self.training.digest)
        within = view.round - self.settings.recent
        self._copies = {at: copy for at, copy in self._copies.items() if at[0] == view.epoch and at[1] >= within}

    def _take_part(self, view: RoundView) -> None:
        """Rules 4 and 6."""
        now = self.node.clock.now()
        if self._border_at is None:
            self._border_at = now
        offer = self.training.offer
        hurry = any(other.update.site != self.site for other in view.offers)
        if offer is None and view.id is None and self.training.at_border(view.terms, now - self._border_at, hurry):
            self._border_at = now
            self._start(self._offer())
            return
        if not self._has(view.offers):
            self._ask(view, view.offers)
        elif view.id is not None and (self._sum is None or self._sum[0] != view.id):
            self._start(self._add_up(view.id, view.offers))

    def _comes_by_updates(self, view: RoundView, commit: RoundCommitted) -> bool:
        """Whether what the round was made of is here, or can be had of somebody before long, and adds up to what it should."""
        position, now = (commit.epoch, commit.round), self.node.clock.now()
        if self._behind is None or self._behind[0] != position:
            self._behind = position, now
        lacking = {offer.update for offer in commit.named} - self.store.whole
        held = {holding.update for holding in view.holdings if set(holding.processes) - {self.node.name}}
        in_time = now - self._behind[1] < 4 * self.settings.patience_seconds
        return position != self._distrusts and (not lacking or (lacking <= held and in_time))

    def _catch_up(self, view: RoundView, commit: RoundCommitted) -> None:
        """Rule 8: by the updates of the round that was missed, or that was just decided."""
        if (self._sum is not None and self._is_sum_of(self._sum, commit)) or self._has(commit.named):
            self._start(self._advance(commit))
        else:
            self._ask(view, commit.named)

    def _is_sum_of(self, found: tuple[RoundId, Any, str], commit: RoundCommitted) -> bool:
        return found[0] == commit.id

    def _has(self, offers: Sequence[Offer]) -> bool:
        return all(offer.update in self.store.whole for offer in offers)

    def _ask(self, view: RoundView, offers: Sequence[Offer]) -> None:
        holdings = {holding.update: holding.processes for holding in view.holdings}

        def holders(update: UpdateId) -> list[str]:
            return [process for process in holdings.get(update, ()) if process != self.node.name]

        def send(to: str, update: UpdateId, chunk: int) -> None:
            self.node.transport.send(to, FetchUpdate(update, chunk, self.node.name))

        limit = self.settings.in_flight
        self.store.ask([offer.update for offer in offers], holders, self.node.clock.now(), self.settings.patience_seconds, limit, send)

    def _fetch_state(self, view: RoundView) -> None:
        """Rule 8: from all who have it at once; from the beginning every site comes by itself."""
        if view.round == 0:
            self._start(self.training.begin((view.epoch, 0)) if self.training.position is None else self._begin_again(view))
            return
        now, fetch = self.node.clock.now(), self.fetch
        if fetch is None or self._is_useless(fetch, view, now):
            fetch = self.fetch = self.fetch_type((view.epoch, view.round), self.named, self.settings.chunks, now)
        if fetch.chunks is not None:
            self._start(self._adopt(fetch.position, fetch.chunks, fetch.named))
            return

        def send(to: str, chunk: int) -> None:
            self.node.transport.send(to, FetchGlobal(fetch.position, chunk, self.node.name))

        donors = [process for process in view.donors if process != self.node.name]
        fetch.ask(donors, now, self.settings.patience_seconds, self.settings.in_flight, send)

    def _is_useless(self, fetch: GlobalFetch, view: RoundView, now: float) -> bool:
        """Whether no round leads from there to the present state by updates that are kept, or nothing comes any more."""
        epoch, round = fetch.position
        silent = now - fetch.came_at > 4 * self.settings.patience_seconds
        return epoch != view.epoch or view.round - round > self.settings.recent or (silent and round != view.round)

    # ---- what takes time

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._working = True
        self.node.clock.spawn(self._work(work))

    async def _work(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except GatewayReplacedError:
            self.incarnation = 0
        self._working = False
        self.node.inbox.put(_DONE)
        self._beat()

    async def _offer(self) -> None:
        await self.training.make_offer(self.incarnation)

    async def _add_up(self, id: RoundId, offers: Sequence[Offer]) -> None:
        mean, digest = await self.training.combine([(offer, self.store.chunks(offer.update)) for offer in offers])
        self._sum = (id, mean, digest)

    async def _advance(self, commit: RoundCommitted) -> None:
        found = self._sum
        if found is None or not self._is_sum_of(found, commit):
            await self._add_up(commit.id, commit.named)
            found = self._sum
        assert found is not None
        _, mean, digest = found
        if not self._is_as_decided(digest, commit):
            self._distrusts = self.training.position
            return
        own = next((offer for offer in commit.named if offer.update.site == self.site), None)
        kept = self._kept(own)
        cursor = self.training.cursor if own is None else own.last
        await self.training.advance(self.incarnation, mean, commit.terms, kept, cursor)
        self._sum = None

    def _is_as_decided(self, digest: str, commit: RoundCommitted) -> bool:
        return digest == commit.digest

    def _kept(self, own: Offer | None) -> Kept:
        """Rule 10, of a round with this update of the site's own, or with none."""
        if own is None:
            return "all"
        offer = self.training.offer
        return "since sent" if offer is not None and offer.update == own.update else "nothing"

    async def _begin_again(self, view: RoundView) -> None:
        await self.training.adopt(self.incarnation, (view.epoch, 0), (), "nothing", 0)

    async def _adopt(self, position: Position, chunks: Sequence[Any], named: Offer | None) -> None:
        """Rule 10, of a state that holds the site's updates up to `named`."""
        kept = "all" if self.training.cursor == _end(named) else self._kept(named) if named is not None else "nothing"
        await self.training.adopt(self.incarnation, position, chunks, kept, _end(named))
        self.fetch = None

    # ---- what is said

    def _beat(self) -> None:
        """Where it stands, to whoever coordinates; also where it is not the gateway, so that it may become it."""
        self._beats += 1
        training, gateway = self.training, bool(self.incarnation)
        beat = SiteBeat(
            site=self.site,
            process=self.node.name,
            nonce=self.node.nonce,
            count=self._beats,
            incarnation=self.incarnation,
            position=training.position if gateway else None,
            offer=training.offer if gateway else None,
            gathered=self._sum[0] if gateway and self._sum is not None else None,
            digest=self._sum[2] if gateway and self._sum is not None else "",
            holds=self.store.whole if gateway else frozenset(),
            done=training.done if gateway else False,
        )
        for coordinator in self.coordinators:
            self.node.transport.send(coordinator, beat)


def _end(offer: Offer | None) -> int:
    """The first step that is not in a state with this update as the site's last."""
    return 0 if offer is None else offer.last
