"""Pulling a stream of chunks from a peer, watched: a peer that dies, stops or stalls ends the pull with a reason, never a hang."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from atoll.errors import CodecError, FabricError, PeerLostError
from atoll.fabric.collective.messages import Item
from atoll.fabric.remote import Remote
from atoll.units import format_seconds

__all__ = ["LONGEST_SECONDS", "Pulling", "Watch"]

LONGEST_SECONDS = 86_400.0
"""A deadline that never decides: what decides is the time without progress."""

_SILENT = ("stopped", "unreachable")
_GONE_SECONDS = 5.0  # a lost connection has so long to come back


class Pulling:
    """One stream being pulled; `Watch` ends it when nothing comes for too long, but not while its reader is what it waits for."""

    def __init__(self, peer: str, remote: Remote | None, limit_seconds: float, first_seconds: float, now: float) -> None:
        self.peer = peer
        self.reason = ""  # why it was ended from here
        self._remote = remote
        self._limit_seconds = limit_seconds
        self._waits_until: float | None = now + first_seconds
        self._gone_since: float | None = None
        self.task: asyncio.Task[Any] | None = None

    def waiting(self, now: float) -> None:
        """The next item was asked for."""
        self._waits_until = now + self._limit_seconds

    def pausing(self) -> None:
        """An item came, and no other is asked for now."""
        self._waits_until = None

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

    async def pull(
        self, pull: Pulling, items: Callable[[], AsyncIterator[Item]], take: Callable[[Item], Coroutine[Any, Any, bool]]
    ) -> FabricError | None:
        """Gives every item to `take`, until it says that was the last; returns why it ended before that, or None."""
        pull.task = asyncio.create_task(self._drain(pull, items, take))
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

    async def _drain(
        self, pull: Pulling, items: Callable[[], AsyncIterator[Item]], take: Callable[[Item], Coroutine[Any, Any, bool]]
    ) -> bool:
        stream = items()
        try:
            async for item in stream:
                pull.pausing()
                if await take(item):
                    return True
                pull.waiting(self._clock())
            return False
        finally:
            await stream.aclose()  # type: ignore[attr-defined]
