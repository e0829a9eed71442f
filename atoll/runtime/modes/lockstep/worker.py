"""A rank's run from meeting the others to leaving them: it captures the job, puts its rank together, continues, trains and saves."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.callbacks import Callback, Snapshot, callback_states, restore_callbacks
from atoll.cluster import Cluster, load_cluster
from atoll.cluster.memory import host_memory, keep_freed_memory, memory_to_try
from atoll.cost import Evaluator
from atoll.cost.evaluate import DEFAULT_BUCKET_BYTES, bucket_bytes
from atoll.data import Dataset, StreamSamples
from atoll.errors import AtollError, CaptureError, DividedLossError, JobError, PlanError
from atoll.events import CheckpointBegun, Evaluated, EventLog, Observer, PhaseFinished, Warned
from atoll.graph import Graph
from atoll.graph.capture import Captured
from atoll.graph.eager import Uncaptured, capture_for_pieces, run_once
from atoll.graph.loss_check import notes_on_pieces
from atoll.job import Job, RunResult
from atoll.plan import Plan, Replica, Stage, load_plan, validate
from atoll.plan.division import apportion
from atoll.plan.link_codecs import PlanCodecs
from atoll.plan.modes.lockstep import LOCKSTEP
from atoll.runtime.checkpoint.checkpointer import Checkpointer, SavePolicy
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.gathering import gather_tensors
from atoll.runtime.checkpoint.manifest import RunIdentity
from atoll.runtime.checkpoint.trained import load_trained
from atoll.runtime.checkpoint.training_state import restore_data, training_state
from atoll.runtime.checkpoint.values import data_state
from atoll.runtime.evaluated_programs import EvaluatedPrograms, capture_evaluated
from atoll.runtime.imposed_speed import pace_of_rank
from atoll.runtime.mode import CapturedJob
from atoll.runtime.modes.lockstep.calls import Calls
from atoll.runtime.modes.lockstep.evaluation import Evaluation
from atoll.runtime.modes.lockstep.gradients import OuterReduction
from atoll.runtime.modes.lockstep.heartbeat import Doing
from atoll.runtime.modes.lockstep.layout import Layout
from atoll.runtime.modes.lockstep.rank import assemble
from atoll.runtime.modes.lockstep.recorder import MeasuredFile
from atoll.runtime.modes.lockstep.rendezvous import RankMembership, joined, own_device
from atoll.runtime.modes.lockstep.role import Role
from atoll.runtime.modes.lockstep.trainer import Trainer
from atoll.runtime.run_directory import SPEEDS, RunDirectory, RunSettings, run_lock
from atoll.runtime.stage.compilation import Compiler, compiler_for
from atoll.runtime.training import STEP, Reason
from atoll.runtime.turns import optimizer_names

__all__ = ["Planning", "RankTraining", "equal_shares", "training_among_others", "training_rank"]


_PLAN = "atoll/plan"  # in the store: what rank 0 says of it
Planning: TypeAlias = Plan | Callable[[Graph], Plan]  # a plan, or who makes one for the captured job
_CANDIDATES = 10  # plans among which one that uses every process is looked for
_LOOP = Doing("running the loop around its steps", "user")


class Phases:
    """How long the parts of a rank's start took."""

    def __init__(self, source: str) -> None:
        self._source, self._began = source, time.perf_counter()
        self.finished: list[PhaseFinished] = []

    def ended(self, phase: str) -> None:
        """This is done, and the next part begins."""
        now = time.perf_counter()
        self.finished.append(PhaseFinished(phase=phase, seconds=now - self._began, source=self._source))
        self._began = now


