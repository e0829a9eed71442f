"""`atoll run SCRIPT --cluster FILE`: plan the job, show the plan, and have its mode train it."""

import ast
import os
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from atoll.cli.forkable_start import ForkableStart
from atoll.cli.mode_options import apply_to_plan, chosen_options, is_given
from atoll.cli.output import notes_view, say, working
from atoll.cli.plan import make_plan_for, priced
from atoll.cli.render import plan_view, show
from atoll.cli.report import short_view
from atoll.cli.target import Target, load_target
from atoll.cli.trial import Grounds, grounds_of, times_by
from atoll.cluster import Cluster, dump_cluster, load_cluster
from atoll.codec import CodecChoice
from atoll.cost import Calibration, Cost, load_calibration
from atoll.errors import AtollError, ClusterError, JobError, PlanError
from atoll.events import EventLog, PhaseFinished, PlanChosen, Warned
from atoll.plan import Plan, load_plan, validate
from atoll.plan.link_codecs import PlanCodecs
from atoll.plan.modes import ModeRules, collaboration_rules, default_rules, mode_rules
from atoll.plan.modes.alone import ALONE
from atoll.plan.modes.parts import PartLoad, place_parts
from atoll.runtime.mode import ModeRuntime, RunContext, mode_runtime
from atoll.runtime.run_directory import SPEEDS, RunDirectory, RunSettings, run_lock, with_checksum
from atoll.runtime.supervise.placement import Placement, place_processes
from atoll.units import format_seconds, plural

if TYPE_CHECKING:
    from atoll.job import Job

__all__ = ["run"]


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(help="The training script.", metavar="SCRIPT")],
    options: Mapping[str, Any],
    cluster: Annotated[Path | None, typer.Option("--cluster", "-c", help="The devices to train on.", metavar="FILE")] = None,
    plan: Annotated[Path | None, typer.Option(help="Run exactly this plan.", metavar="FILE")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for everything about the run; a new one.", metavar="DIR")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this run, also in another mode or under another plan.", metavar="DIR")
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(help="How devices work together; if not given, as the plan says, or as the run that is resumed did."),
    ] = None,
    alone: Annotated[bool, typer.Option("--alone", help="Short for --mode alone: one process, the reference for every plan.")] = False,
    max_restarts: Annotated[int, typer.Option(help="Start anew from the last checkpoint this many times when a process dies.", min=0)] = 0,
    checkpoint_every: Annotated[int | None, typer.Option(help="Save after every so many steps; always at the end.", min=1)] = None,
    keep_last: Annotated[int, typer.Option(help="How many checkpoints to keep.", min=1)] = 2,
    sync: Annotated[bool, typer.Option("--sync", help="Copy the script's directory to hosts that are reached over ssh.")] = False,
    calibration: Annotated[Path | None, typer.Option(help="Measured constants of the cost model.", metavar="FILE")] = None,
    codec: Annotated[
        CodecChoice,
        typer.Option(
            help="How activations and their gradients are sent between sites: as they are, with a codec, or `auto`: what saves time. "
            "Where others join, they send so on links that the plan does not name, too."
        ),
    ] = "none",
) -> None:
    """Plan the job and train it: a process for every device of the plan, here or over ssh. What follows `--` is the script's own."""
    arguments = tuple(context.obj or ())
    before = RunDirectory(resume).settings() if resume is not None else None
    rules = _mode(mode, alone, plan, before, script)
    own, runtime = chosen_options(rules, options, before), mode_runtime(rules.name)
    runtime.check_options(own)
    directory, settings = _directory(script, arguments, out, resume, checkpoint_every, keep_last)
    if not is_given(context, "codec"):
        codec = msgspec.convert(before.codec, CodecChoice) if before is not None else codec
    elif not rules.others_join and (plan is not None or (resume is not None and cluster is None)):
        raise JobError(f"--codec {codec}: a plan that is there already says its own codecs; leave it out, or plan anew with --cluster")
    given = _Given(directory, before, load_plan(plan) if plan is not None else None, plan, cluster, codec)
    constants = load_calibration(calibration) if calibration else None
    with ForkableStart(runtime) as start:
        prepared = _prepare(script, arguments, rules, own, given, constants, start)
        if prepared.own_loop and not rules.runs_loops:
            raise JobError(f"{script}: it makes the steps itself (atoll.step), which a {rules.name} does for it; give the run an atoll.Job")
        settings = msgspec.structs.replace(
            settings, mode=rules.name, codec=codec, options=msgspec.to_builtins(prepared.options), own_loop=prepared.own_loop
        )
        run_context = _context(prepared, directory, settings, start, resumed=before is not None, max_restarts=max_restarts, sync=sync)
        _check_borders(rules, run_context)
        runtime.check(run_context)
        with run_lock(directory.path), _untouched_if_refused(directory):
            _write(run_context, prepared)
            _show(prepared)
            _log_plan(prepared, directory)
            if prepared.phases:
                say(_ready(prepared.phases, start.why_not))
            _launch(runtime, run_context)


