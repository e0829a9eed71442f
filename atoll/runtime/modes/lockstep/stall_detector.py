"""Stalls: all ranks are alive, but nobody makes progress. One event a minute, and one when the cause changes, says who waits for whom.

Data that hangs in `__getitem__`, a callback that waits for input, a rank that never joins: to the ranks that wait they look alike, until a
collective's time-out ends the run many minutes later.
"""

import time
from collections import deque
from collections.abc import Mapping
from statistics import median

from atoll.events import MembersAwaited, Stalled, StallEnded, Wait
from atoll.runtime.modes.lockstep.heartbeat import Heartbeat, blamed, name_of, spoken

__all__ = ["DEFAULT_STALL_SECONDS", "StallDetector"]

DEFAULT_STALL_SECONDS = 30.0
_STEPS = 10  # as long as so many steps must nobody have got on
_PAUSE_SECONDS = 60.0  # between two events of the same cause
_KEPT_STEPS = 20


class StallDetector:
    """Looks at all ranks' heart-beats now and then; `event` is what there is to say, if anything.

    `least_seconds` is how long nobody must have got on, or ten times a step if that is longer. `give_up_seconds` is when those who joined
    stop waiting for those who did not.
    """

    def __init__(
        self, world_size: int, *, least_seconds: float = DEFAULT_STALL_SECONDS, give_up_seconds: float, devices: Mapping[int, str]
    ) -> None:
        self.world_size, self.least_seconds, self.give_up_seconds = world_size, least_seconds, give_up_seconds
        self._devices = devices
        self._steps: deque[float] = deque(maxlen=_KEPT_STEPS)  # seconds
        self._last_step: tuple[int, float] | None = None
        self._first_look: float | None = None
        self._first_joined: float | None = None
        self._said: tuple[float, object] | None = None  # when, and of what
        self._stalled_at: float | None = None  # since when nobody made progress, if that was said

    def event(self, beats: Mapping[int, Heartbeat], now: float) -> MembersAwaited | Stalled | StallEnded | None:
        """What to tell people now; `now` is of any clock that only goes forward."""
        self._note(beats, now)
        if any(beat.left for beat in beats.values()):
            return None
        found = self._missing(beats, now) if len(beats) < self.world_size else self._stalled(beats)
        if found is None:
            began, self._said, self._stalled_at = self._stalled_at, None, None
            return StallEnded(seconds=now - began) if began is not None else None
        subject = sorted((rank, beat.doing) for rank, beat in beats.items() if rank in blamed(beats))
        if self._said is not None and now - self._said[0] < _PAUSE_SECONDS and subject == self._said[1]:
            return None
        self._said = now, subject
        if isinstance(found, Stalled) and self._stalled_at is None:
            self._stalled_at = now - found.seconds
        return found

    def _note(self, beats: Mapping[int, Heartbeat], now: float) -> None:
        self._first_look = now if self._first_look is None else self._first_look
        if beats and self._first_joined is None:
            self._first_joined = now
        step = max((beat.step for beat in beats.values() if beat.step is not None), default=None)
        if step is None or (self._last_step is not None and step <= self._last_step[0]):
            return
        if self._last_step is not None:
            self._steps.append((now - self._last_step[1]) / (step - self._last_step[0]))
        self._last_step = step, now

    def _missing(self, beats: Mapping[int, Heartbeat], now: float) -> MembersAwaited | None:
        assert self._first_look is not None
        waited = now - self._first_look
        if waited < self.least_seconds:
            return None
        absent = [rank for rank in range(self.world_size) if rank not in beats]
        until = None if self._first_joined is None else time.time() + self._first_joined + self.give_up_seconds - now
        return MembersAwaited(
            joined=len(beats),
            expected=self.world_size,
            missing=tuple(name_of(rank, self._devices.get(rank, "")) for rank in absent),
            seconds=waited,
            until_unix_seconds=until,
        )

    def _stalled(self, beats: Mapping[int, Heartbeat]) -> Stalled | None:
        seconds = min(beat.doing_seconds for beat in beats.values())
        if seconds < max(self.least_seconds, _STEPS * median(self._steps or [0.0])):
            return None
        cause = tuple(name_of(rank) for rank in blamed(beats))
        members = tuple(
            Wait(
                name=name_of(beat.rank),
                doing=spoken(beat.doing, beat.stage),
                seconds=beat.doing_seconds,
                step=beat.step,
                stage=beat.stage,
                device=beat.device,
                waits_for=() if name_of(beat.rank) in cause else cause,
            )
            for beat in beats.values()
        )
        return Stalled(seconds=seconds, members=members, cause=cause)
