"""One rank of a lockstep run, put together: its stages with their parameters, its schedule, whom it adds up gradients with.

Putting it together is a row of steps, each a function of what the steps before it returned: cut, take parts, shard, share, assemble. Steps
that talk to other ranks say so: all ranks take them together.
"""

import dataclasses
import socket
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from atoll.cluster.memory import host_memory
from atoll.cost.evaluate import DEFAULT_BUCKET_BYTES
from atoll.data import Dataset
from atoll.graph.capture import Captured
from atoll.graph.eager import Uncaptured
from atoll.job import Job, ParameterGroup
from atoll.model_identity import ModelIdentity, identify
from atoll.runtime.batch_loader import BatchLoader
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.gathering import gather_tensors
from atoll.runtime.checkpoint.loading import fill_shards
from atoll.runtime.checkpoint.local_shard import LocalShard
from atoll.runtime.evaluated_programs import EvaluatedPrograms
from atoll.runtime.executor import Accumulated, LossScale, StageExecutor, Updater, WorkItem
from atoll.runtime.imposed_speed import Pace
from atoll.runtime.modes.lockstep.agreement import ChangedBuffers, agree, digest_of_code, digest_of_weights
from atoll.runtime.modes.lockstep.channels import Channels
from atoll.runtime.modes.lockstep.data_loader import ShardLoader
from atoll.runtime.modes.lockstep.evaluation import EvaluatedFunction, Evaluation, buffers_read
from atoll.runtime.modes.lockstep.gradients import GradientGroup, Gradients, OuterReduction, Share, gradient_groups
from atoll.runtime.modes.lockstep.layout import Layout, RankPlace
from atoll.runtime.modes.lockstep.measurement import Bucket
from atoll.runtime.modes.lockstep.parallelize import CutStage
from atoll.runtime.modes.lockstep.recorder import Recorder
from atoll.runtime.modes.lockstep.schedule import Schedule, Workers
from atoll.runtime.modes.lockstep.schedule_builder import make_schedule, post_receives_early
from atoll.runtime.modes.lockstep.schedule_check import check
from atoll.runtime.modes.lockstep.schedule_runner import Activity, Generators, ScheduleRunner, StageWork
from atoll.runtime.modes.lockstep.sharding import (
    BackwardPhases,
    Counted,
    OptimizerShard,
    UsedParameters,
    build_on_parts,
    check_elementwise,
    check_separable,
    make_meshes,
    owned_shard,
    shard_stage,
)
from atoll.runtime.modes.lockstep.stage_source import StageSource, TrainedStage, stage_source
from atoll.runtime.modes.lockstep.whole_model import WholeModel
from atoll.runtime.stage.collectives import Lanes
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.stage.eager import EagerStage
from atoll.runtime.stage.rng import DrawKey
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.weights import MatchedWeights

__all__ = ["RankWork", "assemble", "make_plan_schedule", "turns"]

T = TypeVar("T")
_AHEAD = 2  # pieces of data that are read before they are needed
_MODELS_SHARE = 0.5  # of a host's free memory that whole models may take while ranks pick their parts


@dataclass(frozen=True)
class RankTurn:
    """One of a step's losses, with what trains by it."""

    name: str  # empty where there is one
    executor: StageExecutor
    runner: ScheduleRunner
    owned: list[OptimizerShard]
    counted: list[Counted]  # what the rank adds to the norm of the gradient
    entered: Callable[[], AbstractContextManager[None]]  # around its run

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Of what the rank owns; of a stand-in without numbers where it trains nothing."""
        assert self.executor.updater.optimizer is not None
        return self.executor.updater.optimizer

    @property
    def trainable(self) -> list[OptimizerShard]:
        """What its optimizer has."""
        return [owned for owned in self.owned if owned.leaf.requires_grad]


@dataclass(frozen=True)
class RankWork:
    """Everything a rank works with."""

    layout: Layout
    rank: int
    schedule: Schedule
    turns: tuple[RankTurn, ...]  # of a step: one, unless the job has several losses
    feed: ShardLoader
    owned: list[OptimizerShard]  # its parts of trainable and frozen parameters
    trainable_parameters: int  # of the whole model
    frozen_parameters: int
    rebuilt: frozenset[str]  # what checkpoints leave out
    identity: ModelIdentity
    buffers: ChangedBuffers  # running statistics and the like
    evaluation: Evaluation | None  # None: the job has no evaluation data
    evaluation_on: Callable[[Dataset], Evaluation]  # other data, later; all ranks make it together
    callbacks: bool  # whether some rank has callbacks, which may ask to stop
    requests: bool  # and whether they may ask for more
    notes: list[str]  # on what the run begins with, to be told once
    compiler: Compiler | None  # of its stages, where they are compiled
    doing: Callable[[object, int], None]  # told what the rank does, and at which step

    @property
    def executor(self) -> StageExecutor:
        """Of the first turn; all have the same stages."""
        return self.turns[0].executor

    @property
    def runner(self) -> ScheduleRunner:
        """Of the first turn."""
        return self.turns[0].runner


def make_plan_schedule(layout: Layout) -> Schedule:
    """The schedule of a plan's steps, checked."""
    workers = Workers(layout.homes, layout.route)
    schedule = post_receives_early(make_schedule(layout.plan.schedule, workers))
    check(schedule, workers)
    return schedule


