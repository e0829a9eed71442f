"""Before people are told what a step takes: on the machine that was probed the job is tried for a moment, in as many processes as will run.

The prediction then holds for this job and this hour, whatever the probe knew of them. Where the job is not tried, the plan says what its
times rest on.
"""

import time
from pathlib import Path

import msgspec

from atoll.cli.forkable_start import ForkableStart
from atoll.cli.output import working
from atoll.cli.target import Target
from atoll.cluster import Cluster, Device
from atoll.cluster.host_name import this_host
from atoll.cost import Calibration, Evaluator
from atoll.events import PhaseFinished
from atoll.plan import Plan
from atoll.plan.modes.lockstep import LOCKSTEP
from atoll.units import format_seconds, plural

__all__ = ["Grounds", "grounds_of", "grounds_without_trial", "times_by"]

_SECONDS = 1.0  # of steps, or more where they differ
_LONGEST_STEP = 1.0  # seconds by the probe: at least three are made
_LEAST_STEPS = 20  # of a run that is worth it
_PROBED = "times are by the probe's figures of this machine"
_MOST_BYTES = 2e9  # of all copies of the model, with gradients and the optimizer's state


class Grounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the times of a plan rest on."""

    sentences: tuple[str, ...] = ()
    calibration: Calibration | None = None  # None: the cluster file's figures
    phases: tuple[PhaseFinished, ...] = ()


def grounds_of(plan: Plan, model: Target, cluster: Cluster, start: ForkableStart, script: str) -> Grounds:
    """The job is tried by the plan where that can be done; where it cannot, that is said."""
    devices = _devices(plan, cluster)
    if not _are_here(devices, cluster):
        return Grounds(sentences=(grounds_without_trial(plan, cluster),))
    predicted = Evaluator(model.graph, cluster, optimizer=model.optimizer).cost(plan).step_seconds
    lockstep = msgspec.structs.replace(plan, mode=LOCKSTEP.name, staleness=0)
    if why_not := _why_not(lockstep, model, len(devices), predicted, start):
        return Grounds(sentences=(f"{_PROBED}: the job was not tried, since {why_not}",))
    from atoll.runtime.modes.lockstep.trial import try_plan  # PyTorch takes seconds to load: mistakes are told before
    from atoll.runtime.supervise.hosts import ThisMachine

    began = time.perf_counter()
    with working("trying the job for a moment"):
        found = try_plan(model.graph, lockstep, cluster, script=Path(script).resolve(), host=ThisMachine(start.server), seconds=_SECONDS)
    phases = (PhaseFinished(phase="job tried", seconds=time.perf_counter() - began),)
    if found is None:
        return Grounds(sentences=(f"{_PROBED}: trying the job failed; if running it does too, that says why",), phases=phases)
    how = "" if plan.mode == LOCKSTEP.name else f" in mode {LOCKSTEP.name}, and for what mode {plan.mode} does otherwise by the cost model"
    counted = f"the median of {plural(found.steps, 'step')} in {plural(len(devices), 'process', 'processes')}"
    sentence = f"times are of the job, tried here{how}: {format_seconds(found.step_seconds)} a step, {counted}"
    sentence += f"; by the probe's figures it would be {format_seconds(predicted)}"
    return Grounds(sentences=(sentence,), calibration=found.calibration, phases=phases)


def grounds_without_trial(plan: Plan, cluster: Cluster) -> str:
    """What the times of a plan rest on where the job was not tried."""
    devices = _devices(plan, cluster)
    if _are_here(devices, cluster):
        return f"{_PROBED}; `atoll run` tries the job itself before it predicts"
    kinds = list(dict.fromkeys(device.kind.name for device in devices))
    named = ", ".join(kinds[:3]) + (f" and {len(kinds) - 3} more" if len(kinds) > 3 else "")
    probed = {device.kind.measured is not None for device in devices}
    if probed == {True}:
        return f"times are by what `atoll probe` measured of {named}; the job itself was not tried there"
    figures = "the cluster file's or the catalogue's figures" + (" and what `atoll probe` measured" if len(probed) > 1 else "")
    return f"times are by {figures} of {named}; nothing of the job was measured there"


def times_by(given: Calibration) -> str:
    """What times rest on where a calibration was given."""
    return f"times are by the calibration that was given ({given.source})"


def _devices(plan: Plan, cluster: Cluster) -> list[Device]:
    """That the plan uses."""
    used = {name for stage in plan.stages for name in stage.devices}
    return [device for device in cluster.devices if device.name in used]


def _are_here(devices: list[Device], cluster: Cluster) -> bool:
    """Whether all are those that a probe found on this machine."""
    far = {host.name for host in cluster.hosts if host.address}
    return all(device.kind.measured is not None and device.host == this_host() and device.host not in far for device in devices)


def _why_not(plan: Plan, model: Target, processes: int, predicted: float, start: ForkableStart) -> str:
    """What keeps the job from being tried; empty: nothing."""
    from atoll.data import StreamSamples

    job = model.job
    if job is None:
        return "there is no script"
    if start.server is None:
        return start.why_not
    if (problem := LOCKSTEP.why_not(plan)) is not None:
        return problem
    if isinstance(job.samples, StreamSamples):
        return "its data is a stream, which is read once"
    if job.compile:
        return "compiling it would take long"
    if job.total_steps < _LEAST_STEPS:
        return f"it has only {plural(job.total_steps, 'step')}"
    if (16.0 * model.graph.parameters + 4.0 * model.graph.frozen_parameters) * processes > _MOST_BYTES:
        return "the model is large"
    return "its steps take too long for that" if predicted > _LONGEST_STEP else ""