@contextmanager
def training_rank(
    job: Job,
    planning: Planning,
    role: Role,
    *,
    directory: RunDirectory | None,
    settings: RunSettings,
    observers: Sequence[Callback],
    order: Sequence[str] | None = None,
    cluster: Cluster | None = None,
    own: Observer = lambda event: None,
    notes_shown: bool = False,
    known: CapturedJob | None = None,
    outer: OuterReduction | None = None,
) -> Iterator["RankTraining"]:
    """This process's rank of the plan, ready for its first step; all ranks train together, and end the run by leaving the block.

    Rank 0 has the plan or makes it; who has none hears it from there. `order` names devices in the order of ranks; by default it is the
    order in which the plan names them. `cluster` is what the run's directory has unless given. `own` hears, on every rank and in any
    thread, what keeps this process waiting and why it ends. `notes_shown`: what there is to say of the captured job was said with the plan.
    `known` is the job as it was captured before. With `outer`, gradients are added up with others than these ranks, too.
    """
    if cluster is None and directory is not None:
        cluster = directory.load_cluster()
    layout = _checked_layout(planning, order, role, cluster) if isinstance(planning, Plan) else None
    device_name = layout.devices[role.rank] if layout is not None else ""
    stages = " and ".join(f"stage {place.stage}" for place in layout.places(role.rank)) if layout is not None else ""
    device = own_device(role)
    if device.type == "cpu":
        keep_freed_memory()
    compiler = compiler_for(job, device)
    phases = Phases(f"rank {role.rank}")
    with joined(role, device_name, stages, device=device, observer=own) as run:
        phases.ended("ranks met")
        run.doing("capturing the model")
        own_capture = known.captured if known is not None else _captured(job, role)
        if known is None:
            phases.ended("model captured")
        run.doing(Doing("waiting for the plan", "atoll" if role.rank == 0 else "others"))
        plan, order, cluster, captured = _agreed(planning, order, cluster, own_capture, run)
        evaluated = known.evaluated if known is not None else None
        if evaluated is None:
            evaluated = capture_evaluated(job) if isinstance(captured, Captured) else {}
        layout = _checked_layout(plan, order, role, cluster)
        validate(layout.plan, captured.graph)
        if directory is not None and role.rank == 0:
            _write_plan(directory, layout.plan)
        training = RankTraining(job, layout, captured, evaluated, device, run, directory, settings, cluster, compiler, outer)
        phases.ended("own part of the model built")
        notes = captured.notes[:1] if isinstance(captured, Uncaptured) else notes_on_pieces(captured.notes)
        with training.under_way(observers, () if notes_shown else notes, phases.finished):
            yield training


def _write_plan(directory: RunDirectory, plan: Plan) -> None:
    """Say what runs where; what was predicted of another plan that the run had before is not true of this one."""
    if (directory.path / "plan.json").exists() and directory.plan() != plan:
        directory.forget("predicted.json")
    directory.write_plan(plan)


def _captured(job: Job, role: Role) -> Captured | Uncaptured | CaptureError:
    """The job. Where it cannot be captured, rank 0 runs it once for all of them."""
    try:
        return capture_for_pieces(job, check=role.rank == 0)
    except DividedLossError:
        raise
    except CaptureError as error:
        return run_once(job, error, most_bytes=memory_to_try()) if role.rank == 0 else error


class _Said(msgspec.Struct):
    """What rank 0 says of the plan to the others."""

    plan: str = ""
    cluster: str = ""  # empty: it has none
    order: list[str] | None = None
    captured: str = ""  # digest of the program it captured
    problem: str = ""  # why there is no plan
    uncaptured: Uncaptured | None = None  # where the model could not be captured there


