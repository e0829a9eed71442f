"""What the processes of a swarm must know of the run: the job and how it is divided, which the coordinator tells to members only; which of
its machine's devices a worker has; and the files by which a coordinator started in another's place goes on.
"""

import math
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch

from atoll.cluster import Cluster
from atoll.cluster.cluster import host_index
from atoll.control.settings import Settings
from atoll.errors import AtollError
from atoll.events import AnyEvent, RunStarted
from atoll.fabric.fingerprint import job_fingerprint
from atoll.fabric.service import CallingPeer, allowed
from atoll.job import Job
from atoll.plan import Plan, Replica
from atoll.plan.link_codecs import PlanCodecs
from atoll.runtime.run_directory import RunDirectory, with_checksum
from atoll.script import load_job
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.graph.capture import Captured
    from atoll.runtime.stage.program import StageProgram

__all__ = [
    "JOURNAL",
    "STATES",
    "STOP",
    "JobService",
    "Nothing",
    "OwnDevices",
    "Start",
    "SwarmSpec",
    "bounds_of",
    "check_devices",
    "devices_here",
    "keep_start",
    "load_spec_job",
    "planned_workers",
    "read_spec",
    "read_start",
    "since_start",
    "spec_of",
    "write_spec",
    "write_start",
]

_CHUNK_BYTES = 1 << 20  # about what a part of a stage's gradient weighs: few large ones would leave the links of most members unused
_MOST_CHUNKS = 64
_QUOTA = 16  # a stored state has at most so many times the bytes of its parameters: Adam's has three, with staleness four
_QUOTA_BYTES = 16 << 20  # and this for what does not grow with them


class SwarmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The job and how it is divided."""

    script_name: str
    script: str  # its text
    arguments: tuple[str, ...]
    bounds: tuple[int, ...]  # the stages' first layers, and the end of the last
    micro_batches: tuple[tuple[int, int], ...]  # first sample and end of each, in the global batch
    settings: Settings
    fingerprint: dict[str, str]
    program: str = ""  # digest of the captured program, which members that capture for themselves compare
    codec: str = "none"  # of activations and their gradients on links the plan names none for: a codec's name, or `auto`
    sites: tuple[str, ...] = ()  # of the plan's workers, by number, where the plan has codecs
    site_codecs: tuple[tuple[str, str, str], ...] = ()  # two sites and the codec of the link between them
    parameters: int = 0
    frozen_parameters: int = 0
    recompute: tuple[bool, ...] = ()  # which stages run their forward again in backward; none if not given


class Nothing(msgspec.Struct, frozen=True):
    """A request that asks for all there is."""


class JobService:
    """Tells members what is trained."""

    def __init__(self, spec: SwarmSpec) -> None:
        self._spec = spec

    @allowed("feeder", "worker")
    async def describe(self, request: Nothing, peer: CallingPeer) -> SwarmSpec:
        """The job and how it is divided."""
        return self._spec


def spec_of(
    script: Path,
    arguments: Sequence[str],
    job: Job,
    plan: Plan,
    captured: "Captured",
    checkpoint_every: int | None,
    codec: str = "none",
    cluster: Cluster | None = None,
) -> SwarmSpec:
    """What a plan in swarm mode means for a job; `cluster` is the one it was made for, which a plan with codecs needs."""
    from atoll.runtime.modes.swarm.compute import (  # who only reads a spec, as the coordinator does, needs no capture
        programs_of,
        tied_parameters,
    )

    codecs = PlanCodecs(plan, cluster)
    size, batch, parameters = plan.micro_batch_size, job.batch_size, captured.graph.parameters
    bounds = bounds_of(plan)
    programs = programs_of(captured, bounds)
    micro_batches = tuple((start, min(start + size, batch)) for start in range(0, batch, size))
    chunks = min(_MOST_CHUNKS, max(1, 4 * parameters // len(plan.stages) // _CHUNK_BYTES))
    settings = Settings(
        stages=len(plan.stages),
        micro_batches=len(micro_batches),
        steps=job.total_steps,
        chunks=chunks,
        checkpoint_every=checkpoint_every or 0,
        evaluate_every=(job.eval_every or 0) if job.eval_data is not None else 0,
        state_quota=tuple(_state_quota(captured, program) for program in programs),
        max_norm=job.max_grad_norm,
        skips_overflows=job.precision == "fp16",
        staleness=plan.staleness,
        tied=tuple(tied_parameters(programs)),
    )
    config = {"arguments": list(arguments), "bounds": bounds, "micro_batches": micro_batches, "settings": msgspec.to_builtins(settings)}
    return SwarmSpec(
        script_name=script.name,
        script=script.read_text("utf-8"),
        arguments=tuple(arguments),
        bounds=bounds,
        micro_batches=micro_batches,
        settings=settings,
        fingerprint=job_fingerprint([script], config),
        program=captured.digest(),
        codec=codec,
        sites=_sites(plan, cluster) if codecs else (),
        site_codecs=tuple(codecs.between_sites()),
        parameters=parameters,
        frozen_parameters=captured.graph.frozen_parameters,
        recompute=tuple(stage.recompute for stage in plan.stages),
    )


def _sites(plan: Plan, cluster: Cluster | None) -> tuple[str, ...]:
    assert cluster is not None, "a plan with codecs has its cluster"
    return tuple(host_index(cluster)[host].site for host, _ in planned_workers(plan))


def _state_quota(captured: "Captured", program: "StageProgram") -> int:
    """Bytes that a stored state of a stage has at most: its parameters and buffers, and what any optimizer keeps beside them."""
    tensors = captured.program.state_dict
    names = {name for unit in program.units for name in unit.parameters.values()}
    sizes = [tensor.numel() * tensor.element_size() for name, tensor in tensors.items() if name.removeprefix("model.") in names]
    buffers = [tensors[name] for name in captured.program.graph_signature.buffers if name in tensors]
    total: int = sum(sizes) + sum(tensor.numel() * tensor.element_size() for tensor in buffers)
    return _QUOTA * total + _QUOTA_BYTES


def bounds_of(plan: Plan) -> tuple[int, ...]:
    """The stages' first layers, and the end of the last."""
    return (*(stage.start for stage in plan.stages), plan.stages[-1].stop)


