"""What the forwarder does to a packet: drops it, or has it leave later. Pure: times and chances are given."""

from collections.abc import Callable

import msgspec

__all__ = ["Pipes", "ForwarderState", "Pipe", "PipeState", "wire_bytes"]

_QUEUE_SECONDS = 0.05  # a link's buffer holds so much, and a round trip
_LEAST_QUEUE_BYTES = 256 * 1024


class PipeState(msgspec.Struct, frozen=True, array_like=True):
    """One direction of the link of two sites, by their numbers; or the inside of a site."""

    source: int
    target: int
    bytes_per_s: float | None  # None: as fast as it goes
    latency_s: float
    loss: float


class ForwarderState(msgspec.Struct, frozen=True):
    """Everything the forwarder has to know. `blocked` are pairs of addresses, or of prefixes that end in a dot."""

    pipes: tuple[PipeState, ...]
    blocked: tuple[tuple[str, str], ...] = ()
    lossy: dict[str, float] = {}

    @property
    def loses(self) -> bool:
        """Whether packets are lost anywhere: then they must come one by one, not in bundles of up to 64 KB."""
        return bool(self.lossy) or any(pipe.loss for pipe in self.pipes)


class Pipe:
    """A narrow place followed by a long way. A packet enters when those before it have passed, or is dropped when too many wait."""

    def __init__(self, state: PipeState) -> None:
        self.state = state
        self._free_at = 0.0  # when all that entered will have passed the narrow place

    def change(self, state: PipeState) -> None:
        """What is on its way stays on its way; what waits passes at the new speed from now on, as far as this can know."""
        self.state = state

    def leaves_at(self, now: float, size_bytes: int) -> float | None:
        """When a packet that comes now is at the other end; None: dropped."""
        state = self.state
        if state.bytes_per_s is None:
            return now + state.latency_s
        queue_bytes = max(state.bytes_per_s * (2 * state.latency_s + _QUEUE_SECONDS), _LEAST_QUEUE_BYTES)
        if (self._free_at - now) * state.bytes_per_s > queue_bytes:
            return None
        self._free_at = max(now, self._free_at) + size_bytes / state.bytes_per_s
        return self._free_at + state.latency_s


class Pipes:
    """All pipes, and which packets may enter them."""

    def __init__(self, state: ForwarderState, chance: Callable[[], float]) -> None:
        self._chance = chance
        self._pipes: dict[tuple[int, int], Pipe] = {}
        self.change(state)

    def change(self, state: ForwarderState) -> None:
        """Other conditions from now on."""
        for one in state.pipes:
            if (one.source, one.target) in self._pipes:
                self._pipes[one.source, one.target].change(one)
            else:
                self._pipes[one.source, one.target] = Pipe(one)
        self._blocked = [(_bytes(a), _bytes(b)) for a, b in state.blocked]
        self._lossy = {_bytes(address): share for address, share in state.lossy.items()}

    def leaves_at(self, now: float, source: bytes, target: bytes, size_bytes: int) -> float | None:
        """When a packet from one address to another is there; None: never."""
        pipe = self._pipes.get((source[1] - 1, target[1] - 1))
        if pipe is None or (self._blocked and self._is_blocked(source, target)):
            return None
        if (pipe.state.loss or self._lossy) and self._is_lost(pipe.state.loss, source, target):
            return None
        return pipe.leaves_at(now, size_bytes)

    def _is_lost(self, of_pipe: float, source: bytes, target: bytes) -> bool:
        shares = (of_pipe, self._lossy.get(source, 0.0), self._lossy.get(target, 0.0))
        return any(share and self._chance() < share for share in shares)

    def _is_blocked(self, source: bytes, target: bytes) -> bool:
        return any(source.startswith(a) and target.startswith(b) for a, b in self._blocked)


def _bytes(text: str) -> bytes:
    """`"10.1.0.2"` or `"10.1."` as the bytes addresses begin with."""
    return bytes(int(part) for part in text.split(".") if part)


def wire_bytes(size_bytes: int, segment_bytes: int, header_bytes: int) -> int:
    """What a packet, or a bundle of segments that the kernel left together, takes on a wire: every segment has headers."""
    if not segment_bytes or size_bytes <= header_bytes:
        return size_bytes
    segments = -(-(size_bytes - header_bytes) // segment_bytes)
    return size_bytes + (segments - 1) * header_bytes
