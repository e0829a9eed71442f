"""Measuring the link to another host: `atoll probe --serve PORT` there, `atoll probe --peer HOST:PORT` here.

The protocol is as small as it can be. Both sides greet with `GREETING`. Then the client sends requests, each a four-letter verb and a
64-bit number: `PING` is answered by `PONG`; `PUSH n` is followed by n bytes and answered by `DONE` when all have arrived; `PULL n` is
answered by n bytes; `SELF` by the server's cluster file; `QUIT` ends. The server reads nothing but counts and throws pushed bytes away;
every wait has a time limit, every size a bound, and a session as a whole a deadline.
"""

import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from atoll.errors import ClusterError

__all__ = ["GREETING", "PeerLink", "listen", "measure_loopback", "measure_peer", "parse_address", "serve_session"]

GREETING = b"atoll-probe/1\n"
_REQUEST = struct.Struct("!4sQ")
_WAIT_S = 10.0
_SESSION_S = 180.0
_LARGEST_TRANSFER = 1 << 28
_LARGEST_DESCRIPTION = 1 << 20
_CHUNK = 1 << 18
_PINGS = 21
_LONG_ENOUGH_S = 0.4  # of one transfer: beyond the start-up of TCP


@dataclass(frozen=True)
class PeerLink:
    """What was measured of the way to a peer, and the peer's own description (a cluster file)."""

    address: str
    round_trip_s: float
    there_bytes_per_s: float
    back_bytes_per_s: float
    description: str

    @property
    def bytes_per_s(self) -> float:
        """The slower direction."""
        return min(self.there_bytes_per_s, self.back_bytes_per_s)


