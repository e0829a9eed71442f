"""Reduction: one worker's part in summing a stage's chosen buffers — the chunks it owns, and the sums it collects from other owners.

Nothing here waits: asking, answering and asking again are driven by messages and by the worker's tick. The result is kept apart from the
buffers, so that a round that fails can be repeated with the same buffers. What is late is asked for again, and late is what takes longer
than chunks have taken so far: over a slow link, asking sooner would fill it with doubles, and nothing would ever be summed.
"""

from collections.abc import Callable
from typing import Any

from atoll.control.buffers import Buffers
from atoll.control.checks import Checks
from atoll.control.messages import Message, Part, Pull, PullSum, Reduce, Round, StageReduction, SumChunk
from atoll.control.patience import Patience
from atoll.control.world import Compute

__all__ = ["Reduction"]


class _Owned:
    """A chunk this worker sums: who is still missing, and who wants it."""

    __slots__ = ("total", "waiting_for", "wanted_by", "done")

    def __init__(self, total: Any, contributors: set[str]) -> None:
        self.total = total
        self.waiting_for = contributors
        self.wanted_by: set[str] = set()
        self.done = False


class Reduction:
    """A worker's state of one round."""

    def __init__(
        self,
        worker: str,
        position: tuple[int, int, int],  # epoch, version, stage
        order: Reduce,
        compute: Compute,
        buffers: Buffers,
        checks: Checks,
        send: Callable[[str, Message], None],
        patience: Patience,
    ) -> None:
        self._patience = patience  # kept over rounds
        self._asked: dict[tuple[int, str], float] = {}  # when which chunk was asked of whom
        self.round: Round = order.round
        self.position = position
        self._worker = worker
        self._plan: StageReduction = order.stages[position[2]]
        self._compute = compute
        self._buffers = buffers
        self._checks = checks
        self._send = send
        self.sums: dict[int, Any] = {}
        self.digest = ""
        self.norm_squared = 0.0
        self._owned: dict[int, _Owned] = {}
        names = {contributor.worker for contributor in self._plan.contributors}
        for chunk, owner in enumerate(self._plan.owners):
            if owner == worker:
                self._owned[chunk] = _Owned(compute.zero(position[2], chunk), set(names))

    @property
    def complete(self) -> bool:
        """Whether all chunks of the result are here."""
        return self.digest != ""

    def ask(self, now: float) -> None:
        """Asks for everything not here yet: at the start, and again when an answer is late."""
        limit = now - self._patience.seconds()
        if any(at <= limit for at in self._asked.values()):
            self._patience.failed()
        for chunk, owner in enumerate(self._plan.owners):
            owned = self._owned.get(chunk)
            if owned is None:
                if chunk not in self.sums and self._due(chunk, owner, now, limit):
                    self._send(owner, PullSum(self.round, *self.position, chunk, self._worker))
                continue
            for who in self._plan.contributors:
                if who.worker in owned.waiting_for and self._due(chunk, who.worker, now, limit):
                    self._send(who.worker, Pull(self.round, *self.position, chunk, self._worker, who.incarnation, who.buffers))

    def _due(self, chunk: int, of: str, now: float, limit: float) -> bool:
        if self._asked.get((chunk, of), limit) > limit:
            return False
        self._asked[chunk, of] = now
        return True

    def _answered(self, chunk: int, by: str, now: float) -> None:
        at = self._asked.pop((chunk, by), None)
        if at is not None:
            self._patience.measured(now - at)

    def missing(self) -> tuple[str, ...]:
        """Whom this worker is waiting for."""
        names: set[str] = set()
        for chunk, owner in enumerate(self._plan.owners):
            owned = self._owned.get(chunk)
            if owned is not None:
                names |= owned.waiting_for
            elif chunk not in self.sums:
                names.add(owner)
        return tuple(sorted(names))

    def on_part(self, part: Part, now: float) -> None:
        """A contributor's chunk. Each is added once, in the order of arrival."""
        owned = self._owned.get(part.chunk)
        if owned is None or owned.done:
            return
        if part.worker not in owned.waiting_for and self._checks.duplicate_filter:
            return
        owned.waiting_for.discard(part.worker)
        self._answered(part.chunk, part.worker, now)
        owned.total = self._compute.add(owned.total, part.payload)
        if owned.waiting_for:
            return
        owned.done = True
        if not self._checks.out_of_place:
            self._compute.store(self._buffers.get(0, self.position[2]).value, part.chunk, owned.total)
        self._keep(part.chunk, owned.total)
        for worker in sorted(owned.wanted_by):
            self._send(worker, SumChunk(self.round, *self.position, part.chunk, owned.total))

    def on_pull_sum(self, pull: PullSum) -> None:
        """Somebody wants a chunk this worker owns: now, or when it is summed."""
        owned = self._owned.get(pull.chunk)
        if owned is None:
            return
        if owned.done:
            self._send(pull.worker, SumChunk(self.round, *self.position, pull.chunk, owned.total))
        else:
            owned.wanted_by.add(pull.worker)

    def on_sum(self, message: SumChunk, now: float) -> None:
        """An owner's sum."""
        if message.chunk not in self.sums:
            self._answered(message.chunk, self._plan.owners[message.chunk], now)
            self._keep(message.chunk, message.payload)

    def _keep(self, chunk: int, value: Any) -> None:
        self.sums[chunk] = value
        if len(self.sums) == len(self._plan.owners):
            ordered = self.result()
            self.norm_squared = self._compute.norm_squared(ordered)
            self.digest = self._compute.digest(ordered)

    def result(self) -> list[Any]:
        """The reduced gradient, chunk by chunk."""
        return [self.sums[chunk] for chunk in range(len(self._plan.owners))]
