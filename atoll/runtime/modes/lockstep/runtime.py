"""Lockstep as a mode: a process for every device of the plan, each a rank; they go on from the newest checkpoint by themselves."""

from typing import TYPE_CHECKING

import msgspec

from atoll.errors import AtollError
from atoll.events import EventLog, EventStream
from atoll.runtime.mode import CapturedJob, ResumePoint, RunContext, RunOutcome, newest_checkpoint
from atoll.runtime.report import ModeReport, RunSummary
from atoll.runtime.run_directory import RunDirectory
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.graph.capture import Captured
    from atoll.graph.eager import Uncaptured
    from atoll.job import Job

__all__ = ["LockstepRuntime"]

_INTERRUPTED = 130


class LockstepRuntime:
    """`torch.distributed` ranks under one supervisor."""

    def check_options(self, options: msgspec.Struct) -> None:
        """There are none."""

    def check(self, run: RunContext) -> None:
        """PlanError where the plan says what lockstep does not do, or not with the sizes the job was captured for."""
        from atoll.graph.capture import Captured  # PyTorch takes seconds to load: mistakes are told before
        from atoll.runtime.modes.lockstep.layout import Layout
        from atoll.runtime.modes.lockstep.parallelize import check_lane_sizes
        from atoll.runtime.stage.sizes import Sizes

        layout = Layout(run.plan)
        if isinstance(run.captured, Captured):
            check_lane_sizes(layout, run.captured, Sizes(run.captured))

    def resume(self, run: RunContext) -> ResumePoint | None:
        """The newest checkpoint; ranks load it when they start."""
        return newest_checkpoint(run.directory)

    def hand_over(self, job: "Job", captured: "Captured | Uncaptured") -> CapturedJob:
        """With the programs of what is evaluated."""
        from atoll.runtime.evaluated_programs import capture_evaluated
        from atoll.runtime.modes.lockstep import worker  # noqa: F401 - for those who are forked from this process

        if captured.graph.eager:
            return CapturedJob(job, captured, {})
        try:
            return CapturedJob(job, captured, capture_evaluated(job))
        except AtollError:  # ranks find the same, and tell it
            return CapturedJob(job, captured)

    def launch(self, run: RunContext) -> RunOutcome:
        """Starts every rank, all anew when one dies, and waits for them."""
        from atoll.runtime.modes.lockstep.layout import Layout
        from atoll.runtime.modes.lockstep.supervisor import launch

        directory, devices = run.directory, Layout(run.plan).devices
        hosts = [device.rpartition("/")[0] for device in devices]
        placement = run.place(hosts, True)
        processes = plural(len(devices), "process", "processes")
        run.say(f"starting {processes} {placement.where}, one a device; the run is in {directory.path}")

        def command(rank: int, generation: int) -> list[str]:
            host = placement.hosts[hosts[rank]]
            own = placement.scripts.get(host.name)
            return [host.python, "-m", "atoll.cli.worker", str(directory.path.resolve()), *([own] if own is not None else [])]

        with EventLog(directory.path, resume=True) as log:
            result = launch(
                command,
                len(devices),
                observer=EventStream(log, *run.observers, seconds=log.seconds),
                devices=devices,
                hosts=[placement.hosts[host] for host in hosts],
                max_restarts=run.max_restarts,
                address=placement.address,
                newest_checkpoint=lambda: newest.step if (newest := newest_checkpoint(directory)) is not None else None,
            )
        newest = newest_checkpoint(directory) if result.interrupted else None
        if newest is not None and newest.step >= run.job.total_steps:
            return RunOutcome(result.exit_code)  # asked to stop when there was nothing left to do
        return RunOutcome(result.exit_code or (_INTERRUPTED if result.interrupted else 0), resumable=newest is not None)

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """It listens nowhere."""
        return None

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """Predicted against measured."""
        from atoll.runtime.modes.lockstep.report import report_lockstep

        return report_lockstep(directory, summary)