def assemble(
    job: Job,
    layout: Layout,
    captured: Captured | Uncaptured,
    *,
    device: torch.device,
    evaluated: EvaluatedPrograms | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    pace: Pace | None = None,
    doing: Callable[[object, int], None] = lambda action, step: None,
    compiler: Compiler | None = None,
    outer: OuterReduction | None = None,
) -> RankWork:
    """Put this process's rank together. All ranks do so at the same time: process groups are made on the way.

    `evaluated` is what `capture_evaluated` found, if it was asked before; `bucket_bytes` must be the same on all ranks; `pace` is where
    speeds are imposed; a `compiler` compiles its stages. With `outer`, gradients are added up with others than these ranks, too.
    """
    source = stage_source(job, captured, evaluated, compiler)
    rank = _Rank(job, layout, source, device, dist.get_rank(), DrawKey(job.seed, job.samples.first), compiler, outer)
    cut = source.cut(layout, rank.number)
    parts = _build_in_turn(lambda: _take_parts(rank, cut), 4.0 * source.graph.all_parameters)
    callbacks, requests = agree(job, parts.weights, parts.code)
    held = _held(rank, cut, parts, _shard(rank, cut, parts))
    _read_weights(parts, held)
    groups = _agree_on_groups(rank, parts, held)
    _check_optimizer(rank, groups)
    recorder = Recorder(device)
    stages = [_stage_work(rank, stage, module) for stage, module in zip(cut, parts.modules, strict=True)]
    schedule, activity = make_plan_schedule(layout), Activity(doing)
    if compiler is not None:
        compiler.around = lambda: activity.instead("compiling (torch.compile)")
    actions = schedule[layout.worker_of(rank.number)]
    loader = BatchLoader(job.samples, job.num_workers, rank.key.lock)
    feed = ShardLoader(loader, layout, actions, stages, source.sizes, device, last_step=job.total_steps, ahead=_AHEAD)
    generators, channels, buckets = Generators(rank.key.lock, feed.reading, activity), Channels(rank.number, device), list[Bucket]()
    turns, counted = [], _counted(rank, held, groups)
    for number, (name, names) in enumerate(_names_of_turns(rank, parts).items()):
        mine = held.of(names)
        executor = _executor(rank, number, stages, parts, mine, held, generators)
        runner = ScheduleRunner(
            layout,
            actions,
            stages,
            executor,
            sizes=source.sizes,
            channels=channels,
            gradients=_gradients(rank, mine, [group for group in groups if group.name in names], recorder, bucket_bytes, buckets),
            feed=feed,
            activity=activity,
            recorder=recorder,
            pace=pace,
        )
        own = {id(part.leaf) for part in mine.owned} | {id(part.source) for part in mine.owned}
        norm = [one for one in counted if id(one.parameter) in own]
        turns.append(RankTurn(name, executor, runner, mine.owned, norm, _entering(parts, number, name)))
    buffers = _changed_buffers(rank, cut, parts, parts.evaluated)
    gather = partial(_gathered, turns[0].executor, parts.identity)
    evaluation, notes = _planned_evaluation(rank, cut, parts, held, doing, gather)
    return RankWork(
        layout=layout,
        rank=rank.number,
        schedule=schedule,
        turns=tuple(turns),
        feed=feed,
        owned=held.owned,
        trainable_parameters=parts.trainable,
        frozen_parameters=parts.frozen,
        rebuilt=parts.rebuilt,
        identity=parts.identity,
        buffers=buffers,
        evaluation=evaluation,
        evaluation_on=lambda dataset: _evaluation_on(dataset, rank, cut, parts, held, doing, gather),
        callbacks=callbacks,
        requests=requests,
        notes=notes,
        compiler=compiler,
        doing=doing,
    )


