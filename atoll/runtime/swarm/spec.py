"""Spec: what somebody who joins a swarm must know of the job. The coordinator tells it to members only."""

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.control.settings import Settings
from atoll.fabric.fingerprint import job_fingerprint
from atoll.fabric.method import Peer
from atoll.fabric.roles import allowed
from atoll.job import Job
from atoll.plan import Plan
from atoll.script import load_job

if TYPE_CHECKING:
    from atoll.graph.capture import Captured

__all__ = ["JobService", "Nothing", "SwarmSpec", "bounds_of", "load_spec_job", "spec_of", "stored_every"]

_CHUNK_BYTES = 1 << 20  # about what a part of a stage's gradient weighs: few large ones would leave the links of most members unused
_MOST_CHUNKS = 64


class SwarmSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The job and how it is divided."""

    script_name: str
    script: str  # its text
    arguments: tuple[str, ...]
    bounds: tuple[int, ...]  # the stages' first layers, and the end of the last
    micro_batches: tuple[tuple[int, int], ...]  # first sample and end of each, in the global batch
    settings: Settings
    fingerprint: dict[str, str]
    codec: str = "none"  # of activations and their gradients on links: a codec's name, or `auto`
    parameters: int = 0
    recompute: tuple[bool, ...] = ()  # which stages run their forward again in backward; none if not given


class Nothing(msgspec.Struct, frozen=True):
    """A request that asks for all there is."""


class JobService:
    """Tells members what is trained."""

    def __init__(self, spec: SwarmSpec) -> None:
        self._spec = spec

    @allowed("feeder", "worker")
    async def describe(self, request: Nothing, peer: Peer) -> SwarmSpec:
        """The job and how it is divided."""
        return self._spec


def spec_of(
    script: Path, arguments: Sequence[str], job: Job, plan: Plan, captured: "Captured", checkpoint_every: int | None, codec: str = "none"
) -> SwarmSpec:
    """What a plan in swarm mode means for a job."""
    from atoll.runtime.swarm.compute import programs_of, tied_parameters  # who only reads a spec, as the coordinator does, needs no capture

    size, batch, parameters = plan.micro_batch_size, job.batch_size, captured.graph.parameters
    bounds = bounds_of(plan)
    micro_batches = tuple((start, min(start + size, batch)) for start in range(0, batch, size))
    chunks = min(_MOST_CHUNKS, max(1, 4 * parameters // len(plan.stages) // _CHUNK_BYTES))
    settings = Settings(
        stages=len(plan.stages),
        micro_batches=len(micro_batches),
        steps=job.total_steps,
        chunks=chunks,
        heartbeat_seconds=0.5,
        patience_seconds=10.0,
        gather_seconds=2.0,
        checkpoint_every=stored_every(checkpoint_every, job),
        max_norm=job.max_grad_norm,
        skips_overflows=job.precision == "fp16",
        rebalance_seconds=60.0,
        staleness=plan.staleness,
        tied=tuple(tied_parameters(programs_of(captured, bounds))),
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
        codec=codec,
        parameters=parameters,
        recompute=tuple(stage.recompute for stage in plan.stages),
    )


def bounds_of(plan: Plan) -> tuple[int, ...]:
    """The stages' first layers, and the end of the last."""
    return (*(stage.start for stage in plan.stages), plan.stages[-1].stop)


def stored_every(checkpoint_every: int | None, job: Job) -> int:
    """How often states are stored, so that there is one after every step that is evaluated; 0: never."""
    return math.gcd(checkpoint_every or 0, (job.eval_every or 0) if job.eval_data is not None else 0)


def load_spec_job(spec: SwarmSpec) -> Job:
    """The job, from the script's text. Whoever joins a run trusts its coordinator with this."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / spec.script_name
        path.write_text(spec.script, "utf-8")
        return load_job(path, spec.arguments)
