"""Reduction: one worker's part in summing chosen buffers — the chunks it owns, and the sums it collects from other owners.

Nothing here waits: asking, answering and asking again are driven by messages and by the worker's tick. The result is kept apart from the
buffers, so that a round that fails can be repeated with the same buffers.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from atoll.control.messages import Message, Pull, PullSum, Reduce, Round, StageReduction, SumChunk, SumPart
from atoll.control.settings import Settings
from atoll.control.worker_state import Buffers
from atoll.control.world import Compute

__all__ = ["Reduction", "SumSection"]


class _Owned:
    """A chunk this worker sums: who is still missing, and who wants it."""

    __slots__ = ("total", "waiting_for", "wanted_by", "done")

    def __init__(self, total: Any, contributors: set[str]) -> None:
        self.total = total
        self.waiting_for = contributors
        self.wanted_by: set[str] = set()
        self.done = False


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
        self._worker = worker
        self._round = round
        self._position = position
        self._plan = plan
        self._fits = fits
        self._compute = compute
        self._send = send
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
        self._compute = compute
        self._buffers = buffers
        self._settings = settings
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
