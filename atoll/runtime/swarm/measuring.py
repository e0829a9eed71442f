"""Measuring: what a worker has done, what it received from whom, and how long it took to be of use; the coordinator writes it down."""

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import msgspec
import torch

from atoll.control.worker import Worker
from atoll.errors import RefusedError
from atoll.fabric.method import Peer
from atoll.fabric.roles import allowed
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.swarm.measured import MEMBERS, Kernels, Measured, read_members
from atoll.runtime.swarm.transport import speaks_for
from atoll.units import format_bytes, format_seconds

if TYPE_CHECKING:  # it loads what captures models, and the coordinator, which writes accounts down, captures none
    from atoll.runtime.swarm.compute import StageState

__all__ = ["Account", "MeasureService", "Measuring", "state_bytes"]


class Measuring:
    """A worker's account of itself. `say` tells people when it has a state and when it is of use."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._began = time.monotonic()
        self._seen: dict[str, int] = {}
        self.measured = Measured()

    def on_state(self, worker: Worker) -> None:
        """For `Worker`."""
        measured = self.measured
        if measured.state_seconds is None:
            measured.state_seconds = time.monotonic() - self._began
            measured.state_bytes = state_bytes(worker.state)
            self._say(
                f"stage {worker.stage}: its state ({format_bytes(measured.state_bytes)}) is here {format_seconds(measured.state_seconds)} "
                f"after connecting; it goes on after step {worker.version}"
            )

    def on_kernel(self, worker: Worker, work: float, seconds: float) -> None:
        """For `Worker`."""
        measured = self.measured
        measured.kernels.setdefault(worker.stage, Kernels()).add(work, seconds)
        if measured.work_seconds is None:
            measured.work_seconds = time.monotonic() - self._began
            self._say(f"first micro-batch done {format_seconds(measured.work_seconds)} after connecting")

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


class Account(msgspec.Struct, frozen=True):
    """What one worker measured. What was received is in the account of the first of its process."""

    worker: str
    measured: Measured


class MeasureService:
    """Takes what workers say of themselves and writes it to the run's directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._members = read_members(directory)

    @allowed("worker")
    async def measured(self, account: Account, peer: Peer) -> None:
        """The newest account of a worker of the caller."""
        if not speaks_for(peer.name, peer.role, account.worker):
            raise RefusedError(f"{peer.name} gave an account of {account.worker}")
        self._members[account.worker] = account.measured

    def write(self) -> None:
        """What is known, whole or not at all."""
        self._directory.write(MEMBERS, msgspec.json.format(msgspec.json.encode(self._members), indent=1))


def state_bytes(state: "StageState") -> int:
    """Weights, buffers and optimizer."""
    tensors = [*state.module.parameters_by_name().values(), *state.module.buffers_by_name().values()]
    if state.optimizer is not None:
        tensors += [value for row in state.optimizer.state.values() for value in row.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
