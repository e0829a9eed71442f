"""Event: everything a run says happened. Supervisors, runtimes, the protocol, the simulator and the planner emit events; the terminal,
reports, callbacks and the dashboard are views of them.

Events are frozen, typed and survive a JSON round trip; a run's `events.jsonl` holds one a line. Times are seconds since the run began,
real or virtual, so that views need no clock of their own. `docs/events.md` lists every kind.
"""

import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import reduce
from operator import or_
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Literal, Self, TypeAlias, get_args

import msgspec

from atoll.errors import AtollError

__all__ = [
    "AnyEvent",
    "CertificateIssued",
    "CertificateRevoked",
    "CheckpointBegun",
    "CheckpointFailed",
    "CheckpointIntervalChosen",
    "CheckpointRestored",
    "CheckpointSaved",
    "CodecChosen",
    "Compiled",
    "CoordinatorStarted",
    "Evaluated",
    "EvaluationFailed",
    "Event",
    "EventLog",
    "EventStream",
    "FaultEnded",
    "FaultInjected",
    "LinkUse",
    "LinksMeasured",
    "Logged",
    "MemberChanged",
    "MemberMoved",
    "MemberState",
    "MemberTooSlow",
    "MembersAwaited",
    "NonFinite",
    "Note",
    "Observer",
    "PeerChanged",
    "PeerRefused",
    "PeerRetried",
    "PhaseFinished",
    "PlanChosen",
    "ProcessEnded",
    "ProcessStarted",
    "OuterChosen",
    "ReductionFinished",
    "RenewalFailed",
    "Restarted",
    "RoundFinished",
    "RunFinished",
    "RunStarted",
    "SiteRound",
    "StageLost",
    "StallEnded",
    "Stalled",
    "StateFetched",
    "StepFinished",
    "StepRepaired",
    "StopRequested",
    "StopTraining",
    "UnknownEvent",
    "Wait",
    "Warned",
    "WorkerFailed",
    "read_events",
    "steps_after_the_first",
]

_FORMAT = 2  # of the log; 1 had no header
_TAIL_BYTES = 1 << 16  # more than almost any event has


def _kind(class_name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", class_name).lower()


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag=_kind):
    """Something that happened, `at_seconds` after the run began."""

    at_seconds: float = 0.0  # an `EventStream` stamps it; an emitter with a clock of its own gives it

    @property
    def kind(self) -> str:
        """The event's name on disk, such as `"step_finished"`."""
        return str(self.__struct_config__.tag)


# ---- the run


class PhaseFinished(Event, frozen=True, kw_only=True):
    """A part of a run's start is over, such as loading PyTorch, capturing, planning or building."""

    phase: str  # what is done by then: "model captured"
    seconds: float
    source: str = ""  # the process it was in; empty: the one that starts the others


class Compiled(Event, frozen=True, kw_only=True):
    """`torch.compile` was at work, mostly in the first step; the step's time includes it."""

    seconds: float
    graphs: int  # compiled, forward and backward
    graph_breaks: int = 0  # places where compiled code is interrupted: random operators but dropout, exchanges, what it cannot compile
    source: str = ""  # the process it was in


class RunStarted(Event, frozen=True, kw_only=True):
    """A run began: what is going to be done, and where."""

    name: str
    mode: str
    steps: int
    batch_size: int
    samples: int  # in the training data; 0: it is read in order, and has no known length
    parameters: int  # trainable
    devices: tuple[str, ...]
    precision: str
    seed: int
    unix_seconds: float  # when, by the clock on the wall
    frozen_parameters: int = 0  # that are not trained
    num_workers: int = 0  # processes that load data, for every process that trains
    in_place: bool = False  # what is trained is the very module that the job was given, in the process that tells of it


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
    epoch: int = 0  # of a swarm: how often it went back to a checkpoint before
    rounds: int = 1  # of a swarm: how often the step was sealed until nothing was missing
    data_seconds: float | None = None  # of `seconds`, spent waiting for data: the mean of the processes that read any
    loading_seconds: float | None = None  # that loading the data took them or their workers, added up: the mean of these processes
    losses: dict[str, float] = {}  # of a job with several: by name; `loss` is their sum


