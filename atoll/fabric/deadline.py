"""How long a call may take, from measured round trips, throughput and the method's own times, and when to try again. No clocks here.

Delays between attempts are bounded, growing and jittered; the randomness comes from outside.
"""

from collections import deque

import msgspec

__all__ = ["Backoff", "DeadlineRule", "LinkEstimate", "RateMeter", "Smoothed"]


class Smoothed:
    """A running mean of times and of their deviation, as TCP keeps for its round trips (RFC 6298)."""

    def __init__(self) -> None:
        self.mean: float | None = None
        self.deviation = 0.0

    def add(self, sample: float) -> None:
        """One more measurement."""
        if self.mean is None:
            self.mean, self.deviation = sample, sample / 2
            return
        self.deviation += (abs(sample - self.mean) - self.deviation) / 4
        self.mean += (sample - self.mean) / 8

    def upper(self, default: float) -> float:
        """What a measurement should hardly ever pass; `default` before the first."""
        return default if self.mean is None else self.mean + 4 * self.deviation


class RateMeter:
    """Throughput of bulk that arrives: bytes over the time in which some was on its way. Time without any does not count.

    A sample needs `SAMPLE_BYTES` or `SAMPLE_SECONDS` of busy time, so that neither buffers of the kernel nor single delays decide.
    """

    SAMPLE_BYTES = 4_000_000
    SAMPLE_SECONDS = 0.25
    SMALLEST_BYTES = 128 * 1024

    def __init__(self) -> None:
        self.bytes_per_s = 0.0  # 0: nothing measured yet
        self._since: float | None = None
        self._busy_seconds = 0.0
        self._bytes = 0

    def arrived(self, now: float, size_bytes: int) -> None:
        """Bytes of bulk arrived. The first after a pause only start the clock: they were on their way before it."""
        if self._since is None:
            self._since = now
            return
        self._bytes += size_bytes
        self._busy_seconds += now - self._since
        self._since = now
        enough = self._bytes >= self.SAMPLE_BYTES or self._busy_seconds >= self.SAMPLE_SECONDS
        if enough and self._bytes >= self.SMALLEST_BYTES and self._busy_seconds > 0:
            sample = self._bytes / self._busy_seconds
            self.bytes_per_s = sample if not self.bytes_per_s else self.bytes_per_s + 0.4 * (sample - self.bytes_per_s)
            self._bytes, self._busy_seconds = 0, 0.0

    def pause(self) -> None:
        """Nothing is on its way any more."""
        self._since = None


class LinkEstimate:
    """What was measured of the way to a peer and back."""

    def __init__(self) -> None:
        self.round_trip = Smoothed()
        self._round_trips: deque[float] = deque(maxlen=8)  # the last ones
        self.incoming = RateMeter()
        self.outgoing_bytes_per_s = 0.0  # as the peer reports it; 0: not yet
        self.queued_bytes = 0  # handed over for sending and not sent

    def answered(self, round_trip_seconds: float) -> None:
        """A heart-beat came back."""
        self.round_trip.add(round_trip_seconds)
        self._round_trips.append(round_trip_seconds)

    @property
    def latency_seconds(self) -> float:
        """There and back without waiting in queues: the shortest of late; 0 before the first."""
        return min(self._round_trips, default=0.0)


class DeadlineRule(msgspec.Struct, frozen=True, kw_only=True):
    """From estimates to a deadline: `margin` times what is expected, plus a floor for what cannot be measured (a busy machine).

    Before anything was measured the link counts as `unknown_bytes_per_s` and the method as `unknown_service_seconds`.
    """

    margin: float = 4.0
    floor_seconds: float = 2.0
    unknown_bytes_per_s: float = 125_000.0  # 1 Mbit/s
    unknown_round_trip_seconds: float = 0.5
    unknown_service_seconds: float = 30.0
    slowest_bytes_per_s: float = 1000.0  # whatever a peer claims

    def expected_seconds(self, link: LinkEstimate, service: Smoothed, outgoing_bytes: int, incoming_bytes: int = 0) -> float:
        """What a call with this much to send and to receive should take."""
        out = (outgoing_bytes + link.queued_bytes) / max(link.outgoing_bytes_per_s or self.unknown_bytes_per_s, self.slowest_bytes_per_s)
        back = incoming_bytes / (link.incoming.bytes_per_s or self.unknown_bytes_per_s)
        return link.round_trip.upper(self.unknown_round_trip_seconds) + out + back + service.upper(self.unknown_service_seconds)

    def timeout_seconds(self, link: LinkEstimate, service: Smoothed, outgoing_bytes: int, incoming_bytes: int = 0) -> float:
        """After how long the call has failed."""
        return self.floor_seconds + self.margin * self.expected_seconds(link, service, outgoing_bytes, incoming_bytes)


class Backoff(msgspec.Struct, frozen=True, kw_only=True):
    """Delays between attempts to connect: doubling from `first_seconds` to `largest_seconds`, each cut by up to half at random so that
    peers that lost the same host do not return in step. After `attempts` failures in a row the peer is given up."""

    first_seconds: float = 0.1
    largest_seconds: float = 10.0
    attempts: int = 12

    def delay_seconds(self, failures: int, random: float) -> float | None:
        """How long to wait after this many failures in a row, with `random` in [0, 1); None: give up."""
        if failures >= self.attempts:
            return None
        whole = min(self.first_seconds * 2.0 ** min(failures - 1, 60), self.largest_seconds)
        return float(whole * (1 - random / 2))
