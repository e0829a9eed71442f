"""A way between two peers that cannot be dialled, through a third that both have dialled.

The relay forwards pieces of bytes between two streaming calls and sees nothing in them: TLS runs between the two ends. Calls have credit,
so a slow end slows the other down instead of filling the relay's memory.

```python
hub:    Fabric("hub", services=[relay := Relay()]);              relay.fabric = hub
ends:   Fabric("oslo", services=[end := RelayEnd(carrier)], …);  end.fabric = oslo
        rome = end.connect(hub_remote, "rome")
```
"""

import asyncio
import concurrent.futures
import contextlib
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator

import msgspec

from atoll.errors import FabricError, PeerLostError, RefusedError
from atoll.fabric.carrier import Wire
from atoll.fabric.connection import Connection
from atoll.fabric.fabric import Fabric
from atoll.fabric.remote import Remote
from atoll.fabric.service import CallingPeer, allowed, carries
from atoll.fabric.tcp import TcpCarrier
from atoll.privacy.border import RELAYED

__all__ = ["RelayedPiece", "Relay", "RelayEnd"]

_PIECE_BYTES = 256 * 1024
_MOST_PAIRS = 256  # that one peer joins
_MOST_RELAYED = 64  # connections of one end
_OPEN_SECONDS = 20.0
_LONG_SECONDS = 1e9  # a relayed connection lasts as long as its ends want
_EVERYBODY = ("coordinator", "feeder", "observer", "worker")


class RelayedPiece(msgspec.Struct, array_like=True):
    """Bytes on their way. The first piece of a call has none and says who is meant, or who asks."""

    data: bytes
    name: str = ""


class Relay:
    """The service of a peer that forwards between others, so many pairs for one of them at most."""

    def __init__(self, *, pairs_per_peer: int = 16) -> None:
        self.fabric: Fabric | None = None  # whose peers it joins; set once there is one
        self._pairs_per_peer = pairs_per_peer
        self._open: Counter[str] = Counter()  # relayed connections by who asked

    @allowed(*_EVERYBODY)
    @carries(request=RELAYED, reply=RELAYED)
    async def through(self, pieces: AsyncIterator[RelayedPiece], peer: CallingPeer) -> AsyncIterator[RelayedPiece]:
        """Joins the caller with the peer its first piece names; then bytes both ways until either ends."""
        target = self._target(await anext(pieces, RelayedPiece(b"")), peer)
        self._open[peer.name] += 1
        try:
            async with _read_aside(pieces) as rest:
                onward = self._forward(_after(RelayedPiece(b"", peer.name), rest))
                replies = target.stream(RelayEnd.incoming, onward, timeout_seconds=_LONG_SECONDS)
                async with contextlib.aclosing(self._forward(replies)) as forwarded:
                    async for piece in forwarded:
                        yield piece
        finally:
            self._open[peer.name] -= 1
            if not self._open[peer.name]:
                del self._open[peer.name]

    def _target(self, first: RelayedPiece, peer: CallingPeer) -> Remote:
        assert self.fabric is not None, "a relay is given its fabric"
        if self._open.total() >= _MOST_PAIRS or self._open[peer.name] >= self._pairs_per_peer:
            raise RefusedError(f"{self.fabric.name} relays {self._open[peer.name]} connections for {peer.name} and accepts no more")
        remote = self.fabric.peer(first.name)
        if remote.state == "dead" or first.name == peer.name:
            raise RefusedError(f"{self.fabric.name} has no connection to {first.name}")
        return remote

    async def _forward(self, pieces: AsyncIterator[RelayedPiece]) -> AsyncGenerator[RelayedPiece, None]:
        """One direction, within its limits."""
        async for piece in pieces:
            if len(piece.data) > _PIECE_BYTES:
                raise RefusedError(f"a piece of {len(piece.data)} bytes to relay; at most {_PIECE_BYTES}")
            yield piece