def _agreed(
    planning: "Planning",
    order: Sequence[str] | None,
    cluster: Cluster | None,
    captured: Captured | Uncaptured | CaptureError,
    run: RankMembership,
) -> tuple[Plan, Sequence[str] | None, Cluster | None, Captured | Uncaptured]:
    """Rank 0 has the plan or makes it, and the cluster; the others hear both, or why there is none. Who was given others is refused."""
    if run.role.rank == 0:
        assert not isinstance(captured, CaptureError)
        said = _Said(cluster=cluster.to_json() if cluster is not None else "", order=list(order) if order is not None else None)
        said.captured = captured.digest() if isinstance(captured, Captured) else ""
        try:
            said.plan = (planning if isinstance(planning, Plan) else planning(captured.graph)).to_json()
        except AtollError as error:
            said.problem = str(error)
        said.uncaptured = captured if isinstance(captured, Uncaptured) else None
        run.store.set(_PLAN, msgspec.json.encode(said).decode())
    said = msgspec.json.decode(run.store.get(_PLAN), type=_Said)
    if said.problem:
        raise PlanError(said.problem)
    if isinstance(captured, Captured) and said.uncaptured is None and said.captured != captured.digest():
        raise JobError(
            f"rank {run.role.rank} captured another program than rank 0: its host has other versions of the script's libraries, or what "
            "the script builds depends on the host, the time or chance; make it build the same everywhere"
        )
    plan, agreed = Plan.from_json(said.plan), Cluster.from_json(said.cluster) if said.cluster else None
    for noun, own, theirs in (("plan", planning if isinstance(planning, Plan) else None, plan), ("cluster", cluster, agreed)):
        if own is not None and own != theirs:
            other = f"another {noun} than rank 0" if theirs is not None else f"a {noun}, but rank 0 has none"
            raise PlanError(f"this rank was given {other}; give all ranks the same, or rank 0 alone")
    captured = said.uncaptured or captured  # what rank 0 cannot capture, nobody cuts
    if isinstance(captured, CaptureError):
        raise captured
    return plan, said.order, agreed, captured


def _checked_layout(plan: Plan, order: Sequence[str] | None, role: Role, cluster: Cluster | None) -> Layout:
    layout = Layout(plan, order, cluster)
    PlanCodecs(plan, cluster)  # an error where it has some that cannot be found in the cluster
    if role.world_size != layout.world_size:
        raise PlanError(f"the plan uses {layout.world_size} devices, but {role.world_size} processes were started; start one a device")
    return layout


