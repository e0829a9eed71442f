"""Summing: a reduction under way as the coordinator sees it — who has reported, who is waited for, who is blamed."""

from collections import Counter
from collections.abc import Collection, Sequence

from atoll.control.decision import Choice
from atoll.control.messages import BufferId, Contributor, Manifest, Reduce, Reduced, StageReduction

__all__ = ["Summing", "stage_reduction"]


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


class Summing:
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
