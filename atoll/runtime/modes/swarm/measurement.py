"""Measurement: what a worker has done, what it received from whom, and how long it took to be of use; the coordinator writes it down."""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

import msgspec
import torch

from atoll.control.multi_stage import process_of
from atoll.control.worker import Worker
from atoll.errors import RefusedError
from atoll.events import CodecChosen, Compiled, LinksMeasured, LinkUse, Note, Observer, StateFetched, Warned
from atoll.fabric.service import CallingPeer, allowed
from atoll.runtime.modes.swarm.report import MEMBERS, KernelTimes, Measured, read_members
from atoll.runtime.modes.swarm.transport import COORDINATOR, speaks_for
from atoll.runtime.run_directory import RunDirectory
from atoll.units import format_seconds

if TYPE_CHECKING:  # it loads what captures models, and the coordinator, which writes accounts down, captures none
    from atoll.runtime.modes.swarm.compute import StageState

__all__ = ["Account", "MeasureService", "MemberEvent", "Measuring", "state_bytes"]

_MOST_EVENTS = 64  # of an account
_EVENTS_SECONDS = 1.0  # between two accounts of a member whose events are taken
_MOST_LETTERS = 500


class Measuring:
    """A worker's account of itself. `observer` hears when it has a state and when it is of use."""

    def __init__(self, name: str, observer: Observer) -> None:
        self._name, self._observer = name, observer
        self._began = time.monotonic()
        self._seen: dict[str, int] = {}
        self.measured = Measured()

    def on_state(self, worker: Worker) -> None:
        """For `Worker`."""
        measured = self.measured
        if measured.state_seconds is None:
            measured.state_seconds = time.monotonic() - self._began
            measured.state_bytes = state_bytes(worker.state)
            self._observer(
                StateFetched(
                    name=self._name,
                    stage=worker.stage,
                    step=worker.version,
                    size_bytes=measured.state_bytes,
                    seconds=measured.state_seconds,
                )
            )

    def on_kernel(self, worker: Worker, work: float, seconds: float) -> None:
        """For `Worker`."""
        measured = self.measured
        measured.kernels.setdefault(worker.stage, KernelTimes()).add(work, seconds)
        if measured.work_seconds is None:
            measured.work_seconds = time.monotonic() - self._began
            message = f"first micro-batch done {format_seconds(measured.work_seconds)} after connecting"
            self._observer(Note(message=message, source=self._name))

    def look(self, received: Mapping[str, int], rates: Mapping[str, float], round_trips: Mapping[str, float]) -> Measured:
        """Takes what connections have counted; a count that fell is of a new connection."""
        measured = self.measured
        for name, count in received.items():
            before = self._seen.get(name, 0)
            measured.received_bytes[name] = measured.received_bytes.get(name, 0) + (count - before if count >= before else count)
            self._seen[name] = count
        measured.received_bytes_per_s.update(rates)
        measured.round_trip_seconds.update(round_trips)
        measured.seconds = time.monotonic() - self._began
        return measured


MemberEvent: TypeAlias = CodecChosen | Compiled | StateFetched | Warned
"""What the run's log has of a member's own events."""


class Account(msgspec.Struct, frozen=True):
    """What one worker measured. What was received is in the account of the first of its process."""

    worker: str
    measured: Measured
    events: tuple[MemberEvent, ...] = ()  # of its process since the last account


class MeasureService:
    """Takes what workers say of themselves and writes it to the run's directory. `observer` hears what happened there; with `codec`, which
    links use that have not chosen another.
    """

    def __init__(self, directory: RunDirectory, observer: Observer = lambda event: None, codec: str = "none") -> None:
        self._directory, self._observer = directory, observer
        self._members = read_members(directory)
        self._codec, self._codecs = codec if codec != "auto" else "none", dict[tuple[str, str], str]()
        self._counted = {(source, name): size for name, own in self._members.items() for source, size in own.received_bytes.items()}
        self._looked = time.monotonic()
        self._heard: dict[str, float] = {}  # when events of a member were last taken

    @allowed("worker")
    async def measured(self, account: Account, peer: CallingPeer) -> None:
        """The newest account of a worker of the caller."""
        if not speaks_for(peer.name, peer.role, account.worker):
            raise RefusedError(f"{peer.name} gave an account of {account.worker}")
        self._members[account.worker] = account.measured
        now = time.monotonic()
        if account.events and now - self._heard.get(peer.name, -_EVENTS_SECONDS) >= _EVENTS_SECONDS:
            self._heard[peer.name] = now
            for event in account.events[:_MOST_EVENTS]:
                self._observer(self._of(peer.name, event))

    def _of(self, name: str, event: MemberEvent) -> MemberEvent:
        """A member speaks for itself only, in words a terminal can show."""
        match event:
            case CodecChosen():
                self._codecs[name, event.link] = event.codec
                return msgspec.structs.replace(event, link=f"{name} → {_shown(event.link)}", reason=_shown(event.reason))
            case StateFetched():
                return msgspec.structs.replace(event, name=event.name if process_of(event.name) == name else name)
            case Compiled():
                return msgspec.structs.replace(event, source=name)
            case Warned():
                return msgspec.structs.replace(event, source=name, message=_shown(event.message))

    def links(self) -> LinksMeasured | None:
        """What went over links since this was last asked; None where nothing did."""
        now = time.monotonic()
        found = []
        for name, own in list(self._members.items()):  # accounts arrive in another thread
            for source, size in own.received_bytes.items():
                if source != name and size > self._counted.get((source, name), 0):
                    found.append(self._use(source, name, own, size - self._counted.get((source, name), 0)))
                self._counted[source, name] = size
        seconds, self._looked = now - self._looked, now
        return LinksMeasured(seconds=seconds, links=tuple(found)) if found else None

    def _use(self, source: str, name: str, own: Measured, size: int) -> LinkUse:
        rate = own.received_bytes_per_s.get(source)
        return LinkUse(
            source=source,
            target=name,
            bytes=size,
            seconds=size / rate if rate else None,
            codec=self._codecs.get((source, name), self._codec) if source != COORDINATOR else "",
            round_trip_seconds=own.round_trip_seconds.get(source),
        )

    def write(self) -> None:
        """What is known, whole or not at all."""
        self._directory.write(MEMBERS, msgspec.json.format(msgspec.json.encode(self._members), indent=1))


def _shown(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_LETTERS])


def state_bytes(state: "StageState") -> int:
    """Weights, buffers and optimizer."""
    tensors = [*state.module.parameters_by_name().values(), *state.module.buffers_by_name().values()]
    optimizer = state.executor.updater.optimizer
    if optimizer is not None:
        tensors += [value for row in optimizer.state.values() for value in row.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
