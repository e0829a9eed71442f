"""Coordinating: the process that keeps a swarm's journal, tells its members what to do and writes the run's directory.

It may be killed at any moment and started again on the same directory: members find it at the same address and go on.
"""

import asyncio
import random
import time
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from atoll.control.coordinator import Coordinator
from atoll.control.happenings import Happening
from atoll.control.journal import Epoch, replay
from atoll.control.messages import Committed, Message
from atoll.control.world import Node
from atoll.errors import JobFailedError
from atoll.events import AnyEvent, EventLog, Observer, RunFinished, RunStarted
from atoll.fabric.security import Authority, serve
from atoll.graph.capture import Captured
from atoll.job import Job
from atoll.runtime.checkpoint import Checkpointer, Held, RunIdentity
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.stage.holding import Holding
from atoll.runtime.swarm.clock import LoopClock
from atoll.runtime.swarm.files import CheckpointFiles, CheckpointService, FileJournal, Key
from atoll.runtime.swarm.packing import unpack
from atoll.runtime.swarm.spec import JobService, SwarmSpec
from atoll.runtime.swarm.telling import Teller, say_event
from atoll.runtime.swarm.transport import COORDINATOR, Directory, FabricTransport, SwarmService

__all__ = ["coordinate", "read_spec", "write_spec"]

_FINAL_SECONDS = 120.0  # how long the last states are waited for


def coordinate(
    directory: RunDirectory, spec: SwarmSpec, job: Job, captured: Captured, address: str, *, observers: tuple[Observer, ...] = ()
) -> None:
    """Coordinates until the run is over and its weights are in the directory."""
    asyncio.run(_Coordinating(directory, spec, job, captured, observers).run(address))


class _Coordinating:
    def __init__(self, directory: RunDirectory, spec: SwarmSpec, job: Job, captured: Captured, observers: tuple[Observer, ...]) -> None:
        self.directory, self.spec, self.job, self.captured = directory, spec, job, captured
        self.observers = observers
        self._began = time.monotonic()
        self._before = directory.last_moment()
        self._teller = Teller(self._now, job.batch_size)
        self._errors: list[BaseException] = []
        self.files = CheckpointFiles(directory.path / "swarm")
        self.journal = FileJournal(directory.path / "journal.jsonl")

    async def run(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        clock = LoopClock(self._errors.append)
        inbox = clock.mailbox()

        def arrived(message: Message) -> None:
            loop.call_soon_threadsafe(inbox.put, message)

        places = Directory()
        services = [SwarmService(arrived), places, CheckpointService(self.files), JobService(self.spec)]
        authority = await asyncio.to_thread(Authority.open, self.directory.path)
        resumed = self.directory.events.exists()
        with EventLog(self.directory.path, resume=resumed) as log:
            self._log = log
            if resumed:
                for observer in self.observers:
                    observer(self._started())
            else:
                self._tell(self._started())
            member, _ = await asyncio.to_thread(lambda: serve(authority, address, services=services, fingerprint=self.spec.fingerprint))
            try:
                transport = FabricTransport(member, None, places)
                node = Node(COORDINATOR, clock, transport, inbox, 0, random.Random(time.time_ns()))
                coordinator = Coordinator(node, self.journal, self.spec.settings, observe=self._observe)
                await self._until(asyncio.ensure_future(coordinator.run()))
                if coordinator.deposed:
                    raise JobFailedError(f"{self.directory.path}: another coordinator runs on the same directory; this one stops")
                await self._write_weights()
            finally:
                await clock.close()
                await asyncio.to_thread(member.close)

    async def _until(self, task: "asyncio.Future[None]") -> None:
        while not task.done():
            await asyncio.wait([task], timeout=0.2)
            if self._errors:
                task.cancel()
                raise self._errors[0]
        await task

    # ---- events

    def _now(self) -> float:
        return self._before + time.monotonic() - self._began

    def _tell(self, event: AnyEvent) -> None:
        self._log(event)
        for observer in self.observers:
            observer(event)

    def _started(self) -> RunStarted:
        job = self.job
        return RunStarted(
            at_seconds=0.0,
            name=job.name,
            mode="swarm",
            steps=job.total_steps,
            batch_size=job.batch_size,
            samples=job.samples.length,
            parameters=self.captured.graph.parameters,
            devices=(),
            precision=job.precision,
            seed=job.seed,
            unix_seconds=time.time(),
        )

    def _observe(self, happening: Happening) -> None:
        event = self._teller.event(happening)
        if event is None:
            return
        line = say_event(event)
        if line is not None:
            print(f"  {line}", flush=True)
        self._tell(event)

    # ---- the end

    async def _write_weights(self) -> None:
        """From the stages' last states, as a checkpoint that `atoll export` and every other mode read."""
        records = await self.journal.read()
        history = replay(records)
        epoch = history.origin.epoch if isinstance(history.origin, Epoch) else 0
        stages = range(self.spec.settings.stages)
        keys = [Key(epoch, self.spec.settings.steps, stage) for stage in stages]
        until = time.monotonic() + _FINAL_SECONDS
        while not all(self.files.path(key).exists() for key in keys):
            if time.monotonic() > until:
                raise JobFailedError("the last states did not all arrive; `--resume` goes on from the last checkpoint")
            await asyncio.sleep(0.2)
        tensors: dict[str, Tensor] = {}
        for key in keys:
            packed = self.files.read(key)
            assert packed is not None
            saved = unpack(packed)
            tensors |= saved["parameters"] | saved["buffers"]
        await asyncio.to_thread(self._save, tensors)
        losses = {record.version: record.loss / record.weight for record in records if isinstance(record, Committed)}
        steps = self.spec.settings.steps
        self._tell(
            RunFinished(
                at_seconds=self._now(),
                reason="done",
                steps=steps,
                samples=steps * self.job.batch_size,
                seconds=self._now(),
                loss=losses.get(steps - 1),
            )
        )

    def _save(self, tensors: dict[str, Tensor]) -> None:
        model = self.job.build_model("cpu")
        persistent = model.state_dict()
        rest = {name: value for name, value in persistent.items() if name not in tensors}
        own = {name: value for name, value in tensors.items() if name in persistent}
        held = [Held(Holding(name=name, shape=tuple(value.shape)), value) for name, value in (own | rest).items()]
        identity = RunIdentity(
            job=self.job.name,
            optimizer=type(self.job.build_optimizer([torch.nn.Parameter(torch.zeros(1))])).__name__,
            seed=self.job.seed,
            batch_size=self.job.batch_size,
            plan=str(self.directory.plan()),
        )
        with Checkpointer(self.directory.checkpoints, None, identity=identity) as checkpoints:
            checkpoints.save(self.spec.settings.steps, held, final=True)


def write_spec(directory: RunDirectory, spec: SwarmSpec) -> None:
    """For the coordinator's process, and for one started in its place."""
    directory.write("swarm.json", msgspec.json.format(msgspec.json.encode(spec), indent=1))


def read_spec(path: Path) -> SwarmSpec:
    """What was written."""
    return msgspec.json.decode((path / "swarm.json").read_bytes(), type=SwarmSpec)
