"""Spec: what somebody who joins a swarm must know of the job. The coordinator tells it to members only."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.cluster import Cluster
from atoll.cluster.cluster import host_index
from atoll.control.settings import Settings
from atoll.fabric.fingerprint import job_fingerprint
from atoll.fabric.service import CallingPeer, allowed
from atoll.job import Job
from atoll.plan import Plan
from atoll.plan.link_codecs import PlanCodecs
from atoll.script import load_job

if TYPE_CHECKING:
    from atoll.graph.capture import Captured
    from atoll.runtime.stage.program import StageProgram

__all__ = ["JobService", "Nothing", "SwarmSpec", "bounds_of", "load_spec_job", "spec_of"]

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
    codec: str = "none"  # of activations and their gradients on links the plan names none for: a codec's name, or `auto`
    sites: tuple[str, ...] = ()  # of the plan's workers, by number, where the plan has codecs
    site_codecs: tuple[tuple[str, str, str], ...] = ()  # two sites and the codec of the link between them
    parameters: int = 0
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
        codec=codec,
        sites=_sites(plan, cluster) if codecs else (),
        site_codecs=tuple(codecs.between_sites()),
        parameters=parameters,
        recompute=tuple(stage.recompute for stage in plan.stages),
    )


def _sites(plan: Plan, cluster: Cluster | None) -> tuple[str, ...]:
    from atoll.runtime.modes.swarm.own_devices import planned_workers  # it loads PyTorch

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