@dataclass(frozen=True)
class _Rank:
    """What is known before anything is done."""

    job: Job
    layout: Layout
    source: StageSource
    device: torch.device
    number: int
    key: DrawKey
    compiler: Compiler | None
    outer: OuterReduction | None


def _lane_divided(cut: Sequence[CutStage]) -> set[str]:
    return {name for stage in cut for name in stage.lane_divided}


@dataclass(frozen=True)
class _Parts:
    """What the rank took from the whole model, which is gone by then."""

    modules: Sequence[TrainedStage]
    holdings: dict[str, ShardSpec]
    order: list[str]  # of all parameters of the model
    weights: str  # digest of the whole model's
    code: str  # digest of what runs as it is written; empty: a captured program runs
    trainable: int
    frozen: int
    rebuilt: frozenset[str]
    groups: list[ParameterGroup]  # of the optimizer, of the whole model
    persistent: frozenset[str]
    unread: dict[str, Tensor]
    identity: ModelIdentity
    weights_read: MatchedWeights | None  # from files, by whoever holds a part of them
    evaluated: list[EvaluatedFunction]


def _stage_work(rank: _Rank, stage: CutStage, module: TrainedStage) -> StageWork:
    return StageWork(
        program=stage.program,
        module=module,
        turn_to=_tell(stage.lanes, rank.layout),
        place=stage.place,
        parameters=list(module.parameters_by_name().values()),
        before_backward=BackwardPhases(module),
        after_backwards=_after_backwards(module, rank),
    )


def turns(hosts: list[str], free_bytes: list[float], model_bytes: float) -> list[int]:
    """In which turn each rank builds: all in turn 0, unless a host could not hold a whole model for each of its ranks. Pure."""
    counts = Counter(hosts)
    free = {host: min(amount for name, amount in zip(hosts, free_bytes, strict=True) if name == host) for host in counts}
    if all(counts[host] * model_bytes <= _MODELS_SHARE * free[host] for host in counts):
        return [0] * len(hosts)
    seen: Counter[str] = Counter()
    order = []
    for host in hosts:
        order.append(seen[host])
        seen[host] += 1
    return order


def _build_in_turn(build: Callable[[], T], model_bytes: float) -> T:
    """What `build` returns; it must have dropped the whole model by then. All ranks call it together."""
    said = CheckpointRanks(dist.group.WORLD).gather((socket.gethostname(), host_memory().available_bytes), tuple[str, float])
    order = turns([host for host, _ in said], [free for _, free in said], model_bytes)
    own, built = order[dist.get_rank()], None
    for turn in range(max(order) + 1):
        if turn == own:
            built = build()
        if max(order):
            dist.barrier()
    assert built is not None, "every rank has a turn"
    return built


def _take_parts(rank: _Rank, cut: Sequence[CutStage]) -> _Parts:
    """Build the whole model and take from it what this rank holds."""
    model, read = rank.job.build_to_take_parts_from() if rank.source.takes_parts else (rank.job.build_model("cpu"), None)
    weights = digest_of_weights(model, read)
    code = digest_of_code(model, rank.job) if rank.source.graph.eager else ""
    without_memory = _sharded_names(rank, cut, model) & read.names.keys() if read is not None else set[str]()
    taken = rank.source.take(cut, model, rank.layout, rank.number, rank.device, rank.key, without_memory)
    return _Parts(
        modules=taken.modules,
        holdings=taken.holdings,
        order=[name for name, _ in model.named_parameters()],
        weights=weights,
        code=code,
        trainable=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        rebuilt=rank.job.rebuilt(model),
        groups=rank.job.group_names(model.named_parameters()),
        persistent=frozenset(model.state_dict()),
        unread=taken.unread,
        identity=identify(model),
        weights_read=read,
        evaluated=taken.evaluated,
    )


def _sharded_names(rank: _Rank, cut: Sequence[CutStage], model: nn.Module) -> set[str]:
    """What `_shard` will shard of stages that are cut from a program."""
    stages = [stage for stage in cut if rank.layout.plan.stages[stage.place.stage].sharded]
    names = {name for stage in stages for unit in stage.program.units for name in unit.parameters.values()}
    return {name for name in names - rank.source.shared - _lane_divided(cut) if model.get_parameter(name).dim()}


