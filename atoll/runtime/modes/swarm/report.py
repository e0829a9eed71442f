"""The report of a swarm: who came and went, what each stage and each link did, and what had to be done again.

From its events and from what workers say of themselves. Read without PyTorch.
"""

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from atoll.control.multi_stage import process_of
from atoll.control.settings import BACKWARD_WORK
from atoll.cost import Cost
from atoll.events import (
    AnyEvent,
    CoordinatorStarted,
    MemberChanged,
    MemberMoved,
    RunFinished,
    RunStarted,
    StageLost,
    StepFinished,
    StepRepaired,
    steps_after_the_first,
)
from atoll.runtime.report import Compared
from atoll.runtime.run_directory import RunDirectory

__all__ = [
    "MEMBERS",
    "KernelTimes",
    "Measured",
    "MemberReport",
    "SwarmLinkReport",
    "SwarmReport",
    "SwarmStageReport",
    "read_members",
    "tell_swarm",
]

MEMBERS = "measured/swarm.json"


class KernelTimes(msgspec.Struct):
    """What a worker computed on one stage. The last stage does forward and backward in one, a turn."""

    forwards: int = 0
    forward_seconds: float = 0.0
    backwards: int = 0
    backward_seconds: float = 0.0
    turns: int = 0
    turn_seconds: float = 0.0

    def add(self, work: float, seconds: float) -> None:
        """One more kernel, by what it counts as."""
        if work > BACKWARD_WORK:
            self.turns, self.turn_seconds = self.turns + 1, self.turn_seconds + seconds
        elif work == BACKWARD_WORK:
            self.backwards, self.backward_seconds = self.backwards + 1, self.backward_seconds + seconds
        else:
            self.forwards, self.forward_seconds = self.forwards + 1, self.forward_seconds + seconds


class Measured(msgspec.Struct, kw_only=True):
    """What one worker says of itself, from its start until now."""

    seconds: float = 0.0  # since it was connected
    kernels: dict[int, KernelTimes] = msgspec.field(default_factory=dict)  # by stage
    received_bytes: dict[str, int] = msgspec.field(default_factory=dict)  # by peer
    received_bytes_per_s: dict[str, float] = msgspec.field(default_factory=dict)  # by peer, while something was on its way
    round_trip_seconds: dict[str, float] = msgspec.field(default_factory=dict)
    state_bytes: int = 0  # of the first state it had
    state_seconds: float | None = None  # from being connected until it had a state
    work_seconds: float | None = None  # and until its first kernel was done


def read_members(directory: RunDirectory) -> dict[str, Measured]:
    """What was written; empty where nothing readable is."""
    try:
        return msgspec.json.decode((directory.path / MEMBERS).read_bytes(), type=dict[str, Measured])
    except (OSError, msgspec.DecodeError):
        return {}


_MOST_LINKS = 24


class SwarmStageReport(msgspec.Struct, frozen=True, kw_only=True):
    """What all workers of a stage did together. The last stage does forward and backward in one; both are then under backward."""

    stage: int
    workers: int  # that ever computed for it
    micro_batches: int  # whose backward was computed, those done again included
    micro_batches_per_second: float | None  # that were committed
    forward_seconds: Compared  # of a micro-batch, the mean
    backward_seconds: Compared


class MemberReport(msgspec.Struct, frozen=True, kw_only=True):
    """One process of the swarm."""

    name: str
    stages: list[int]  # it was on, in order
    joined_seconds: float  # the run's own time
    ending: str  # "works", or "stayed" until the run ended; "left", "dead", "silent" (it stands still, is cut off or dead), "unknown"
    ended_seconds: float | None
    micro_batches: int
    state_bytes: int
    state_seconds: float | None  # from connecting until it had a state
    work_seconds: float | None  # and until its first kernel was done


class SwarmLinkReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one process got from another."""

    source: str
    target: str
    bytes: int
    bytes_per_s: float | None  # while something was on its way
    round_trip_seconds: float | None


class SwarmReport(msgspec.Struct, frozen=True, kw_only=True):
    """Of a run in swarm mode."""

    steps_per_second: float | None  # without the first since each start, which lasts as long as starting does
    micro_batches: int  # of a step
    joined: int
    left: int
    silent: int  # times that somebody was not heard for too long
    returned: int
    moved: int
    coordinators: int
    stages_lost: int
    steps_repaired: int
    asked_again: list[int]  # micro-batches, by stage
    steps_repeated: int  # made again after a return to a checkpoint
    again: int | None  # micro-batches of a stage that were computed and not needed, those of repeated steps included
    again_at_least: bool  # somebody's last account is missing, so more may have been
    computed_again: float | None  # as a share of all that were computed
    stages: list[SwarmStageReport]
    members: list[MemberReport]
    links: list[SwarmLinkReport]  # the slowest first; after them those too little used to tell, the busiest first
    more_links: int = 0  # that are not listed


def tell_swarm(
    events: Sequence[AnyEvent],
    measured: dict[str, Measured],
    micro_batches: int,
    stages: int,
    predicted: Cost | None,
    *,
    silent: bool = False,
) -> SwarmReport:
    """What events and the workers' own accounts say. `silent`: the run has not said how it ended, and nobody seems to be there."""
    counts = Counter(type(event) for event in events)
    changes = Counter(map(_change, events))
    steps = [event for event in events if isinstance(event, StepFinished)]
    seconds = [event.seconds for event in steps_after_the_first(events)]
    rate = len(seconds) / sum(seconds) if sum(seconds) else None
    links = _links(measured)
    repaired = [event for event in events if isinstance(event, StepRepaired)]
    needed, repeated = len({event.step for event in steps}), len(steps) - len({event.step for event in steps})
    again = _again(measured, needed * micro_batches * stages, repeated * micro_batches * stages)
    return SwarmReport(
        steps_per_second=rate,
        micro_batches=micro_batches,
        joined=changes["joined"],
        left=changes["left"],
        silent=changes["silent"],
        returned=changes["returned"],
        moved=counts[MemberMoved],
        coordinators=counts[CoordinatorStarted],
        stages_lost=counts[StageLost],
        steps_repaired=len({event.step for event in repaired}),
        asked_again=[sum(event.micro_batches[stage] for event in repaired if stage < len(event.micro_batches)) for stage in range(stages)],
        steps_repeated=repeated,
        again=again,
        again_at_least=_accounts_end_early(events),
        computed_again=None if again is None else again / (again + needed * micro_batches * stages),
        stages=[_stage(stage, measured, predicted, None if rate is None else rate * micro_batches) for stage in range(stages)],
        members=_members(events, measured, silent),
        links=links[:_MOST_LINKS],
        more_links=len(links[_MOST_LINKS:]),
    )


