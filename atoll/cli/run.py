"""`atoll run SCRIPT --cluster FILE`: plan the job, show the plan, start a process for every device, train."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from atoll.cli.output import notes_view
from atoll.cli.plan import RunMode, make_plan_for, priced
from atoll.cli.render import plan_view, show
from atoll.cli.report import short_view
from atoll.cli.status import say
from atoll.cli.swarm import check_resumed, check_swarm, launch_swarm
from atoll.cli.target import Target, load_target
from atoll.cluster import Cluster, dump_cluster, load_cluster
from atoll.codec import SwarmCodec
from atoll.cost import Calibration, Cost, load_calibration
from atoll.errors import FabricError, JobError, PlanError
from atoll.events import EventLog
from atoll.fabric.address import split_address
from atoll.lab.environment import lab_of
from atoll.lab.remote import remote_command
from atoll.plan import Plan, load_plan, validate, why_not_swarm
from atoll.runtime.lockstep.layout import check_supported
from atoll.runtime.run_directory import SPEEDS, RunDirectory, RunSettings
from atoll.units import plural

if TYPE_CHECKING:
    from atoll.events import AnyEvent

__all__ = ["run"]


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script.", metavar="SCRIPT")],
    cluster: Annotated[Path | None, typer.Option("--cluster", "-c", help="The devices to train on.", metavar="FILE")] = None,
    plan: Annotated[Path | None, typer.Option(help="Run exactly this plan.", metavar="FILE")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for everything about the run; a new one.", metavar="DIR")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this run, also under another plan.", metavar="DIR")] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Train in one process: the reference for every plan.")] = False,
    max_restarts: Annotated[int, typer.Option(help="Start anew from the last checkpoint this many times when a process dies.", min=0)] = 0,
    checkpoint_every: Annotated[int | None, typer.Option(help="Save after every so many steps; always at the end.", min=1)] = None,
    keep_last: Annotated[int, typer.Option(help="How many checkpoints to keep.", min=1)] = 2,
    calibration: Annotated[Path | None, typer.Option(help="Measured constants of the cost model.", metavar="FILE")] = None,
    mode: Annotated[RunMode, typer.Option(help="How devices work together; as a given plan says, where it is not given.")] = "lockstep",
    listen: Annotated[
        str | None, typer.Option(help="Swarm: where the coordinator listens; others join there.", metavar="HOST:PORT")
    ] = None,
    nats: Annotated[
        str | None, typer.Option(help="Swarm: keep the journal on these NATS servers, so that another can coordinate.", metavar="URL,…")
    ] = None,
    standby: Annotated[
        list[str] | None, typer.Option(help="Swarm with --nats: where `atoll standby` will listen; may be repeated.", metavar="HOST:PORT")
    ] = None,
    codec: Annotated[
        SwarmCodec, typer.Option(help="Swarm: how activations and their gradients are sent; `auto` chooses for each link as it is.")
    ] = "none",
    staleness: Annotated[
        int | None,
        typer.Option(help="Swarm: with 1 a step begins while the gradients of the one before are still summed.", min=0, max=1),
    ] = None,
) -> None:
    """Plan the job and train it: a process for every device of the plan, on this machine. What follows `--` is the script's own."""
    arguments = tuple(context.obj or ())
    if alone:
        _run_alone(script, arguments, out, cluster, plan, resume)
        return
    if resume is not None:
        mode, codec, nats = _as_before(context, RunDirectory(resume).settings(), mode, codec, nats)
    elif plan is not None and not _is_given(context, "mode") and load_plan(plan).mode == "swarm":
        mode = "swarm"
    _check_swarm_options(mode, codec, nats, standby, staleness)
    _check_addresses(mode, listen, standby)
    directory, settings = _directory(script, arguments, out, resume, checkpoint_every, keep_last)
    devices = _cluster(cluster, plan, directory if resume else None)
    constants = load_calibration(calibration) if calibration else None
    _check_mode(plan, directory if resume and not cluster else None, mode, staleness)
    model = load_target(script, None, arguments)
    chosen = _plan(model, devices, plan, constants, directory if resume and not cluster else None, mode)
    if mode == "swarm":
        if staleness is None:  # a resumed run that is planned anew trains as it did
            staleness = directory.plan().staleness if resume is not None and plan is None else chosen.staleness
        chosen = msgspec.structs.replace(chosen, mode=mode, staleness=staleness)
    if mode == "swarm" and model.captured is not None and model.job is not None:
        check_swarm(chosen, model.captured, model.job)
    if mode == "swarm" and resume is not None:
        check_resumed(directory, chosen, nats)
    elif mode != "swarm":
        check_lockstep(chosen)
    settings = msgspec.structs.replace(settings, mode=mode, codec=codec, nats=nats)
    matching = devices if devices is not None and devices.name == chosen.cluster else None
    predicted, said = priced(chosen, model, matching, constants) if matching else (None, ())
    _write(directory, settings, chosen, devices, predicted, resumed=resume is not None)
    _show(chosen, predicted, model, devices, said)
    if mode == "swarm":
        assert model.captured is not None  # a script always is
        launch_swarm(directory, settings, chosen, model.captured, max_restarts, listen, tuple(standby or ()))
    else:
        _launch(directory, chosen, max_restarts)


