"""Reduction: which frozen buffers make up a step, and how they are summed: one worker's part in it, and what the coordinator knows of it.

Chosen buffers are pairwise disjoint; where their union is every micro-batch, their sum is the gradient of the step, each micro-batch once.
Exactness rests on that choice, which is a pure function. A worker sums the chunks it owns and collects the others from their owners.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from atoll.control.membership import Members
from atoll.control.messages import (
    BufferId,
    BufferManifest,
    Contributor,
    Manifest,
    Message,
    Pull,
    PullSum,
    Reduce,
    Reduced,
    Round,
    StageReduction,
    SumChunk,
    SumPart,
)
from atoll.control.settings import Settings
from atoll.control.worker_state import Buffers
from atoll.control.world import Compute
from atoll.events import MemberTooSlow

__all__ = [
    "Choice",
    "Reduction",
    "ReductionRound",
    "SumSection",
    "choose",
    "choose_stages",
    "stage_reduction",
    "too_slow",
    "waits_for_joiners",
]


class Choice(msgspec.Struct, frozen=True):
    """Buffers to be summed for one stage, and what none of them holds."""

    buffers: tuple[BufferId, ...]
    missing: frozenset[int]
    loss: float
    weight: float


def choose(manifests: Iterable[Manifest], micro_batches: frozenset[int]) -> Choice:
    """Keeps disjoint buffers greedily, largest first; equal ones by name, so that everybody would choose alike."""
    found: list[tuple[BufferManifest, BufferId]] = [
        (buffer, (manifest.worker, manifest.incarnation, buffer.index)) for manifest in manifests for buffer in manifest.buffers
    ]
    found.sort(key=lambda pair: (-len(pair[0].micro_batches), pair[1]))
    held: set[int] = set()
    chosen: list[BufferId] = []
    loss = weight = 0.0
    for buffer, identity in found:
        if not buffer.micro_batches or not buffer.micro_batches <= micro_batches:
            continue
        if not held.isdisjoint(buffer.micro_batches):
            continue
        held |= buffer.micro_batches
        chosen.append(identity)
        loss += buffer.loss
        weight += buffer.weight
    return Choice(buffers=tuple(chosen), missing=micro_batches - held, loss=loss, weight=weight)


def choose_stages(manifests: Iterable[Manifest], stages: int, micro_batches: frozenset[int]) -> tuple[Choice, ...]:
    """The choice of every stage."""
    by_stage: list[list[Manifest]] = [[] for _ in range(stages)]
    for manifest in manifests:
        by_stage[manifest.stage].append(manifest)
    return tuple(choose(row, micro_batches) for row in by_stage)


@dataclass(slots=True, eq=False)
class _Owned:
    """A chunk this worker sums: who is still missing, and who wants it."""

    total: Any
    waiting_for: set[str]
    wanted_by: set[str] = field(default_factory=set)
    done: bool = False


class SumSection:
    """One sum: the stage's own, or what it shares with tied stages."""

    def __init__(
        self,
        worker: str,
        round: Round,
        position: tuple[int, int, int],  # epoch, version, number of the sum
        plan: StageReduction,
        fits: Callable[[int, Any], bool],
        compute: Compute,
        send: Callable[[str, Message], None],
    ) -> None:
        self._worker, self._round, self._position, self._plan, self._fits = worker, round, position, plan, fits
        self._compute, self._send = compute, send
        self.sums: dict[int, Any] = {}
        self._owned: dict[int, _Owned] = {}
        names = {contributor.worker for contributor in plan.contributors}
        for chunk, owner in enumerate(plan.owners):
            if owner == worker:
                self._owned[chunk] = _Owned(compute.zero(position[2], chunk), set(names))

    @property
    def complete(self) -> bool:
        """Whether all chunks of the sum are here."""
        return len(self.sums) == len(self._plan.owners)

    def ask(self) -> None:
        """Asks for what is not here yet."""
        for chunk, owner in enumerate(self._plan.owners):
            owned = self._owned.get(chunk)
            if owned is None:
                if chunk not in self.sums:
                    self._send(owner, PullSum(self._round, *self._position, chunk, self._worker))
                continue
            for who in self._plan.contributors:
                if who.worker in owned.waiting_for:
                    self._send(who.worker, Pull(self._round, *self._position, chunk, self._worker, who.incarnation, who.buffers))

    def missing(self) -> set[str]:
        """Who has not sent what is missing."""
        names: set[str] = set()
        for chunk, owner in enumerate(self._plan.owners):
            owned = self._owned.get(chunk)
            if owned is not None:
                names |= owned.waiting_for
            elif chunk not in self.sums:
                names.add(owner)
        return names

    def on_part(self, part: SumPart) -> Any:
        """The chunk's sum where this was the last part of it, else None."""
        owned = self._owned.get(part.chunk)
        if owned is None or owned.done or not self._fits(part.chunk, part.payload):
            return None
        if not self._counts(part, owned.waiting_for):
            return None
        owned.waiting_for.discard(part.worker)
        owned.total = self._compute.add(owned.total, part.payload)
        if owned.waiting_for:
            return None
        owned.done = True
        self.sums[part.chunk] = owned.total
        for worker in sorted(owned.wanted_by):
            self._send(worker, SumChunk(self._round, *self._position, part.chunk, owned.total))
        return owned.total

    def _counts(self, part: SumPart, waiting_for: set[str]) -> bool:
        """Once from every contributor."""
        return part.worker in waiting_for

    def on_pull_sum(self, pull: PullSum) -> None:
        """Sends the sum, now or when it is there."""
        owned = self._owned.get(pull.chunk)
        if pull.chunk in self.sums:  # its own, or asked for by one who catches up and has heard of the commit before this worker
            self._send(pull.worker, SumChunk(self._round, *self._position, pull.chunk, self.sums[pull.chunk]))
        elif owned is not None:
            owned.wanted_by.add(pull.worker)

    def on_sum(self, message: SumChunk) -> None:
        """An owner's sum."""
        if self._fits(message.chunk, message.payload):
            self.sums.setdefault(message.chunk, message.payload)

    def result(self) -> list[Any]:
        """All chunks, in order."""
        return [self.sums[chunk] for chunk in range(len(self._plan.owners))]


