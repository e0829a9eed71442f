"""Which messages cannot be meant: numbers outside what a swarm has, lists of other lengths, times that are not.

Whoever takes messages in, a transport or the simulator's network, drops these and names their sender, so that no role has to survive them.
What is late, doubled or about another state is no matter of this: roles tell those by themselves.
"""

import math
from collections.abc import Callable, Collection
from typing import Any

from atoll.control.messages import (
    Ack,
    Announce,
    Backward,
    FeederBeat,
    FetchState,
    Finished,
    Forward,
    Manifest,
    Message,
    OfState,
    OfSum,
    OfWork,
    Pull,
    PullSum,
    Reduce,
    Reduced,
    Run,
    Seal,
    StateChunk,
    SumChunk,
    SumPart,
    WorkerBeat,
)
from atoll.control.settings import Settings
from atoll.control.worker_state import BUFFERS

__all__ = ["why_unsound"]

LONGEST_DIGEST = 128
SHORTEST_SECONDS = 1e-9  # of a kernel that was measured


def why_unsound(message: Message, settings: Settings) -> str | None:
    """What is wrong with a message; None: it can be meant."""
    check = _CHECKS.get(type(message))
    if check is None:
        return f"{type(message).__name__} is no message of a swarm"
    return check(message, settings)


def _first(**problems: bool) -> str | None:
    return next((f"its {name.replace('_', ' ')} cannot be" for name, wrong in problems.items() if wrong), None)


def _outside(value: int, most: int, least: int = 0) -> bool:
    return not least <= value < most


def _not_seconds(value: float) -> bool:
    return not (value == 0 or SHORTEST_SECONDS <= value < math.inf)


def _worker_beat(beat: WorkerBeat, settings: Settings) -> str | None:
    return _first(
        incarnation=beat.incarnation < 0,
        stage=_outside(beat.stage, settings.stages, -1),
        version=beat.version < -1,
        speed=not 0 <= beat.speed < math.inf,
        fetched=_outside(beat.fetched, settings.chunks + 1, -1),
        digest=len(beat.digest) > LONGEST_DIGEST or (beat.attests is not None and len(beat.attests[1]) > LONGEST_DIGEST),
    )


def _feeder_beat(beat: FeederBeat, settings: Settings) -> str | None:
    return _first(incarnation=beat.incarnation < 0, done=_outside(beat.done, settings.micro_batches + 1), progress=beat.progress < 0)


def _forward(message: Forward, settings: Settings) -> str | None:
    return _work(message, settings) or _first(
        path=len(message.path) != settings.stages, owned=not message.owned <= frozenset(range(settings.stages))
    )


def _work(message: OfWork, settings: Settings) -> str | None:
    return _first(
        stage=_outside(message.stage, settings.stages),
        micro_batch=_outside(message.micro_batch, settings.micro_batches),
        attempt=message.attempt.number < 0,
    )


def _ack(message: Ack, settings: Settings) -> str | None:
    return _work(message, settings) or _first(seconds=_not_seconds(message.seconds))


def _manifest(message: Manifest, settings: Settings) -> str | None:
    every = frozenset(range(settings.micro_batches))
    indices = [buffer.index for buffer in message.buffers]
    return _first(
        stage=_outside(message.stage, settings.stages),
        buffers=_not_buffers(indices) and bool(indices),
        micro_batches=any(not buffer.micro_batches <= every for buffer in message.buffers),
        weight=any(not 0 <= buffer.weight < math.inf for buffer in message.buffers),
    )


def _not_buffers(indices: Collection[int]) -> bool:
    return not indices or len(set(indices)) != len(indices) or any(_outside(index, BUFFERS) for index in indices)


def _sum(message: OfSum, settings: Settings) -> str | None:
    return _first(stage=_outside(message.stage, settings.stages + len(settings.tied)), chunk=_outside(message.chunk, settings.chunks))


def _pull(message: Pull, settings: Settings) -> str | None:
    return _sum(message, settings) or _first(buffers=_not_buffers(message.buffers))


def _reduced(message: Reduced, settings: Settings) -> str | None:
    return _first(
        stage=_outside(message.stage, settings.stages),
        norm=message.norm_squared < 0,  # one that is not finite may be: gradients overflow
        digest=len(message.digest) > LONGEST_DIGEST,
    )


def _state(message: OfState, settings: Settings) -> str | None:
    return _first(stage=_outside(message.stage, settings.stages), chunk=_outside(message.chunk, settings.chunks))


def _announce(message: Announce, settings: Settings) -> str | None:
    view, yours = message.view, message.yours
    return _first(
        stage=_outside(yours.stage, settings.stages, -1),
        routes=len(yours.routes) not in (0, settings.stages),
        lease=any(_outside(micro_batch, settings.micro_batches) for micro_batch in yours.lease),
        commit=view.commit is not None and len(view.commit.digests) != settings.stages,
        phase=_not_phase(view.phase, settings) or (view.trailing is not None and _not_phase(view.trailing, settings)),
    )


def _not_phase(phase: Run | Seal | Reduce | Finished, settings: Settings) -> bool:
    if isinstance(phase, Run):
        return len(phase.missing) != settings.stages
    sums = phase.stages if isinstance(phase, Reduce) else ()
    return isinstance(phase, Reduce) and (
        len(sums) != settings.stages + len(settings.tied) or any(len(each.owners) != settings.chunks for each in sums)
    )


_CHECKS: dict[type, Callable[[Any, Settings], str | None]] = {
    Ack: _ack,
    Announce: _announce,
    Backward: _work,
    FeederBeat: _feeder_beat,
    FetchState: _state,
    Forward: _forward,
    Manifest: _manifest,
    Pull: _pull,
    PullSum: _sum,
    Reduced: _reduced,
    StateChunk: _state,
    SumChunk: _sum,
    SumPart: _sum,
    WorkerBeat: _worker_beat,
}
