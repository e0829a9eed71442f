"""Messages: everything that travels between coordinator, feeders and workers.

Every message names what it is about as completely as rule 1 of docs/swarm.md asks, so that a receiver can tell a late, doubled or
foreign one from one that matters. Payloads (activations, gradients, chunks of state) are opaque here; a transport sends
their bytes behind the header.
"""

from typing import Any, NamedTuple, TypeAlias

import msgspec

__all__ = [
    "Ack",
    "Announce",
    "Assignment",
    "Attempt",
    "Backward",
    "BufferId",
    "BufferManifest",
    "Committed",
    "Contributor",
    "FeederBeat",
    "FetchState",
    "Finished",
    "Forward",
    "Manifest",
    "Message",
    "OfState",
    "OfSum",
    "OfWork",
    "Order",
    "Peer",
    "Phase",
    "Pull",
    "PullSum",
    "Reduce",
    "Reduced",
    "Round",
    "Run",
    "Seal",
    "StageReduction",
    "StateChunk",
    "SumChunk",
    "SumPart",
    "View",
    "WorkerBeat",
]

Round: TypeAlias = tuple[int, int]
"""(term, seq) of the announcement that opened it."""

Order: TypeAlias = tuple[int, int]
"""(term, seq): announcements are ordered by it."""

BufferId: TypeAlias = tuple[str, int, int]
"""(worker, incarnation, index of the buffer)."""


class Attempt(NamedTuple):
    """Which try at a micro-batch: unique over the whole run, since rounds and incarnations are."""

    round: Round
    feeder: str
    incarnation: int
    number: int


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """What a transport carries."""


class Committed(msgspec.Struct, frozen=True, tag="commit", gc=False):
    """A step that is decided: what the journal holds and every announcement repeats. `loss` and `weight` are totals over the step."""

    epoch: int
    version: int
    round: Round
    digests: tuple[str, ...]  # of each stage's reduced gradient
    clip: float
    skipped: bool
    loss: float
    weight: float


