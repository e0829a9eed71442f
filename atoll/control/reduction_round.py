"""A reduction under way as the coordinator sees it: who has reported, who is blamed, and whether its commit waits for joining members."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from atoll.control.decision import Choice
from atoll.control.membership import Members
from atoll.control.messages import BufferId, Contributor, Manifest, Reduce, Reduced, StageReduction
from atoll.control.notices import TooSlow
from atoll.control.settings import Settings

__all__ = ["ReductionRound", "stage_reduction", "too_slow", "waits_for_joiners"]


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
        self.order = order
        self.choices = choices
        self.rounds = rounds
        self.began = began
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


def too_slow(members: Members, settings: Settings, now: float) -> Iterator[TooSlow]:
    """Those that a commit has just been made without though they had all the time there is for them; each is told once."""
    for member in members:
        if member.held_at_most and now >= member.held_at_most and not member.too_slow and member.fetched >= 0:
            member.too_slow = True
            yield TooSlow(member.name, member.stage, member.fetched / settings.chunks)
