"""Checker of rounds: the invariants of docs/islands.md, looked at whenever a record becomes durable, an update is made or a state is set.

It sees everything at once, which no site can, and makes every state again from the records alone.
"""

from typing import Any

from atoll.control.journal import Epoch
from atoll.control.rounds.messages import Offer, Position, RoundCommitted, SiteJoined, UpdateId
from atoll.simulate.arithmetic import PRIME, stable_hash
from atoll.simulate.loop import Loop
from atoll.simulate.rounds.exact_site import CHUNKS, LEFT_OUT, ExactMemory, GlobalCell, beginning, joined_at, mean_of, next_cells, progress

__all__ = ["RoundChecker", "site_number"]

NOTHING = (0,) * CHUNKS


def site_number(site: str) -> int:
    """Of `s3`."""
    return int(site[1:])


class RoundChecker:
    """Collects violations, each with the virtual time it was seen at."""

    def __init__(self, loop: Loop, quorum: int) -> None:
        self.violations: list[str] = []
        self.commits = self.rollbacks = 0
        self.named_sites: list[frozenset[str]] = []  # of each round, in the order they were decided
        self.memories: dict[str, ExactMemory] = {}
        self._loop, self._quorum = loop, quorum
        self._cells: dict[Position, tuple[GlobalCell, ...]] = {}
        self._last: dict[Position, dict[str, Offer]] = {}  # each site's last update in a state
        self._made: dict[UpdateId, tuple[Offer, tuple[int, ...], tuple[int, ...]]] = {}  # (offer, update, what it left out)
        self._next: Position = (-1, 0)
        self._joined: list[int] = []  # the first batch of every site that joined
        self._divided: dict[UpdateId, list[int]] = {}  # how the batches of an update's steps were divided when they were trained
        self._reached: dict[ExactMemory, Position] = {}  # by each site's memory, as long as it lives

    def wrong(self, text: str) -> None:
        """Something is."""
        self.violations.append(f"{self._loop.now:.2f}: {text}")

    # ---- the journal

    def on_record(self, record: Any) -> None:
        """A record is durable."""
        if isinstance(record, Epoch):
            self._on_epoch(record)
        elif isinstance(record, RoundCommitted):
            self._on_commit(record)
        elif isinstance(record, SiteJoined):
            self._joined.append(record.first)

    def _on_epoch(self, record: Epoch) -> None:
        if record.epoch != self._next[0] + 1:
            self.wrong(f"epoch {record.epoch} follows epoch {self._next[0]}")
        self.rollbacks += record.epoch > 0
        origin, position = (record.from_epoch, record.version), (record.epoch, record.version)
        self._next = position
        if record.version and origin not in self._cells:
            self.wrong(f"epoch {record.epoch} begins with a state that no round made")
        self._cells[position] = self._cells.get(origin, ()) if record.version else beginning()
        self._last[position] = dict(self._last.get(origin, {})) if record.version else {}

    def _on_commit(self, record: RoundCommitted) -> None:
        where = f"round {record.round} of epoch {record.epoch}"
        position = (record.epoch, record.round)
        if position != self._next:
            self.wrong(f"{where} is decided where {self._next} is due")
            return
        self.commits += 1
        self._next = (record.epoch, record.round + 1)
        sites = [offer.update.site for offer in record.named]
        self.named_sites.append(frozenset(sites))
        if len(set(sites)) != len(sites) or len(sites) < self._quorum:
            self.wrong(f"{where} names the sites {sites}")
        last = self._last[position]
        for offer in record.named:
            self._check_offer(offer, position, last.get(offer.update.site), where)
        updates = [(offer.weight, self._made[offer.update][1]) for offer in record.named if offer.update in self._made]
        mean = mean_of(updates)
        if record.digest != f"{stable_hash(*[number for cell in mean for number in cell]):x}":
            self.wrong(f"{where}: its Δ is not the weighted sum of the updates it names")
        self._cells[self._next] = next_cells(self._cells[position], mean, record.terms)
        self._last[self._next] = {**last, **{offer.update.site: offer for offer in record.named}}

    def _check_offer(self, offer: Offer, position: Position, last: Offer | None, where: str) -> None:
        made = self._made.get(offer.update)
        if made is None or made[0] != offer:
            self.wrong(f"{where} names an update that {offer.update.site} did not make so")
        if (offer.epoch, offer.round) != position:
            self.wrong(f"{where} names an update made for another round")
        if self._divided.get(offer.update) != [joined_at(self._joined, step) for step in range(offer.first, offer.last)]:
            self.wrong(f"{where}: {offer.update.site}'s steps {offer.first} to {offer.last} are of batches that a site joined since")
        if offer.first != (last.last if last is not None else 0):
            self.wrong(f"{where}: {offer.update.site}'s steps from {offer.first} on follow {last.last if last is not None else 0}")

    # ---- sites

    def watch(self, site: str, made: tuple[Offer, tuple[int, ...]] | None) -> None:
        """A site has a new state, or has made an update."""
        memory = self.memories[site]
        if made is None:
            self._check_state(site, memory)
            return
        offer, update = made
        whole = tuple(sum(both) for both in zip(progress(site_number(site), offer.first, offer.last), memory.owed, strict=True))
        left_out = tuple((all_of_it - sent) % PRIME for all_of_it, sent in zip(whole, update, strict=True))
        if any(each >= LEFT_OUT for each in left_out):
            self.wrong(f"an update of {site} is not what its steps {offer.first} to {offer.last} and its debt make")
        self._made[offer.update] = (offer, update, left_out)
        self._divided[offer.update] = [memory.divided[step] for step in range(offer.first, offer.last)]

    def _check_state(self, site: str, memory: ExactMemory) -> None:
        assert memory.position is not None
        where = f"{site} at round {memory.position[1]} of epoch {memory.position[0]}"
        cells = self._cells.get(memory.position)
        if cells is None:
            self.wrong(f"{where}: no round made this state")
            return
        if memory.cells != cells:
            self.wrong(f"{where}: its state is not that of its rounds")
        if memory.position < self._reached.get(memory, (0, 0)):
            self.wrong(f"{where}: it goes back from {self._reached[memory]}")
        self._reached[memory] = memory.position
        last = self._last[memory.position].get(site)
        if memory.cursor != (last.last if last is not None else 0):
            self.wrong(f"{where}: it takes its steps from {memory.cursor} on for new")
        if memory.own != progress(site_number(site), memory.cursor, memory.steps):
            self.wrong(f"{where}: its own steps {memory.cursor} to {memory.steps} do not count once each")
        if memory.owed not in (NOTHING, self._made[last.update][2] if last is not None else NOTHING):
            self.wrong(f"{where}: what it owes is not what its last update left out")

    def at_the_end(self) -> None:
        """Every site."""
        for site, memory in self.memories.items():
            if memory.position is not None:
                self._check_state(site, memory)
