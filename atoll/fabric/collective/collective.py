"""Collective: reductions among peers of a fabric, as one of them takes part, and what other members may ask about its rounds.

```python
collective = Collective("oslo-0", codecs=FixedCodecs("int8"))
with Fabric("oslo-0", services=[collective.service]) as fabric:
    collective.attach(fabric)  # peers are found by name among those connected
    reduction = fabric.run(collective.reduce(plan, gradient))  # `plan` came from whoever coordinates: make_plan
    gradient.copy_(reduction.require_complete())
```
"""

import asyncio
import concurrent.futures
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from atoll.errors import FabricError, RefusedError
from atoll.events import Observer, ReductionFinished
from atoll.fabric.collective.chunk import CellProgress, EncodedChunk, Item, PullChunks
from atoll.fabric.collective.link_codecs import AdaptiveCodecs, LinkCodecs, RateWindow
from atoll.fabric.collective.plan import PeerRates, RoundPlan
from atoll.fabric.collective.pull import LONGEST_SECONDS, Pulling
from atoll.fabric.collective.result import ReductionResult, SumFeedback
from atoll.fabric.collective.round import Peers, Round
from atoll.fabric.deadline import LinkEstimate
from atoll.fabric.fabric import Fabric
from atoll.fabric.remote import Remote
from atoll.fabric.service import CallingPeer, allowed

__all__ = ["Collective", "Reductions"]

_BEGIN_SECONDS = 60.0
_MOST_ENDED = 10_000
_KEEP_ROUNDS = 2


class RoundTable:
    """Rounds under way and those that ended last, by id. An id is never used twice."""

    def __init__(self) -> None:
        self.known: dict[str, Round] = {}
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
        _forget_oldest(self._refused)
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
        for one in [one for one in self.known if one in self._ended][:-_KEEP_ROUNDS]:
            del self.known[one]
        _forget_oldest(self._ended)

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


def _forget_oldest(table: dict[str, Any]) -> None:
    while len(table) > _MOST_ENDED:
        del table[next(iter(table))]


class Reductions:
    """What members call on each other: a service of the fabric."""

    def __init__(self, rounds: "RoundTable") -> None:
        self._rounds = rounds

    @allowed("worker", "coordinator")
    async def contribution(self, request: PullChunks, peer: CallingPeer) -> AsyncIterator[EncodedChunk]:
        """A member's contribution to a cell."""
        round_ = await self._rounds.get(request.round)
        async for item in round_.contributions(request, peer.name):
            yield item

    @allowed("worker", "coordinator")
    async def result(self, request: PullChunks, peer: CallingPeer) -> AsyncIterator[Item]:
        """A reduced cell."""
        round_ = await self._rounds.get(request.round)
        async for item in round_.reduced(request, peer.name):
            yield item

    @allowed("worker", "coordinator")
    async def held(self, request: PullChunks, peer: CallingPeer) -> CellProgress:
        """How much of a reduced cell is here."""
        round_ = self._rounds.known.get(request.round)
        if round_ is None or not 0 <= request.cell < len(round_.cells):
            return CellProgress(0, True)
        return round_.cells[request.cell].progress


