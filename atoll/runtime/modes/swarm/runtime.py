"""The swarm as a mode: coordinator, feeder and local workers are started, and the command with which others join is told."""

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from atoll.errors import FabricError, JobError
from atoll.events import EventLog, EventStream
from atoll.plan.modes.swarm import SwarmOptions
from atoll.runtime.mode import CapturedJob, ResumePoint, RunContext, RunOutcome
from atoll.runtime.report import ModeReport, RunSummary
from atoll.runtime.run_directory import RunDirectory
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.fabric.security import Authority
    from atoll.graph.capture import Captured
    from atoll.graph.eager import Uncaptured
    from atoll.job import Job
    from atoll.runtime.modes.swarm.resume import Resumed
    from atoll.runtime.modes.swarm.spec import SwarmSpec

__all__ = ["SwarmRuntime"]

_JOIN_USES = 1000
_JOIN_SECONDS = 24 * 3600.0
_INTERRUPTED = 130


class SwarmRuntime:
    """The protocol of `control/`, with its processes."""

    def check_options(self, options: msgspec.Struct) -> None:
        """Addresses that are none, and a standby without a journal that it could read."""
        from atoll.fabric.address import split_address

        own = _own(options)
        if own.standby and own.nats is None:
            raise JobError("--standby: another machine can only coordinate where the journal is on NATS; give --nats URL too")
        for option, address in [("--listen", own.listen), *(("--standby", other) for other in own.standby)]:
            if address is not None:
                try:
                    split_address(address)
                except FabricError as error:
                    raise JobError(f"{option} {error}") from None

    def check(self, run: RunContext) -> None:
        """Losses that cannot be divided, optimizers that staleness would leave behind, a journal that is damaged."""
        from atoll.graph.capture import Captured
        from atoll.runtime.modes.swarm.member_process import check_divisible  # PyTorch takes seconds to load: mistakes are told before
        from atoll.runtime.modes.swarm.resume import check_journal
        from atoll.runtime.modes.swarm.spec import bounds_of
        from atoll.runtime.modes.swarm.staleness import check_optimizer

        assert isinstance(run.captured, Captured)  # as devices are needed, and nothing else passes its rules
        check_divisible(run.captured, bounds_of(run.plan))
        _check_training(run.job)
        if run.plan.staleness:
            check_optimizer(run.job)
        if run.resumed and _own(run.options).nats is None:
            check_journal(run.directory)

    def resume(self, run: RunContext) -> ResumePoint | None:
        """What was committed is in the journal; those who start now find it prepared for them."""
        from atoll.runtime.modes.swarm.resume import continue_run

        spec, authority = _spec(run), _authority(run.directory)
        found = asyncio.run(continue_run(run.directory, _own(run.options).nats, authority.run, spec, run.job))
        if found is None:
            return None
        sentences = (_going_on(found, spec.settings.steps), *found.notes)
        return ResumePoint(found.checkpoint if found.lost else found.committed, "\n".join(sentences))

    def hand_over(self, job: "Job", captured: "Captured | Uncaptured") -> CapturedJob:
        """For the coordinator, the feeder and workers alike."""
        from atoll.runtime.modes.swarm import coordinator_process, member_process  # noqa: F401 - for those who are forked from this process

        return CapturedJob(job, captured)

    def launch(self, run: RunContext) -> RunOutcome:
        """Starts the swarm, or goes on with one that was begun, and waits for its end."""
        from atoll.runtime.modes.swarm.spec import JOURNAL, planned_workers, read_start, write_spec, write_start
        from atoll.runtime.modes.swarm.supervisor import SwarmProcesses, free_address

        options, spec, directory = _own(run.options), _spec(run), run.directory
        before = read_start(directory)
        workers = planned_workers(run.plan)
        placement = run.place([host for host, _ in workers], False)
        address = options.listen or (before.address if before is not None else free_address(placement.address))
        write_spec(directory, spec)
        authority = _authority(directory)
        EventLog(directory.path, resume=True).close()  # the run's time goes on from here
        start = write_start(directory, address, sum(own.stages for _, own in workers))
        if run.resume_point is not None and run.resume_point.step >= spec.settings.steps:
            workers = []  # the coordinator writes what may be missing
        else:
            started = f"a coordinator, a feeder and {_workers([own.stages for _, own in workers])}"
            run.say(f"starting {started} {placement.where}; the run is in {directory.path}")
            _invite(authority, run, address, options.standby)
        with EventLog.join(directory.path) as log:
            processes = SwarmProcesses(
                directory.path,
                address,
                workers=[(placement.hosts[host], own) for host, own in workers],
                scripts=placement.scripts,
                max_restarts=run.max_restarts,
                observer=EventStream(log, *run.observers, seconds=log.seconds),
                generation=start.number,
                standby=options.standby,
                here=placement.here,
            )
            code = processes.run()
        begun = options.nats is not None or (directory.path / JOURNAL).exists()  # else nothing was begun that could go on
        return RunOutcome(code, resumable=code == _INTERRUPTED and begun)

    def is_listening(self, directory: RunDirectory) -> bool | None:
        """Whether its coordinator does."""
        from atoll.runtime.modes.swarm.report_view import is_listening

        return is_listening(directory)

    def report(self, directory: RunDirectory, summary: RunSummary) -> ModeReport:
        """Who came and went, what each stage and each link did, and what had to be done again."""
        from atoll.runtime.modes.swarm.report_view import report_swarm

        return report_swarm(directory, summary)


