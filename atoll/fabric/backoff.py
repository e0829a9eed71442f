"""When to try again: bounded, growing, jittered delays. Pure: the randomness comes from outside."""

import msgspec

__all__ = ["Backoff"]


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
