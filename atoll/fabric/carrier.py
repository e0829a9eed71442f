"""What carries a connection's bytes: the interface that TCP, memory and simulated carriers share. Protocol code never knows which."""

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeAlias

from atoll.fabric.connection import Connection

__all__ = ["Accept", "Carrier", "Listener", "Wire"]


class Wire(Protocol):
    """One end of a wire, driving one connection."""

    @property
    def certificate(self) -> bytes | None:
        """The peer's certificate (DER), where the wire has such a thing and once it is there."""

    @property
    def address(self) -> str:
        """Where the peer is, in words; empty while not known."""

    def start(self) -> None:
        """Begins to connect and to move bytes."""

    def submit(self, action: Callable[[], None]) -> None:
        """Has the connection's owner do something with it, in order, soon; callable from any thread."""


Accept: TypeAlias = Callable[[Callable[[Connection], Wire]], bool]
"""Told about whoever dials, with what makes the wire once there is a connection for it; False: not wanted now."""


class Listener(Protocol):
    """Where peers can dial."""

    @property
    def address(self) -> str:
        """What to dial."""

    def close(self) -> None:
        """Accepts no more. Connections that exist stay."""


class Carrier(Protocol):
    """Makes wires. All methods are called in the fabric's event loop."""

    def dial(self, address: str, connection: Connection, loop: asyncio.AbstractEventLoop) -> Wire:
        """A wire to an address, not started."""

    def listen(self, address: str, accept: Accept, loop: asyncio.AbstractEventLoop) -> Listener:
        """Accepts at an address."""