def _shard(rank: _Rank, cut: Sequence[CutStage], parts: _Parts) -> dict[str, RankPlace]:
    """Shard over lanes what only one layer uses and lanes hold alike; which parameters, and where. Meshes are made on the way."""
    plan, lane_divided = rank.layout.plan, _lane_divided(cut)
    meshes, shared = make_meshes(rank.layout, rank.device), rank.source.shared
    sharded: dict[str, RankPlace] = {}
    for stage, module in zip(cut, parts.modules, strict=True):
        place = stage.place
        if not plan.stages[place.stage].sharded:
            continue
        names = module.parameters_by_name()
        whole = {name for name in names if name in shared or name in lane_divided or not names[name].dim()}
        sharded.update(dict.fromkeys(names.keys() - whole, place))
        ends_model = place.stage == len(plan.stages) - 1
        shard_stage(module, meshes[place.stage, place.tensor], {names[name] for name in whole}, ends_model=ends_model)
        if parts.weights_read is not None:  # those that are read get their memory now that they are divided
            module._apply(partial(_with_memory, rank.device))  # type: ignore[no-untyped-call]
    return sharded


def _with_memory(device: torch.device, value: Tensor) -> Tensor:
    return torch.empty_like(value, device=device) if value.is_meta else value


def _read_weights(parts: _Parts, held: "_HeldParameters") -> None:
    """Fill what the rank holds of the weights that are in files; nobody has a whole copy."""
    if parts.weights_read is None:
        return
    buffers = [item for module in parts.modules for item in module.buffers_by_name().items()]
    others = [*buffers, *buffers_read(parts.evaluated), *parts.unread.items()]
    kept = [(name, value) for name, value in others if name in parts.persistent]
    shards = [LocalShard(ShardSpec(name=name, shape=tuple(value.shape)), value) for name, value in kept]
    fill_shards(parts.weights_read, [*(part.held for part in held.owned), *shards])


@dataclass(frozen=True)
class _HeldParameters:
    """What the rank holds of parameters once lanes have sharded theirs."""

    places: list[tuple[RankPlace, dict[str, nn.Parameter]]]  # stage by stage
    parameters: dict[str, nn.Parameter]
    holdings: dict[str, ShardSpec]
    sharded: dict[str, RankPlace]
    owned: list[OptimizerShard]

    def of(self, names: Collection[str]) -> "_HeldParameters":
        """Of these alone."""
        places = [(place, {name: value for name, value in named.items() if name in names}) for place, named in self.places]
        parameters = {name: value for name, value in self.parameters.items() if name in names}
        owned = [part for part in self.owned if part.name in names]
        return dataclasses.replace(self, places=places, parameters=parameters, owned=owned)

    @property
    def whole(self) -> dict[str, nn.Parameter]:
        """Trained, and not sharded: those whose gradients this rank adds up with others."""
        return {name: value for name, value in self.parameters.items() if value.requires_grad and name not in self.sharded}


def _held(rank: _Rank, cut: Sequence[CutStage], parts: _Parts, sharded: dict[str, RankPlace]) -> _HeldParameters:
    places = [(stage.place, module.parameters_by_name()) for stage, module in zip(cut, parts.modules, strict=True)]
    parameters = {name: value for _, named in places for name, value in named.items()}
    owned = []
    for name in parts.order:
        if name not in parameters:
            continue
        value, holding = parameters[name], parts.holdings[name]
        if name in sharded:
            place = sharded[name]
            owned.append(owned_shard(name, holding, value, place.lane, rank.layout.plan.stages[place.stage].lanes))
        else:
            owned.append(OptimizerShard(name, holding, value, value))
    return _HeldParameters(places, parameters, parts.holdings, sharded, owned)


def _agree_on_groups(rank: _Rank, parts: _Parts, held: _HeldParameters) -> list[GradientGroup]:
    """What is added up among whom, for all parameters of all ranks but those that sharding takes care of. Asks all ranks."""
    own, whole = list[Share](), held.whole
    for place, named in held.places:
        tensor = rank.layout.plan.stages[place.stage].tensor
        lane = tuple(rank.layout.rank(dataclasses.replace(place, tensor=i)) for i in range(tensor))
        mine = [held.holdings[name] for name in named if name in whole]
        own += [Share(rank=rank.number, stage=place.stage, tensor=place.tensor, lane=lane, holding=holding) for holding in mine]
    shares: dict[str, list[Share]] = {}
    for share in (share for row in CheckpointRanks(dist.group.WORLD).gather(own, list[Share]) for share in row):
        shares.setdefault(share.holding.name, []).append(share)
    return [group for name in parts.order if name in shares for group in gradient_groups(shares[name])]


