"""One stream of a connection as its owner keeps it: what is arriving, what is unread, who is told."""

from typing import Protocol

import torch

from atoll.errors import FabricError, FrameError
from atoll.fabric.headers import Message
from atoll.fabric.tensors import allocate, tensor_size
from atoll.fabric.window import Window, cost_of

__all__ = ["IncomingMessage", "Stream", "StreamHandler", "message_size"]

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


def message_size(header: Message) -> int:
    """Bytes of an announced message, payload and tensors; FrameError for tensors that cannot be."""
    size_bytes = header.payload_bytes + sum(map(tensor_size, header.tensors))
    if size_bytes > _MOST_BYTES:  # lengths have a limit in headers, which a product of them may pass
        raise FrameError(f"a message of {size_bytes} bytes, which no memory holds")
    return size_bytes


class IncomingMessage:
    """A message that arrives or has arrived. Memory for it is set aside here, once, after all limits were checked."""

    __slots__ = ("bulk", "cost", "end", "payload", "size_bytes", "stream", "taken", "tensors", "_sinks")

    def __init__(self, stream: int, header: Message, size_bytes: int, bulk: bool) -> None:
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
        self.window = Window(window_bytes)  # what the peer may still send here
        self.local_done = False
        self.remote_done = False
        self.unsent_bytes = 0
