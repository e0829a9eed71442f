"""What the protocol's notices are as events, one for one: they gain the run's time, samples and bytes, which `control/` does not know."""

from collections.abc import Callable, Sequence

import msgspec

from atoll.control.notices import (
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
    StateRefused,
    StatesDiffer,
    StepCommitted,
    TookOver,
    TooSlow,
)
from atoll.events import (
    AnyEvent,
    CheckpointSaved,
    CoordinatorStarted,
    MemberChanged,
    MemberMoved,
    MembersAwaited,
    MemberState,
    MemberTooSlow,
    NonFinite,
    PeerRefused,
    StageLost,
    StepFinished,
    StepRepaired,
    Warned,
)
from atoll.units import format_seconds

__all__ = ["StartupProgress", "SwarmEvents"]

_NEWS_SECONDS = 2.0  # between two events that differ
_AGAIN_SECONDS = 15.0  # until the same is told again


class SwarmEvents:
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
            case Refused(what="loss" | "gradient" | "weight" as what):
                return NonFinite(at_seconds=now, step=happening.version + 1, what=what, value=str(happening.value))
            case Joined():
                return self._member(happening.name, happening.stage, "active", "joining")
            case Left():
                return self._member(happening.name, happening.stage, "left", "active", "it asked to leave")
            case Silent():
                return self._member(
                    happening.name, happening.stage, "silent", "active", f"no heartbeat for {format_seconds(happening.seconds)}"
                )
            case Returned():
                return self._member(happening.name, happening.stage, "active", "silent")
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
                return self.saved(happening.version)
            case RolledBack():
                return StageLost(at_seconds=now, stage=happening.stage, step=happening.version, epoch=happening.epoch)
            case StateRefused():
                reason = f"a state of stage {happening.stage} after step {happening.version}: {happening.reason}"
                return PeerRefused(at_seconds=now, peer=happening.name, role="worker", what="state", reason=reason)
            case StatesDiffer():
                return Warned(
                    at_seconds=now,
                    message=f"workers of stage {happening.stage} have states after step {happening.version} that differ in some bits, as "
                    "devices of several kinds may; that of the worker told to store it was taken",
                )
            case TookOver():
                return CoordinatorStarted(at_seconds=now, term=happening.term, step=happening.version)
        return None

    def _member(self, name: str, stage: int, state: MemberState, before: MemberState, reason: str = "") -> MemberChanged:
        role, stages = ("worker", (stage,)) if stage >= 0 else ("feeder", ())
        return MemberChanged(at_seconds=self._now(), name=name, state=state, before=before, role=role, stages=stages, reason=reason)

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
            epoch=happening.epoch,
            rounds=happening.rounds,
        )

    def saved(self, step: int) -> CheckpointSaved:
        """Every stage's state after this step is stored."""
        now = self._now()
        began = self._made.get(step, now)
        self._made = {other: at for other, at in self._made.items() if other > step}
        size = self._stored_bytes(step)
        return CheckpointSaved(
            at_seconds=now, step=step, path=f"checkpoints/step-{step:08d}", size_bytes=size, blocked_seconds=0.0, seconds=now - began
        )


class StartupProgress:
    """What is waited for between the start of a swarm and its first step, while processes load and nothing else is to be seen.

    It reads no clock: times are given, from the start of the coordinator.
    """

    def __init__(self, workers: int, stages: int) -> None:
        """So many workers were started; each of so many stages needs one."""
        self._workers, self._stages = workers, stages
        self._said: MembersAwaited | None = None
        self._said_at = 0.0

    def event(self, now: float, joined: Sequence[int]) -> MembersAwaited | None:
        """What to tell now, if anything; `joined` are the stages of the workers that are there."""
        empty = tuple(stage for stage in range(self._stages) if stage not in joined)
        event = MembersAwaited(joined=len(joined), expected=max(self._workers, len(joined)), stages=empty)
        if now - self._said_at < (_NEWS_SECONDS if event != self._said else _AGAIN_SECONDS):
            return None
        self._said, self._said_at = event, now
        return msgspec.structs.replace(event, seconds=now)