def _check_borders(rules: ModeRules, run: RunContext) -> None:
    """What sites may send must be kept by the mode."""
    why_not = None if run.cluster is None else rules.why_not_borders(run.plan, run.cluster)
    if why_not is not None:
        raise ClusterError(why_not)


@contextmanager
def _untouched_if_refused(directory: RunDirectory) -> Iterator[None]:
    """A resumed run that ends before it has begun (another script's checkpoint, say) has the files it had."""
    names = [name for name in ("run.json", "plan.json", "cluster.toml", "predicted.json") if (directory.path / name).exists()]
    before = {name: (directory.path / name).read_bytes() for name in names}
    log = directory.path / "events.jsonl"
    told = log.stat().st_size if log.exists() else 0
    try:
        yield
    except (AtollError, typer.Exit):
        if before and log.exists() and b'"run_started"' not in log.read_bytes()[told:]:
            for name, content in before.items():
                directory.write(name, content)
        raise


@dataclass(frozen=True)
class _Given:
    """What there is to make a plan from."""

    directory: RunDirectory
    before: RunSettings | None  # of the run that is resumed
    plan: Plan | None
    plan_file: Path | None
    cluster_file: Path | None
    codec: CodecChoice

    @property
    def last_plan(self) -> Plan | None:
        """That a resumed run had; `job.run` in one process has none."""
        return self.directory.plan() if self.before is not None and (self.directory.path / "plan.json").exists() else None

    def plan_before(self, rules: ModeRules) -> Plan | None:
        """The plan that a resumed run goes on with, in another mode too if that can run it; None where it is planned anew."""
        plan = self.last_plan
        if plan is None or self.cluster_file is not None:
            return None
        if plan.mode == rules.name:
            return plan
        if not rules.needs_devices or self.directory.cluster.exists() or not mode_rules(plan.mode).needs_devices:
            return None
        return msgspec.structs.replace(plan, mode=rules.name, staleness=0)

    def cluster(self, needed: bool) -> Cluster | None:
        """The devices, if they are known; JobError where nothing says which there are."""
        if self.cluster_file is not None:
            return load_cluster(self.cluster_file)
        known = self.directory.load_cluster() if self.before is not None else None
        if known is None and needed:
            probe = "`atoll probe -o here.toml` writes one"
            raise JobError(f"give the devices with --cluster FILE ({probe}), a plan with --plan FILE, or --alone")
        return known


@dataclass(frozen=True)
class _Prepared:
    """What is to be run, and what was predicted of it."""

    plan: Plan
    options: msgspec.Struct
    job: "Job"
    cluster: Cluster | None = None  # as given
    matching: Cluster | None = None  # if it is the plan's
    model: Target | None = None  # None where nothing was captured
    predicted: Cost | None = None
    notes: tuple[str, ...] = ()
    reasons: tuple[str, ...] = ()  # for the plan
    own_loop: bool = False  # the script makes the steps itself
    phases: tuple[PhaseFinished, ...] = ()  # what it took to prepare