def _check_optimizer(rank: _Rank, groups: Sequence[GradientGroup]) -> None:
    """Refuse one that would make other steps where parameters are divided, or apart from each other."""
    stages = rank.layout.plan.stages
    divided = any(group.dim is not None for group in groups) or any(stage.sharded for stage in stages)
    for turn in rank.job.turns.values():
        if divided:
            check_elementwise(turn.build_optimizer)
        if divided or len(stages) > 1:
            check_separable(turn.build_optimizer)


def _gradients(
    rank: _Rank,
    held: _HeldParameters,
    groups: Sequence[GradientGroup],
    recorder: Recorder,
    bucket_bytes: int,
    buckets: list[Bucket],
) -> Gradients:
    """Process groups are made on the way."""
    uses = Counter(name for _, named in held.places for name in named)
    late = frozenset(name for name in held.whole if uses[name] > 1 or rank.source.late)
    size = bucket_bytes if rank.outer is None else rank.outer.bucket_bytes
    return Gradients(
        rank.number, groups, held.whole, held.holdings, recorder,
        bucket_bytes=size, ready_late=late, buckets=buckets, outer=rank.outer,
    )  # fmt: skip


def _counted(rank: _Rank, held: _HeldParameters, groups: Sequence[GradientGroup]) -> list[Counted]:
    """What the rank adds to the norm of the gradient."""
    counted = []
    for owned in held.owned:
        if owned.sharded and owned.leaf.requires_grad:
            stage = rank.layout.plan.stages[held.sharded[owned.name].stage]
            counted.append(Counted(owned.leaf, len(stage.replicas) * (stage.tensor if owned.holding.dim is None else 1)))
    for group in groups:
        if rank.number not in group.ranks:
            continue
        parameter, holding = held.parameters[group.name], held.holdings[group.name]
        if group.dim is None:
            counted.append(Counted(parameter, group.holders))
            continue
        counted += [Counted(parameter, group.holders, group.dim, *part) for part in group.ranges_in(holding)]
    return counted


def _names_of_turns(rank: _Rank, parts: _Parts) -> dict[str, Collection[str]]:
    """What each turn of a step trains, of the whole model: all ranks make the same groups. The first also has what nobody trains."""
    if list(rank.job.turns) == [""]:
        return {"": set(parts.order)}
    (stage,) = parts.modules
    assert isinstance(stage, EagerStage)  # nothing else has several turns
    return {name: set(names) for name, names in stage.trained_in.items()}


def _entering(parts: _Parts, number: int, name: str) -> Callable[[], AbstractContextManager[None]]:
    (stage, *_) = parts.modules
    return partial(stage.in_turn, number, name) if isinstance(stage, EagerStage) else nullcontext


def _executor(
    rank: _Rank,
    turn: int,
    stages: Sequence[StageWork],
    parts: _Parts,
    own: _HeldParameters,
    held: _HeldParameters,
    generators: Generators,
) -> StageExecutor:
    job = list(rank.job.turns.values())[turn]
    return StageExecutor(
        {work.place.stage: work for work in stages},
        sizes=rank.source.sizes,
        loss=rank.source.losses[turn],
        key=rank.key,
        autocast=lambda: rank.job.autocast(rank.device),
        generators=generators,
        gradients=Accumulated(rank.job.batch_size if rank.outer is None else rank.outer.batch_size),
        updater=_updater(job, own.owned, parts.groups),
        persistent=parts.persistent,
        owned=[part.held for part in held.owned],
        unread=parts.unread if rank.number == 0 else {},
        compiler=rank.compiler,
    )


def _updater(job: Job, owned: Sequence[OptimizerShard], groups: Sequence[ParameterGroup]) -> Updater:
    """A rank whose stages are frozen keeps the schedule too: it may be the one that tells and saves it."""
    trained = [part for part in owned if part.leaf.requires_grad]
    leaves, shapes = [part.leaf for part in trained], [part.holding.shape for part in trained]
    if job.parameter_groups is not None and leaves:
        optimizer = job.build_part_optimizer({part.name: part.leaf for part in trained}, groups)
    else:
        optimizer = build_on_parts(job.build_optimizer, leaves or [nn.Parameter(torch.zeros(0))], shapes or [(0,)])
    scheduler, scale = job.build_scheduler(optimizer), LossScale(job.precision == "fp16")
    return Updater(leaves, optimizer, scheduler, scale, steps=job.total_steps, ema_decay=job.ema_decay)