def _as_before(
    context: typer.Context, before: RunSettings, mode: RunMode, codec: SwarmCodec, nats: str | None
) -> tuple[RunMode, SwarmCodec, str | None]:
    """What a resumed run does not say anew stays as it was."""
    if before.mode != "swarm" or (_is_given(context, "mode") and mode != "swarm"):
        return mode, codec, nats
    kept = codec if _is_given(context, "codec") else msgspec.convert(before.codec, SwarmCodec)
    return "swarm", kept, nats if _is_given(context, "nats") else before.nats


def _is_given(context: typer.Context, option: str) -> bool:
    source = context.get_parameter_source(option)
    return source is not None and source.name != "DEFAULT"


def _check_swarm_options(mode: RunMode, codec: str, nats: str | None, standby: list[str] | None, staleness: int | None) -> None:
    if staleness and mode != "swarm":
        raise JobError("--staleness: only `--mode swarm` begins a step before the one before it is summed; leave it out")
    if codec != "none" and mode != "swarm":
        raise JobError(f"--codec {codec}: only `--mode swarm` sends with codecs; leave it out")
    if nats is not None and mode != "swarm":
        raise JobError("--nats: only `--mode swarm` has a journal; leave it out")
    if standby and nats is None:
        raise JobError("--standby: another machine can only coordinate where the journal is on NATS; give --nats URL too")


def _check_addresses(mode: RunMode, listen: str | None, standby: list[str] | None) -> None:
    """Before anything is captured, planned or started."""
    if listen is not None and mode != "swarm":
        raise JobError("--listen: only `--mode swarm` has others join; leave it out")
    for option, address in [("--listen", listen), *(("--standby", other) for other in standby or ())]:
        if address is not None:
            try:
                split_address(address)
            except FabricError as error:
                raise JobError(f"{option} {error}") from None


def _check_mode(given: Path | None, resumed: RunDirectory | None, mode: RunMode, staleness: int | None) -> None:
    """PlanError where a plan that is there already is not for this mode: before the model is captured, which takes long."""
    if given is None and resumed is None:
        return
    chosen = load_plan(given) if given is not None else resumed.plan()  # type: ignore[union-attr]
    if mode == "lockstep":
        check_supported(chosen)
        return
    why_not = why_not_swarm(chosen if staleness is None else msgspec.structs.replace(chosen, staleness=staleness))
    if why_not is not None:
        raise PlanError(why_not)


def _run_alone(script: str, arguments: tuple[str, ...], out: Path | None, *contradicting: Path | None) -> None:
    if any(value is not None for value in contradicting):
        raise JobError("--alone: trains in one process without a plan; leave out --cluster, --plan and --resume")
    from atoll.script import load_job, seen_arguments  # PyTorch takes seconds to load: mistakes above are told before

    job = load_job(script, arguments)
    with seen_arguments(script, arguments):
        job.run(out=out)


def _directory(
    script: str, arguments: tuple[str, ...], out: Path | None, resume: Path | None, checkpoint_every: int | None, keep_last: int
) -> tuple[RunDirectory, RunSettings]:
    """Where the run is written, and what is said of it there; nothing is written yet."""
    if not Path(script).is_file():
        raise JobError(f"{script}: there is no such file; `atoll run` needs a training script")
    settings = RunSettings(
        script=str(Path(script).resolve()),
        arguments=arguments,
        checkpoint_every=checkpoint_every,
        keep_last=keep_last,
        speeds=os.environ.get(SPEEDS) or None,
    )
    if resume is not None:
        if out is not None and out.resolve() != resume.resolve():
            raise JobError("--out: a resumed run goes on in its own directory; leave it out")
        directory = RunDirectory(resume)
        before = directory.settings()
        every = checkpoint_every if checkpoint_every is not None else before.checkpoint_every
        return directory, msgspec.structs.replace(settings, checkpoint_every=every)
    return RunDirectory(out or Path("runs") / f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}"), settings