def _mode(mode: str | None, alone: bool, plan: Path | None, before: RunSettings | None, script: str) -> ModeRules:
    """The mode asked for; else the given plan's, that of the run before, or the usual one for such a script."""
    if alone:
        if mode not in (None, ALONE.name):
            raise JobError(f"--alone: short for `--mode {ALONE.name}`, but --mode {mode} is given; leave one of them out")
        mode = ALONE.name
    if mode is None and plan is not None:
        mode = load_plan(plan).mode
    if mode is None and before is not None:
        mode = before.mode
    if mode is not None:
        return mode_rules(mode)
    return collaboration_rules() if _collaborates(script) else default_rules()


def _collaborates(script: str) -> bool:
    """Whether a script says `atoll.collaborate`; it is read, not run, which would take PyTorch."""
    try:
        tree = ast.parse(Path(script).read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):  # whoever loads it says what is wrong
        return False
    return any(isinstance(node, ast.Attribute) and node.attr == "collaborate" for node in ast.walk(tree)) or any(
        isinstance(node, ast.ImportFrom) and node.module == "atoll" and any(name.name == "collaborate" for name in node.names)
        for node in ast.walk(tree)
    )


def _prepare(
    script: str,
    arguments: tuple[str, ...],
    rules: ModeRules,
    options: msgspec.Struct,
    given: _Given,
    constants: Calibration | None,
    start: ForkableStart,
) -> _Prepared:
    if rules.for_collaborations:
        return _prepare_parts(script, arguments, options, given)
    if not rules.needs_devices and given.plan is None and given.cluster_file is None:
        return _prepare_here(script, arguments, rules, options)
    plan = given.plan or given.plan_before(rules)
    cluster = given.cluster(needed=plan is None)
    if plan is not None:  # what is wrong with it is told before the model is captured, which takes long
        plan, options = apply_to_plan(msgspec.structs.replace(plan, mode=rules.name), options, None)
        if (why_not := rules.why_not(plan)) is not None:
            raise PlanError(f"{given.plan_file or 'plan.json'}: {why_not}")
    began = time.perf_counter()
    with working("loading PyTorch"):
        start.prepare()
    phases = [PhaseFinished(phase="PyTorch loaded", seconds=time.perf_counter() - began)]
    model = load_target(script, None, arguments)
    start.begin(model)
    phases.append(PhaseFinished(phase="script loaded", seconds=model.script_seconds))
    phases.append(PhaseFinished(phase="model captured", seconds=model.capture_seconds - model.script_seconds))
    began = time.perf_counter()
    reasons: tuple[str, ...] = ("given with --plan" if given.plan is not None else "as before",)
    if plan is None:
        assert cluster is not None  # as it was needed
        made, last = make_plan_for(model, cluster, constants, rules.name, given.codec), given.last_plan
        plan, options = apply_to_plan(made.best, options, last if last is not None and last.mode == rules.name else None)
        reasons = made.candidates[0].reasons
    matching = cluster if cluster is not None and cluster.name == plan.cluster else None
    _validate(plan, model, matching, given.plan_file)
    PlanCodecs(plan, matching)  # an error where it has some that cannot be found in the cluster
    phases.append(PhaseFinished(phase="plan made", seconds=time.perf_counter() - began))
    grounds = _grounds(plan, model, matching, constants, start, script)
    constants = grounds.calibration
    predicted, notes = priced(plan, model, matching, constants) if matching is not None else (None, ())
    assert model.job is not None  # a script always has one
    notes = (*model.notes, *_other_micro_batches(plan, model), *notes, *grounds.sentences)
    reasons, phases = (*reasons, *grounds.sentences), [*phases, *grounds.phases]
    return _Prepared(plan, options, model.job, cluster, matching, model, predicted, notes, reasons, model.own_loop, tuple(phases))


