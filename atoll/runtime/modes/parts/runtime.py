"""Parts as a mode: a process for every part, and a hub in this one, which makes one run of what they tell."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from atoll.blame import in_words
from atoll.errors import JobError
from atoll.events import AnyEvent, CheckpointRestored, EventLog, EventStream, RunFinished, RunStarted
from atoll.plan.modes.parts import PartsOptions
from atoll.runtime.mode import CapturedJob, ResumePoint, RunContext, RunOutcome, newest_checkpoint
from atoll.runtime.report import ModeReport, RunSummary
from atoll.runtime.run_directory import RunDirectory
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.collaboration import Collaboration
    from atoll.graph.capture import Captured
    from atoll.graph.eager import Uncaptured
    from atoll.job import Job
    from atoll.runtime.modes.parts.hub import HubState
    from atoll.runtime.modes.parts.messages import PartsSpec
    from atoll.runtime.modes.parts.run_events import RunEvents

Reason = Literal["done", "stopped", "interrupted", "failed"]

__all__ = ["PartsRuntime"]

_INTERRUPTED = 130
_CHECKPOINTS = 10  # of a run that does not say how often to save


class PartsRuntime:
    """Each part in a process of its own."""

    def check_options(self, options: msgspec.Struct) -> None:
        """Whatever they say means something."""

    def check(self, run: RunContext) -> None:
        """Callbacks that need the whole model in this process, and data that cannot be asked for twice."""
        from atoll.callbacks import takes_run
        from atoll.data.stream import is_stream

        job = _collaboration(run.job)
        for callback in job.callbacks:
            if takes_run(callback):
                name = getattr(callback, "__name__", type(callback).__name__)
                raise JobError(f"mode parts: the callback {name} takes the run, whose models are elsewhere; use --alone, or one argument")
        if is_stream(job.dataset):
            raise JobError("mode parts: data that is read in order cannot be read again by a part that asks for a step again; use --alone")

    def resume(self, run: RunContext) -> ResumePoint | None:
        """The newest step that all parts have saved, or that another mode has, whose checkpoint is divided among them."""
        from atoll.runtime.modes.parts.checkpoints import divide_checkpoint, newest_common

        job, path = _collaboration(run.job), run.directory
        newest, whole = newest_common(path, job), newest_checkpoint(path)
        if whole is not None and whole.step > newest:
            divide_checkpoint(path, job, whole.step)
            return whole
        return ResumePoint(newest) if newest else None

    def hand_over(self, job: "Job", captured: "Captured | Uncaptured") -> CapturedJob:
        """Its processes are not forked."""
        return CapturedJob(job, captured)

    def launch(self, run: RunContext) -> RunOutcome:
        """Starts the parts, hears what they do, and waits for their end."""
        from atoll.callbacks import listeners
        from atoll.fabric.security import Authority
        from atoll.fabric.security.member import serve
        from atoll.fabric.shaped import imposed_links
        from atoll.runtime.modes.parts.checkpoints import join_checkpoints, newest_common
        from atoll.runtime.modes.parts.hub import HubState, PartsHub
        from atoll.runtime.modes.parts.report import write_measured_parts
        from atoll.runtime.modes.parts.run_events import RunEvents
        from atoll.runtime.modes.parts.supervisor import PartPlace, PartsProcesses
        from atoll.runtime.modes.swarm.supervisor import free_address

        job, path = _collaboration(run.job), run.directory.path
        devices = {name: stage.devices[0] for name, stage in zip(job.parts, run.plan.stages, strict=True)}
        hosts = [device.rpartition("/")[0] for device in devices.values()]
        placement = run.place(hosts, False)
        known = (path / "authority" / "authority.key").exists()
        authority: Authority = Authority.open(path) if known else Authority.create(path)
        spec = _spec(run)
        hub = HubState(frozenset(job.turns), job.total_steps)
        evaluated = [name for name, part in job.parts.items() if part.is_evaluated]
        events = RunEvents(list(job.turns), evaluated, job.batch_size, str(path / "parts"))
        run.say(f"starting {plural(len(job.parts), 'part')} {placement.where}; the run is in {path}")
        links, at = imposed_links(os.environ), free_address(placement.address)
        member, address = serve(authority, at, services=[PartsHub(spec, hub)], fingerprint=spec.fingerprint, links=links)
        with member, EventLog(path, resume=True) as log:
            stream = EventStream(log, *run.observers, *listeners(job.callbacks), seconds=log.seconds)
            places = {
                name: PartPlace(placement.hosts[host], placement.scripts.get(placement.hosts[host].name, str(path.resolve())))
                for name, host in zip(job.parts, hosts, strict=True)
            }
            processes = PartsProcesses(
                *(job, places, hub, member, address, authority, events),
                max_restarts=run.max_restarts,
                emit=stream,
                begun=lambda step: _tell_begun(run, job, hub, stream, step),
            )
            began = time.monotonic()
            try:
                processes.run()
            except BaseException as error:
                stream(_finished(job, events, "failed", str(error) or in_words(error), time.monotonic() - began))
                raise
            finally:
                write_measured_parts(run.directory, events.measured(devices))
            newest = newest_common(run.directory, job)
            if newest:
                join_checkpoints(run.directory, job, newest, run.settings.keep_last)
            reason: Reason = "interrupted" if processes.interrupted else events.ending() or "stopped"
            stream(_finished(job, events, reason, "", time.monotonic() - began))
        return RunOutcome(_INTERRUPTED if processes.interrupted else 0, resumable=processes.interrupted and newest > 0)

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """Its last event has to tell."""
        return None

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """What crossed, and who waited."""
        from atoll.runtime.modes.parts.report import report_parts

        return report_parts(directory)


def _collaboration(job: "Job") -> "Collaboration":
    from atoll.collaboration import Collaboration

    if not isinstance(job, Collaboration):
        raise JobError("mode parts trains what atoll.collaborate makes, and the script's job is one model; leave --mode out")
    return job


def _spec(run: RunContext) -> "PartsSpec":
    from atoll.fabric.fingerprint import job_fingerprint
    from atoll.runtime.modes.parts.messages import PartsSpec

    script, job, settings = Path(run.settings.script), _collaboration(run.job), run.settings
    assert isinstance(run.options, PartsOptions)
    every = settings.checkpoint_every or max(1, -(-job.total_steps // _CHECKPOINTS))
    ahead = -(-(run.options.credits * len(job.parts)) // every)  # saves by which one part may be ahead of another
    return PartsSpec(
        script_name=script.name,
        script=script.read_text("utf-8"),
        arguments=settings.arguments,
        fingerprint=job_fingerprint([script], {"arguments": list(settings.arguments)}),
        credits=run.options.credits,
        checkpoint_every=every,
        keep_last=settings.keep_last + ahead,
        directory=run.directory.path.name,
    )


def _tell_begun(run: RunContext, job: "Collaboration", hub: "HubState", tell: Callable[[AnyEvent], None], step: int) -> None:
    """All parts that train have begun, or go on after a step."""
    entries = hub.entries()
    tell(
        RunStarted(
            name=job.name,
            mode=run.plan.mode,
            steps=job.total_steps,
            batch_size=job.batch_size,
            samples=max((one.samples for one in entries.values()), default=0),
            parameters=sum(one.parameters for one in entries.values()),
            frozen_parameters=sum(one.frozen_parameters for one in entries.values()),
            devices=tuple(dict.fromkeys(stage.devices[0] for stage in run.plan.stages)),
            precision="+".join(dict.fromkeys(part.precision for part in job.parts.values())),
            seed=job.seed,
            unix_seconds=time.time(),
            num_workers=job.num_workers,
        )
    )
    if step:
        tell(CheckpointRestored(step=step, path=str(run.directory.path / "parts")))


def _finished(job: "Collaboration", events: "RunEvents", reason: Reason, message: str, seconds: float) -> RunFinished:
    samples = events.step * job.batch_size
    return RunFinished(reason=reason, steps=events.step, samples=samples, seconds=seconds, loss=events.loss, message=message)
