"""Dialling and listening over TCP, with or without TLS; `pump.py` moves the bytes."""

import asyncio
import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import TypeAlias

from atoll.errors import FabricError, PeerLostError
from atoll.fabric.address import split_address
from atoll.fabric.carrier import Accept, Listener, Wire
from atoll.fabric.connection import Connection
from atoll.fabric.pump import TcpPump, prepare_socket
from atoll.fabric.shaped import LinkChoice, ShapedLink, ShapedOutlet
from atoll.fabric.tls import shake_hands

__all__ = ["ContextSource", "TcpCarrier"]

_CONNECT_SECONDS = 10.0  # and for the TLS handshake
_USER_TIMEOUT_SECONDS = 20.0  # without an acknowledgement, after which the kernel ends a connection
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

ContextSource: TypeAlias = ssl.SSLContext | Callable[[], ssl.SSLContext] | None
"""A context, or what gives the one to use now: certificates are renewed while connections come and go."""


class TcpCarrier:
    """TCP, with TLS where contexts are given: `client` for dialling, `server` for accepting. `link` shapes what is sent, to all or by peer.

    `door` sees every accepted TLS socket first, in the thread it will have: True means that it was somebody else's business, now done.
    """

    def __init__(
        self,
        *,
        client: ContextSource = None,
        server: ContextSource = None,
        server_hostname: str | None = None,
        door: Callable[[ssl.SSLSocket], bool] | None = None,
        link: ShapedLink | LinkChoice | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._server, self._server_hostname = client, server, server_hostname
        self._link, self._clock, self._door = link, clock, door

    def dial(self, address: str, connection: Connection, loop: asyncio.AbstractEventLoop) -> Wire:
        """A wire to `"host:port"`."""
        host, port = split_address(address)

        def establish(pump: TcpPump) -> socket.socket:
            pump.address = address
            source = self._link.source_for(host) if isinstance(self._link, LinkChoice) else None
            return self._shake(socket.create_connection((host, port), _CONNECT_SECONDS, source), self._client, host)

        return self._pump(connection, establish, loop, host)

    def over(self, open_socket: Callable[[], socket.socket], connection: Connection, *, dialled: bool, address: str) -> Wire:
        """A wire over a socket that is made otherwise, such as through a relay, in the wire's thread. `address`: what messages call it."""

        def establish(pump: TcpPump) -> socket.socket:
            pump.address = address
            sock = open_socket()
            return self._shake(sock, self._client, address) if dialled else self._take(sock)

        return self._pump(connection, establish, None)

    def listen(self, address: str, accept: Accept, loop: asyncio.AbstractEventLoop) -> Listener:
        """Accepts at `"host:port"`; port 0 takes any."""
        host, port = split_address(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            listening = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise FabricError(f"cannot listen at {address}: {error.strerror or error}") from None
        listening.setblocking(False)

        def incoming() -> None:
            try:
                sock, peer_address = listening.accept()
            except OSError as error:  # it left again, or there are no descriptors: whoever dialled tries again
                if error.errno in _EXHAUSTED:  # it would be told again at once, and at once again
                    listener.pause()
                return

            def establish(pump: TcpPump) -> socket.socket:
                pump.address = _written(*peer_address[:2])
                return self._take(sock)

            if not accept(lambda connection: self._pump(connection, establish, loop, peer_address[0])):
                sock.close()

        listener = _TcpListener(listening, loop, incoming)
        return listener

    def _take(self, sock: socket.socket) -> socket.socket:
        """Shakes hands with whoever dialled; PeerLostError if it only wanted something at the door."""
        taken = self._shake(sock, self._server, None)
        if self._door is not None and isinstance(taken, ssl.SSLSocket):
            try:
                elsewhere = self._door(taken)
            except BaseException:
                taken.close()
                raise
            if elsewhere:
                taken.close()
                raise PeerLostError("it came to the door only")
        return taken

    def _shake(self, sock: socket.socket, source: ContextSource, host: str | None) -> socket.socket:
        try:
            sock.settimeout(_CONNECT_SECONDS)
            prepare_socket(sock, _USER_TIMEOUT_SECONDS)
            context = source if source is None or isinstance(source, ssl.SSLContext) else source()
            if context is None:
                return sock
            hostname = host and (self._server_hostname or (host if context.check_hostname else None))
            return shake_hands(sock, context, server_side=host is None, hostname=hostname)
        except BaseException:
            sock.close()
            raise

    def _pump(
        self,
        connection: Connection,
        establish: Callable[[TcpPump], socket.socket],
        loop: asyncio.AbstractEventLoop | None,
        host: str = "",
    ) -> TcpPump:
        link = self._link.link_to(host) if isinstance(self._link, LinkChoice) else self._link
        outlet = None if link is None else ShapedOutlet(connection, link, self._clock)
        return TcpPump(connection, establish, self._clock, outlet, loop)


def _written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class _TcpListener:
    """A listening socket in an event loop."""

    def __init__(self, listening: socket.socket, loop: asyncio.AbstractEventLoop, incoming: Callable[[], None]) -> None:
        self._listening, self._loop, self._incoming = listening, loop, incoming
        self._pausing: asyncio.TimerHandle | None = None
        self.address = _written(*listening.getsockname()[:2])
        self._go_on()

    def _go_on(self) -> None:
        self._loop.add_reader(self._listening, self._incoming)

    def pause(self) -> None:
        """Accepts nobody for a second."""
        self._loop.remove_reader(self._listening)
        self._pausing = self._loop.call_later(1.0, self._go_on)

    def close(self) -> None:
        """Accepts no more."""
        if self._pausing is not None:
            self._pausing.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