class RelayEnd:
    """The service of a peer that can be reached through relays, and its way to reach others so."""

    def __init__(self, carrier: TcpCarrier) -> None:
        self.fabric: Fabric | None = None  # whose connections these are; set once there is one
        self._carrier = carrier
        self._open = 0  # connections
        self._carrying: set[asyncio.Task[None]] = set()

    @allowed(*_EVERYBODY)
    @carries(request=RELAYED, reply=RELAYED)
    async def incoming(self, pieces: AsyncIterator[RelayedPiece], peer: CallingPeer) -> AsyncIterator[RelayedPiece]:
        """A relay has somebody who wants to connect; its bytes are those of an ordinary connection."""
        first = await anext(pieces, RelayedPiece(b""))
        assert self.fabric is not None, "a relay's end is given its fabric"
        if self._open >= _MOST_RELAYED:
            raise RefusedError(f"{self.fabric.name} has {self._open} relayed connections and accepts no more")
        near, ends = await _open_ends()
        self._open += 1
        address = f"{first.name} through {peer.name}"
        try:
            if not self.fabric.accept(lambda connection: self._carrier.over(lambda: near, connection, dialled=False, address=address)):
                near.close()
                raise RefusedError(f"{self.fabric.name} has too many connections that have not said who they are")
            yield RelayedPiece(b"")
            async with _read_aside(pieces, ends):
                async for piece in ends.read_all():
                    yield piece
        finally:
            ends.close()
            self._open -= 1

    def connect(self, relay: Remote, name: str) -> Remote:
        """A peer through a relay, kept connected like any other; whoever answers must be of that name. Outside the loop."""
        assert self.fabric is not None, "a relay's end is given its fabric"
        address = f"{name} through {relay.name}"

        def dial(connection: Connection) -> Wire:
            return self._carrier.over(lambda: self._open_socket(relay, name), connection, dialled=True, address=address)

        return self.fabric.connect(address, name=name, dial=dial)

    def _open_socket(self, relay: Remote, name: str) -> socket.socket:
        """In the wire's thread: asks the relay, and gives the near end once the far one is there."""
        assert self.fabric is not None
        opening = self.fabric.submit(self._begin(relay, name))
        try:
            return opening.result(_OPEN_SECONDS)
        except concurrent.futures.CancelledError:
            raise PeerLostError("the fabric was closed") from None
        except TimeoutError:
            if opening.cancel():
                raise PeerLostError(f"{relay.name} did not join us with {name} within {_OPEN_SECONDS:.0f} s") from None
            return opening.result()

    async def _begin(self, relay: Remote, name: str) -> socket.socket:
        near, ends = await _open_ends()
        replies = relay.stream(Relay.through, _after(RelayedPiece(b"", name), ends.read_all()), timeout_seconds=_LONG_SECONDS)
        try:
            await anext(replies)
        except BaseException as error:
            ends.close()
            near.close()
            if isinstance(error, (FabricError, StopAsyncIteration)):  # whoever is meant may come later: it is tried again
                raise PeerLostError(str(error) or f"{relay.name} did not join us with {name}") from None
            raise
        task = asyncio.create_task(_carry(ends, replies))
        self._carrying.add(task)
        task.add_done_callback(self._carrying.discard)
        return near


async def _carry(ends: "_Ends", replies: AsyncIterator[RelayedPiece]) -> None:
    """What comes through the relay goes to the near end, for as long as both last."""
    try:
        await ends.write_all(replies)
    finally:
        await replies.aclose()  # type: ignore[attr-defined]
        ends.close()


async def _open_ends() -> tuple[socket.socket, "_Ends"]:
    """A pair of sockets: the near one for a connection's own thread, the far one for the loop."""
    near, far = socket.socketpair()
    try:
        reader, writer = await asyncio.open_connection(sock=far, limit=_PIECE_BYTES)
    except BaseException:
        near.close()
        far.close()
        raise
    return near, _Ends(reader, writer)


class _Ends:
    """The far end as pieces, in the loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        writer.transport.set_write_buffer_limits(high=0)  # what was written and waited for is in the kernel

    async def read_all(self) -> AsyncGenerator[RelayedPiece, None]:
        """What comes out of it, until its end."""
        with contextlib.suppress(OSError):
            while data := await self._reader.read(_PIECE_BYTES):
                yield RelayedPiece(data)

    async def write_all(self, pieces: AsyncIterator[RelayedPiece]) -> None:
        """Puts everything in, as fast as it is read; then the near end sees an end."""
        with contextlib.suppress(FabricError, OSError):
            async for piece in pieces:
                self._writer.write(piece.data)
                await self._writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            self._writer.write_eof()

    def close(self) -> None:
        """Ends it."""
        self._writer.transport.abort()


@contextlib.asynccontextmanager
async def _read_aside(pieces: AsyncIterator[RelayedPiece], into: _Ends | None = None) -> AsyncIterator[AsyncIterator[RelayedPiece]]:
    """The caller's pieces, read by a task that has ended when this is left: nobody may be using a call's iterator when the call ends.

    They go `into` a socket, or come out of the iterator this gives.
    """
    queue: asyncio.Queue[RelayedPiece | None] = asyncio.Queue(maxsize=1)

    async def read() -> None:
        with contextlib.suppress(FabricError):  # the call is over, and whoever serves it is told so
            async for piece in pieces:
                await queue.put(piece)
        await queue.put(None)

    async def taken() -> AsyncGenerator[RelayedPiece, None]:
        while (piece := await queue.get()) is not None:
            yield piece

    reading = asyncio.create_task(read() if into is None else into.write_all(pieces))
    try:
        yield taken()
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def _after(first: RelayedPiece, rest: AsyncIterator[RelayedPiece]) -> AsyncGenerator[RelayedPiece, None]:
    yield first
    async for piece in rest:
        yield piece