def _evaluation_on(
    dataset: Dataset,
    rank: _Rank,
    cut: Sequence[CutStage],
    parts: _Parts,
    held: _HeldParameters,
    doing: Callable[[object, int], None],
    gather: Callable[[], dict[str, Tensor]],
) -> Evaluation:
    """Evaluation that the job did not announce: captured now, on the model as it was at first, of which only what never changes is read."""
    build, not_captured = rank.source.evaluation_on(dataset, parts.modules, rank.layout, rank.number, rank.device, rank.key)
    functions = _build_in_turn(build, 4.0 * rank.source.graph.all_parameters)
    changed = _changed_buffers(rank, cut, parts, functions)
    whole = _whole_model(rank, not_captured, gather)
    return Evaluation(
        rank.job, rank.layout, rank.number, rank.device, functions, held.owned, _lane_divided(cut), doing, rank.key.lock, changed, whole
    )


def _planned_evaluation(
    rank: _Rank,
    cut: Sequence[CutStage],
    parts: _Parts,
    held: _HeldParameters,
    doing: Callable[[object, int], None],
    gather: Callable[[], dict[str, Tensor]],
) -> tuple[Evaluation | None, list[str]]:
    """On the job's own data, if it has some, and what is to be told before the run begins."""
    notes = [note for note in (parts.weights_read.note() if parts.weights_read is not None else None,) if note]
    whole = _whole_model(rank, rank.source.not_captured, gather)
    if not parts.evaluated and whole is None:
        return None, notes
    given = (rank.job, rank.layout, rank.number, rank.device, parts.evaluated, held.owned, _lane_divided(cut), doing, rank.key.lock)
    return Evaluation(*given, whole_model=whole), [*notes, *(whole.notes if whole is not None else [])]


def _whole_model(rank: _Rank, not_captured: Mapping[str, str], gather: Callable[[], dict[str, Tensor]]) -> WholeModel | None:
    return WholeModel(rank.job, not_captured, rank.source.graph.all_parameters, rank.number, gather) if not_captured else None


def _gathered(executor: StageExecutor, identity: ModelIdentity) -> dict[str, Tensor]:
    """The model's weights on rank 0, under all their names. All ranks take part."""
    whole = gather_tensors(executor.shards(), dist.group.WORLD)
    return {**whole, **{name: whole[first] for name, first in identity.tied.items() if first in whole}}


def _changed_buffers(rank: _Rank, cut: Sequence[CutStage], parts: _Parts, evaluated: Sequence[EvaluatedFunction]) -> ChangedBuffers:
    """Training's own tensors first; evaluation mostly has the same ones. Asks all ranks."""
    held: dict[str, list[Tensor]] = {}
    changed: dict[str, RankPlace] = {}
    for stage, module in zip(cut, parts.modules, strict=True):
        for name, buffer in module.buffers_by_name().items():
            held.setdefault(name, []).append(buffer)
        for name in module.changed_buffers():
            changed.setdefault(name, stage.place)
    for name, buffer in buffers_read(evaluated):
        held.setdefault(name, []).append(buffer)
    distinct = {name: list({id(copy): copy for copy in copies}.values()) for name, copies in held.items()}
    settle = [module.settle_buffers for module in parts.modules if isinstance(module, EagerStage)]
    return ChangedBuffers(rank.number, distinct, changed, settle)


def _after_backwards(module: TrainedStage, rank: _Rank) -> Callable[[], None]:
    sharded = isinstance(module, EagerStage) and isinstance(module, FSDPModule)
    return UsedParameters(module, rank.device).agree if sharded and isinstance(module, EagerStage) else lambda: None


def _tell(lanes: Lanes | None, layout: Layout) -> Callable[[WorkItem], None]:
    """Lanes that divide layers of a stage must know each micro-batch's samples."""

    def tell(work: WorkItem) -> None:
        if lanes is not None:
            lanes.samples = tuple(stop - start for start, stop in layout.pieces(work.stage, work.micro_batch))

    return tell
