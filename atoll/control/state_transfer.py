"""A stage's state on its way to a joining worker (docs/swarm.md, rule 13), fetched from several donors at once, all chunks of one
(epoch, version); and to the store (rule 15).

A donor gives its state chunk by chunk, and over a commit what joiners need to finish and make the step themselves: a joiner whose state is
superseded while it arrives finishes it, and catches up by making the missed step with the sums of its donors.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from atoll.control.adaptive_timeout import AdaptiveTimeout
from atoll.control.messages import Assignment, FetchState, Message, PullSum, Reduce, Round, StageReduction, StateChunk, SumChunk, View
from atoll.control.worker_state import EARLY_LIMIT, WorkerState
from atoll.control.world import Checkpoints, Clock

__all__ = ["DONORS", "ENOUGH", "Fetch", "Snapshots", "StateDonor", "sums_from"]

DONORS = 4  # of a joiner, at most
ENOUGH = 0.5  # of a state's chunks: with fewer, beginning anew is as quick as finishing and fetching the sums too


def sums_from(donors: Collection[str], round: Round, sums: int, chunks: int) -> Reduce:
    """An order by which whoever takes no part gets every sum of a committed round from those who have kept it."""
    names = sorted(donors)
    owners = tuple(names[chunk % len(names)] for chunk in range(chunks))
    return Reduce(round, (StageReduction((), (), owners),) * sums)


WINDOW = 4  # chunks asked of each donor at once: the next is on its way while one arrives, and a busy donor is not drowned


class Fetch:
    """One attempt at one (epoch, version, stage). A new version is a new attempt, with a new nonce."""

    def __init__(
        self, worker: str, nonce: int, position: tuple[int, int, int], chunks: int, patience: AdaptiveTimeout | None = None
    ) -> None:
        self.nonce, self.position, self._worker, self._chunks = nonce, position, worker, chunks
        self._timeout = patience or AdaptiveTimeout(1.0, 0.0)  # kept over attempts: what a chunk takes on these links is learnt once
        self._asked: dict[int, tuple[float, str]] = {}  # when and whom
        self._turn = nonce
        self.received: dict[int, Any] = {}
        self.givers: set[str] = set()  # who has sent some of it

    def ask(self, now: float, donors: tuple[str, ...], send: Callable[[str, FetchState], None]) -> None:
        """Asks donors in turn, a few chunks of each at a time; another donor when one is gone or an answer is late.

        Late is what takes longer than chunks have taken so far: over a slow link, asking again too soon would fill it with doubles.
        """
        window = WINDOW * len(donors)
        late = self.late(now)
        if late:
            self._timeout.failed()
        for chunk in {*late, *(chunk for chunk, (_, donor) in self._asked.items() if donor not in donors)}:
            del self._asked[chunk]
        for chunk in range(self._chunks):
            if len(self._asked) >= window:
                return
            if chunk not in self.received and chunk not in self._asked:
                donor = donors[self._turn % len(donors)]
                self._asked[chunk] = now, donor
                send(donor, FetchState(self.nonce, *self.position, chunk, self._worker))
                self._turn += 1

    def late(self, now: float) -> list[int]:
        """Chunks that take longer than others did."""
        return [chunk for chunk, (at, _) in self._asked.items() if now - at >= self._timeout.seconds()]

    def on_chunk(self, message: StateChunk, now: float) -> bool:
        """Takes a chunk; True when it was the last one missing."""
        if not self._is_of_this(message) or message.chunk in self.received:
            return False
        self.received[message.chunk] = message.payload
        at, donor = self._asked.pop(message.chunk, (None, ""))
        if at is not None:
            self.givers.add(donor)
            self._timeout.measured(now - at)
        return len(self.received) == self._chunks

    def _is_of_this(self, message: StateChunk) -> bool:
        return message.nonce == self.nonce and (message.epoch, message.version, message.stage) == self.position

    def chunks(self) -> list[Any]:
        """All of them, in order."""
        return [self.received[chunk] for chunk in range(self._chunks)]


class _Past(NamedTuple):
    """What is kept of a step: the state before it, and the sums it was made with."""

    position: tuple[int, int, int]  # epoch, version, stage
    round: Round
    state: Any
    sums: Mapping[int, Mapping[int, Any]]  # by number of the sum, and chunk


class StateDonor:
    """One donor."""

    def __init__(self, at: WorkerState, send: Callable[[str, Message], None]) -> None:
        self._given: dict[str, set[int]] = {}  # chunks of this version, by who fetches it
        self._asked_for_past = False
        self._at, self._send = at, send
        self._past: _Past | None = None
        self._early: deque[FetchState] = deque(maxlen=EARLY_LIMIT)

    @property
    def wanted(self) -> bool:
        """Whether somebody may want the state over the next commit: one that catches up, or has enough of it by then.

        A donor gives a share of the chunks only.
        """
        enough = ENOUGH * self._at.settings.chunks / DONORS
        return self._asked_for_past or any(len(chunks) >= enough for chunks in self._given.values())

    def remember(self, position: tuple[int, int, int], round: Round, kept: Any, sums: Mapping[int, Mapping[int, Any]]) -> None:
        """A step was made; `kept` is the state before it, None where nobody wants it."""
        self._past = _Past(position, round, kept, sums) if kept is not None else None
        self._given, self._asked_for_past = {}, False

    def forget(self) -> None:
        """The state is given up."""
        self._past = None
        self._given, self._asked_for_past = {}, False

    def on_fetch(self, fetch: FetchState) -> None:
        """A chunk of exactly the version asked for: this one, the one before it, or one this worker is about to have."""
        at, past = self._at, self._past
        if fetch.stage != at.stage:
            return
        if past is not None and past.position == (fetch.epoch, fetch.version, fetch.stage):
            self._asked_for_past = True
            chunk = at.compute.read_kept(past.state, fetch.chunk)
            self._send(fetch.worker, StateChunk(fetch.nonce, *past.position, fetch.chunk, chunk))
            return
        if at.changing or self._is_to_come(fetch):
            self._early.append(fetch)
            return
        if at.state is None or not self._is_here(fetch):
            return
        self._given.setdefault(fetch.worker, set()).add(fetch.chunk)
        self._send(fetch.worker, StateChunk(fetch.nonce, *at.position, fetch.chunk, at.compute.read_chunk(at.state, fetch.chunk)))

    def _is_to_come(self, fetch: FetchState) -> bool:
        return (fetch.epoch, fetch.version) > (self._at.epoch, self._at.version)

    def _is_here(self, fetch: FetchState) -> bool:
        return (fetch.epoch, fetch.version) == (self._at.epoch, self._at.version)

    def answer_early(self) -> None:
        """There is a new state."""
        early, self._early = self._early, deque(maxlen=EARLY_LIMIT)
        for fetch in early:
            self.on_fetch(fetch)

    def on_pull_sum(self, pull: PullSum) -> bool:
        """Gives a sum of the step before; False where it is not about that."""
        past = self._past
        if past is None or (past.round, *past.position[:2]) != (pull.round, pull.epoch, pull.version):
            return False
        self._asked_for_past = True
        kept = past.sums.get(pull.stage, {}).get(pull.chunk)
        if kept is not None:
            self._send(pull.worker, SumChunk(past.round, pull.epoch, pull.version, pull.stage, pull.chunk, kept))
        return True


@dataclass(slots=True, eq=False)
class _Snapshot:
    """A copy of the state at a version that is being stored."""

    version: int
    content: Any
    written_in: int = 0  # the term of the coordinator it was last sent to
    digested: bool = False
    digest: str = ""


class Snapshots:
    """Takes the snapshot exactly at its version; writes it, or tells its digest, while training goes on."""

    def __init__(self, at: WorkerState, clock: Clock, checkpoints: Checkpoints, beat: Callable[[], None]) -> None:
        self._at, self._clock, self._checkpoints, self._beat = at, clock, checkpoints, beat
        self._taken: _Snapshot | None = None  # as long as its version is being stored

    def forget(self) -> None:
        """It is not this worker's any more."""
        self._taken = None

    def attests(self) -> tuple[int, str] | None:
        """Version and digest of the state, as soon as it is known."""
        return (self._taken.version, self._taken.digest) if self._taken is not None and self._taken.digest else None

    def follow(self, view: View, yours: Assignment) -> None:
        """What the coordinator asks for. Another one does not know what was sent to the one before."""
        if self._taken is not None and self._taken.version != view.checkpoint:
            self._taken = None
        if self._taken is None and view.checkpoint == self._at.version and (yours.store or yours.attest):
            self._taken = _Snapshot(self._at.version, self._copy())
        taken = self._taken
        if taken is not None and yours.store and taken.written_in < view.term:
            taken.written_in = view.term
            self._clock.spawn(self._write(self._at.epoch, self._at.stage, taken))
        if taken is not None and yours.attest and not taken.digested:
            taken.digested = True
            self._clock.spawn(self._attest(taken))

    def _copy(self) -> Any:
        return self._at.compute.snapshot(self._at.state)

    async def _write(self, epoch: int, stage: int, taken: _Snapshot) -> None:
        await self._checkpoints.write(epoch, taken.version, stage, taken.content)

    async def _attest(self, taken: _Snapshot) -> None:
        taken.digest = await self._checkpoints.digest(taken.content)
        self._beat()