class Reduction:
    """A worker's state of one round: the sums its stage needs, its own first."""

    section_type = SumSection

    def __init__(
        self,
        worker: str,
        position: tuple[int, int, int],  # epoch, version, stage
        settings: Settings,
        order: Reduce,
        compute: Compute,
        buffers: Buffers,
        send: Callable[[str, Message], None],
    ) -> None:
        self.round: Round = order.round
        self.position = position
        self.digest = ""
        self.norm_squared = 0.0
        self._compute, self._buffers, self._settings = compute, buffers, settings
        stage = position[2]
        self._sections = {
            number: self.section_type(
                worker,
                order.round,
                (position[0], position[1], number),
                order.stages[number],
                partial(compute.fits, stage, place),
                compute,
                send,
            )
            for place, number in enumerate(settings.sections(stage))
        }

    @property
    def complete(self) -> bool:
        """Whether all chunks of the result are here."""
        return self.digest != ""

    def ask(self) -> None:
        """Asks for everything not here yet: at the start, and again when an answer is late."""
        for section in self._sections.values():
            section.ask()

    def missing(self) -> tuple[str, ...]:
        """Whom this worker is waiting for."""
        return tuple(sorted(set().union(*(section.missing() for section in self._sections.values()))))

    def on_part(self, part: SumPart) -> None:
        """A contributor's chunk. Each is added once, in the order of arrival."""
        total = self._sections[part.stage].on_part(part)
        if total is not None:
            self._look()

    def on_pull_sum(self, pull: PullSum) -> None:
        """Somebody wants a chunk this worker has, or owns: now, or when it is summed."""
        self._sections[pull.stage].on_pull_sum(pull)

    def on_sum(self, message: SumChunk) -> None:
        """An owner's sum."""
        self._sections[message.stage].on_sum(message)
        self._look()

    def _look(self) -> None:
        if not all(section.complete for section in self._sections.values()):
            return
        stage = self.position[2]
        self.norm_squared = sum(
            self._compute.norm_squared(stage, place, section.result())
            for place, (number, section) in enumerate(self._sections.items())
            if self._settings.counts(stage, number)
        )
        self.digest = self._compute.digest(self.result())

    def sums(self, stage: int) -> Mapping[int, Any]:
        """The chunks of one sum that are here."""
        return self._sections[stage].sums

    def all_sums(self) -> dict[int, Mapping[int, Any]]:
        """All chunks that are here, by number of the sum."""
        return {number: section.sums for number, section in self._sections.items()}

    def take_over(self, other: "Reduction") -> None:
        """What another has collected of the same sums."""
        for number, section in self._sections.items():
            section.sums.update(other.sums(number))
        self._look()

    def result(self) -> list[Any]:
        """The reduced gradient, chunk by chunk, section by section."""
        return [part for section in self._sections.values() for part in section.result()]