def _grounds(plan: Plan, model: Target, cluster: Cluster | None, given: Calibration | None, start: ForkableStart, script: str) -> Grounds:
    """What the plan's times rest on: the calibration that was given, or what is found out."""
    if given is not None:
        return Grounds(sentences=(times_by(given),), calibration=given)
    return grounds_of(plan, model, cluster, start, script) if cluster is not None else Grounds()


def _prepare_here(script: str, arguments: tuple[str, ...], rules: ModeRules, options: msgspec.Struct) -> _Prepared:
    """On this machine, whichever device there is: the model is not captured, so that it may be one that cannot be."""
    from atoll.script import load_script  # PyTorch takes seconds to load: mistakes above are told before

    found = load_script(script, arguments)
    job = found.job
    plan = rules.plan_here(job.name, job.batch_size, job.micro_batch_size or job.batch_size)
    return _Prepared(plan, options, job, reasons=("one process on this machine, as asked for",), own_loop=found.own_loop)


def _prepare_parts(script: str, arguments: tuple[str, ...], options: msgspec.Struct, given: _Given) -> _Prepared:
    """Parts are not captured: each is computed whole. What decides where is how large they are."""
    from atoll.collaboration import Collaboration
    from atoll.script import load_job

    if given.codec != "none":
        raise JobError(f"--codec {given.codec}: every part says how what it sends is sent (sends={{…}}); leave it out")
    job = load_job(script, arguments)
    if not isinstance(job, Collaboration):
        raise JobError(f"{script}: mode parts trains what atoll.collaborate makes, and this job is one model; leave --mode out")
    cluster = given.cluster(needed=False)
    sizes = {name: sum(p.numel() for p in one.build_model("meta").parameters()) for name, one in job.part_jobs.items()}
    loads = [PartLoad(name, sizes[name], part.trains, part.site, part.precision) for name, part in job.parts.items()]
    plan, reasons = place_parts(loads, cluster, job.name, job.batch_size)
    if given.plan is not None:
        if len(given.plan.stages) != len(job.parts):
            raise PlanError(f"{given.plan_file}: it has {plural(len(given.plan.stages), 'stage')}, and the job {len(job.parts)} parts")
        plan, reasons = given.plan, ("given with --plan",)
    for reason in reasons:
        say(reason)
    return _Prepared(
        plan, options, job, cluster, cluster if cluster is not None and cluster.name == plan.cluster else None, reasons=reasons
    )


def _validate(plan: Plan, model: Target, cluster: Cluster | None, file: Path | None) -> None:
    validate(plan, model.graph, cluster, source=file or "plan.json")
    if plan.batch_size != model.batch_size:
        raise PlanError(f"{file or 'plan.json'}: a plan of a batch of {plan.batch_size}, but the job's is {model.batch_size}; plan anew")


def _other_micro_batches(plan: Plan, model: Target) -> list[str]:
    """What a plan's micro-batches mean where the job asks for others."""
    if model.micro_batch_size is None or model.micro_batch_size == plan.micro_batch_size:
        return []
    return [
        f"the plan's micro-batches have {plan.micro_batch_size} samples, not {model.micro_batch_size} as the job's micro_batch_size says: "
        "memory differs, and so do dropout and batch statistics, which depend on what is computed together; nothing else does"
    ]


def _directory(
    script: str, arguments: tuple[str, ...], out: Path | None, resume: Path | None, checkpoint_every: int | None, keep_last: int
) -> tuple[RunDirectory, RunSettings]:
    """Where the run is written, and what is said of it there; nothing is written yet."""
    if not Path(script).is_file():
        what = "is a directory" if Path(script).is_dir() else "there is no such file"
        raise JobError(f"{script}: {what}; `atoll run` needs a training script")
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
    directory = RunDirectory(out or Path("runs") / f"{Path(script).stem}-{time.strftime('%Y%m%d-%H%M%S')}")
    directory.check_new()
    return directory, settings


