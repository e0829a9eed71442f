"""Heartbeats: what every rank says of itself in the store, in words people read, and who keeps the others waiting.

A stall is when all ranks are alive, but nobody makes progress: data that hangs in `__getitem__`, a callback that waits for input, a rank
that never joins. To the ranks that wait they look alike, until a collective's timeout ends the run many minutes later.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Literal, TypeAlias

import msgspec
from torch.distributed.distributed_c10d import Store

from atoll.errors import ScheduleError
from atoll.events import MembersAwaited, MemberState, Stalled, StallEnded, Wait
from atoll.runtime.modes.lockstep.schedule import Action

__all__ = [
    "DEFAULT_STALL_SECONDS",
    "NOTHING",
    "Doing",
    "Heartbeat",
    "StallDetector",
    "Whose",
    "blamed",
    "heartbeat_key",
    "name_of",
    "read_heartbeat",
    "read_heartbeats",
    "spoken",
    "state_of",
    "whose",
]

NOTHING = b"-"  # what a key holds before anybody wrote to it: reading a missing key would block
DEFAULT_STALL_SECONDS = 30.0
_STEPS = 10  # as long as so many steps must nobody have got on
_PAUSE_SECONDS = 60.0  # between two events of the same cause
_KEPT_STEPS = 20

Whose: TypeAlias = Literal["user", "atoll", "others"]
"""Who decides how long something takes: code of the user's (data, callbacks, the optimizer), Atoll's, or the ranks that are waited for."""


@dataclass(frozen=True)
class Doing:
    """What a rank does, in words that may be found when somebody wants to read them, and whose code it waits for."""

    words: str | Callable[[], str]
    whose: Whose = "atoll"

    def __str__(self) -> str:
        return self.words if isinstance(self.words, str) else self.words()


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank last said of itself."""

    rank: int
    device: str
    stage: str
    place: str  # processes with the same place see each other's pids
    pid: int
    count: int
    step: int | None = None
    doing: str = "starting"
    doing_seconds: float = 0.0  # for how long it had been doing just that
    whose: Whose = "atoll"
    checkpoint: int | None = None  # the last step that is saved
    left: bool = False  # it ended well


def heartbeat_key(rank: int) -> str:
    """Where a rank's heartbeat is kept."""
    return f"atoll/beat/{rank}"


def read_heartbeat(value: bytes) -> Heartbeat:
    """A heartbeat as it is stored."""
    return msgspec.json.decode(value, type=Heartbeat)


def read_heartbeats(store: Store, ranks: range) -> dict[int, Heartbeat]:
    """What the ranks last said, of those that said anything."""
    values = store.multi_get([heartbeat_key(rank) for rank in ranks])
    return {rank: read_heartbeat(value) for rank, value in zip(ranks, values, strict=True) if value != NOTHING}


def whose(action: object) -> Whose:
    """Who decides how long an action takes."""
    if isinstance(action, Doing):
        return action.whose
    return "others" if isinstance(action, Action) and action.kind in ("RF", "RB", "G") else "atoll"


def blamed(beats: Mapping[int, Heartbeat]) -> list[int]:
    """Those whom the others wait for: ranks in the user's code, if there are none those that compute; nobody where all are alike."""
    working = {rank: beat for rank, beat in beats.items() if not beat.left}
    for kind in ("user", "atoll"):
        found = [rank for rank, beat in working.items() if beat.whose == kind]
        if found:
            return found if len(found) < len(working) else []
    return []


def name_of(rank: int, device: str = "", stage: str = "") -> str:
    """`rank 2 (oslo-1/gpu0, stage 1)`."""
    names = ", ".join(filter(None, (device, stage)))
    return f"rank {rank}" + (f" ({names})" if names else "")


def state_of(beat: Heartbeat) -> MemberState:
    """What a rank's heartbeat says of it."""
    if beat.left:
        return "left"
    if beat.step is not None:
        return "active"
    if beat.doing.startswith("capturing"):
        return "capturing"
    return "joining" if beat.whose == "others" else "loading"


def spoken(doing: str, stage: str) -> str:
    """`1B3` → `running backward of micro-batch 3`; texts that are no actions stay. The stage is said where the rank has another one too."""
    try:
        action = Action.parse(doing)
    except ScheduleError:
        return doing
    words = {
        "F": f"running forward of micro-batch {action.micro_batch}",
        "B": f"running backward of micro-batch {action.micro_batch}",
        "RF": f"receiving the input of micro-batch {action.micro_batch}",
        "SF": f"sending the output of micro-batch {action.micro_batch}",
        "RB": f"receiving the gradient of micro-batch {action.micro_batch}",
        "SB": f"sending the gradient of micro-batch {action.micro_batch}",
        "G": "synchronising gradients",
        "O": "making the optimizer's step",
    }
    among = f" in stage {action.stage}" if action.stage >= 0 and stage and stage != f"stage {action.stage}" else ""
    return words[action.kind] + among


class StallDetector:
    """Looks at all ranks' heartbeats now and then; `event` is what there is to say, if anything.

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