class RankTraining:
    """One rank's run between meeting the others and leaving them."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        captured: Captured | Uncaptured,
        evaluated: EvaluatedPrograms,
        device: torch.device,
        run: RankMembership,
        directory: RunDirectory | None,
        settings: RunSettings,
        cluster: Cluster | None,
        compiler: Compiler | None = None,
        outer: OuterReduction | None = None,
    ) -> None:
        self.job, self.plan, self.run, self.directory, self.settings = job, layout.plan, run, directory, settings
        run.doing("taking its part of the model")
        self.cluster = cluster if cluster is not None and cluster.name == layout.plan.cluster else None
        size = _bucket_bytes(layout.plan, captured.graph, self.cluster)
        pace = None
        if settings.speeds is not None:
            replicas = {place.stage: place.replica for place in layout.places(run.role.rank)}
            sizes = [stop - start for start, stop in layout.micro_batches]
            pace = pace_of_rank(settings.speeds, layout.plan, replicas, sizes, captured.graph, device)
        self.work = assemble(
            job, layout, captured, device=device, evaluated=evaluated, bucket_bytes=size, pace=pace, doing=run.doing, compiler=compiler,
            outer=outer,
        )  # fmt: skip
        self.trainer = Trainer(job, self.work, device)
        self.graph = captured.graph
        self.policy: SavePolicy | None = None
        self.ask_at = 0  # after which step rank 0 is asked again whether to save
        self.checkpoints: Checkpointer | None = None
        self._calls = Calls()
        self._snapshot: Snapshot | None = None  # on rank 0, of a run without a directory
        self._evaluation: Evaluation | None = self.work.evaluation
        self.measured: MeasuredFile | None = None
        if directory is not None:
            runner = self.work.runner
            self.measured = MeasuredFile(directory, layout, run.role.rank, self.work.schedule, runner.recorder, runner.buckets)

    @contextmanager
    def under_way(
        self, observers: Sequence[Callback], warnings: Sequence[str] = (), phases: Sequence[PhaseFinished] = ()
    ) -> Iterator[None]:
        """From the last checkpoint, if there is one, to the last step: inside, steps are made; leaving saves and tells how it ended.

        `phases` have ended before.
        """
        with ExitStack() as stack:
            stack.callback(self.work.feed.close)
            if self.work.compiler is not None:
                stack.callback(self.work.compiler.close)
            stack.callback(self._close_evaluations)
            self._open(stack, observers)
            for phase in phases:
                self.trainer.tell(msgspec.structs.replace(phase, at_seconds=self.trainer.moment()))
            for message in warnings:
                self.trainer.tell(Warned(at_seconds=self.trainer.moment(), message=message))
            try:
                self.trainer.begin()
                yield
                if self.measured is not None:
                    self.run.doing("writing down what was measured")
                    self.measured.write()
                self.save_last()
            except BaseException as error:
                with self.run.still_doing():
                    if isinstance(error, AtollError):
                        self.trainer.finish("failed", str(error))
                    if self.measured is not None:
                        self.measured.write()
                raise
            self.trainer.finish(self.reason or "stopped")
            self._conclude()

    def _close_evaluations(self) -> None:
        for evaluation in (self.work.evaluation, self._evaluation):
            if evaluation is not None:
                evaluation.close()

    def _open(self, stack: ExitStack, observers: Sequence[Callback]) -> None:
        self.checkpoints = self._checkpoints(stack)
        if self.checkpoints is not None:
            self.trainer.saved_in = self.checkpoints.directory
            self.trainer.save_kept = partial(self._keep, self.checkpoints)
            self.trainer.save_first = partial(self._save_first, self.checkpoints)
            self._load(self.checkpoints)
            self.policy = SavePolicy(
                self.settings.checkpoint_every,
                step=self.trainer.last_step,
                moment=self.trainer.elapsed(),
                failures_per_hour=_failures_per_hour(self.plan, self.cluster),
            )
        if self.run.role.rank == 0 and self.directory is not None:
            log = stack.enter_context(EventLog.join(self.directory.path))
            self.trainer.seconds_before = log.seconds() - self.trainer.elapsed()
            observers = [log, *observers]
        self.trainer.observe(observers)

    @property
    def reason(self) -> Reason | None:
        """Why no step follows; None while one does."""
        return self.trainer.reason

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what this rank has of the model."""
        return self.trainer.optimizer

    @property
    def model(self) -> None:
        """Its parts are on several devices."""
        return None

    @property
    def losses(self) -> list[float]:
        """Of all steps."""
        return self.trainer.losses

    @property
    def evaluations(self) -> list[Evaluated]:
        """Since this process began."""
        return self.trainer.evaluations

    def result(self) -> RunResult:
        """What the run leaves behind, once it has ended."""
        trainer, reason = self.trainer, self.reason or "stopped"
        return RunResult(
            reason=reason,
            losses=tuple(trainer.losses),
            evaluations=tuple(trainer.evaluations),
            seconds=trainer.elapsed(),
            trained=self._trained,
        )

    def _trained(self) -> tuple[nn.Module | None, torch.optim.Optimizer | None]:
        if self.directory is not None:
            return load_trained(self.job, self.directory.path)
        return (self._snapshot.load_into(self.job.build_model("cpu")) if self._snapshot is not None else None), None

    def bring_model(self) -> None:
        """To rank 0, where nothing is saved, unless its memory is too small. All ranks take part."""
        if self.directory is not None:
            return
        ranks = CheckpointRanks(dist.group.WORLD)
        held = sum(part.tensor.nbytes for part in self.work.executor.shards())
        needed, free = 3 * sum(ranks.gather(held, int)), ranks.gather(float(host_memory().available_bytes), float)[0]
        if needed < free:  # the optimizer's state travels too
            self._snapshot = self.trainer.gather()

    def step(self) -> None:
        """The next step, and the evaluation and the save after it if they are due."""
        self.trainer.advance(self.run.stop_asked, self._after_step)
        self._calls.check()
        self.run.doing(_LOOP, self.trainer.last_step)

    def stop(self) -> None:
        """Let no other step follow the next one, on any rank."""
        self.trainer.stopping = True

    def together(self, call: str) -> None:
        """JobFailedError where another rank makes another call; a step goes on meanwhile, and is checked at its end."""
        self._calls.begin(call, self.trainer.last_step)
        if call != STEP:
            self.run.doing(Doing(f"waiting for the others to {call} too", "others"))
            self._calls.check()

    def evaluate(self, dataset: Dataset) -> Evaluated:
        """Loss and metrics of the weights as they are."""
        if self._evaluation is None:
            self.run.doing("capturing the model for evaluation")
            self._evaluation = self.work.evaluation_on(dataset)
        if self.trainer.evaluate(self._evaluation, dataset):
            self.trainer.reason = self.trainer.reason or "stopped"
        self.run.doing(_LOOP)
        return self.trainer.evaluations[-1]

    def save(self) -> None:
        """A checkpoint of the last step; a thread writes it."""
        if self.checkpoints is not None and self.trainer.last_step:
            self._begin_save(self.checkpoints, self.trainer.last_step)
            self.tell_saved(self.checkpoints)
            self.run.doing(_LOOP)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's on rank 0, in the CPU's memory; nothing on the others."""
        self.run.doing("putting the model together on rank 0")
        whole = gather_tensors(self.work.executor.shards(), self._calls.group)
        self.run.doing(_LOOP)
        return {**whole, **{name: whole[first] for name, first in self.work.identity.tied.items() if first in whole}}

    def _conclude(self) -> None:
        if self.measured is not None:
            self.run.doing(Doing("waiting for what the others measured", "others"))
            dist.barrier()  # everybody has written
            if self.run.role.rank == 0 and self.settings.trial_seconds is None:
                self.measured.conclude(self.graph)

    def _checkpoints(self, stack: ExitStack) -> Checkpointer | None:
        if self.directory is None or self.settings.trial_seconds is not None:
            return None
        group = dist.new_group(backend="gloo")
        identity = RunIdentity.of(
            self.work.identity,
            job=self.job.name,
            optimizer=optimizer_names([turn.optimizer for turn in self.work.turns]),
            seed=self.job.seed,
            batch_size=self.job.batch_size,
            plan=str(self.plan),
        )
        keep_last, rebuilt = self.settings.keep_last, self.work.rebuilt
        return stack.enter_context(Checkpointer(self.directory.checkpoints, group, identity=identity, keep_last=keep_last, rebuilt=rebuilt))

    def _save(self, checkpoints: Checkpointer, step: int, *, final: bool = False, keep: str | None = None) -> None:
        extra = training_state(self.trainer.scheduler, self.trainer.updater.scale, self.trainer.losses)
        extra |= {"callbacks": callback_states(self.job.callbacks), "data": self._data_state(step), "unevaluated": self.trainer.unevaluated}
        checkpoints.save(step, self.work.executor.shards(), optimizers=self.trainer.optimizers, extra=extra, final=final, keep=keep)

    def _save_first(self, checkpoints: Checkpointer) -> None:
        """Before the first evaluation: what fails in it ends the run, and the steps until then are saved. It is in place on return."""
        if self.trainer.last_step and not checkpoints.tried(self.trainer.last_step):
            self._begin_save(checkpoints, self.trainer.last_step)
            checkpoints.wait()
            self.tell_saved(checkpoints)
            checkpoints.replace_next()

    def _keep(self, checkpoints: Checkpointer, name: str) -> None:
        self._save(checkpoints, self.trainer.last_step, keep=name)

    def _data_state(self, step: int) -> Any:
        """Of a stream, said by the first rank that reads it; all take part."""
        if not isinstance(self.job.samples, StreamSamples):
            return None
        own = data_state(self.work.feed.state_after(step))
        return next((said for said in CheckpointRanks(dist.group.WORLD).gather(own, Any) if said is not None), None)

    def _load(self, checkpoints: Checkpointer) -> None:
        self.run.doing("reading the checkpoint")
        loaded = checkpoints.load(self.work.executor.shards(), optimizers=self.trainer.optimizers)
        if loaded is None:
            return
        restore_callbacks(self.job.callbacks, loaded.extra.get("callbacks", {}))
        self.trainer.resume(loaded.step, loaded.extra)
        restore_data(loaded.extra, self.job.samples)
        self.run.saved(loaded.step)
        self.trainer.resumed = loaded

    def _after_step(self, step: int) -> None:
        if self.measured is not None:
            self.measured.after_step()
        self._save_when_due(self.checkpoints, step)

    def _save_when_due(self, checkpoints: Checkpointer | None, step: int) -> None:
        if checkpoints is None or self.policy is None:
            return
        if step != self.job.total_steps and self._due(self.policy, step):
            self._begin_save(checkpoints, step)
        self.tell_saved(checkpoints)

    def _begin_save(self, checkpoints: Checkpointer, step: int) -> None:
        self.trainer.tell(CheckpointBegun(at_seconds=self.trainer.moment(), step=step))
        self.run.doing("saving a checkpoint")
        self._save(checkpoints, step)

    def save_last(self) -> None:
        """When it cannot be saved the run has failed: there is no later save to make up for it."""
        checkpoints, step = self.checkpoints, self.trainer.last_step
        if checkpoints is None or not step:
            return
        self.run.doing("saving the last checkpoint")
        try:
            self._save(checkpoints, step, final=True)
        finally:
            self.tell_saved(checkpoints)
        self.run.saved(step)

    def tell_saved(self, checkpoints: Checkpointer) -> None:
        """What became of saves since the last call."""
        for outcome in checkpoints.finished():
            if self.policy is not None:
                self.policy.ended(outcome.seconds)
            if outcome.error is None:
                self.run.saved(outcome.step)
            self.trainer.tell(outcome.event(self.trainer.moment()))
            chosen = self.policy.decision(self.trainer.last_step, self.trainer.elapsed()) if self.policy is not None else None
            chosen = chosen if self.trainer.last_step < self.job.total_steps else None
            if chosen is not None:
                self.trainer.tell(msgspec.structs.replace(chosen, at_seconds=self.trainer.moment()))

    def _due(self, policy: SavePolicy, step: int) -> bool:
        """Whether to save now. Where clocks say so it is rank 0's, and all hear of it; how often they ask is part of the answer."""
        if policy.every is not None:
            return policy.due(step, 0.0)
        if step < self.ask_at:
            return False
        moment = self.trainer.elapsed()
        due = policy.due(step, moment)
        if due:
            policy.begun(step)
        due, self.ask_at = CheckpointRanks(dist.group.WORLD).gather((due, policy.ask_again(step, moment)), tuple[bool, int])[0]
        return due