def _change(event: AnyEvent) -> str:
    """What happened to a process; it is told of each worker it hosts, and counts once."""
    if not isinstance(event, MemberChanged) or process_of(event.name) != event.name:
        return ""
    if event.state == "active":
        return "returned" if event.before == "silent" else "joined"
    return event.state


def _done(kernels: KernelTimes) -> int:
    return kernels.backwards + kernels.turns


def _again(measured: dict[str, Measured], needed: int, repeated: int) -> int | None:
    """By the workers' accounts, from which some may be missing, but no fewer than the events say; None where nothing is known."""
    computed = sum(_done(kernels) for account in measured.values() for kernels in account.kernels.values())
    return max(computed - needed, repeated) if needed and (computed or repeated) else None


def _accounts_end_early(events: Sequence[AnyEvent]) -> bool:
    """Workers give accounts every few seconds: what they did after the last is not known of those who were lost, or are at work."""
    started = sum(isinstance(event, RunStarted) for event in events)
    finished = sum(isinstance(event, RunFinished) for event in events)
    return finished < started or any(_change(event) == "silent" for event in events)


def _stage(stage: int, measured: dict[str, Measured], predicted: Cost | None, rate: float | None) -> SwarmStageReport:
    rows = [account.kernels[stage] for account in measured.values() if stage in account.kernels]
    price = predicted.stages[stage] if predicted is not None and stage < len(predicted.stages) else None
    turning = any(row.turns for row in rows)
    forward = None if turning else _mean(sum(row.forward_seconds for row in rows), sum(row.forwards for row in rows))
    backward = _mean(sum(row.backward_seconds + row.turn_seconds for row in rows), sum(_done(row) for row in rows))
    expected = None if price is None else price.backward_seconds + (price.forward_seconds if turning else 0.0)
    return SwarmStageReport(
        stage=stage,
        workers=len(rows),
        micro_batches=sum(_done(row) for row in rows),
        micro_batches_per_second=rate,
        forward_seconds=Compared(measured=forward, predicted=None if price is None or turning else price.forward_seconds),
        backward_seconds=Compared(measured=backward, predicted=expected),
    )


def _mean(total: float, count: int) -> float | None:
    return total / count if count else None


def _members(events: Sequence[AnyEvent], measured: dict[str, Measured], silent: bool) -> list[MemberReport]:
    """Workers, in the order they came; one that came back as somebody new is one."""
    stages: dict[str, list[int]] = {}
    joined: dict[str, float] = {}
    ending: dict[str, tuple[str, float | None]] = {}
    last = next((event for event in reversed(events) if isinstance(event, RunFinished | RunStarted | StepFinished | MemberChanged)), None)
    over = isinstance(last, RunFinished)  # processes end after it
    works = "stayed" if over else "unknown" if silent else "works", None
    for event in events:
        match event:
            case MemberChanged(state="active", before="silent"):
                ending[event.name] = works
            case MemberChanged(state="active", stages=(stage, *_)):
                joined.setdefault(event.name, event.at_seconds)
                stages.setdefault(event.name, []).append(stage)
                ending[event.name] = works
            case MemberMoved() if event.name in stages:
                stages[event.name].append(event.target)
            case MemberChanged(state="dead"):
                ending |= {name: ("dead", event.at_seconds) for name in joined if process_of(name) == event.name}
            case MemberChanged(state="left" | "silent") if ending.get(event.name, works)[0] != "dead":  # nobody is heard after that
                ending[event.name] = event.state, event.at_seconds
    return [_member(name, stages[name], joined[name], ending[name], measured.get(name, Measured())) for name in joined]


def _member(name: str, stages: list[int], joined: float, ending: tuple[str, float | None], account: Measured) -> MemberReport:
    return MemberReport(
        name=name,
        stages=stages,
        joined_seconds=joined,
        ending=ending[0],
        ended_seconds=ending[1],
        micro_batches=sum(map(_done, account.kernels.values())),
        state_bytes=account.state_bytes,
        state_seconds=account.state_seconds,
        work_seconds=account.work_seconds,
    )


def _links(measured: dict[str, Measured]) -> list[SwarmLinkReport]:
    found = [
        SwarmLinkReport(
            source=source,
            target=target,
            bytes=size,
            bytes_per_s=account.received_bytes_per_s.get(source),
            round_trip_seconds=account.round_trip_seconds.get(source),
        )
        for target, account in measured.items()
        for source, size in account.received_bytes.items()
        if source != target
    ]
    return sorted(found, key=lambda link: (link.bytes_per_s or math.inf, -link.bytes))
