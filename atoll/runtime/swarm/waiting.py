"""Waiting: what people are told between the start of a swarm and its first step, while processes load and nothing else is to be seen."""

from collections.abc import Sequence

from atoll.units import plural

__all__ = ["Waiting"]

_NEWS_SECONDS = 2.0  # between two lines that differ
_AGAIN_SECONDS = 15.0  # until the same line is told again


class Waiting:
    """Says what is waited for. It reads no clock: times are given, from the start of the coordinator."""

    def __init__(self, workers: int, stages: int) -> None:
        """So many workers were started; each of so many stages needs one."""
        self._workers, self._stages = workers, stages
        self._said = ""
        self._said_at = 0.0

    def line(self, now: float, joined: Sequence[int]) -> str | None:
        """What to tell now, if anything; `joined` are the stages of the workers that are there."""
        line = self._state(joined)
        if now - self._said_at < (_NEWS_SECONDS if line != self._said else _AGAIN_SECONDS):
            return None
        self._said, self._said_at = line, now
        return line

    def _state(self, joined: Sequence[int]) -> str:
        empty = [stage for stage in range(self._stages) if stage not in joined]
        if not empty:
            return f"{plural(len(joined), 'worker')} joined; the first step is under way"
        there = f"waiting for workers: {len(joined)} of {max(self._workers, len(joined))} joined"
        if not joined:
            return f"{there} (they load PyTorch and the job)"
        several = f"stages {', '.join(map(str, empty[:8]))}{' …' if len(empty) > 8 else ''} have"
        return f"{there}; {several if len(empty) > 1 else f'stage {empty[0]} has'} nobody yet"
