"""The rounds a member takes part in, and what other members may ask about them."""

import asyncio
from collections.abc import AsyncIterator

from atoll.errors import FabricError, RefusedError
from atoll.fabric.collective.messages import Item, Progress, Pull, Settled
from atoll.fabric.collective.round import Round
from atoll.fabric.method import Peer
from atoll.fabric.roles import allowed

__all__ = ["Reductions", "RoundTable"]

_BEGIN_SECONDS = 60.0
_MOST_ENDED = 10_000


class RoundTable:
    """Rounds under way and those that ended last, by id. An id is never used twice."""

    def __init__(self, keep: int) -> None:
        self.known: dict[str, Round] = {}
        self._keep = keep
        self._ended: dict[str, None] = {}  # oldest first
        self._refused: dict[str, str] = {}  # why, oldest first
        self._begun = asyncio.Event()

    def begin(self, round_: Round) -> None:
        """A round begins here."""
        self.known[round_.plan.id] = round_
        self._refused.pop(round_.plan.id, None)
        self._wake()

    def refuse(self, round_id: str, reason: str) -> None:
        """It cannot begin here as it was asked for: whoever waits for it is told."""
        self._refused[round_id] = reason
        while len(self._refused) > _MOST_ENDED:
            del self._refused[next(iter(self._refused))]
        self._wake()

    def _wake(self) -> None:
        self._begun.set()
        self._begun = asyncio.Event()

    def check_new(self, round_id: str) -> None:
        """FabricError if the id was used."""
        if round_id in self.known or round_id in self._ended:
            raise FabricError(f"round {round_id} was begun already; every round has an id of its own")

    def end(self, round_id: str) -> None:
        """It ended; the oldest that did is forgotten."""
        self._ended[round_id] = None
        kept = [one for one in self.known if one in self._ended]
        for one in kept[: max(0, len(kept) - self._keep)]:
            del self.known[one]
        while len(self._ended) > _MOST_ENDED:
            del self._ended[next(iter(self._ended))]

    async def get(self, round_id: str) -> Round:
        """A round; it may begin here a little later than elsewhere."""
        try:
            async with asyncio.timeout(_BEGIN_SECONDS):
                while round_id not in self.known:
                    if round_id in self._ended:
                        raise RefusedError(f"round {round_id} is over here and forgotten")
                    if round_id in self._refused:
                        raise RefusedError(f"it did not begin there: {self._refused[round_id]}")
                    begun = self._begun
                    await begun.wait()
        except TimeoutError:
            raise RefusedError(f"round {round_id} was not begun here within {_BEGIN_SECONDS:g} s") from None
        return self.known[round_id]


class Reductions:
    """What members call on each other: a service of the fabric."""

    def __init__(self, rounds: "RoundTable") -> None:
        self._rounds = rounds

    @allowed("worker", "coordinator")
    async def contribution(self, request: Pull, peer: Peer) -> AsyncIterator[Item]:
        """A member's contribution to a cell, or its site's."""
        round_ = await self._rounds.get(request.round)
        async for item in round_.contributions(request, peer.name):
            yield item

    @allowed("worker", "coordinator")
    async def result(self, request: Pull, peer: Peer) -> AsyncIterator[Item]:
        """A reduced cell."""
        round_ = await self._rounds.get(request.round)
        async for item in round_.reduced(request, peer.name):
            yield item

    @allowed("worker", "coordinator")
    async def held(self, request: Pull, peer: Peer) -> Progress:
        """How much of a reduced cell is here."""
        round_ = self._rounds.known.get(request.round)
        if round_ is None or not 0 <= request.cell < len(round_.cells):
            return Progress(0, True)
        return round_.cells[request.cell].progress

    @allowed("worker", "coordinator")
    async def settled(self, request: Settled, peer: Peer) -> Settled:
        """How the round ended here, once it did."""
        round_ = await self._rounds.get(request.round)
        reduction = await asyncio.shield(round_.settled)
        return Settled(request.round, reduction.digest)