def _cluster(path: Path | None, plan: Path | None, resumed: RunDirectory | None) -> Cluster | None:
    if path is not None:
        return load_cluster(path)
    if resumed is not None and resumed.cluster.exists():
        return load_cluster(resumed.cluster)
    if plan is None and resumed is None:
        raise JobError("give the devices with --cluster FILE (`atoll probe -o here.toml` writes one), a plan with --plan FILE, or --alone")
    return None


def _plan(
    model: Target, cluster: Cluster | None, given: Path | None, constants: Calibration | None, resumed: RunDirectory | None, mode: RunMode
) -> Plan:
    """The plan to run: the one given, the one a resumed run had, or the best for the devices."""
    if given is None and resumed is None:
        assert cluster is not None
        return make_plan_for(model, cluster, constants, mode).best
    chosen = load_plan(given) if given is not None else resumed.plan()  # type: ignore[union-attr]
    matching = cluster if cluster is not None and cluster.name == chosen.cluster else None
    try:
        validate(chosen, model.graph, matching)
    except PlanError as error:
        raise PlanError(f"{given or 'plan.json'}: {error}") from None
    if chosen.batch_size != model.batch_size:
        raise PlanError(f"{given}: it is a plan of a batch of {chosen.batch_size}, but the job's is {model.batch_size}; plan anew")
    return chosen


def _write(
    directory: RunDirectory, settings: RunSettings, plan: Plan, cluster: Cluster | None, predicted: Cost | None, *, resumed: bool
) -> None:
    if resumed:
        directory.write_settings(settings)
    else:
        directory.create(settings)
    directory.write_plan(plan)
    if cluster is not None:
        directory.write("cluster.toml", dump_cluster(cluster))
    if predicted is not None:
        directory.write("predicted.json", msgspec.json.format(msgspec.json.encode(predicted), indent=1))
    else:
        directory.forget("predicted.json")  # of the plan that a resumed run had before


def _show(plan: Plan, predicted: Cost | None, model: Target, cluster: Cluster | None, said: tuple[str, ...]) -> None:
    told = (*model.notes, *_other_micro_batches(plan, model), *said)
    notes = [notes_view(told)] if told else []
    if predicted is not None and cluster is not None:
        show(plan_view(plan, predicted, model.graph, cluster), *notes)
    else:
        print(plan, flush=True)
        if notes:
            show(*notes)


def _other_micro_batches(plan: Plan, model: Target) -> list[str]:
    """What a plan's micro-batches mean where the job asks for others."""
    if model.micro_batch_size is None or model.micro_batch_size == plan.micro_batch_size:
        return []
    return [
        f"the plan's micro-batches have {plan.micro_batch_size} samples, not {model.micro_batch_size} as the job's micro_batch_size says: "
        "memory differs, and so do dropout and batch statistics, which depend on what is computed together; nothing else does"
    ]


def check_lockstep(plan: Plan) -> None:
    """PlanError where the plan is for another mode. Nothing has been written or started yet."""
    from atoll.runtime.lockstep.layout import Layout

    Layout(plan)


def _launch(directory: RunDirectory, plan: Plan, max_restarts: int) -> None:
    from atoll.runtime.checkpoint.directory import find
    from atoll.runtime.lockstep.launch import launch
    from atoll.runtime.lockstep.layout import Layout
    from atoll.watch.report import read_report

    devices = Layout(plan).devices
    lab = lab_of([_host_of(device) for device in devices], os.environ)
    where = "on this machine" if lab is None else f"on hosts of {lab.name}"
    say(f"starting {plural(len(devices), 'process', 'processes')} {where}, one a device; the run is in {directory.path}")

    before = directory.last_moment()

    def keep(event: "AnyEvent") -> None:
        moment = max(before + event.at_seconds, directory.last_moment())  # the run's own time goes on, and never back
        with EventLog(directory.path, resume=True) as log:
            log(msgspec.structs.replace(event, at_seconds=moment))

    def newest_checkpoint() -> int | None:
        found = find(directory.checkpoints, None)
        return int(found.name.removeprefix("step-")) if found is not None else None

    command = [sys.executable, "-m", "atoll.cli.worker", str(directory.path.resolve())]
    result = launch(
        lambda rank, generation: command if lab is None else remote_command(_host_of(devices[rank]), command),
        len(devices),
        devices=devices,
        max_restarts=max_restarts,
        observers=[keep],
        host="127.0.0.1" if lab is None else lab.address,
        newest_checkpoint=newest_checkpoint,
    )
    if result.interrupted and newest_checkpoint() is not None:
        say(f"to go on: atoll run {directory.settings().script} --resume {directory.path}")
    if result.exit_code or result.interrupted:
        raise typer.Exit(130 if result.interrupted and not result.exit_code else result.exit_code)
    show(short_view(read_report(directory.path), directory.path))


def _host_of(device: str) -> str:
    return device.rpartition("/")[0]
