"""A site's training in exact integers: each inner step adds a number that no other step adds, so that a step too many or too few shows.

A site has several processes; its memory is theirs together and is lost with the last of them, its disk is not. Numbers stand for vectors:
a state has chunks of (weight, momentum, order of sums), θ is the weight and what the site's own steps added to it. The codec leaves out the
last three digits of what is sent.
"""

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from atoll.control.rounds.messages import Offer, Position, RoundTerms, UpdateId
from atoll.control.rounds.site import GatewayReplacedError, Kept
from atoll.simulate.arithmetic import PRIME, stable_hash
from atoll.simulate.loop import Process

__all__ = [
    "CHUNKS",
    "ExactMemory",
    "ExactTraining",
    "GlobalCell",
    "SiteDisk",
    "beginning",
    "joined_at",
    "joined_in",
    "mean_of",
    "next_cells",
    "progress",
]

CHUNKS = 2
LEFT_OUT = 1000


class GlobalCell(NamedTuple):
    """One chunk of the common state."""

    weight: int
    momentum: int
    rounding: int


class MeanCell(NamedTuple):
    """One chunk of Δ: its value, and a hash of how it was added up."""

    value: int
    rounding: int


def beginning() -> tuple[GlobalCell, ...]:
    """The state before the first round."""
    return tuple(GlobalCell(stable_hash(11, chunk), 0, 0) for chunk in range(CHUNKS))


@lru_cache(maxsize=65536)
def _step(site: int, step: int, chunk: int) -> int:
    return stable_hash(12, site, step, chunk)


def progress(site: int, first: int, last: int) -> tuple[int, ...]:
    """What a site's steps from `first` up to `last` add to its weights."""
    return tuple(sum(_step(site, step, chunk) for step in range(first, last)) % PRIME for chunk in range(CHUNKS))


def mean_of(updates: Sequence[tuple[float, Sequence[int]]]) -> tuple[MeanCell, ...]:
    """Δ in exact arithmetic: division is by the inverse modulo the prime."""
    share = pow(int(sum(weight for weight, _ in updates)), -1, PRIME)
    found = []
    for chunk in range(CHUNKS):
        value = rounding = 0
        for weight, update in updates:
            value = (value + int(weight) * update[chunk]) % PRIME
            rounding = (rounding * 31 + int(weight) * 17 + update[chunk] + 1) % PRIME
        found.append(MeanCell(value * share % PRIME, rounding))
    return tuple(found)


def next_cells(cells: Sequence[GlobalCell], mean: Sequence[MeanCell], terms: RoundTerms) -> tuple[GlobalCell, ...]:
    """b = μ·b + Δ; g += η·(Δ + μ·b), with μ = 3 and η as the round's terms say."""
    rate, found = int(terms.choice.partition(";")[0]), []
    for cell, each in zip(cells, mean, strict=True):
        momentum = (3 * cell.momentum + each.value) % PRIME
        weight = (cell.weight + rate * (each.value + 3 * momentum)) % PRIME
        found.append(GlobalCell(weight, momentum, stable_hash(cell.rounding, each.rounding)))
    return tuple(found)


def joined_in(terms: RoundTerms) -> tuple[int, ...]:
    """The first batch of every site that joined, as the terms say."""
    return tuple(int(first) for first in terms.choice.partition(";")[2].split(",") if first)


class SiteDisk(msgspec.Struct):
    """A site's own checkpoint."""

    position: Position | None = None
    cells: tuple[GlobalCell, ...] = ()
    cursor: int = 0