class Collective(Peers):
    """One peer's part in reductions. Rounds may run side by side; the last two that ended serve members that are late.

    `codecs` None: adapted to each link, by `AdaptiveCodecs(self.estimate, self.clock)`; others may be set between rounds.
    `threads` encode, decode and sum; the fabric's loop never does.
    """

    def __init__(self, name: str, *, codecs: LinkCodecs | None = None, observer: Observer | None = None, threads: int = 2) -> None:
        self.name = name
        self.codecs: LinkCodecs = codecs or AdaptiveCodecs(self.estimate, self.clock, observer)
        self.up, self.down = RateWindow(), RateWindow()
        self._observer = observer
        self._work = ThreadPoolExecutor(threads, thread_name_prefix=f"collective {name}")
        self._fabric: Fabric | None = None
        self._rounds = RoundTable()
        self.service = Reductions(self._rounds)
        """What the fabric of this member must serve."""

    def attach(self, fabric: Fabric) -> None:
        """Uses the fabric this is a service of."""
        self._fabric = fabric

    def close(self) -> None:
        """Ends the worker threads; call it after the fabric was closed."""
        self._work.shutdown(wait=True, cancel_futures=True)

    # ---- for its own member

    async def reduce(
        self,
        plan: RoundPlan,
        buffer: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        feedback: SumFeedback | None = None,
    ) -> ReductionResult:
        """Takes part in a round. `buffer` must not change until this returns; the result is apart from it (in `out` if given).

        With `feedback`, what earlier rounds left out goes with it: `feedback.keep(reduction)` once the result is used.
        Returns whatever happens to other members, with what is missing named; `require_complete` raises if anything is.
        """
        self._rounds.check_new(plan.id)
        begin = self.clock()
        try:
            round_ = Round(plan, self.name, buffer, self, self.codecs, self._work, out, feedback)
        except FabricError as error:
            self._rounds.refuse(plan.id, str(error))
            raise
        self._rounds.begin(round_)
        try:
            reduction = await round_.run()
        finally:
            self._rounds.end(plan.id)
        self.up.end_round()
        self.down.end_round()
        if self._observer is not None:
            missing = reduction.missing
            event = ReductionFinished(
                at_seconds=self.clock(),
                round=plan.id,
                seconds=self.clock() - begin,
                predicted_seconds=plan.bound_seconds,
                complete=reduction.complete,
                left_out=reduction.blamed,
                message=missing[0].reason if missing else "",
            )
            self._observer(event)
        return reduction

    def reduce_soon(
        self,
        plan: RoundPlan,
        buffer: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        feedback: SumFeedback | None = None,
    ) -> "concurrent.futures.Future[ReductionResult]":
        """As `reduce`, for code outside the loop: a future of the result."""
        assert self._fabric is not None, "attach a fabric first"
        return self._fabric.submit(self.reduce(plan, buffer, out, feedback))

    def rates(self, default_bytes_per_s: float = 25e6) -> PeerRates:
        """What was measured of this member's interface in earlier rounds."""
        return PeerRates(
            name=self.name,
            up_bytes_per_s=self.up.bytes_per_s or default_bytes_per_s,
            down_bytes_per_s=self.down.bytes_per_s or default_bytes_per_s,
        )

    def estimate(self, name: str) -> LinkEstimate | None:
        """What the fabric measured of the way to a peer; None while it is not connected. For `AdaptiveCodecs`."""
        remote = self._fabric.peers.get(name) if self._fabric is not None else None
        return None if remote is None else remote.estimate

    # ---- Peers

    def contributions(self, peer: str, pull: PullChunks) -> AsyncIterator[EncodedChunk]:
        """Asks a peer."""
        return self._remote(peer).stream(Reductions.contribution, pull, timeout_seconds=LONGEST_SECONDS)

    def reduced(self, peer: str, pull: PullChunks) -> AsyncIterator[Item]:
        """Asks a peer."""
        return self._remote(peer).stream(Reductions.result, pull, timeout_seconds=LONGEST_SECONDS)

    async def progress(self, peer: str, pull: PullChunks) -> CellProgress:
        """Asks a peer."""
        remote = self._remote(peer)
        if remote.estimate is None:
            raise FabricError(f"{peer} is not connected")
        return await remote.call(Reductions.held, pull, timeout_seconds=5.0)

    def watched(self, peer: str, limit_seconds: float, first_seconds: float) -> Pulling:
        """A pull that is about to begin."""
        assert self._fabric is not None
        remote = self._fabric.peers.get(peer)
        return Pulling(peer, remote, limit_seconds, first_seconds, self.clock())

    def clock(self) -> float:
        """Of the loop."""
        return asyncio.get_running_loop().time()

    def sent(self, peer: str, begin: float, end: float, nbytes: int) -> None:
        """Bytes went out."""
        self.up.add(begin, end, nbytes)
        self.codecs.sent(peer, begin, end, nbytes)

    def received(self, begin: float, end: float, nbytes: int) -> None:
        """Bytes came in."""
        self.down.add(begin, end, nbytes)

    def _remote(self, name: str) -> Remote:
        assert self._fabric is not None, "attach a fabric first"
        return self._fabric.peer(name)