def _context(
    prepared: _Prepared,
    directory: RunDirectory,
    settings: RunSettings,
    start: ForkableStart,
    *,
    resumed: bool,
    max_restarts: int,
    sync: bool,
) -> RunContext:
    def place(hosts: Sequence[str], shared: bool) -> Placement:
        script, path, server = Path(settings.script), directory.path, start.server
        return place_processes(
            hosts, prepared.matching, os.environ, script=script, run=path, sync=sync, shared=shared, say=say, server=server
        )

    return RunContext(
        directory=directory,
        settings=settings,
        plan=prepared.plan,
        options=prepared.options,
        job=prepared.job,
        captured=prepared.model.captured if prepared.model is not None else None,
        cluster=prepared.matching,
        resumed=resumed,
        max_restarts=max_restarts,
        say=say,
        place=place,
    )


def _write(run: RunContext, prepared: _Prepared) -> None:
    directory = run.directory
    plan_before = directory.plan() if (directory.path / "plan.json").exists() else None
    if run.resumed:
        directory.write_settings(run.settings)
    else:
        directory.create(run.settings)
    directory.write_plan(run.plan)
    with directory.must_take():
        if prepared.cluster is not None:
            directory.write("cluster.toml", with_checksum(dump_cluster(prepared.cluster).encode()))
        if prepared.predicted is not None:
            directory.write("predicted.json", msgspec.json.format(msgspec.json.encode(prepared.predicted), indent=1))
        else:
            directory.forget("predicted.json")  # of the plan that a resumed run had before
    if plan_before != run.plan:
        directory.forget("trace.json", "predicted-trace.json", "schedule.txt")


def _show(prepared: _Prepared) -> None:
    if prepared.model is None:
        return
    notes = [notes_view(prepared.notes)] if prepared.notes else []
    if prepared.predicted is not None and prepared.matching is not None:
        show(plan_view(prepared.plan, prepared.predicted, prepared.model.graph, prepared.matching), *notes)
    else:
        print(prepared.plan, flush=True)
        if notes:
            show(*notes)


def _log_plan(prepared: _Prepared, directory: RunDirectory) -> None:
    plan = prepared.plan
    with EventLog(directory.path, resume=True) as log:
        for phase in prepared.phases:
            log(msgspec.structs.replace(phase, at_seconds=log.seconds()))
        log(
            PlanChosen(
                at_seconds=log.seconds(),
                mode=plan.mode,
                plan=str(plan),
                stages=len(plan.stages),
                devices=tuple(dict.fromkeys(device for stage in plan.stages for device in stage.devices)),
                step_seconds=prepared.predicted.step_seconds if prepared.predicted is not None else None,
                reasons=prepared.reasons,
            )
        )
        if prepared.model is not None and prepared.model.graph.eager:
            log(Warned(at_seconds=log.seconds(), message=prepared.model.notes[0]))  # it was shown with the plan


def _ready(phases: Sequence[PhaseFinished], why_not_forked: str) -> str:
    """What it took until processes can be started, and what they cannot take over."""
    took = ", ".join(f"{phase.phase} in {format_seconds(phase.seconds)}" for phase in phases)
    again = f"; each process loads and captures for itself: {why_not_forked}" if why_not_forked else ""
    return took + again


def _launch(runtime: ModeRuntime, run: RunContext) -> None:
    from atoll.watch.progress import Progress
    from atoll.watch.report import read_report

    path = run.directory.path
    point = runtime.resume(run) if run.resumed else None
    if point is not None and point.sentence:
        say(point.sentence)
    with Progress() as progress:
        outcome = runtime.launch(replace(run, resume_point=point, observers=(progress,)))
    if outcome.resumable:
        own = f" -- {shlex.join(run.settings.arguments)}" if run.settings.arguments else ""
        say(f"to go on: atoll run {shlex.quote(run.settings.script)} --resume {shlex.quote(str(path))}{own}")
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)
    show(short_view(read_report(path), path))