class ExactMemory:
    """What the processes of a site have in common. `save_every` rounds it is written to the site's disk."""

    def __init__(self, site: int, disk: SiteDisk, save_every: int) -> None:
        self.site, self.disk, self.save_every = site, disk, save_every
        self.incarnation = 0
        self.position: Position | None = None
        self.cells: tuple[GlobalCell, ...] = ()
        self.cursor = 0
        self.steps = 0
        self.own: tuple[int, ...] = (0,) * CHUNKS  # θ − g
        self.owed: tuple[int, ...] = (0,) * CHUNKS  # e
        self.offer: Offer | None = None
        self.update: tuple[int, ...] = ()
        self.own_when_sent: tuple[int, ...] = ()
        self.owed_when_sent: tuple[int, ...] = ()
        self.offers_made = 0
        self.joined: tuple[int, ...] = ()  # the first batches of sites that joined, as far as it was told
        self.divided: dict[int, int] = {}  # of how many of those there were samples in the batch of a step, when it was made

    def train(self) -> None:
        """One inner step."""
        if self.position is not None:
            self.divided[self.steps] = joined_at(self.joined, self.steps)
            self.own = tuple((own + _step(self.site, self.steps, chunk)) % PRIME for chunk, own in enumerate(self.own))
            self.steps += 1

    def make_offer(self, incarnation: int, name: str) -> Offer:
        """The update of what is not in the state yet, with what was left out before."""
        assert self.position is not None
        whole = tuple((own + owed) % PRIME for own, owed in zip(self.own, self.owed, strict=True))
        self.owed_when_sent = tuple(each % LEFT_OUT for each in whole)
        self.update = tuple((each - owed) % PRIME for each, owed in zip(whole, self.owed_when_sent, strict=True))
        self.own_when_sent = self.own
        self.offers_made += 1
        weight = float((self.steps - self.cursor) * (1 + self.site))
        identity = UpdateId(name, incarnation, self.offers_made)
        self.offer = Offer(identity, *self.position, self.cursor, self.steps, weight, _digest(self.update), joined=len(self.joined))
        return self.offer

    def hear_of_joined(self, joined: tuple[int, ...]) -> bool:
        """Batches are larger from some on. Steps that were made with those as they were before count no more: whether there were any."""
        if len(joined) <= len(self.joined):
            return False
        self.joined = joined
        assert self.position is not None
        if self._counts_otherwise():
            self.change(self.position, self.cells, "nothing", self.cursor)
            return True
        return False

    def _counts_otherwise(self) -> bool:
        return any(self.divided[step] != joined_at(self.joined, step) for step in range(self.cursor, self.steps))

    def change(self, position: Position, cells: tuple[GlobalCell, ...], kept: Kept, cursor: int) -> None:
        """Another common state, with what goes on counting of the site's own steps."""
        if kept == "since sent":
            self.own = tuple((own - sent) % PRIME for own, sent in zip(self.own, self.own_when_sent, strict=True))
            self.owed = self.owed_when_sent
        elif kept == "nothing":
            self.own, self.owed, self.steps = (0,) * CHUNKS, (0,) * CHUNKS, cursor
        self.position, self.cells, self.cursor, self.offer = position, cells, cursor, None
        if position[1] % self.save_every == 0:
            self.disk.position, self.disk.cells, self.disk.cursor = position, cells, cursor