class Evaluated(Event, frozen=True, kw_only=True):
    """The model was evaluated after `step` steps."""

    step: int
    loss: float | None  # None: it was not finite, which JSON has no number for; the same for metrics
    metrics: dict[str, float | None]
    samples: int
    seconds: float
    notes: tuple[str, ...] = ()  # what could not be made exact


class Logged(Event, frozen=True, kw_only=True):
    """A callback logged numbers after `step` steps."""

    step: int
    numbers: dict[str, float]


class EvaluationFailed(Event, frozen=True, kw_only=True):
    """The model after `step` steps could not be evaluated. Training goes on."""

    step: int
    message: str


class NonFinite(Event, frozen=True, kw_only=True):
    """A number that must be finite was not; the run ends with an error and the weights of the step before."""

    step: int
    what: Literal["loss", "gradient", "weight"]
    value: str  # "nan", "inf" or "-inf", which JSON has no numbers for


class StopRequested(Event, frozen=True, kw_only=True):
    """Somebody asked the run, or a member, to stop before its last step: Ctrl-C, a signal, a callback."""

    source: str  # who stops: "run", or a member's name
    message: str  # what happens now, and what a second request does


class RunFinished(Event, frozen=True, kw_only=True):
    """A run ended, one way or the other."""

    reason: Literal["done", "stopped", "interrupted", "failed"]
    steps: int
    samples: int
    seconds: float
    loss: float | None = None  # of the last step
    message: str = ""


class Note(Event, frozen=True, kw_only=True):
    """Something people may want to know that no other event says."""

    message: str
    source: str = ""  # the process or member it is about; empty: the run


class Warned(Event, frozen=True, kw_only=True):
    """Something people might not expect. The run goes on."""

    message: str
    source: str = ""  # the process or member it is about; empty: the run


# ---- decisions, with their reasons


class PlanChosen(Event, frozen=True, kw_only=True):
    """What runs where, in which mode, from now on."""

    mode: str
    plan: str  # as text
    stages: int
    devices: tuple[str, ...]
    step_seconds: float | None = None  # predicted
    reasons: tuple[str, ...] = ()


class CheckpointIntervalChosen(Event, frozen=True, kw_only=True):
    """How often the run saves, from now on."""

    steps: int | None  # between two checkpoints; None: only at the end
    reason: str


class CodecChosen(Event, frozen=True, kw_only=True):
    """A link sends with another codec from now on."""

    link: str  # the peer it leads to, or what is sent to several
    codec: str
    before: str  # empty: the first choice
    reason: str


class MemberMoved(Event, frozen=True, kw_only=True):
    """A worker of a swarm changes stage."""

    name: str
    source: int
    target: int
    reason: str


class Restarted(Event, frozen=True, kw_only=True):
    """Every rank is started anew after a failure, from the last checkpoint."""

    generation: int  # of the ranks that start now; the first were 0
    max_restarts: int
    reason: str


class StageLost(Event, frozen=True, kw_only=True):
    """Nobody could continue a stage of a swarm: everybody goes on from the checkpoint after `step` steps."""

    stage: int
    step: int
    epoch: int = 0  # the one that begins
    lost: int = 0  # steps that are made again


# ---- checkpoints


class CheckpointBegun(Event, frozen=True, kw_only=True):
    """The state after `step` steps is being saved."""

    step: int


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


class CheckpointRestored(Event, frozen=True, kw_only=True):
    """The run goes on from the state after `step` steps."""

    step: int
    path: str
    notes: tuple[str, ...] = ()  # what has changed since, or was found damaged, as sentences


# ---- processes, as their supervisor sees them


class ProcessStarted(Event, frozen=True, kw_only=True):
    """The supervisor started a process of the run."""

    name: str
    role: str  # "rank", "coordinator", "feeder", "worker"
    host: str = ""  # empty: the supervisor's own
    restarts: int = 0  # how often it had been started before


