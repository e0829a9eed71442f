"""Event: everything a run says happened. Runtimes, the simulator and the planner speak it; progress, reports and callbacks listen.

Events are frozen, typed and survive a JSON round trip; a run's `events.jsonl` holds one a line. Times are seconds since the run began,
real or virtual, so that listeners need no clock of their own.
"""

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal, Self, TypeAlias

import msgspec

from atoll.errors import AtollError

__all__ = [
    "AnyEvent",
    "CertificateIssued",
    "CertificateRevoked",
    "CheckpointFailed",
    "CheckpointSaved",
    "CodecChosen",
    "DonorRefused",
    "Evaluated",
    "CoordinatorStarted",
    "Event",
    "EventLog",
    "FaultEnded",
    "FaultInjected",
    "MemberJoined",
    "MemberLeft",
    "MemberMoved",
    "MemberReturned",
    "MemberSilent",
    "MemberTooSlow",
    "NonFinite",
    "Observer",
    "PeerChanged",
    "PeerRefused",
    "PeerRetried",
    "ReductionFinished",
    "RenewalFailed",
    "RunFinished",
    "RunStarted",
    "Restarted",
    "StageLost",
    "StateFetched",
    "StepRepaired",
    "StepFinished",
    "StopTraining",
    "WorkerFailed",
    "read_events",
]


def _kind(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_kind):
    """Something that happened, `at_seconds` after the run began."""

    at_seconds: float

    @property
    def kind(self) -> str:
        """The event's name on disk, such as `"step_finished"`."""
        return str(self.__struct_config__.tag)


class RunStarted(Event, frozen=True, kw_only=True):
    """A run began: what is going to be done, and where."""

    name: str
    mode: str
    steps: int
    batch_size: int
    samples: int  # in the training data
    parameters: int  # trainable
    devices: tuple[str, ...]
    precision: str
    seed: int
    unix_seconds: float  # when, by the clock on the wall


class StepFinished(Event, frozen=True, kw_only=True):
    """The optimizer made a step; steps are counted from 1."""

    step: int
    loss: float  # over the whole global batch
    samples: int
    weight: float  # what the loss was divided by: samples, or what the job's loss counts (tokens)
    seconds: float
    learning_rate: float | None  # of the first group of parameters; a swarm's coordinator does not know it
    gradient_norm: float | None = None  # before clipping; None when the job does not clip, or when it overflowed
    memory_bytes: int | None = None  # the most used so far, on the accelerator if there is one, else by the process
    applied: bool = True  # False: fp16 gradients overflowed, the step was skipped and the loss scale lowered


class Evaluated(Event, frozen=True, kw_only=True):
    """The model was evaluated after `step` steps."""

    step: int
    loss: float | None  # None: it was not finite, which JSON has no number for; the same for metrics
    metrics: dict[str, float | None]
    samples: int
    seconds: float


class CheckpointSaved(Event, frozen=True, kw_only=True):
    """The state after `step` steps is on disk, whole, and the run can be resumed from it."""

    step: int
    path: str
    size_bytes: int
    blocked_seconds: float  # training stood still: waiting for the save before, and copying
    seconds: float  # from the start of the copy until it was in place


class CheckpointFailed(Event, frozen=True, kw_only=True):
    """The state after `step` steps could not be saved. The run goes on; the checkpoint before it is still good."""

    step: int
    message: str


class NonFinite(Event, frozen=True, kw_only=True):
    """A number that must be finite was not; the run ends with an error and the weights of the step before."""

    step: int
    what: Literal["loss", "gradient"]
    value: str  # "nan", "inf" or "-inf", which JSON has no numbers for


class RunFinished(Event, frozen=True, kw_only=True):
    """A run ended, one way or the other."""

    reason: Literal["done", "stopped", "interrupted", "failed"]
    steps: int
    samples: int
    seconds: float
    loss: float | None = None  # of the last step
    message: str = ""


class WorkerFailed(Event, frozen=True, kw_only=True):
    """A process of a distributed run died, hung or raised; every other rank stops."""

    rank: int
    device: str
    stage: str  # in words, such as "stage 1"; empty when it had not said
    step: int | None  # it was at; None: it had not begun
    doing: str
    message: str  # the whole sentence
    generation: int = 0  # how often everybody had been started anew before


class Restarted(Event, frozen=True, kw_only=True):
    """Every rank is started anew after a failure, from the last checkpoint."""

    generation: int  # of the ranks that start now; the first were 0
    max_restarts: int
    reason: str


class PeerChanged(Event, frozen=True, kw_only=True):
    """A peer of the fabric came, went or is judged otherwise than before."""

    peer: str
    role: str
    state: Literal["alive", "slow", "stopped", "unreachable", "dead"]
    before: Literal["new", "alive", "slow", "stopped", "unreachable", "dead"]
    reason: str


class PeerRetried(Event, frozen=True, kw_only=True):
    """A peer could not be reached or was lost; it is dialled again after a delay, or given up (`delay_seconds` None)."""

    peer: str
    attempt: int
    delay_seconds: float | None
    reason: str


class PeerRefused(Event, frozen=True, kw_only=True):
    """A peer was refused, or this side was by a peer; the reason says by whom. Everybody else goes on."""

    peer: str  # as it calls itself, or its address
    role: str  # empty where it is not known
    what: Literal["connection", "call", "enrolment", "renewal"]
    reason: str


class CertificateIssued(Event, frozen=True, kw_only=True):
    """The run's authority let somebody in, or for longer."""

    peer: str
    role: str
    serial: str
    lifetime_seconds: float
    how: Literal["enrolled", "renewed"]


class CertificateRevoked(Event, frozen=True, kw_only=True):
    """A member was shut out: its connections are cut and it gets no new ones."""

    peer: str
    reason: str


