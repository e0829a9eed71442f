"""Stalling: all ranks are alive, but nobody gets on. One line a minute, and one when the cause changes, says who keeps the others waiting.

Data that hangs in `__getitem__`, a callback that waits for input, a rank that never joins: to the ranks that wait they look alike, until a
collective's time-out ends the run many minutes later.
"""

import time
from collections import deque
from collections.abc import Mapping
from statistics import median

from atoll.runtime.lockstep.beats import Beat, blamed, has_been, name_of, spoken

__all__ = ["DEFAULT_STALL_SECONDS", "Stalling"]

DEFAULT_STALL_SECONDS = 30.0
_STEPS = 10  # as long as so many steps must nobody have got on
_PAUSE_SECONDS = 60.0  # between two lines
_KEPT_STEPS = 20
_SHOWN_RANKS = 8


class Stalling:
    """Looks at all ranks' heart-beats now and then; `line` is what there is to say, if anything.

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

    def line(self, beats: Mapping[int, Beat], now: float) -> str | None:
        """What to tell people now; `now` is of any clock that only goes forward."""
        self._note(beats, now)
        if any(beat.left for beat in beats.values()):
            return None
        sentence = self._missing(beats, now) if len(beats) < self.world_size else self._stalled(beats)
        if sentence is None:
            self._said = None
            return None
        subject = sorted((rank, beat.doing) for rank, beat in beats.items() if rank in blamed(beats))
        if self._said is not None and now - self._said[0] < _PAUSE_SECONDS and subject == self._said[1]:
            return None
        self._said = now, subject
        return sentence

    def _note(self, beats: Mapping[int, Beat], now: float) -> None:
        self._first_look = now if self._first_look is None else self._first_look
        if beats and self._first_joined is None:
            self._first_joined = now
        step = max((beat.step for beat in beats.values() if beat.step is not None), default=None)
        if step is None or (self._last_step is not None and step <= self._last_step[0]):
            return
        if self._last_step is not None:
            self._steps.append((now - self._last_step[1]) / (step - self._last_step[0]))
        self._last_step = step, now

    def _missing(self, beats: Mapping[int, Beat], now: float) -> str | None:
        assert self._first_look is not None
        waited = now - self._first_look
        if waited < self.least_seconds:
            return None
        absent = [rank for rank in range(self.world_size) if rank not in beats]
        names = ", ".join(name_of(rank, self._devices.get(rank, "")) for rank in absent[:_SHOWN_RANKS])
        more = f" and {len(absent) - _SHOWN_RANKS} more" if len(absent) > _SHOWN_RANKS else ""
        verb = "has" if len(absent) == 1 else "have"
        said = f"{names}{more} {verb} not joined after {waited:.0f} s"
        if self._first_joined is None:
            return f"{said}: still starting, or reading the script"
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + self._first_joined + self.give_up_seconds - now))
        return f"{said}; the others wait until {until}"

    def _stalled(self, beats: Mapping[int, Beat]) -> str | None:
        seconds = min(beat.doing_seconds for beat in beats.values())
        if seconds < max(self.least_seconds, _STEPS * median(self._steps or [0.0])):
            return None
        culprits = blamed(beats)
        if culprits:
            those = "; ".join(has_been(beats[rank]) for rank in culprits[:_SHOWN_RANKS])
            return f"{those}; the others wait for {'it' if len(culprits) == 1 else 'them'}"
        if len(beats) == 1 or len({(beat.doing, beat.step) for beat in beats.values()}) > 1:
            return f"nobody has got on for {seconds:.0f} s: " + "; ".join(has_been(beat) for beat in list(beats.values())[:_SHOWN_RANKS])
        beat = beats[0]
        when = f" at step {beat.step}" if beat.step is not None else ""
        return f"every rank has been {spoken(beat.doing, beat.stage)} for {seconds:.0f} s{when}"
