"""Islands as a mode: a coordinator, and the ranks of every site, each site a lockstep world of its own."""

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from atoll.errors import AtollError, JobError
from atoll.events import EventLog, EventStream
from atoll.plan.modes.islands import IslandsOptions
from atoll.plan.sites import SitePart, site_parts
from atoll.runtime.mode import CapturedJob, ResumePoint, RunContext, RunOutcome, newest_checkpoint
from atoll.runtime.report import ModeReport, RunSummary, read_prediction
from atoll.runtime.run_directory import RunDirectory
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.fabric.security import Authority
    from atoll.graph.capture import Captured
    from atoll.graph.eager import Uncaptured
    from atoll.job import Job
    from atoll.runtime.modes.islands.borders import IslandBorders
    from atoll.runtime.modes.islands.spec import IslandsSpec

__all__ = ["IslandsRuntime"]

_INTERRUPTED = 130
_JOIN_USES = 1000
_JOIN_SECONDS = 24 * 3600.0


class IslandsRuntime:
    """Lockstep inside each site, the protocol of `control/rounds` between them."""

    def check_options(self, options: msgspec.Struct) -> None:
        """Numbers of the outer update that cannot be."""
        own = _own(options)
        if own.outer_learning_rate is not None and not own.outer_learning_rate > 0:
            raise JobError(f"--outer-learning-rate: must be positive, got {own.outer_learning_rate}")
        if own.outer_momentum is not None and not 0 <= own.outer_momentum < 1:
            raise JobError(f"--outer-momentum: at least 0 and less than 1, got {own.outer_momentum}")

    def check(self, run: RunContext) -> None:
        """A plan that sites cannot train by themselves, data that cannot be shared out, callbacks that nobody could obey."""
        from atoll.callbacks import takes_run
        from atoll.data import StreamSamples
        from atoll.graph.capture import Captured
        from atoll.runtime.modes.islands.noise import check_noise
        from atoll.runtime.modes.lockstep.layout import Layout
        from atoll.runtime.modes.lockstep.parallelize import check_lane_sizes
        from atoll.runtime.stage.sizes import Sizes

        for part in _parts(run):
            layout = Layout(part.plan)
            if isinstance(run.captured, Captured):
                check_lane_sizes(layout, run.captured, Sizes(run.captured))
        if isinstance(run.job.samples, StreamSamples):
            raise JobError(
                "mode islands: each site reads its own part of the data by its place, which a stream has not; give data with a length"
            )
        for callback in run.job.callbacks:
            name = getattr(callback, "__name__", type(callback).__name__)
            if takes_run(callback):
                raise JobError(
                    f"mode islands: the callback {name} takes the run, for which all sites would have to stop between two steps; "
                    "use lockstep, or one argument"
                )
        spec = _spec(run)
        check_noise(run.directory, spec.noise, [part.site for part in _parts(run)])
        gradients = spec.choice.exchange == "gradients"
        _borders(run).check("gradients" if gradients else "updates", 0 if gradients else run.max_restarts)

    def resume(self, run: RunContext) -> ResumePoint | None:
        """The newest checkpoint, whichever mode wrote it; rounds are counted anew from there."""
        from atoll.runtime.modes.islands.resume import prepare_rounds

        found = prepare_rounds(run.directory, [part.site for part in _parts(run)])
        if found is None:
            return None
        _borders(run).check_kept(found.kept)
        return ResumePoint(found.step, "\n".join((f"going on after step {found.step}", *found.notes)))

    def hand_over(self, job: "Job", captured: "Captured | Uncaptured") -> CapturedJob:
        """As to ranks of a lockstep run."""
        from atoll.runtime.evaluated_programs import capture_evaluated
        from atoll.runtime.modes.islands import (  # noqa: F401 - for those who are forked from this process
            coordinator_process,
            gradient_coordinator,
            gradient_site,
            site_process,
        )

        if captured.graph.eager:
            return CapturedJob(job, captured, {})
        try:
            return CapturedJob(job, captured, capture_evaluated(job))
        except AtollError:  # ranks find the same, and tell it
            return CapturedJob(job, captured)

    def launch(self, run: RunContext) -> RunOutcome:
        """Starts the coordinator and all sites, and waits for their end."""
        from atoll.runtime.modes.islands.spec import write_islands, write_site
        from atoll.runtime.modes.islands.supervisor import IslandProcesses, SiteProcesses
        from atoll.runtime.modes.swarm.spec import write_start
        from atoll.runtime.modes.swarm.supervisor import free_address

        spec, parts, directory = _spec(run), _parts(run), run.directory
        hosts = list(dict.fromkeys(_host(device) for part in parts for device in _devices(part)))
        placement = run.place(hosts, True)
        address = free_address(placement.address)
        write_islands(directory, spec)
        if not spec.settings.rounds:
            run.say("all steps were made before")
            return RunOutcome(0)
        for part in parts:
            write_site(directory, part, part.site == spec.first, run.settings)
        authority = _authority(directory)
        EventLog(directory.path, resume=True).close()  # the run's time goes on from here
        start = write_start(directory, address, len(parts))
        _say(run, spec, parts, placement.where)
        if spec.choice.exchange == "weights":
            token = authority.issue_token("worker", uses=_JOIN_USES, lifetime_seconds=_JOIN_SECONDS)
            run.say(f"another site joins with: atoll join {address} --token {token} --site NAME")
        sites = [
            SiteProcesses(part.site, _devices(part), [placement.hosts[_host(device)] for device in _devices(part)], placement.scripts)
            for part in parts
        ]
        prepare = None
        if spec.choice.exchange == "gradients":
            from atoll.runtime.modes.islands.owed_gradients import prepare_gradients

            prepare = partial(prepare_gradients, directory, [part.site for part in parts])
        with EventLog.join(directory.path) as log:
            processes = IslandProcesses(
                directory,
                address,
                sites,
                store_address=placement.address,
                here=placement.here,
                max_restarts=run.max_restarts,
                observer=EventStream(log, *run.observers, seconds=log.seconds),
                number=start.number,
                prepare_all=prepare,
            )
            code = processes.run()
        return RunOutcome(code, resumable=code == _INTERRUPTED and newest_checkpoint(directory) is not None)

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """Its last event tells."""
        return None

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """What each site gave to the rounds."""
        from atoll.runtime.modes.islands.report import report_islands

        return report_islands(directory, read_prediction(directory))