class RenewalFailed(Event, frozen=True, kw_only=True):
    """This side's certificate could not be renewed; it is tried again after a delay, or no more (`delay_seconds` None)."""

    peer: str  # whom it was asked of
    expires_seconds: float  # until the certificate expires; negative: it has
    delay_seconds: float | None
    reason: str


class CodecChosen(Event, frozen=True, kw_only=True):
    """A link sends with another codec from now on."""

    link: str  # the peer it leads to, or what is sent to several
    codec: str
    before: str  # empty: the first choice
    reason: str


class ReductionFinished(Event, frozen=True, kw_only=True):
    """A reduction among peers ended here; whose contributions are not in all of it."""

    round: str
    seconds: float
    predicted_seconds: float  # the linear program's bound
    complete: bool
    left_out: tuple[str, ...]
    message: str = ""  # why something is missing


class DonorRefused(Event, frozen=True, kw_only=True):
    """Something a donor sent of a state is not what it should be, or it could not send it: it is fetched from another."""

    peer: str
    state: str
    piece: int | None  # None: the donor as a whole
    reason: str


class StateFetched(Event, frozen=True, kw_only=True):
    """A whole state arrived and was verified."""

    state: str
    size_bytes: int
    kept_bytes: int  # verified in an earlier attempt
    seconds: float
    bytes_by_donor: dict[str, int]


class MemberJoined(Event, frozen=True, kw_only=True):
    """A process came into a swarm, or came back as somebody new. `stage` is -1 for one that feeds."""

    name: str
    stage: int


class MemberLeft(Event, frozen=True, kw_only=True):
    """A worker of a swarm asked to leave and was let go: nothing was lost with it."""

    name: str
    stage: int


class MemberSilent(Event, frozen=True, kw_only=True):
    """A process of a swarm was not heard for too long: it died, stands still or is cut off, and gets no work."""

    name: str
    stage: int
    seconds: float  # since it was last heard


class MemberReturned(Event, frozen=True, kw_only=True):
    """A silent process of a swarm is heard again, as the one it was."""

    name: str
    stage: int


class MemberTooSlow(Event, frozen=True, kw_only=True):
    """A worker of a swarm has not got its stage's state in several steps; the others wait for it no longer."""

    name: str
    stage: int
    fetched: float  # of the state, in the last attempt


class MemberMoved(Event, frozen=True, kw_only=True):
    """A worker of a swarm changes stage."""

    name: str
    source: int
    target: int
    reason: str


class StepRepaired(Event, frozen=True, kw_only=True):
    """A step of a swarm lacked gradients when it was summed up, as somebody who had them is gone; they are computed again."""

    step: int
    micro_batches: tuple[int, ...]  # asked for again, by stage
    reason: str


class StageLost(Event, frozen=True, kw_only=True):
    """Nobody could continue a stage of a swarm: everybody goes on from the checkpoint after `step` steps."""

    stage: int
    step: int


class CoordinatorStarted(Event, frozen=True, kw_only=True):
    """A swarm's coordinator took over after `step` steps; terms are counted from 1."""

    term: int
    step: int


class FaultInjected(Event, frozen=True, kw_only=True):
    """A lab did something bad on purpose."""

    fault: str  # "cut", "kill", …
    places: tuple[str, ...]  # hosts or sites
    amount: float | None = None  # slow: the factor; loss: the share
    duration_seconds: float | None = None  # None: until it is restored


class FaultEnded(Event, frozen=True, kw_only=True):
    """A fault of a lab was over after its duration."""

    fault: str
    places: tuple[str, ...]


AnyEvent: TypeAlias = (
    RunStarted
    | StepFinished
    | Evaluated
    | CheckpointSaved
    | CheckpointFailed
    | NonFinite
    | RunFinished
    | WorkerFailed
    | Restarted
    | PeerChanged
    | PeerRetried
    | FaultInjected
    | FaultEnded
    | PeerRefused
    | CertificateIssued
    | CertificateRevoked
    | RenewalFailed
    | CodecChosen
    | ReductionFinished
    | DonorRefused
    | StateFetched
    | MemberJoined
    | MemberLeft
    | MemberSilent
    | MemberReturned
    | MemberTooSlow
    | MemberMoved
    | StepRepaired
    | StageLost
    | CoordinatorStarted
)
Observer: TypeAlias = Callable[[AnyEvent], None]


class StopTraining(Exception):  # noqa: N818 - a request, not an error
    """Raise it in a callback to end the run after the current step, politely."""


class EventLog:
    """Appends events to `events.jsonl` in a run's directory. Each is on disk's way at once: a killed run keeps its past.

    The file must be new, unless a run is continued (`resume`): then a last line that a crash cut short is taken off first.
    """

    def __init__(self, directory: Path, *, resume: bool = False) -> None:
        self.path = directory / "events.jsonl"
        if self.path.exists() and not resume:
            raise AtollError(f"{self.path}: holds another run already; choose a new directory or remove this one")
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if resume and self.path.exists():
                whole = self.path.read_bytes().rfind(b"\n") + 1
                os.truncate(self.path, whole)
            self._file: BinaryIO = self.path.open("ab", buffering=0)
        except OSError as error:
            raise AtollError(f"{directory}: cannot write the run there: {error.strerror or error}") from error

    def __call__(self, event: AnyEvent) -> None:
        self._file.write(msgspec.json.encode(event) + b"\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of `events.jsonl`, in order. A last line cut short by a crash is left out; any other bad line is an error naming it."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise AtollError(f"{path}: cannot read it: {error.strerror or error}") from error
    decoder = msgspec.json.Decoder(AnyEvent)
    for number, line in enumerate(lines[:-1], start=1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            raise AtollError(f"{path}:{number}: not an event: {error}") from error
