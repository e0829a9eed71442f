"""One stream of a connection: what is arriving and unread, the credit that bounds it, and handing it to the coroutine that waits.

Credit says how many bytes of messages may be on their way or unread, so that a slow reader bounds memory on both sides.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

from atoll.errors import FabricError, FrameError
from atoll.fabric.frame import CallMessage
from atoll.fabric.payload import allocate, tensor_size

__all__ = ["FlowWindow", "Inbox", "IncomingMessage", "Stream", "StreamHandler", "cost_of", "message_size"]

MESSAGE_COST_BYTES = 512
"""What even an empty message costs, and each tensor in it: the objects that keep them."""


def cost_of(size_bytes: int, tensors: int) -> int:
    """What a message takes from a window."""
    return max(size_bytes, MESSAGE_COST_BYTES * (1 + tensors))


class FlowWindow:
    """A bound on bytes that were sent and not yet taken by their reader. A message larger than the whole window travels alone."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0

    def admits(self, cost: int) -> bool:
        """Whether a message may go now."""
        return not cost or self.used_bytes == 0 or self.used_bytes + cost <= self.limit_bytes

    def take(self, cost: int) -> None:
        """A message goes."""
        self.used_bytes += cost

    def give(self, cost: int) -> None:
        """A message was taken; FrameError if more comes back than went."""
        if cost > self.used_bytes:
            raise FrameError(f"credit for {cost} bytes where {self.used_bytes} were unread")
        self.used_bytes -= cost

    def receive(self, cost: int) -> None:
        """A message arrived; FrameError if its sender had no credit for it."""
        if not self.admits(cost):
            raise FrameError(f"a message of {cost} bytes while {self.used_bytes} of {self.limit_bytes} were unread: sent without credit")
        self.take(cost)


_MOST_BYTES = 2**62


class StreamHandler(Protocol):
    """Who is told what arrives on a stream. Called by whoever drives the connection: must be quick and must not raise."""

    def on_announced(self, size_bytes: int) -> None:
        """A large message began to arrive."""

    def on_message(self, message: "IncomingMessage") -> None:
        """A whole message arrived; its `end` says whether it is the last."""

    def on_end(self) -> None:
        """The other side says nothing more, after its last message."""

    def on_failed(self, error: FabricError) -> None:
        """The stream is over before its end: the peer failed or cancelled it, or is gone."""


def message_size(header: CallMessage) -> int:
    """Bytes of an announced message, payload and tensors; FrameError for tensors that cannot be."""
    size_bytes = header.payload_bytes + sum(map(tensor_size, header.tensors))
    if size_bytes > _MOST_BYTES:  # lengths have a limit in headers, which a product of them may pass
        raise FrameError(f"a message of {size_bytes} bytes, which no memory holds")
    return size_bytes


class IncomingMessage:
    """A message that arrives or has arrived. Memory for it is set aside here, once, after all limits were checked."""

    __slots__ = ("bulk", "cost", "end", "payload", "size_bytes", "stream", "taken", "tensors", "_sinks")

    def __init__(self, stream: int, header: CallMessage, size_bytes: int, bulk: bool) -> None:
        self.stream = stream
        self.size_bytes = size_bytes
        self.cost = cost_of(size_bytes, len(header.tensors))
        self.bulk = bulk
        self.end = header.end
        self.taken = False  # whether its credit was given back
        try:
            self.payload = bytearray(header.payload_bytes)
        except MemoryError:
            raise FrameError(f"stream {stream}: a message of {size_bytes} bytes, for which there is no memory") from None
        self.tensors: list[torch.Tensor] = []
        self._sinks = [memoryview(self.payload)]
        for tensor_header in header.tensors:
            tensor, view = allocate(tensor_header)
            self.tensors.append(tensor)
            self._sinks.append(view)
        self._sinks = [sink for sink in self._sinks if len(sink)]

    @property
    def complete(self) -> bool:
        """Whether every byte has its place given out."""
        return not self._sinks

    def take_sinks(self, size_bytes: int) -> list[memoryview]:
        """Where the next `size_bytes` go; FrameError if the message is not so long."""
        given: list[memoryview] = []
        while size_bytes:
            if not self._sinks:
                raise FrameError(f"stream {self.stream}: {size_bytes} bytes more than the message announced")
            first = self._sinks[0]
            part = first[:size_bytes]
            size_bytes -= len(part)
            given.append(part)
            if len(part) == len(first):
                del self._sinks[0]
            else:
                self._sinks[0] = first[len(part) :]
        return given


class Stream:
    """The state of one stream at one end."""

    __slots__ = ("arriving", "handler", "id", "local_done", "remote_done", "unsent_bytes", "window")

    def __init__(self, stream_id: int, handler: StreamHandler, window_bytes: int) -> None:
        self.id = stream_id
        self.handler = handler
        self.arriving: IncomingMessage | None = None
        self.window = FlowWindow(window_bytes)  # what the peer may still send here
        self.local_done = False
        self.remote_done = False
        self.unsent_bytes = 0


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