def load_spec_job(spec: SwarmSpec) -> Job:
    """The job, from the script's text. Whoever joins a run trusts its coordinator with this."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / spec.script_name
        path.write_text(spec.script, "utf-8")
        return load_job(path, spec.arguments)


class OwnDevices(msgspec.Struct, frozen=True):
    """A worker's devices, by their numbers on its machine, how it divides samples among them, and how many stages it hosts on them.

    `planned` are the stages a plan means them for; without a plan the coordinator says which.
    """

    numbers: tuple[int, ...] = (0,)
    shares: tuple[int, ...] = ()  # in proportion to these; equally if not given
    stages: int = 1
    planned: tuple[int, ...] = ()

    def find(self) -> list[torch.device]:
        """This machine's accelerators of these numbers, or so many times its processor where it has none."""
        if not torch.accelerator.is_available():
            return [torch.device("cpu")] * len(self.numbers)
        there, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
        assert kind is not None
        if max(self.numbers) >= there:
            raise AtollError(f"device {max(self.numbers)} was asked for (they count from 0); this machine has {there} of kind {kind.type}")
        return [torch.device(kind.type, number) for number in self.numbers]


def devices_here() -> tuple[int, str]:
    """How many devices this machine has and what they are called: its accelerators, or the cores it may use."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.accelerator.device_count(), kind.type
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, "core"


def check_devices(asked: int, there: int, kind: str) -> str | None:
    """What to warn of where so many devices are asked for; None where they are there. AtollError where they cannot be had (cores can)."""
    if asked <= there:
        return None
    if kind != "core":
        raise AtollError(f"--devices {asked}: this machine has {there} of kind {kind}; ask for as many or fewer")
    return (
        f"--devices {asked}: this machine has {plural(there, 'core')}, which they share: --devices {there} is as fast and takes less memory"
    )


def planned_workers(plan: Plan) -> list[tuple[str, OwnDevices]]:
    """A worker for every replica of a plan that a swarm can run: its host and devices. Replicas of the same devices are one worker's."""
    hosted: dict[tuple[str, ...], list[tuple[int, Replica]]] = {}
    for number, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            hosted.setdefault(replica.devices, []).append((number, replica))
    return [(_host(devices[0]), _own(rows[0][1], tuple(number for number, _ in rows))) for devices, rows in hosted.items()]


def _own(replica: Replica, planned: tuple[int, ...]) -> OwnDevices:
    words = [device.rpartition("/")[2] for device in replica.devices]
    numbers = tuple(int(word) if word.isdecimal() else index for index, word in enumerate(words))
    common = math.gcd(*replica.samples) or 1
    shares = tuple(samples // common for samples in replica.samples)
    return OwnDevices(numbers, shares if len(set(shares)) > 1 else (), len(planned), planned)


def _host(device: str) -> str:
    return device.rpartition("/")[0]


JOURNAL = "journal.jsonl"
STATES = "swarm"
STOP = "stop"  # a file of this name asks the coordinator to end the run after a checkpoint
_SPEC = "swarm.json"
_START = "started.json"


class Start(msgspec.Struct, frozen=True):
    """When `atoll run` was last started, so that every coordinator of this start tells the same time."""

    at_seconds: float  # the run's own time then
    unix_seconds: float
    address: str  # where the coordinator listens
    number: int = 0  # how often it was started before
    workers: int = 0  # that were started with it, one for every stage a process hosts


def write_spec(directory: RunDirectory, spec: SwarmSpec) -> None:
    """For the coordinator's process, and for one started in its place."""
    with directory.must_take():
        directory.write(_SPEC, with_checksum(msgspec.json.format(msgspec.json.encode(spec), indent=1)))


def read_spec(path: Path) -> SwarmSpec:
    """What was written."""
    return RunDirectory(path).read_as(_SPEC, SwarmSpec)


def write_start(directory: RunDirectory, address: str, workers: int = 0) -> Start:
    """The run is started now, for the first time or again."""
    before = read_start(directory)
    number = before.number + 1 if before is not None else 0
    start = Start(directory.last_moment(), time.time(), address, number, workers)
    keep_start(directory, start)
    return start


def keep_start(directory: RunDirectory, start: Start) -> None:
    """For processes that look for it there."""
    with directory.must_take():
        directory.write(_START, with_checksum(msgspec.json.encode(start)))


def read_start(directory: RunDirectory) -> Start | None:
    """What was written; None where nothing was."""
    return directory.read_as(_START, Start) if (directory.path / _START).exists() else None


def since_start(events: Sequence[AnyEvent], start: Start) -> Sequence[AnyEvent]:
    """What was told since then, by whoever coordinated; nothing where nobody has told of that start."""
    for index in range(len(events) - 1, -1, -1):
        event = events[index]
        if isinstance(event, RunStarted):
            return events[index:] if event.unix_seconds >= start.unix_seconds else ()
    return ()