class ProcessEnded(Event, frozen=True, kw_only=True):
    """A process of the run ended, by itself or by a signal."""

    name: str
    role: str
    how: str  # "exit code 1", "signal 9"
    exit_code: int  # negative: the signal that ended it
    host: str = ""
    then: Literal["done", "restart", "continue", "stop"] = "continue"  # what the supervisor does: nothing is left to do, start it again,
    # go on without it, end the run


class WorkerFailed(Event, frozen=True, kw_only=True):
    """A rank of a run in lockstep died, hung or raised; every other rank stops."""

    rank: int
    device: str
    stage: str  # in words, such as "stage 1"; empty when it had not said
    step: int | None  # it was at; None: it had not begun
    doing: str
    message: str  # the whole sentence
    generation: int = 0  # how often everybody had been started anew before


# ---- members, and who waits for whom

MemberState: TypeAlias = Literal["starting", "loading", "capturing", "joining", "active", "silent", "dead", "left"]
"""starting: its process was started; loading: PyTorch and the job; capturing: the model; joining: meeting the others, getting its state;
active: it works; silent: it missed heartbeats and gets no work; dead: its process ended; left: it asked to leave and was let go."""


class MemberChanged(Event, frozen=True, kw_only=True):
    """A rank, worker or feeder is in another state than before."""

    name: str
    state: MemberState
    before: MemberState | None = None  # None: it was not known
    role: str = "worker"  # "rank", "worker", "feeder", "coordinator"
    stages: tuple[int, ...] = ()  # that it works on
    host: str = ""
    device: str = ""
    reason: str = ""


class MemberTooSlow(Event, frozen=True, kw_only=True):
    """A joining worker has not got its stage's state in several steps; commits no longer wait for it."""

    name: str
    stage: int
    fetched: float  # of the state, in the last attempt


class MembersAwaited(Event, frozen=True, kw_only=True):
    """The run cannot begin, or cannot go on, before these members have joined."""

    joined: int
    expected: int
    missing: tuple[str, ...] = ()  # by name, where names are known
    stages: tuple[int, ...] = ()  # that nobody works on yet
    seconds: float = 0.0  # since they are waited for
    until_unix_seconds: float | None = None  # when those who joined give up; None: never


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """What one member does while nobody makes progress, and whom it waits for."""

    name: str
    doing: str
    seconds: float  # for how long it has been doing just that
    step: int | None = None
    stage: str = ""
    device: str = ""
    waits_for: tuple[str, ...] = ()  # names; empty: it is not known to wait for anybody


class Stalled(Event, frozen=True, kw_only=True):
    """All members are alive, but nobody has made progress for `seconds`."""

    seconds: float
    members: tuple[Wait, ...]
    cause: tuple[str, ...] = ()  # whom the others wait for; empty: it cannot be told


class StallEnded(Event, frozen=True, kw_only=True):
    """Somebody makes progress again."""

    seconds: float  # how long nobody did


# ---- the swarm's protocol


class CoordinatorStarted(Event, frozen=True, kw_only=True):
    """A swarm's coordinator leads from `step` steps on; terms are counted from 1."""

    term: int
    step: int


class StepRepaired(Event, frozen=True, kw_only=True):
    """A step of a swarm lacked gradients when it was summed up, as somebody who had them is gone; they are computed again."""

    step: int
    micro_batches: tuple[int, ...]  # asked for again, by stage
    reason: str


# ---- sites that train together


class SiteRound(msgspec.Struct, frozen=True, kw_only=True):
    """What one site gave to a round."""

    site: str
    steps: int
    weight: float  # of its update: tokens, or samples
    losses: tuple[tuple[float, float], ...] = ()  # of its steps: loss and weight


class RoundFinished(Event, frozen=True, kw_only=True):
    """Sites that train together have a common state again, which holds the steps of these sites; rounds are counted from 1."""

    epoch: int
    round: int
    rounds: int  # of the run
    sites: tuple[SiteRound, ...]
    missing: tuple[str, ...] = ()  # sites that are there and whose steps count in a later round


class OuterChosen(Event, frozen=True, kw_only=True):
    """How sites train together from the next round on."""

    inner_steps: int
    delay_steps: int
    codec: str
    learning_rate: float
    momentum: float
    quorum: int
    round: int = 0  # from this one on, counted from 1; 0: as the run was started
    reasons: tuple[str, ...] = ()
    exchange: Literal["gradients", "weights"] = "weights"


