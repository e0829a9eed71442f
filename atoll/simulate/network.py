"""Network: carries messages between processes on the virtual clock, with the faults a seed asks for.

A message that arrives is what was sent: a corrupted one fails its check-sum and is dropped, as the fabric does. Links are between
processes: what workers of one process tell each other touches none. A host's connections share its bandwidth, up and down.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from atoll.control.messages import Backward, Forward, StateChunk, SumChunk, SumPart
from atoll.control.multi_stage import process_of
from atoll.simulate.loop import Loop, Process, SimulatedMailbox

__all__ = ["LinkFaults", "Port", "SimulatedLinks", "SimulatedNetwork"]


class SimulatedLinks:
    """Every host has the same bandwidth up and down; connections with something under way share it equally.

    An approximation: a message keeps the share it began with, so that a link whose other connections fall silent is used less than fully.
    """

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._up: dict[str, dict[str, float]] = {}  # sender → receiver → when the connection is free
        self._down: dict[str, dict[str, float]] = {}

    def arrives_at(self, now: float, source: str, target: str, size: float) -> float:
        """When the last byte of a message sent now has passed, without latency. A connection sends one message after another."""
        up, down = self._busy(self._up, source, now), self._busy(self._down, target, now)
        begins = max(now, up.get(target, now))
        sharing = max(len(up.keys() | {target}), len(down.keys() | {source}))
        end = begins + size * sharing / self._bytes_per_s
        up[target] = down[source] = end
        return end

    @staticmethod
    def _busy(side: dict[str, dict[str, float]], host: str, now: float) -> dict[str, float]:
        """The connections of a host with something under way."""
        found = side[host] = {other: free for other, free in side.get(host, {}).items() if free > now}
        return found


BULK = (Forward, Backward, SumPart, SumChunk, StateChunk)


class LinkFaults(NamedTuple):
    """How often the network misbehaves, as probabilities for each message; and by how much chunks of states are late at most."""

    duplicate: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    corrupt: float = 0.0
    lose: float = 0.0
    state_seconds: float = 0.0


class SimulatedNetwork:
    """All links. `sizes` gives the bytes of messages of a kind that take time on a sender's uplink; others count as nothing."""

    def __init__(
        self,
        loop: Loop,
        randomness: random.Random,
        *,
        latency_seconds: float = 0.2,
        jitter_seconds: float = 0.1,
        sizes: Mapping[type, float] | None = None,
        bytes_per_s: float = 0.0,
        unlimited: frozenset[str] = frozenset(),
        shared: SimulatedLinks | None = None,
    ) -> None:
        self.loop, self.latency_seconds, self.jitter_seconds = loop, latency_seconds, jitter_seconds
        self.faults: LinkFaults | None = None
        self.watch: Callable[[str, str, Any], None] | None = None
        self.check: Callable[[Any], None] | None = None  # sees every message when it is sent
        self.refuse: Callable[[Any], str | None] | None = None  # why a message is not taken in, as a transport decides it
        self.refused: list[tuple[str, str]] = []  # by whom it was sent, and why it was not taken
        self.block: Callable[[str, str, Any], bool] | None = None  # for directed tests: True loses the message
        self.sent = 0
        self.dropped = 0
        self._random = randomness
        self._ports: dict[str, Port] = {}
        self._cut: dict[tuple[str, str], int] = {}
        self._held: dict[tuple[str, str], list[tuple[str, Any]]] = {}
        self._sizes = dict(sizes or {})
        self._bytes_per_s = bytes_per_s
        self._shared = shared  # in place of uplinks that send one message after another
        self._unlimited = unlimited  # senders whose messages count as nothing
        self._free_at: dict[str, float] = {}

    def open(self, process: Process, name: str = "") -> "Port":
        """The place on the network of a process, or of one of the workers it hosts, instead of whoever had that name."""
        port = self._ports[name or process.name] = Port(self, process, name or process.name)
        return port

    def cut(self, source: str, target: str) -> None:
        """Nothing passes in this direction until it is joined as often as it was cut."""
        self._cut[source, target] = self._cut.get((source, target), 0) + 1

    def join(self, source: str, target: str) -> None:
        """Undoes one cut."""
        left = self._cut.get((source, target), 0) - 1
        if left > 0:
            self._cut[source, target] = left
        else:
            self._cut.pop((source, target), None)

    def hold(self, source: str, target: str) -> None:
        """From now on bulk sent in this direction waits, as in a connection that hangs. Small messages have a connection of their own."""
        self._held.setdefault((source, target), [])

    def release(self, source: str, target: str) -> None:
        """The connection recovers: what waited arrives now, in order."""
        for addressed in self._held.pop((source, target), ()):
            self.loop.at(self.loop.now, self._deliver, addressed)

    def release_all(self) -> None:
        """Every connection that hangs recovers."""
        for pair in list(self._held):
            self.release(*pair)

    def send(self, source: str, target: str, message: Any) -> None:
        """What `Port.send` does: `source` is a process, `target` anybody."""
        self.sent += 1
        process = process_of(target)
        why = self.refuse(message) if self.refuse is not None else None
        if why is not None:
            self.refused.append((source, f"{type(message).__name__}: {why}"))
            return
        if self.check is not None:
            self.check(message)
        if (self._cut and (source, process) in self._cut) or (self.block is not None and self.block(source, target, message)):
            self.dropped += 1
            return
        if self.watch is not None:
            self.watch(source, target, message)
        if self._held and (source, process) in self._held and isinstance(message, BULK):
            self._held[source, process].append((target, message))
            return
        arrival = self.loop.now + self.latency_seconds
        if self.jitter_seconds:
            arrival += self.jitter_seconds * self._random.random()
        size = self._sizes.get(type(message)) if self._sizes and source != process and source not in self._unlimited else None
        if size:
            arrival += self.transfer_seconds(source, process, size)
        if self.faults is not None and source != process:
            self._send_badly(self.faults, arrival, target, message)
        else:
            self.loop.at(arrival, self._deliver, (target, message))

    def transfer_seconds(self, source: str, target: str, size: float) -> float:
        """What so many bytes that are sent now take on links, without latency; the links carry nothing else meanwhile."""
        now = self.loop.now
        if self._shared is not None:
            return self._shared.arrives_at(now, source, target, size) - now
        self._free_at[source] = max(now, self._free_at.get(source, 0.0)) + size / self._bytes_per_s
        return self._free_at[source] - now

    def hand_over(self, target: str, message: Any) -> None:
        """From one worker to another of the same process, in memory."""
        self.loop.at(self.loop.now, self._deliver, (target, message))

    def _send_badly(self, faults: LinkFaults, arrival: float, target: str, message: Any) -> None:
        draw = self._random.random
        if draw() < faults.corrupt + faults.lose:
            self.dropped += 1
            return
        if faults.state_seconds and isinstance(message, StateChunk):
            arrival += faults.state_seconds * draw()
        if draw() < faults.delay:
            arrival += 10 * draw()
        if draw() < faults.reorder:
            arrival += 1.5 * draw()
        self.loop.at(arrival, self._deliver, (target, message))
        if draw() < faults.duplicate:
            late = (0.5, 3.0, 8.0)[int(3 * draw())]
            self.loop.at(arrival + late * draw(), self._deliver, (target, message))

    def _deliver(self, addressed: tuple[str, Any]) -> None:
        port = self._ports.get(addressed[0])
        if port is not None and port.process.alive:
            port.inbox.put(addressed[1])


class Port:
    """The end of one process or hosted worker: what `atoll.control.world.Transport` asks for, and its inbox."""

    __slots__ = ("network", "process", "name", "inbox")

    def __init__(self, network: SimulatedNetwork, process: Process, name: str) -> None:
        self.network, self.process, self.name = network, process, name
        self.inbox: SimulatedMailbox = process.mailbox()

    def send(self, to: str, message: Any) -> None:
        """Lost if the process is dead."""
        if not self.process.alive:
            return
        if to != self.name and process_of(to) == self.process.name:
            self.network.hand_over(to, message)
        else:
            self.network.send(self.process.name, to, message)