class Run(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Micro-batches still missing, by stage; buffers in `keep` go on, all others are emptied. `opened` names this RUN for good."""

    missing: tuple[frozenset[int], ...]
    keep: frozenset[BufferId]
    opened: Round


class Seal(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Freeze, and say what your buffers hold."""

    round: Round


class Contributor(msgspec.Struct, frozen=True, gc=False):
    """Whose buffers are part of a sum."""

    worker: str
    incarnation: int
    buffers: tuple[int, ...]


class StageReduction(msgspec.Struct, frozen=True, gc=False):
    """How one stage, or a set of tied stages, adds up: `owners[c]` sums chunk c over all contributors and gives it to the members."""

    contributors: tuple[Contributor, ...]
    members: tuple[tuple[str, int], ...]  # (worker, incarnation)
    owners: tuple[str, ...]


class Reduce(msgspec.Struct, frozen=True, tag=True, gc=False):
    """The buffers frozen in `round` are to be summed: of every stage, then of every set of tied stages what they share."""

    round: Round
    stages: tuple[StageReduction, ...]


class Finished(msgspec.Struct, frozen=True, tag=True, gc=False):
    """All steps are committed."""


Phase: TypeAlias = Run | Seal | Reduce | Finished


class View(msgspec.Struct, frozen=True, gc=False):
    """What the coordinator tells everybody alike. `beat` grows with time even when nothing changes.

    `phase` is that of the step under way. With staleness that is the step after `version` while the sums of `version` are still made.
    """

    term: int
    seq: int
    beat: int
    epoch: int
    version: int
    origin: tuple[int, int]  # (epoch, version) of the checkpoint this epoch began from
    commit: Committed | None  # the last of this epoch
    phase: Phase
    checkpoint: int  # the version to store; -1: none
    trailing: Reduce | None = None  # how the step before the one under way is summed

    @property
    def step(self) -> int:
        """The step under way."""
        return self.version + (self.trailing is not None)


class Peer(NamedTuple):
    """A worker a feeder may use, and its speed in forwards a second (0: not measured)."""

    worker: str
    incarnation: int
    speed: float


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """What the coordinator tells one process. `stage` is -1 for feeders and for those dismissed."""

    nonce: int
    incarnation: int
    stage: int
    donors: tuple[str, ...] = ()
    store: bool = False  # writes its stage's state of the version that is stored
    attest: bool = False  # and this one says what its digest should be
    lease: tuple[int, ...] = ()
    window: int = 1  # micro-batches a feeder has under way at once
    routes: tuple[tuple[Peer, ...], ...] = ()
    lost: tuple[tuple[str, int], ...] = ()  # (worker, incarnation) of those whose sums of this RUN seem lost


class Announce(Message, frozen=True, gc=False):
    """Coordinator → each: repeated until it changes, so nothing depends on one message arriving."""

    sender: str
    view: View
    yours: Assignment


class WorkerBeat(Message, frozen=True, gc=False):
    """Worker → coordinator: alive, heard `echo`, and where its state is. `incarnation` 0 asks for one."""

    worker: str
    incarnation: int
    nonce: int
    stage: int
    epoch: int
    version: int  # -1: no state
    echo: int
    term: int
    fetched: int  # chunks so far; -1: not fetching
    speed: float  # forwards a second, 0: not measured
    holds: Round | None  # the round of the reduced gradient it holds
    digest: str
    attests: tuple[int, str] | None  # of a version that is stored: what the digest of its stage's state is
    leaving: bool = False
    planned: int = -1  # the stage a plan means it for; -1: any


class FeederBeat(Message, frozen=True, gc=False):
    """Feeder → coordinator: alive, and how far its lease of `round` is."""

    feeder: str
    incarnation: int
    nonce: int
    echo: int
    term: int
    round: Round | None
    done: int  # micro-batches of the lease that every stage seems to own
    progress: int  # grows with every acknowledgement


class OfWork(Message, frozen=True, gc=False):
    """About a micro-batch at a stage."""

    epoch: int
    version: int
    stage: int
    micro_batch: int
    attempt: Attempt


class Forward(OfWork, frozen=True, gc=False):
    """An activation entering `stage`; `path` names the worker of every stage, `owned` the stages that need not accumulate."""

    path: tuple[str, ...]
    owned: frozenset[int]
    payload: Any


class Backward(OfWork, frozen=True, gc=False):
    """The gradient of what left `stage`."""

    payload: Any


class Ack(OfWork, frozen=True, gc=False):
    """Worker → feeder: a hint. `owns`: the backward is done and the worker's buffers hold the micro-batch."""

    worker: str
    incarnation: int
    forward: bool
    owns: bool
    seconds: float  # what the kernel took, times those who share the device


class BufferManifest(msgspec.Struct, frozen=True, gc=False):
    """What one frozen buffer holds. Loss and weight are counted by the last stage."""

    index: int
    micro_batches: frozenset[int]
    loss: float = 0.0
    weight: float = 0.0


class OfRound(Message, frozen=True, gc=False):
    """Worker → coordinator, about a round of its own step."""

    round: Round
    worker: str
    incarnation: int
    epoch: int
    version: int
    stage: int


class Manifest(OfRound, frozen=True, gc=False):
    """Worker → coordinator: frozen for `round`, with these buffers. `version` is the step's; `state` that of the worker's state.

    With staleness they may differ by one. Whoever cannot apply the commit in between loses its state and its buffers with it.
    """

    buffers: tuple[BufferManifest, ...]
    state: int


class OfSum(Message, frozen=True, gc=False):
    """About a chunk of a sum; `stage` is the sum's number."""

    round: Round
    epoch: int
    version: int
    stage: int
    chunk: int


class Pull(OfSum, frozen=True, gc=False):
    """Owner of a chunk → contributor: send that chunk of those buffers."""

    owner: str
    incarnation: int  # the contributor's
    buffers: tuple[int, ...]


class SumPart(OfSum, frozen=True, gc=False):
    """Contributor → owner."""

    worker: str
    incarnation: int
    payload: Any


class PullSum(OfSum, frozen=True, gc=False):
    """Member → owner: send the sum when you have it."""

    worker: str


class SumChunk(OfSum, frozen=True, gc=False):
    """Owner → member."""

    payload: Any


class Reduced(OfRound, frozen=True, gc=False):
    """Member → coordinator: holds the reduced gradient, or still waits for those in `missing`."""

    digest: str  # "": not yet
    norm_squared: float
    missing: tuple[str, ...]


class OfState(Message, frozen=True, gc=False):
    """About a chunk of the state at exactly (epoch, version, stage)."""

    nonce: int
    epoch: int
    version: int
    stage: int
    chunk: int


class FetchState(OfState, frozen=True, gc=False):
    """Joiner → donor."""

    worker: str


class StateChunk(OfState, frozen=True, gc=False):
    """Donor → joiner: a chunk of its state."""

    payload: Any