# ---- links and peers


class LinkUse(msgspec.Struct, frozen=True, kw_only=True):
    """What went over one link, in one direction, in an interval."""

    source: str
    target: str
    bytes: int  # as sent, encoded
    seconds: float | None = None  # something was on its way; None: not measured
    codec: str = ""  # of what was sent; empty: it is not known
    round_trip_seconds: float | None = None


class LinksMeasured(Event, frozen=True, kw_only=True):
    """What went over links since the last such event; links that carried nothing are left out."""

    seconds: float  # the interval
    links: tuple[LinkUse, ...]


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
    what: Literal["connection", "call", "enrolment", "renewal", "state", "message", "update"]
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


class ReductionFinished(Event, frozen=True, kw_only=True):
    """A reduction among peers ended here; whose contributions are not in all of it."""

    round: str
    seconds: float
    predicted_seconds: float  # the linear program's bound
    complete: bool
    left_out: tuple[str, ...]
    message: str = ""  # why something is missing


class StateFetched(Event, frozen=True, kw_only=True):
    """A joining worker has its stage's state and can work."""

    name: str
    stage: int
    step: int  # the state is that after so many steps
    size_bytes: int
    seconds: float  # since it was connected


# ---- the lab, and logs of other versions


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


class UnknownEvent(Event, frozen=True, kw_only=True):
    """What a newer version of Atoll wrote and this one does not know."""

    name: str

    @property
    def kind(self) -> str:
        """The name it has on disk."""
        return self.name


if TYPE_CHECKING:
    AnyEvent: TypeAlias = Event
else:
    AnyEvent = reduce(or_, Event.__subclasses__())  # of the kinds above: what a line of JSON can be decoded as
Observer: TypeAlias = Callable[[AnyEvent], None]

_KINDS = frozenset(str(kind.__struct_config__.tag) for kind in get_args(AnyEvent))


class StopTraining(Exception):  # noqa: N818 - a request, not an error
    """Raise it in a callback to end the run after the current step, politely."""


# ---- where events go


class EventStream:
    """Where a process emits: each event is stamped with the run's time, never earlier than the one before, and given to all observers in
    order. Any thread may emit. What an observer raises is the emitter's to handle.
    """

    def __init__(self, *observers: Observer, seconds: Callable[[], float]) -> None:
        """`seconds` is the run's time now."""
        self.observers: list[Observer] = list(observers)
        self._seconds, self._last, self._lock = seconds, 0.0, threading.RLock()

    def __call__(self, event: AnyEvent) -> None:
        with self._lock:
            self._last = max(self._last, self._seconds())
            stamped = msgspec.structs.replace(event, at_seconds=self._last)
            for observer in self.observers:
                observer(stamped)


class _Header(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="log_opened"):
    """The first line of a log, and of every time the run was started again: which moment of the run was which on the clock."""

    at_seconds: float
    format: int
    unix_seconds: float


class _Stamp(msgspec.Struct):
    event: str = ""
    at_seconds: float = 0.0