def _bucket_bytes(plan: Plan, graph: Graph, cluster: Cluster | None) -> int:
    """As the cost model would have it, where the cluster's links are known."""
    return bucket_bytes(Evaluator(graph, cluster), plan) if cluster is not None else DEFAULT_BUCKET_BYTES


def _failures_per_hour(plan: Plan, cluster: Cluster | None) -> float | None:
    """Of all devices of the plan: each of them sends the run back. None where nobody tells of them."""
    if cluster is None:
        return None
    used = {name for stage in plan.stages for name in stage.devices}
    return sum(device.preemptions_per_hour for device in cluster.devices if device.name in used)


@contextmanager
def training_among_others(
    job: Job,
    role: Role,
    *,
    out: str | Path | None,
    plan: Plan | str | Path | None,
    cluster: Cluster | str | Path | None,
    resume: bool,
    checkpoint_every: int | None,
    observers: Sequence[Callback],
    own: Observer,
    environ: Mapping[str, str],
) -> Iterator[RankTraining]:
    """`Job.run` and loops under torchrun, Slurm or Kubernetes: this process's rank of a lockstep run.

    What runs where comes from a plan or a cluster file, given or in the environment (`ATOLL_PLAN`, `ATOLL_CLUSTER`). Rank r is the r-th of
    the cluster file's devices that the plan uses. Only rank 0 needs the files: it tells the others. With neither, every process takes an
    equal share of the batch. `observers` are told of events on rank 0 only, `own` on every rank of what concerns its process.
    """
    plan, cluster = plan or environ.get("ATOLL_PLAN") or None, cluster or environ.get("ATOLL_CLUSTER") or None
    if role.rank:  # rank 0 tells those whose hosts do not have the files
        plan, cluster = None if _is_missing(plan) else plan, None if _is_missing(cluster) else cluster
    devices = load_cluster(cluster) if isinstance(cluster, (str, Path)) else cluster
    given = load_plan(plan) if isinstance(plan, (str, Path)) else plan
    order = [device.name for device in devices.devices] if devices is not None else None
    planning: Planning = given if given is not None else partial(_make_plan, job, role, devices)
    directory = RunDirectory(out) if out is not None else None
    settings = RunSettings(
        script=str(Path(sys.argv[0]).resolve()),
        arguments=tuple(sys.argv[1:]),
        checkpoint_every=checkpoint_every,
        speeds=environ.get(SPEEDS) or None,
    )
    told = observers if role.rank == 0 else ()
    with ExitStack() as stack:
        if directory is not None and role.rank == 0:
            stack.enter_context(run_lock(directory.path))
            _begin(directory, settings, resume or role.generation > 0)
        yield stack.enter_context(
            training_rank(
                job, planning, role, directory=directory, settings=settings, observers=told, order=order, cluster=devices, own=own
            )
        )