def _own(options: msgspec.Struct) -> SwarmOptions:
    assert isinstance(options, SwarmOptions)
    return options


def _spec(run: RunContext) -> "SwarmSpec":
    from atoll.graph.capture import Captured
    from atoll.runtime.modes.swarm.spec import spec_of

    assert isinstance(run.captured, Captured)
    settings, job, plan = run.settings, run.job, run.plan
    every, codec = settings.checkpoint_every, settings.codec
    return spec_of(Path(settings.script), settings.arguments, job, plan, run.captured, every, codec, run.cluster)


def _check_training(job: "Job") -> None:
    """Refuse what needs all members to do something together between two steps."""
    import torch
    from torch.optim.lr_scheduler import ReduceLROnPlateau

    from atoll.callbacks import EarlyStopping, takes_run

    for callback in job.callbacks:
        name = getattr(callback, "__name__", type(callback).__name__)
        if takes_run(callback):
            raise JobError(f"mode swarm: the callback {name} takes the run, which a swarm cannot stop for; use lockstep, or one argument")
        if isinstance(callback, EarlyStopping):
            raise JobError("mode swarm: EarlyStopping waits for evaluations, which a swarm makes while it trains on; use lockstep")
    scheduler = None
    with suppress(JobError):  # it may be made for several groups, which one parameter is not
        scheduler = job.build_scheduler(job.build_optimizer([torch.nn.Parameter(torch.zeros(1))]))
    if isinstance(scheduler, ReduceLROnPlateau):
        raise JobError("mode swarm: ReduceLROnPlateau waits for evaluations, which a swarm makes while it trains on; use lockstep")


def _authority(directory: RunDirectory) -> "Authority":
    """The run's own, made where there is none yet."""
    from atoll.fabric.security import Authority

    known = (directory.path / "authority" / "authority.key").exists()
    return Authority.open(directory.path) if known else Authority.create(directory.path)


def _invite(authority: "Authority", run: RunContext, address: str, standby: tuple[str, ...]) -> None:
    """Says with which commands others join and stand by."""
    path, token = run.directory.path, authority.issue_token("worker", uses=_JOIN_USES, lifetime_seconds=_JOIN_SECONDS)
    run.say(f"{_others(address)} join with: atoll join {','.join((_dialled(address), *standby))} --token {token}")
    for other in standby:
        run.say(f"to stand by at {other}, copy {path} there and start: atoll standby {path.name} --listen {other}")


def _workers(hosted: Sequence[int]) -> str:
    several = sum(count > 1 for count in hosted)
    if not several:
        return plural(len(hosted), "worker")
    return f"{plural(len(hosted), 'worker')}, {several} of which host{'s' if several == 1 else ''} several stages,"


def _going_on(resumed: "Resumed", steps: int) -> str:
    committed, checkpoint = resumed.committed, resumed.checkpoint
    if resumed.lost:
        return f"{plural(committed, 'step')} made before, but the last states were not stored: going on after step {checkpoint}"
    if committed >= steps:
        return f"{plural(committed, 'step')} made before, the last one too: only the coordinator is started, to write what may be missing"
    if committed == checkpoint:
        return f"going on after step {committed}"
    made = f"{plural(committed, 'step')} made before"
    return f"{made}; the last checkpoint is of step {checkpoint}: from there, unless workers of before are still there"


def _others(address: str) -> str:
    """Who can dial an address."""
    if address.startswith(("127.", "localhost:", "[::1]")):
        return "others on this machine (give --listen 0.0.0.0:PORT to let other machines in)"
    return "others"


def _dialled(address: str) -> str:
    """Where others dial: an address that stands for all of this machine's says none."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostname()}:{port}" if host in ("0.0.0.0", "[::]", "") else address
