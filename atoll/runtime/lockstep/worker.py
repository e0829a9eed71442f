"""A rank's run from meeting the others to leaving them: it captures the job, puts its rank together, continues, trains and saves."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

from atoll.cluster import load_cluster
from atoll.cluster.memory import keep_freed_memory
from atoll.cost import Evaluator
from atoll.cost.buckets import DEFAULT_BUCKET_BYTES, bucket_bytes
from atoll.errors import AtollError, PlanError
from atoll.events import Evaluated, EventLog, Observer
from atoll.graph import Graph
from atoll.graph.capture import Captured, capture_program
from atoll.job import Job
from atoll.plan import Plan, validate
from atoll.runtime.checkpoint import Checkpointer, Held, RunIdentity
from atoll.runtime.checkpoint.exchange import Ranks
from atoll.runtime.lockstep.beats import Doing
from atoll.runtime.lockstep.concluding import MeasuredFile
from atoll.runtime.lockstep.evaluating import capture_evaluated
from atoll.runtime.lockstep.layout import Layout
from atoll.runtime.lockstep.pacing import imposed_pace
from atoll.runtime.lockstep.rank import assemble
from atoll.runtime.lockstep.rendezvous import Run, joined
from atoll.runtime.lockstep.role import Role
from atoll.runtime.lockstep.trainer import Reason, Trainer
from atoll.runtime.run_directory import RunDirectory, RunSettings

__all__ = ["Ended", "Planning", "run_rank"]


Planning: TypeAlias = Plan | Callable[[Graph], Plan]  # a plan, or who makes one for the captured job


class Ended(NamedTuple):
    """How a rank's run ended."""

    reason: Reason
    losses: tuple[float, ...]
    evaluations: tuple[Evaluated, ...]
    seconds: float


