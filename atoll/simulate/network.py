"""Network: carries messages between processes on the virtual clock, with the faults a seed asks for.

A message that arrives is what was sent: a corrupted one fails its check-sum and is dropped, as the fabric does. Links are between
processes: what workers of one process tell each other touches none.
"""

import random
from collections.abc import Callable, Mapping
from typing import Any

from atoll.control.hosting import process_of
from atoll.control.messages import Backward, Forward, Part, StateChunk, SumChunk
from atoll.simulate.links import SharedLinks
from atoll.simulate.loop import Loop, Process, SimulatedMailbox

__all__ = ["LinkFaults", "Network", "Port"]

BULK = (Forward, Backward, Part, SumChunk, StateChunk)


class LinkFaults:
    """How often the network misbehaves, as probabilities for each message; and by how much chunks of states are late at most."""

    __slots__ = ("duplicate", "reorder", "delay", "corrupt", "lose", "state_seconds")

    def __init__(
        self,
        duplicate: float = 0.0,
        reorder: float = 0.0,
        delay: float = 0.0,
        corrupt: float = 0.0,
        lose: float = 0.0,
        state_seconds: float = 0.0,
    ) -> None:
        self.duplicate = duplicate
        self.reorder = reorder
        self.delay = delay
        self.corrupt = corrupt
        self.lose = lose
        self.state_seconds = state_seconds


class Network:
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
        shared: SharedLinks | None = None,
    ) -> None:
        self.loop = loop
        self.latency_seconds = latency_seconds
        self.jitter_seconds = jitter_seconds
        self.faults: LinkFaults | None = None
        self.watch: Callable[[str, str, Any], None] | None = None
        self.check: Callable[[Any], None] | None = None  # sees every message when it is sent
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
        if size and self._shared is not None:
            arrival += self._shared.arrives_at(self.loop.now, source, process, size) - self.loop.now
        elif size:
            begins = max(self.loop.now, self._free_at.get(source, 0.0))
            self._free_at[source] = begins + size / self._bytes_per_s
            arrival += self._free_at[source] - self.loop.now
        if self.faults is not None and source != process:
            self._send_badly(self.faults, arrival, target, message)
        else:
            self.loop.at(arrival, self._deliver, (target, message))

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

    def __init__(self, network: Network, process: Process, name: str) -> None:
        self.network = network
        self.process = process
        self.name = name
        self.inbox: SimulatedMailbox = process.mailbox()

    def send(self, to: str, message: Any) -> None:
        """Lost if the process is dead."""
        if not self.process.alive:
            return
        if to != self.name and process_of(to) == self.process.name:
            self.network.hand_over(to, message)
        else:
            self.network.send(self.process.name, to, message)