def _is_missing(source: object) -> bool:
    return isinstance(source, (str, Path)) and not Path(source).exists()


def _begin(directory: RunDirectory, settings: RunSettings, resume: bool) -> None:
    if resume:
        directory.settings()  # an error where there is no run to continue
        directory.write_settings(settings)
    else:
        directory.create(settings)
    EventLog(directory.path, resume=True).close()  # the run's time goes on from here


def _make_plan(job: Job, role: Role, cluster: Cluster | None, graph: Graph) -> Plan:
    """For the captured job; only rank 0 is asked."""
    if cluster is None:
        return equal_shares(graph, job.batch_size, job.micro_batch_size, role.world_size)
    from atoll.planner import plan  # it needs scipy, which takes a moment to load

    found = [one.plan for one in plan(graph, cluster, batch_size=job.batch_size, mode=LOCKSTEP.name, top=_CANDIDATES).candidates]
    for one in found:  # there is a process for every device already: a plan that leaves some out cannot be run, however fast
        if len({device for stage in one.stages for device in stage.devices}) == role.world_size:
            return one
    if len(cluster.devices) != role.world_size:
        return found[0]
    names = [device.name for device in cluster.devices]
    return equal_shares(graph, job.batch_size, job.micro_batch_size, role.world_size, names, cluster.name)


def equal_shares(
    graph: Graph, batch_size: int, micro_batch_size: int | None, processes: int, names: Sequence[str] = (), cluster: str = "processes"
) -> Plan:
    """Data parallel over all processes, as equally as the batch allows."""
    if processes > batch_size:
        raise JobError(f"{processes} processes cannot share a batch of {batch_size} samples; start fewer or make batch_size larger")
    shares = apportion(batch_size, [1] * processes)
    devices = names or [f"process-{rank}" for rank in range(processes)]
    replicas = tuple(Replica(devices=(device,), samples=(share,)) for device, share in zip(devices, shares, strict=True))
    return Plan(
        graph=graph.name,
        cluster=cluster,
        batch_size=batch_size,
        micro_batch_size=min(micro_batch_size or shares[0], shares[0]),
        stages=(Stage(start=0, stop=len(graph.layers), replicas=replicas),),
    )