class EventLog:
    """Appends events to `events.jsonl` in a run's directory. Each is on disk's way at once: a killed run keeps its past.

    The file must be new, unless a run is continued (`resume`): then its time goes on where it ended. Several processes of a run may append
    (`join`): lines are whole and in the order of their times. A last line that a crash cut short is taken off. A full disk ends no run:
    what cannot be written is counted, and told in the log when there is room again.
    """

    def __init__(self, directory: Path, *, resume: bool = False, join: bool = False) -> None:
        self.path = directory / "events.jsonl"
        if self.path.exists() and not resume and not join:
            raise AtollError(f"{self.path}: holds another run already; choose a new directory or remove this one")
        self._size, self._last, self._lock = -1, 0.0, threading.Lock()
        self._missing, self._why = 0, ""  # events that could not be written
        header = _newest_header(self.path) if join and self.path.exists() else None
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            if header is None:
                header = self._begin()
        except OSError as error:
            raise AtollError(f"{directory}: cannot write the run there: {error.strerror or error}") from error
        self._at, self._unix = header.at_seconds, header.unix_seconds

    def _begin(self) -> _Header:
        try:
            with self._locked():
                header = _Header(at_seconds=self._last, format=_FORMAT, unix_seconds=time.time())
                self._append(msgspec.json.encode(header))
        except OSError:
            self.close()
            raise
        return header

    @classmethod
    def join(cls, directory: Path) -> Self:
        """The log of a run under way, for another of its processes; a new one where there is none."""
        return cls(directory, join=True)

    def seconds(self) -> float:
        """The run's time now: what the log last said of the clock, and what has passed since."""
        return self._at + max(0.0, time.time() - self._unix)

    def __call__(self, event: AnyEvent) -> None:
        try:
            with self._locked():
                self._last = max(self._last, event.at_seconds)
                if self._missing:
                    told = f"{self._missing} events before this are not in the log: it could not be written ({self._why})"
                    self._append(msgspec.json.encode(Warned(at_seconds=self._last, message=told)))
                    self._missing = 0
                stamped = event if event.at_seconds == self._last else msgspec.structs.replace(event, at_seconds=self._last)
                self._append(msgspec.json.encode(stamped))
        except OSError as error:
            self._missing, self._why = self._missing + 1, error.strerror or str(error)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Nobody else appends, here or in another process; what others appended since is known."""
        with self._lock:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            try:
                size = os.fstat(self._file).st_size
                if size != self._size:
                    self._size = self._whole(size)
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def _whole(self, size: int) -> int:
        """The size without a line cut short, and the time of the last whole one."""
        start = max(0, size - _TAIL_BYTES)
        tail = os.pread(self._file, size - start, start)
        end = tail.rfind(b"\n") + 1
        if start + end < size and (end or not start):
            os.ftruncate(self._file, start + end)
            size = start + end
        line = tail[: max(0, end - 1)].rpartition(b"\n")[2]
        self._last = max(self._last, _stamp(line).at_seconds)
        return size

    def _append(self, line: bytes) -> None:
        """All of it, or an error: the next to append takes off what a full disk cut short."""
        data = line + b"\n"
        written = os.write(self._file, data)
        if written != len(data):
            os.write(self._file, data[written:])
        self._size += len(data)

    def close(self) -> None:
        """No more is appended."""
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _newest_header(path: Path) -> _Header | None:
    found = None
    for line in _lines(path):
        if b'"log_opened"' in line:
            with suppress(msgspec.DecodeError):
                found = msgspec.json.decode(line, type=_Header)
    return found


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")[:-1]  # a last line without an end was cut short by a crash
    except OSError as error:
        raise AtollError(f"{path}: cannot read it: {error.strerror or error}") from error


def steps_after_the_first(events: Sequence[AnyEvent]) -> list[StepFinished]:
    """Of every time the run was started."""
    found: list[StepFinished] = []
    first = True
    for event in events:
        if isinstance(event, StepFinished):
            found += [] if first else [event]
        first = isinstance(event, RunStarted) or (first and not isinstance(event, StepFinished))
    return found


def read_events(path: str | Path) -> Iterator[AnyEvent]:
    """The events of `events.jsonl`, in order. A last line cut short by a crash is left out; what a newer version of Atoll wrote and
    this one does not know is an `UnknownEvent`; any other bad line is an error naming it.
    """
    decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)
    newer = False
    for number, line in enumerate(_lines(Path(path)), start=1):
        try:
            yield decoder.decode(line)
        except msgspec.DecodeError as error:
            stamp = _stamp(line)
            if stamp.event == "log_opened":
                newer = msgspec.json.decode(line, type=_Header).format > _FORMAT
            elif stamp.event and (newer or stamp.event not in _KINDS):
                yield UnknownEvent(at_seconds=stamp.at_seconds, name=stamp.event)
            else:
                raise AtollError(f"{path}:{number}: not an event: {error}") from error


def _stamp(line: bytes) -> _Stamp:
    try:
        return msgspec.json.decode(line, type=_Stamp)
    except msgspec.DecodeError:  # whoever reads the log says what is wrong with it
        return _Stamp()
