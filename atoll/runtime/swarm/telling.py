"""Telling: what happens in a swarm, as events for the run's directory and as lines for people."""

from collections.abc import Callable

from atoll.control.happenings import (
    Happening,
    Joined,
    Left,
    Moved,
    Refused,
    Repaired,
    Resealed,
    Returned,
    RolledBack,
    Saved,
    Silent,
    StepCommitted,
    TookOver,
    TooSlow,
)
from atoll.events import (
    AnyEvent,
    CheckpointSaved,
    CoordinatorStarted,
    MemberJoined,
    MemberLeft,
    MemberMoved,
    MemberReturned,
    MemberSilent,
    MemberTooSlow,
    NonFinite,
    StageLost,
    StepFinished,
    StepRepaired,
)
from atoll.units import format_seconds

__all__ = ["Teller", "say_event"]


class Teller:
    """Makes events of happenings. `now` is the run's own time, `samples` how many a step has, `stored_bytes` what a step's states weigh."""

    def __init__(self, now: Callable[[], float], samples: int, stored_bytes: Callable[[int], int] = lambda step: 0) -> None:
        self._now, self._samples, self._stored_bytes = now, samples, stored_bytes
        self._reason = ""
        self._made: dict[int, float] = {}  # when steps were made that may be stored now

    def event(self, happening: Happening) -> AnyEvent | None:
        """None for what only explains something that follows, or is told elsewhere."""
        now = self._now()
        match happening:
            case StepCommitted():
                return self._step(happening)
            case Refused(what="loss" | "gradient" as what):
                return NonFinite(at_seconds=now, step=happening.version + 1, what=what, value=str(happening.value))
            case Joined():
                return MemberJoined(at_seconds=now, name=happening.name, stage=happening.stage)
            case Left():
                return MemberLeft(at_seconds=now, name=happening.name, stage=happening.stage)
            case Silent():
                return MemberSilent(at_seconds=now, name=happening.name, stage=happening.stage, seconds=happening.seconds)
            case Returned():
                return MemberReturned(at_seconds=now, name=happening.name, stage=happening.stage)
            case TooSlow():
                return MemberTooSlow(at_seconds=now, name=happening.name, stage=happening.stage, fetched=happening.fetched)
            case Moved():
                return MemberMoved(
                    at_seconds=now, name=happening.worker, source=happening.source, target=happening.target, reason=happening.reason
                )
            case Resealed():
                self._reason = happening.reason
            case Repaired():
                reason, self._reason = self._reason or "somebody who had it is gone", ""
                return StepRepaired(at_seconds=now, step=happening.version + 1, micro_batches=happening.missing, reason=reason)
            case Saved():
                return self._saved(happening.version)
            case RolledBack():
                return StageLost(at_seconds=now, stage=happening.stage, step=happening.version)
            case TookOver():
                return CoordinatorStarted(at_seconds=now, term=happening.term, step=happening.version)
        return None

    def _step(self, happening: StepCommitted) -> StepFinished:
        self._reason, now = "", self._now()
        self._made[happening.version + 1] = now
        return StepFinished(
            at_seconds=now,
            step=happening.version + 1,
            loss=happening.loss / happening.weight,
            samples=self._samples,
            weight=happening.weight,
            seconds=happening.seconds,
            learning_rate=None,
            applied=not happening.skipped,
        )

    def _saved(self, step: int) -> CheckpointSaved:
        now = self._now()
        began = self._made.get(step, now)
        self._made = {other: at for other, at in self._made.items() if other > step}
        size = self._stored_bytes(step)
        return CheckpointSaved(at_seconds=now, step=step, path="swarm", size_bytes=size, blocked_seconds=0.0, seconds=now - began)


def say_event(event: AnyEvent, *, starting: bool = False) -> str | None:
    """One line for people; None for what a progress line says better. `starting`: the first coordinator since `atoll run` was started
    has made no step yet, so that what is missing is missing since before.
    """
    match event:
        case MemberJoined():
            return f"{event.name} joined" + (f" and works on stage {event.stage}" if event.stage >= 0 else "")
        case MemberLeft():
            return f"{event.name} left stage {event.stage}, as it had asked"
        case MemberSilent():
            return f"{event.name} has not been heard for {format_seconds(event.seconds)}; it gets no work"
        case MemberReturned():
            return f"{event.name} is heard again"
        case MemberTooSlow():
            return (
                f"{event.name} gets the state of stage {event.stage} too slowly to be of use: after {event.fetched:.0%} of it the next step"
                " superseded it, as before. It goes on trying; a faster link, longer steps or more stages would let it in"
            )
        case MemberMoved():
            return f"{event.name} moves from stage {event.source} to stage {event.target}: {event.reason}"
        case StepRepaired():
            by_stage = ", ".join(f"{count} of stage {stage}" for stage, count in enumerate(event.micro_batches) if count)
            return f"step {event.step}: {event.reason}; done again: {by_stage} (micro-batches)"
        case StageLost() if starting:
            return f"nobody has come back with a later state of stage {event.stage}; everybody goes on from step {event.step}"
        case StageLost():
            return f"stage {event.stage} was lost; everybody goes on from step {event.step}"
        case CoordinatorStarted() if event.term > 1 and not starting:
            return f"a new coordinator goes on after step {event.step}"
    return None
