"""Heartbeats: what every rank says of itself in the store, in words people read, and who keeps the others waiting."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

import msgspec
from torch.distributed.distributed_c10d import Store

from atoll.errors import ScheduleError
from atoll.events import MemberState
from atoll.runtime.modes.lockstep.schedule import Action

__all__ = [
    "NOTHING",
    "Doing",
    "Heartbeat",
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
    """Where a rank's heart-beat is kept."""
    return f"atoll/beat/{rank}"


def read_heartbeat(value: bytes) -> Heartbeat:
    """A heart-beat as it is stored."""
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
    """What a rank's heart-beat says of it."""
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