def parse_address(text: str) -> tuple[str, int]:
    """`"host:7777"` or `"[::1]:7777"` → host and port."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 1 <= int(port) <= 65535:
        raise ClusterError(f"--peer {text}: must be HOST:PORT, like node7:7777")
    return host, int(port)


def listen(port: int, host: str = "") -> socket.socket:
    """A socket on which `serve_session` answers probes; port 0 takes any free one."""
    try:
        return socket.create_server((host, port), backlog=4)
    except (OSError, OverflowError) as error:
        raise ClusterError(f"--serve {port}: cannot listen: {getattr(error, 'strerror', None) or error}") from None


def serve_session(server: socket.socket, description: str) -> str:
    """Waits for one client and serves it to its end; returns a sentence about how it went. A client's mistakes end only its session."""
    connection, address = server.accept()
    who = f"{address[0]}:{address[1]}"
    with connection:
        connection.settimeout(_WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.sendall(GREETING)
            if _receive(connection, len(GREETING)) != GREETING:
                return f"{who}: is not an atoll probe"
            return f"{who}: {_serve(connection, description.encode())}"
        except (OSError, EOFError) as error:
            return f"{who}: {_reason(error)}"


def _serve(connection: socket.socket, description: bytes) -> str:
    deadline = time.monotonic() + _SESSION_S
    while time.monotonic() < deadline:
        verb, size = _REQUEST.unpack(_receive(connection, _REQUEST.size))
        if size > _LARGEST_TRANSFER:
            return f"asked for {size} bytes, which is too much"
        if verb == b"QUIT":
            return "done"
        if verb == b"PING":
            connection.sendall(b"PONG")
        elif verb == b"PUSH":
            _move(size, deadline, connection.recv_into)
            connection.sendall(b"DONE")
        elif verb == b"PULL":
            _move(size, deadline, partial(_sent, connection))
        elif verb == b"SELF":
            connection.sendall(struct.pack("!Q", len(description)) + description)
        else:
            return f"asked for {verb!r}, which is unknown"
    return "took too long"


def measure_peer(address: str, tick: Callable[[float], None] = lambda share: None) -> PeerLink:
    """Round trip and bandwidth, each way, to a host where `atoll probe --serve` runs."""
    host, port = parse_address(address)
    where = f"--peer {address}"
    try:
        connection = socket.create_connection((host, port), timeout=_WAIT_S)
    except OSError as error:
        raise ClusterError(f"{where}: {_reason(error)}; is `atoll probe --serve {port}` running there?") from None
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            connection.sendall(GREETING)
            if _receive(connection, len(GREETING)) != GREETING:
                raise ClusterError(f"{where}: what listens there is not an atoll probe of this version")
            return _measure(connection, address, tick)
        except UnicodeDecodeError:
            raise ClusterError(f"{where}: the peer's description is not text") from None
        except (OSError, EOFError) as error:
            raise ClusterError(f"{where}: {_reason(error)}") from None


def measure_loopback() -> PeerLink:
    """Round trip and bandwidth between two processes of this machine, over the sockets they would use."""
    with listen(0, "127.0.0.1") as server:
        serving = threading.Thread(target=serve_session, args=(server, ""), daemon=True)
        serving.start()
        found = measure_peer(f"127.0.0.1:{server.getsockname()[1]}")
        serving.join(timeout=_WAIT_S)
    return found


def _measure(connection: socket.socket, address: str, tick: Callable[[float], None]) -> PeerLink:
    description = _ask_description(connection, address)
    pings = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        connection.sendall(_REQUEST.pack(b"PING", 0))
        _expect(connection, b"PONG", address)
        pings.append(time.perf_counter() - start)
    round_trip_s = statistics.median(pings)
    tick(0.1)
    sizes = {verb: _size_long_enough(connection, verb, round_trip_s, address) for verb in (b"PUSH", b"PULL")}
    tick(0.4)
    rates: dict[bytes, list[float]] = {b"PUSH": [], b"PULL": []}
    for turn in range(3):
        for verb, size in sizes.items():
            rates[verb].append(size / _transfer(connection, verb, size, round_trip_s, address))
        tick(0.4 + 0.2 * (turn + 1))
    connection.sendall(_REQUEST.pack(b"QUIT", 0))
    return PeerLink(
        address=address,
        round_trip_s=round_trip_s,
        there_bytes_per_s=statistics.median(rates[b"PUSH"]),
        back_bytes_per_s=statistics.median(rates[b"PULL"]),
        description=description,
    )


def _ask_description(connection: socket.socket, address: str) -> str:
    connection.sendall(_REQUEST.pack(b"SELF", 0))
    (size,) = struct.unpack("!Q", _receive(connection, 8))
    if size > _LARGEST_DESCRIPTION:
        raise ClusterError(f"--peer {address}: the peer's description is too long ({size} bytes)")
    return _receive(connection, size).decode("utf-8")


def _size_long_enough(connection: socket.socket, verb: bytes, round_trip_s: float, address: str) -> int:
    """The first of sizes four times larger each that takes long enough to be timed."""
    size = 1 << 16
    while _transfer(connection, verb, size, round_trip_s, address) < _LONG_ENOUGH_S and size < _LARGEST_TRANSFER:
        size *= 4
    return size


def _transfer(connection: socket.socket, verb: bytes, size: int, round_trip_s: float, address: str) -> float:
    """Seconds that bytes took one way, without the round trip of asking."""
    deadline = time.monotonic() + _SESSION_S
    start = time.perf_counter()
    connection.sendall(_REQUEST.pack(verb, size))
    if verb == b"PUSH":
        _move(size, deadline, partial(_sent, connection))
        _expect(connection, b"DONE", address)
    else:
        _move(size, deadline, connection.recv_into)
    taken = time.perf_counter() - start
    return max(taken - round_trip_s, taken / 10, 1e-6)


def _expect(connection: socket.socket, answer: bytes, address: str) -> None:
    if _receive(connection, len(answer)) != answer:
        raise ClusterError(f"--peer {address}: the peer answered something else than {answer.decode()}")


def _receive(connection: socket.socket, size: int) -> bytes:
    received = bytearray()
    deadline = time.monotonic() + _WAIT_S
    while len(received) < size:
        if time.monotonic() > deadline:  # one byte now and then must not keep us waiting for ever
            raise TimeoutError
        piece = connection.recv(size - len(received))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _move(size: int, deadline: float, some: Callable[[memoryview], int]) -> None:
    """Send, or receive and throw away, `size` bytes; `some` moves as many as it can of what it is given."""
    scratch = memoryview(bytearray(_CHUNK))
    while size:
        if time.monotonic() > deadline:
            raise TimeoutError
        moved = some(scratch[: min(size, _CHUNK)])
        if not moved:
            raise EOFError
        size -= moved


def _sent(connection: socket.socket, data: memoryview) -> int:
    connection.sendall(data)
    return len(data)


def _reason(error: Exception) -> str:
    """Why a connection failed, in a few words."""
    if isinstance(error, EOFError):
        return "the other side closed the connection"
    if isinstance(error, TimeoutError):
        return f"no answer within {_WAIT_S:.0f} s"
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"
    if isinstance(error, socket.gaierror):
        return "there is no such host"
    return (getattr(error, "strerror", None) or str(error)).lower()