class ExactTraining:
    """What `atoll.control.rounds.SiteTraining` asks for: one process's access to its site's memory. `watch` hears of updates and states."""

    def __init__(
        self, process: Process, name: str, memory: ExactMemory, randomness: random.Random, watch: Callable[[str, Any], None]
    ) -> None:
        self.memory, self.name = memory, name
        self._process, self._random, self._watch = process, randomness, watch
        self.seconds = 0.3

    @property
    def position(self) -> Position | None:
        """Of the memory."""
        return self.memory.position

    @property
    def cursor(self) -> int:
        """Of the memory."""
        return self.memory.cursor

    @property
    def steps(self) -> int:
        """Of the memory."""
        return self.memory.steps

    @property
    def done(self) -> bool:
        """Sites here never end."""
        return False

    @property
    def offer(self) -> Offer | None:
        """Of the memory."""
        return self.memory.offer

    async def _takes_time(self) -> None:
        await self._process.sleep(self.seconds * (0.5 + self._random.random()) * (1.0 if self._random.random() < 0.9 else 15.0))

    def _check(self, incarnation: int) -> None:
        if incarnation < self.memory.incarnation:
            raise GatewayReplacedError(f"another process of {self.name} is its gateway")

    def at_border(self, terms: RoundTerms, seconds: float, hurry: bool) -> bool:
        """Rounds last equally long by every site's clock."""
        if self.memory.hear_of_joined(joined_in(terms)):
            self._watch(self.name, None)
        return seconds >= terms.seconds and self.steps > self.cursor

    def claim(self, incarnation: int) -> None:
        """Of several the newest counts."""
        self.memory.incarnation = max(self.memory.incarnation, incarnation)

    async def restore(self) -> None:
        """From the disk, where the memory is empty."""
        await self._takes_time()
        disk, memory = self.memory.disk, self.memory
        if memory.position is None and disk.position is not None:
            memory.position, memory.cells, memory.cursor, memory.steps = disk.position, disk.cells, disk.cursor, disk.cursor
            self._watch(self.name, None)

    async def begin(self, position: Position) -> None:
        """The state before the first round."""
        await self._takes_time()
        if self.memory.position is None:
            self.memory.change(position, beginning(), "all", 0)
            self._watch(self.name, None)

    def relabel(self, incarnation: int, position: Position) -> None:
        """The same state under the name of another epoch."""
        self._check(incarnation)
        self.memory.change(position, self.memory.cells, "all", self.memory.cursor)
        self._watch(self.name, None)

    async def make_offer(self, incarnation: int) -> Offer:
        """An update."""
        await self._takes_time()
        self._check(incarnation)
        offer = self.memory.make_offer(incarnation, self.name)
        self._watch(self.name, (offer, self.memory.update))
        return offer

    def offered_chunk(self, chunk: int) -> int:
        """Of the update."""
        return self.memory.update[chunk]

    def fits(self, payload: Any) -> bool:
        """A whole number."""
        return isinstance(payload, int)

    def fits_state(self, payload: Any) -> bool:
        """Three of them."""
        return isinstance(payload, GlobalCell)

    def digest(self, chunks: Sequence[int]) -> str:
        """Of an update."""
        return _digest(chunks)

    async def combine(self, updates: Sequence[tuple[Offer, Sequence[int]]]) -> tuple[Any, str]:
        """Exactly."""
        weighed = [(offer.weight, tuple(chunks)) for offer, chunks in updates]
        await self._takes_time()
        mean = mean_of(weighed)
        return mean, _digest([number for cell in mean for number in cell])

    async def advance(self, incarnation: int, mean: Any, terms: RoundTerms, kept: Kept, cursor: int) -> None:
        """A round."""
        await self._takes_time()
        self._check(incarnation)
        memory = self.memory
        assert memory.position is not None
        epoch, round = memory.position
        memory.change((epoch, round + 1), next_cells(memory.cells, mean, terms), kept, cursor)
        self._watch(self.name, None)

    def copy_state(self) -> tuple[GlobalCell, ...]:
        """States here never change."""
        return self.memory.cells

    def read_chunk(self, state: tuple[GlobalCell, ...], chunk: int) -> GlobalCell:
        """A part of it."""
        return state[chunk]

    async def adopt(self, incarnation: int, position: Position, chunks: Sequence[Any], kept: Kept, cursor: int) -> None:
        """What others gave; nothing stands for the state before the first round."""
        await self._takes_time()
        self._check(incarnation)
        self.memory.change(position, tuple(chunks) or beginning(), kept, cursor)
        self._watch(self.name, None)


def joined_at(joined: Sequence[int], step: int) -> int:
    """Of how many of the sites that joined the batch of a step has samples."""
    return sum(first <= step for first in joined)


def _digest(numbers: Sequence[int]) -> str:
    return f"{stable_hash(*numbers):x}"