def stage_reduction(
    buffers: Sequence[BufferId], responders: Sequence[Manifest], stages: Collection[int], chunks: int, turn: int
) -> StageReduction:
    """How a stage, or several that are tied, add the chosen buffers up. `turn` differs each time, so that owners do too."""
    indices: dict[tuple[str, int], list[int]] = {}
    for worker, incarnation, index in buffers:
        indices.setdefault((worker, incarnation), []).append(index)
    contributors = tuple(Contributor(*who, tuple(sorted(found))) for who, found in sorted(indices.items()))
    members = tuple(sorted((manifest.worker, manifest.incarnation) for manifest in responders if manifest.stage in stages))
    owners = tuple(members[(chunk + turn) % len(members)][0] for chunk in range(chunks))
    return StageReduction(contributors, members, owners)


class ReductionRound:
    """One reduction. `rounds` is how many SEALs its step has taken so far."""

    __slots__ = ("order", "choices", "rounds", "began", "deadline", "awaited", "reports", "_blame", "_owners", "_contributors")

    def __init__(self, order: Reduce, choices: tuple[Choice, ...], rounds: int, began: float, deadline: float) -> None:
        self.order, self.choices, self.rounds, self.began = order, choices, rounds, began
        self.deadline = deadline
        self.awaited = {worker for stage in order.stages for worker, _ in stage.members}
        self.reports: list[dict[str, Reduced]] = [{} for _ in choices]
        self._blame: dict[str, tuple[str, ...]] = {}
        self._owners = {owner for stage in order.stages for owner in stage.owners}
        self._contributors = {(who.worker, who.incarnation) for stage in order.stages for who in stage.contributors}

    def hear(self, report: Reduced) -> bool:
        """Takes a report; True when it brings a result, False when it tells who is missing."""
        if not report.digest:
            self._blame[report.worker] = report.missing
            return False
        self._blame.pop(report.worker, None)
        self.reports[report.stage][report.worker] = report
        self.awaited.discard(report.worker)
        return True

    def contributes(self, worker: str, incarnation: int) -> bool:
        """Whether the sums cannot be made without it."""
        return worker in self._owners or (worker, incarnation) in self._contributors

    def members(self) -> set[str]:
        """All who take part."""
        return {name for stage in self.order.stages for name, _ in stage.members}

    def disagree(self) -> bool:
        """Whether two members of a stage hold different sums."""
        return any(len({report.digest for report in row.values()}) > 1 for row in self.reports)

    def most_blamed(self) -> str | None:
        """Whom most are waiting for."""
        votes = Counter(name for names in self._blame.values() for name in names)
        return min(votes, key=lambda name: (-votes[name], name)) if votes else None


def waits_for_joiners(
    members: Members, summing: ReductionRound, settings: Settings, *, version: int, barred: set[str], now: float, beat: int
) -> bool:
    """Whether the commit of `version` waits: for a joiner's next chunk, and not for ever.

    Nobody waits for one that came in the middle of this step: it has all of the next step to fetch a state, or to finish what it has and
    catch up. Only whoever has missed a commit before would perhaps never be in time. What is decided is noted in the members.
    """
    taking_part = summing.members()
    held = False
    for member in members:
        if not member.worker or member.stage < 0 or member.name in summing.reports[member.stage] or member.name in barred:
            continue
        has_state = member.version >= 0 and member.version in (version, version - 1)  # and still needs sums
        collecting = has_state and member.name not in taking_part and members.live(member, now, beat)
        if not (member.fetched >= 0 or collecting) or not members.heard(member, now):
            continue
        if member.missed < 0:
            member.missed = version
        if member.missed == version:
            continue
        if member.held_at_most == 0.0:
            member.held_at_most = now + settings.hold_limit_seconds
        if member.held_with != (member.version, member.fetched):  # it is getting on
            member.held_with = member.version, member.fetched
            member.held_until = now + settings.hold_seconds
        held = held or now < min(member.held_until, member.held_at_most)
    return held


def too_slow(members: Members, settings: Settings, now: float) -> Iterator[MemberTooSlow]:
    """Those that a commit has just been made without though they had all the time there is for them; each is told once."""
    for member in members:
        if member.held_at_most and now >= member.held_at_most and not member.too_slow and member.fetched >= 0:
            member.too_slow = True
            yield MemberTooSlow(name=member.name, stage=member.stage, fetched=member.fetched / settings.chunks)
