"""A slow, far link imposed in user space: bandwidth and latency on what one process sends, without root.

Shaping is at the sender: bytes enter a line at the link's bandwidth and leave it, to the real wire, `latency_seconds` later. With both
ends shaped, a round trip takes twice the latency. Connections given the same `ShapedLink` share its bandwidth.

A lab without network namespaces imposes links on its processes from outside: `ATOLL_LINKS` names a file that says what the way to each
peer has as bandwidth and latency, and `imposed_links(os.environ)` reads it.
"""

import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from atoll.errors import FabricError
from atoll.fabric.connection import Connection

__all__ = ["LINKS", "ImposedLink", "ImposedLinks", "LinkChoice", "ShapedLink", "ShapedOutlet", "imposed_links"]

_BURST_SECONDS = 0.002  # bytes are let in so much ahead of time, as timers are not exact


class ShapedLink:
    """A bandwidth and a one-way latency."""

    def __init__(self, bytes_per_s: float, latency_seconds: float) -> None:
        assert bytes_per_s > 0
        assert latency_seconds >= 0
        self.bytes_per_s = bytes_per_s
        self.latency_seconds = latency_seconds
        self._free_at = 0.0  # when all that entered will have passed the narrow place
        self._lock = threading.Lock()

    def entry_seconds(self, now: float) -> float:
        """In how long more bytes may enter."""
        return max(0.0, self._free_at - _BURST_SECONDS - now)

    def enter(self, now: float, size_bytes: int) -> float:
        """Bytes enter; returns when they leave at the other end."""
        with self._lock:
            self._free_at = max(now, self._free_at) + size_bytes / self.bytes_per_s
            return self._free_at + self.latency_seconds

    @property
    def burst_bytes(self) -> int:
        """What enters at once."""
        return int(min(max(self.bytes_per_s * _BURST_SECONDS, 1500), 256 * 1024))


class ShapedOutlet:
    """What a connection sends, late and at most so fast: has of Connection what a carrier needs to send."""

    def __init__(self, connection: Connection, link: ShapedLink, clock: Callable[[], float]) -> None:
        self._connection = connection
        self._link = link
        self._clock = clock
        self._line: deque[tuple[float, memoryview]] = deque()

    @property
    def waiting(self) -> bool:
        """Whether bytes are due."""
        now = self._clock()
        self._fill(now)
        return bool(self._line) and self._line[0][0] <= now

    def due_seconds(self, now: float) -> float | None:
        """In how long there is something to do."""
        times = [self._line[0][0] - now] if self._line else []
        if self._connection.waiting:
            times.append(self._link.entry_seconds(now))
        return max(0.0, min(times)) if times else None

    def outgoing(self, size_bytes: int) -> list[memoryview]:
        """Bytes that are due."""
        now = self._clock()
        self._fill(now)
        due: list[memoryview] = []
        for when, data in self._line:
            if when > now or size_bytes <= 0:
                break
            due.append(data)
            size_bytes -= len(data)
        return due

    def sent(self, count: int) -> None:
        """So many bytes went to the real wire."""
        while count:
            when, data = self._line[0]
            if count < len(data):
                self._line[0] = (when, data[count:])
                return
            count -= len(data)
            self._line.popleft()

    def commit(self, count: int) -> None:
        """What is in the line stays in order anyway."""

    def _fill(self, now: float) -> None:
        """Lets bytes enter the line as far as its bandwidth allows."""
        while self._connection.waiting and not self._link.entry_seconds(now):
            data = bytearray()
            for part in self._connection.outgoing(self._link.burst_bytes):
                data += part[: self._link.burst_bytes - len(data)]
            if not data:
                return
            self._connection.sent(len(data))
            self._line.append((self._link.enter(now, len(data)), memoryview(data)))


LINKS = "ATOLL_LINKS"


class ImposedLink(msgspec.Struct, frozen=True):
    """The way to a peer; those of one name share their bandwidth."""

    name: str
    bytes_per_s: float
    latency_s: float


class ImposedLinks(msgspec.Struct, frozen=True):
    """All of them, by the peer's address, and the address this process has itself."""

    source: str
    peers: dict[str, ImposedLink]


class LinkChoice:
    """The shaped link for each peer of this process. Connections of one link share it."""

    def __init__(self, links: ImposedLinks) -> None:
        self.source = links.source  # the address of this process's host
        self._peers = links.peers
        self._shaped = {link.name: ShapedLink(link.bytes_per_s, link.latency_s) for link in links.peers.values()}

    def link_to(self, address: str) -> ShapedLink | None:
        """For a peer with this address, without port; None: not a peer that something is imposed on."""
        found = self._peers.get(address)
        return None if found is None else self._shaped[found.name]

    def source_for(self, address: str) -> tuple[str, int] | None:
        """What to dial such a peer from, so that it knows who comes; None: as it happens to be."""
        return (self.source, 0) if address in self._peers else None


def imposed_links(environ: Mapping[str, str]) -> LinkChoice | None:
    """What the environment imposes on this process; None: nothing."""
    path = environ.get(LINKS)
    if not path:
        return None
    try:
        return LinkChoice(msgspec.json.decode(Path(path).read_bytes(), type=ImposedLinks))
    except (OSError, msgspec.DecodeError) as error:
        raise FabricError(f"{path} ({LINKS}): cannot be read: {error}") from None
