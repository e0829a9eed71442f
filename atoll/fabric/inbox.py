"""What arrives on a stream, handed from whoever drives the connection to the coroutine that waits for it."""

import asyncio
from collections import deque
from collections.abc import Callable

from atoll.errors import FabricError
from atoll.fabric.stream import IncomingMessage

__all__ = ["Inbox"]


class Inbox:
    """A StreamHandler whose other side lives in an event loop. Its length is bounded by the stream's window."""

    def __init__(self, loop: asyncio.AbstractEventLoop, post: Callable[..., None], discard: Callable[[IncomingMessage], None]) -> None:
        self.stream = 0  # known once the call was opened
        self.announced: Callable[[int], None] | None = None  # told in the loop when a large message begins
        self.failed: Callable[[FabricError], None] | None = None  # told in the loop when the stream fails
        self.begin: Callable[[], None] | None = None  # told in the loop with the first message
        self._loop = loop
        self._post = post  # has the loop call something soon
        self._discard = discard  # told in the loop of what comes when nobody reads any more
        self._left = False
        self._items: deque[IncomingMessage | FabricError | None] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._over = False

    # ---- called by whoever drives the connection

    def on_announced(self, size_bytes: int) -> None:
        """A large message began to arrive."""
        self._post(self._announce, size_bytes)

    def on_message(self, message: IncomingMessage) -> None:
        """A whole message arrived."""
        self._post(self._put, message)

    def on_end(self) -> None:
        """The other side says nothing more."""
        self._post(self._put, None)

    def on_failed(self, error: FabricError) -> None:
        """The stream is over before its end."""
        self._post(self._put, error)

    # ---- in the loop

    async def get(self) -> IncomingMessage | None:
        """The next message; None at the end; raises what the stream failed with. A failure passes what is still unread."""
        while not self._items:
            if self._over:
                return None
            self._waiter = self._loop.create_future()
            await self._waiter
        item = self._items[-1] if isinstance(self._items[-1], FabricError) else self._items.popleft()
        if isinstance(item, FabricError):
            raise item
        self._over = item is None or item.end
        return item

    def fail(self, error: FabricError) -> None:
        """Ends the stream for whoever waits here."""
        self._put(error)

    def unread(self) -> list[IncomingMessage]:
        """Takes everything out, so that its credit can be given back. What comes later is discarded."""
        self._left = True
        messages = [item for item in self._items if isinstance(item, IncomingMessage)]
        self._items.clear()
        return messages

    def _put(self, item: IncomingMessage | FabricError | None) -> None:
        if self._left and isinstance(item, IncomingMessage):
            self._discard(item)
            return
        self._items.append(item)
        if self.begin is not None and isinstance(item, IncomingMessage):
            begin, self.begin = self.begin, None
            begin()
        if isinstance(item, FabricError) and self.failed is not None:
            self.failed(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _announce(self, size_bytes: int) -> None:
        if self.announced is not None:
            self.announced(size_bytes)
