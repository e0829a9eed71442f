"""Pulling chunks from several peers at once: a peer that dies, stops or stalls ends its pull with a reason, never a hang.

Streams that leave one interface at the same time end at the same time. Left alone, a stream to a near peer takes most of the interface and
ends early; the far ones then have it to themselves, but congestion control (BBR: a quarter more every eight round trips) takes seconds to
notice. So no stream runs far ahead of the others.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeAlias

from atoll.errors import CodecError, FabricError, PeerLostError
from atoll.fabric.collective.chunk import Item
from atoll.fabric.remote import Remote
from atoll.units import format_seconds

__all__ = ["LONGEST_SECONDS", "OpenStream", "Pacing", "Pulling", "TakeItem", "Watch"]

LONGEST_SECONDS = 86_400.0
"""A deadline that never decides: what decides is the time without progress."""

OpenStream: TypeAlias = Callable[[], AsyncIterator[Item]]
TakeItem: TypeAlias = Callable[[Item], Coroutine[Any, Any, bool]]  # True: it was the last

_SILENT = ("stopped", "unreachable")
_GONE_SECONDS = 5.0  # a lost connection has so long to come back


class Pulling:
    """One stream being pulled; `Watch` ends it when nothing comes for too long, but not while its reader is what it waits for."""

    def __init__(self, peer: str, remote: Remote | None, limit_seconds: float, first_seconds: float, now: float) -> None:
        self.peer = peer
        self.reason = ""  # why it was ended from here
        self.task: asyncio.Task[bool] | None = None
        self._remote = remote
        self._limit_seconds = limit_seconds
        self._waits_until: float | None = now + first_seconds
        self._gone_since: float | None = None

    def check(self, now: float) -> None:
        """Ends the pull when its peer is silent or late."""
        if self.reason or self._waits_until is None or self.task is None:
            return
        connected = self._remote is None or self._remote.estimate is not None
        self._gone_since = None if connected else self._gone_since or now
        if self._remote is not None and self._remote.state in _SILENT:
            self.reason = f"{self.peer} is {self._remote.state}"
        elif self._remote is not None and self._gone_since is not None and now > self._gone_since + _GONE_SECONDS:
            self.reason = f"{self.peer} is not connected: {self._remote.lost_because}"
        elif now > self._waits_until:
            self.reason = f"{self.peer} sent nothing for {format_seconds(self._limit_seconds)}"
        if self.reason:
            self.task.cancel(self.reason)

    async def drain(self, items: OpenStream, take: TakeItem, clock: Callable[[], float]) -> bool:
        """Gives every item to `take`, until it says that was the last; False: there were no more before it did."""
        stream = items()
        try:
            async for item in stream:
                self._waits_until = None
                if await take(item):
                    return True
                self._waits_until = clock() + self._limit_seconds
            return False
        finally:
            await stream.aclose()  # type: ignore[attr-defined]


class Watch:
    """Looks after all pulls of a round, four times a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pulls: set[Pulling] = set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(0.25)
            now = self._clock()
            for pull in list(self._pulls):
                pull.check(now)

    async def pull(self, pull: Pulling, items: OpenStream, take: TakeItem) -> FabricError | None:
        """Gives every item to `take`, until it says that was the last; returns why it ended before that, or None."""
        pull.task = asyncio.create_task(pull.drain(items, take, self._clock))
        self._pulls.add(pull)
        try:
            await asyncio.wait([pull.task])
            if pull.task.cancelled():
                return PeerLostError(pull.reason or f"the pull from {pull.peer} was ended")
            error = pull.task.exception()
            if error is None:
                return None if pull.task.result() else PeerLostError(f"{pull.peer} ended before its last chunk")
            if isinstance(error, FabricError):
                return error
            if isinstance(error, CodecError):
                return FabricError(f"{pull.peer} sent what is no chunk: {error}")
            raise error
        finally:
            self._pulls.discard(pull)
            if not pull.task.done():
                pull.task.cancel()
                await asyncio.wait([pull.task])
            if not pull.task.cancelled():
                pull.task.exception()  # nobody need ask


_SLACK = 0.08  # how far a stream may be ahead of the last one, as a share of the whole
_STILL_SECONDS = 0.3


class PacedStream:
    """One stream: what of it was sent, from 0 to 1; whether it stands still, so that nobody waits for it until it moves again."""

    def __init__(self) -> None:
        self.fraction = 0.0
        self.still = False


class Pacing:
    """All streams of one kind of one round that share an interface."""

    def __init__(self) -> None:
        self._lanes: set[PacedStream] = set()
        self._changed = asyncio.Event()

    def begin(self, fraction: float = 0.0) -> PacedStream:
        """A stream begins."""
        lane = PacedStream()
        lane.fraction = fraction
        self._lanes.add(lane)
        return lane

    def advanced(self, lane: PacedStream, fraction: float) -> None:
        """More of it was sent."""
        lane.fraction, lane.still = fraction, False
        self._tell()

    def end(self, lane: PacedStream) -> None:
        """A stream is over, one way or the other."""
        self._lanes.discard(lane)
        self._tell()

    async def turn(self, lane: PacedStream) -> None:
        """Waits while the stream is too far ahead; never for one that does not move."""
        while behind := [other for other in self._lanes if not other.still and other.fraction < lane.fraction - _SLACK]:
            changed = self._changed
            try:
                async with asyncio.timeout(_STILL_SECONDS):
                    await changed.wait()
            except TimeoutError:
                for other in behind:
                    other.still = True

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