def own_device(role: Role) -> torch.device:
    """The accelerator with this rank's local number, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, role.local_rank % torch.accelerator.device_count())


def run_rank(
    job: Job,
    planning: Planning,
    role: Role,
    *,
    directory: RunDirectory | None,
    settings: RunSettings,
    observers: Sequence[Observer],
    order: Sequence[str] | None = None,
) -> Ended:
    """Train this process's rank of the plan; all ranks do so together. A plan that is still to be made is made by rank 0.

    `order` names devices in the order of ranks; by default it is the order in which the plan names them.
    """
    layout = _checked_layout(planning, order, role) if isinstance(planning, Plan) else None
    device_name = layout.devices[role.rank] if layout is not None else ""
    stages = " and ".join(f"stage {place.stage}" for place in layout.places(role.rank)) if layout is not None else ""
    device = own_device(role)
    if device.type == "cpu":
        keep_freed_memory()
    with joined(role, device_name, stages, device=device) as run:
        run.doing("capturing the model")
        captured, evaluated = capture_program(job), capture_evaluated(job)
        if layout is None:
            run.doing(Doing("waiting for the plan", "atoll" if role.rank == 0 else "others"))
            layout = _checked_layout(_agreed_plan(planning, captured.graph, role), order, role)
        validate(layout.plan, captured.graph)
        if directory is not None and role.rank == 0:
            _write_plan(directory, layout.plan)
        session = _Session(job, layout, captured, evaluated, device, run, directory, settings)
        reason = session.train(observers)
        trainer = session.trainer
        return Ended(reason, tuple(trainer.losses), tuple(trainer.evaluations), trainer.elapsed())


def _write_plan(directory: RunDirectory, plan: Plan) -> None:
    """Say what runs where; what was predicted of another plan that the run had before is not true of this one."""
    if (directory.path / "plan.json").exists() and directory.plan() != plan:
        directory.forget("predicted.json")
    directory.write_plan(plan)


def _agreed_plan(planning: "Planning", graph: Graph, role: Role) -> Plan:
    """Rank 0 plans, the others hear what it decided, or why it could not."""
    said = ("", "")
    if role.rank == 0 and not isinstance(planning, Plan):
        try:
            said = (planning(graph).to_json(), "")
        except AtollError as error:
            said = ("", str(error))
    text, problem = Ranks(dist.group.WORLD).gather(said, tuple[str, str])[0]
    if problem:
        raise PlanError(problem)
    return Plan.from_json(text)


def _checked_layout(plan: Plan, order: Sequence[str] | None, role: Role) -> Layout:
    layout = Layout(plan, order)
    if role.world_size != layout.world_size:
        raise PlanError(f"the plan uses {layout.world_size} devices, but {role.world_size} processes were started; start one a device")
    return layout


class _Session:
    """One rank's run between meeting the others and leaving them."""

    def __init__(
        self,
        job: Job,
        layout: Layout,
        captured: Captured,
        evaluated: Mapping[str, Captured],
        device: torch.device,
        run: Run,
        directory: RunDirectory | None,
        settings: RunSettings,
    ) -> None:
        self.job, self.plan, self.run, self.directory, self.settings = job, layout.plan, run, directory, settings
        run.doing("taking its part of the model")
        size = _bucket_bytes(layout.plan, captured.graph, directory)
        self.work = assemble(job, layout, captured, device=device, evaluated=evaluated, bucket_bytes=size, doing=run.doing)
        if settings.speeds is not None:
            places = layout.places(run.role.rank)
            self.work.executor.pace = imposed_pace(settings.speeds, layout.plan, places, captured.graph, device)
        self.trainer = Trainer(job, self.work, device)
        self.graph = captured.graph
        self.measured = MeasuredFile(directory, self.work, device) if directory is not None else None

    def train(self, observers: Sequence[Observer]) -> Reason:
        """Continue from the last checkpoint if there is one, train, save."""
        with ExitStack() as stack:
            stack.callback(self.work.feed.close)
            checkpoints = self._checkpoints(stack)
            if checkpoints is not None:
                self._load(checkpoints)
            if self.run.role.rank == 0 and self.directory is not None:
                self.trainer.seconds_before = self.directory.last_moment()
                log = stack.enter_context(EventLog(self.directory.path, resume=True))
                observers = [log, *observers]
            self.trainer.observers = observers
            try:
                reason = self.trainer.train(lambda: self.run.stop_asked, lambda step: self._after_step(checkpoints, step))
            except BaseException as error:
                with self.run.still_doing():
                    if isinstance(error, AtollError):
                        self.trainer.finish("failed", str(error))
                    if self.measured is not None:
                        self.measured.write()
                raise
            if self.measured is not None:
                self.run.doing("writing down what was measured")
                self.measured.write()
            if checkpoints is not None and self.trainer.last_step:
                self.run.doing("saving the last checkpoint")
                checkpoints.save(
                    self.trainer.last_step, self._held(saving=True), optimizers=self._optimizers(), extra=self._extra(), final=True
                )
                self.run.saved(self.trainer.last_step)
            self.trainer.finish(reason)
            self._conclude()
            return reason

    def _conclude(self) -> None:
        if self.measured is not None:
            self.run.doing(Doing("waiting for what the others measured", "others"))
            dist.barrier()  # everybody has written
            if self.run.role.rank == 0:
                self.measured.conclude(self.graph)

    def _checkpoints(self, stack: ExitStack) -> Checkpointer | None:
        if self.directory is None:
            return None
        group = dist.new_group(backend="gloo")
        identity = RunIdentity(
            job=self.job.name,
            optimizer=type(self.trainer.optimizer).__name__,
            seed=self.job.seed,
            batch_size=self.job.batch_size,
            plan=str(self.plan),
            tied=self.work.other.tied,
            model_config=self.work.other.model_config,
        )
        return stack.enter_context(Checkpointer(self.directory.checkpoints, group, identity=identity, keep_last=self.settings.keep_last))

    def _held(self, *, saving: bool) -> list[Held]:
        return [owned.held for owned in self.work.owned] + (self.work.other.to_save if saving else self.work.other.to_load)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.trainer.optimizer] if self.trainer.leaves else []  # else it has nothing of the model's

    def _extra(self) -> dict[str, Any]:
        scheduler = self.trainer.scheduler
        return {
            "scheduler": _saved(scheduler.state_dict()) if scheduler is not None else None,
            "loss_scale": self.trainer.scale.state(),
            "losses": self.trainer.losses,
        }

    def _load(self, checkpoints: Checkpointer) -> None:
        self.run.doing("reading the checkpoint")
        loaded = checkpoints.load(self._held(saving=False), optimizers=self._optimizers())
        if loaded is None:
            return
        self.trainer.resume(loaded.step, loaded.extra)
        self.run.saved(loaded.step)
        if self.run.role.rank == 0:
            for sentence in loaded.differences:
                print(f"resuming at step {loaded.step}: {sentence}", file=sys.stderr, flush=True)

    def _after_step(self, checkpoints: Checkpointer | None, step: int) -> None:
        if self.measured is not None:
            self.measured.after_step()
        self._save_when_due(checkpoints, step)

    def _save_when_due(self, checkpoints: Checkpointer | None, step: int) -> None:
        every = self.settings.checkpoint_every
        if checkpoints is None:
            return
        if every is not None and step % every == 0 and step != self.job.total_steps:
            self.run.doing("saving a checkpoint")
            checkpoints.save(step, self._held(saving=True), optimizers=self._optimizers(), extra=self._extra())
        for outcome in checkpoints.finished():
            if outcome.error is None:
                self.run.saved(outcome.step)
            self.trainer.tell(outcome.event(self.trainer.moment()))


def _bucket_bytes(plan: Plan, graph: Graph, directory: RunDirectory | None) -> int:
    """As the cost model would have it, where the run's directory tells of the links."""
    if directory is None or not directory.cluster.exists():
        return DEFAULT_BUCKET_BYTES
    cluster = load_cluster(directory.cluster)
    if cluster.name != plan.cluster:
        return DEFAULT_BUCKET_BYTES
    return bucket_bytes(Evaluator(graph, cluster), plan)


def _saved(state: dict[str, Any]) -> dict[str, Any]:
    """A scheduler's state without functions, which the script makes again; everything else as it is."""
    return {key: value for key, value in state.items() if not callable(value)}