def _own(options: msgspec.Struct) -> IslandsOptions:
    assert isinstance(options, IslandsOptions)
    return options


def _parts(run: RunContext) -> tuple[SitePart, ...]:
    if run.cluster is None:
        raise JobError("mode islands: the cluster file says which devices are at which site; give it with --cluster")
    return site_parts(run.plan, run.cluster)


def _borders(run: RunContext) -> "IslandBorders":
    from atoll.runtime.modes.islands.borders import IslandBorders

    assert run.cluster is not None  # or there were no parts
    return IslandBorders.of(run.cluster, [part.site for part in _parts(run)])


def _spec(run: RunContext) -> "IslandsSpec":
    from atoll.runtime.modes.islands.resume import Beginning, read_beginning
    from atoll.runtime.modes.islands.spec import islands_spec

    assert run.cluster is not None  # or there were no parts
    model = run.job.build_model("meta")
    elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    beginning = read_beginning(run.directory) if run.resume_point is not None else Beginning()
    predicted = None if run.captured is None else _step_seconds(run)
    own, bases, growth = _own(run.options), beginning.bases, beginning.growth
    return islands_spec(run.settings, run.job, run.plan, run.cluster, own, elements, predicted, bases, growth)


def _step_seconds(run: RunContext) -> float | None:
    from atoll.cost import Evaluator

    assert run.cluster is not None and run.captured is not None  # noqa: PT018
    return Evaluator(run.captured.graph, run.cluster).cost(run.plan).step_seconds


def _host(device: str) -> str:
    return device.rpartition("/")[0]


def _devices(part: SitePart) -> tuple[str, ...]:
    from atoll.runtime.modes.lockstep.layout import Layout

    return tuple(Layout(part.plan).devices)


def _authority(directory: RunDirectory) -> "Authority":
    from atoll.fabric.security import Authority

    known = (directory.path / "authority" / "authority.key").exists()
    return Authority.open(directory.path) if known else Authority.create(directory.path)


def _say(run: RunContext, spec: "IslandsSpec", parts: tuple[SitePart, ...], where: str) -> None:
    choice = spec.choice
    counted = ", ".join(
        f"{part.site} ({plural(len(_devices(part)), 'process', 'processes')}, {part.stop - part.start} samples)" for part in parts
    )
    run.say(f"starting a coordinator and {plural(len(parts), 'site')} {where}: {counted}; the run is in {run.directory.path}")
    if choice.exchange == "gradients":
        run.say(f"gradients of every step in {choice.codec}, added up over all sites while backward runs")
        for reason in spec.reasons:
            run.say(f"  {reason}")
        return
    run.say(
        f"an update in {choice.codec} every {plural(choice.inner_steps, 'step')}, applied {plural(choice.delay_steps, 'step')} later; "
        f"outer learning rate {choice.learning_rate:g}, momentum {choice.momentum:g}; quorum {spec.settings.quorum}"
    )
    for reason in spec.reasons:
        run.say(f"  {reason}")
    if choice.exchange == "weights" and (stateless := _borders(run).why_no_state()) is not None:
        run.say(f"a site that falls some rounds behind cannot come back: {stateless}")
