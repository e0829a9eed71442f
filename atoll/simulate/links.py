"""Links: how long bytes take where a host's connections share its bandwidth, up and down."""

__all__ = ["SharedLinks"]


class SharedLinks:
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
