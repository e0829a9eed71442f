"""One rank of a lockstep run, put together: its stages with their parameters, its schedule, whom it adds up gradients with."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor, nn

from atoll.cost.buckets import DEFAULT_BUCKET_BYTES
from atoll.graph.capture import Captured
from atoll.job import Job
from atoll.runtime.checkpoint import Held
from atoll.runtime.checkpoint.exchange import Ranks
from atoll.runtime.lockstep.agreement import agree, digest_of_weights
from atoll.runtime.lockstep.buffers import ChangedBuffers
from atoll.runtime.lockstep.building import build_in_turn
from atoll.runtime.lockstep.channels import Channels
from atoll.runtime.lockstep.check import check
from atoll.runtime.lockstep.dividing import Dividing
from atoll.runtime.lockstep.evaluating import Evaluation, buffers_read, capture_evaluated, prepare_evaluation
from atoll.runtime.lockstep.executor import Executor, StageWork
from atoll.runtime.lockstep.feeding import PieceFeed
from atoll.runtime.lockstep.fitting import check_fits
from atoll.runtime.lockstep.gradients import Gradients
from atoll.runtime.lockstep.layout import Layout, Place
from atoll.runtime.lockstep.optimizing import Counted, check_elementwise, check_separable
from atoll.runtime.lockstep.orders import make_schedule, post_receives_early
from atoll.runtime.lockstep.owned import Owned
from atoll.runtime.lockstep.schedule import Schedule, Workers
from atoll.runtime.lockstep.sharding import BackwardPhases, make_meshes, owned_shard, shard_stage
from atoll.runtime.lockstep.sharing import Part, Share, shares_of
from atoll.runtime.stage.collectives import Lanes
from atoll.runtime.stage.drawing import DrawKey
from atoll.runtime.stage.holding import Holding
from atoll.runtime.stage.module import StageBuilder, StageModule
from atoll.runtime.stage.program import StageProgram, cut_stage, shared_parameters
from atoll.runtime.stage.sizes import Sizes
from atoll.runtime.stage.state import InitialState, tied_names, unread_state

__all__ = ["RankWork", "assemble", "make_plan_schedule"]

_AHEAD = 2  # pieces of data that are read before they are needed


@dataclass
class OtherState:
    """What belongs to the model but is not trained here: for checkpoints."""

    to_save: list[Held]
    to_load: list[Held]
    tied: dict[str, str]  # other names of a parameter → its first
    model_config: dict[str, Any] | None  # of a Hugging Face model


@dataclass
class RankWork:
    """Everything a rank works with."""

    layout: Layout
    rank: int
    schedule: Schedule
    executor: Executor
    feed: PieceFeed
    stages: list[StageWork]
    owned: list[Owned]  # its parts of trainable and frozen parameters
    counted: list[Counted]  # what it adds to the norm of the gradient
    trainable_parameters: int  # of the whole model
    other: OtherState
    buffers: ChangedBuffers  # running statistics and the like
    evaluation: Evaluation | None  # None: the job has no evaluation data
    callbacks: bool  # whether some rank has callbacks, which may ask to stop
    doing: Callable[[object, int], None]  # told what the rank does, and at which step


def make_plan_schedule(layout: Layout) -> Schedule:
    """The schedule of a plan's steps, checked."""
    workers = Workers(layout.homes, layout.route)
    schedule = post_receives_early(make_schedule(layout.plan.schedule, workers), workers=workers)
    check(schedule, workers)
    return schedule


def assemble(
    job: Job,
    layout: Layout,
    captured: Captured,
    *,
    device: torch.device,
    evaluated: Mapping[str, Captured] | None = None,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    doing: Callable[[object, int], None] = lambda action, step: None,
) -> RankWork:
    """Put this process's rank together. All ranks do so at the same time: process groups are made on the way.

    `evaluated` is what `capture_evaluated` found, if it was asked before; `bucket_bytes` must be the same on all ranks.
    """
    programs = capture_evaluated(job) if evaluated is None else evaluated
    return _Assembly(job, layout, captured, programs, device).rank_work(bucket_bytes, doing)


class _Assembly:
    def __init__(self, job: Job, layout: Layout, captured: Captured, evaluated: Mapping[str, Captured], device: torch.device) -> None:
        self.job, self.captured, self.device, self.evaluated_programs = job, captured, device, evaluated
        self.layout, self.rank = layout, dist.get_rank()
        self.places = self.layout.places(self.rank)
        self.sizes, self.key = Sizes(captured), DrawKey(job.seed)
        check_fits(layout, captured, self.sizes)
        self.lane_divided: set[str] = set()  # parameters that lanes divide between them: experts, split layers
        divided = self._cut()
        build_in_turn(lambda: self._take_parts(divided), 4.0 * captured.graph.parameters)
        self.callbacks = agree(job, self.weights)
        self._shard()
        self.parameters = {name: p for module in self.modules for name, p in module.parameters_by_name().items()}
        self.parts = self._agree_on_parts()
        self.owned = [self._owned(name) for name in self.order if name in self.parameters]

    def _cut(self) -> list[dict[str, Holding]]:
        """The rank's stages as programs, rewritten for its part; what it holds of divided parameters, stage by stage."""
        self.programs: list[StageProgram] = []
        self.lanes: list[Lanes | None] = []
        dividing = Dividing(self.layout, self.rank, self.captured)
        divided = []
        for place in self.places:
            stage = self.layout.plan.stages[place.stage]
            program = cut_stage(self.captured, stage.start, stage.stop)
            holdings, among_lanes, lanes = dividing.divide(place, program)
            self.programs.append(program)
            self.lane_divided |= among_lanes
            self.lanes.append(lanes)
            divided.append(holdings)
        return divided

    def _take_parts(self, divided: list[dict[str, Holding]]) -> bool:
        """Build the whole model and take from it what this rank holds."""
        model = self.job.build_model("cpu")
        self.weights = digest_of_weights(model)
        self.order = [name for name, _ in model.named_parameters()]
        self.unread, self.tied, self.config = unread_state(self.captured, model), tied_names(model), _config_of(model)
        self.persistent = set(model.state_dict())
        self.trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        builder = StageBuilder(InitialState(self.captured, model), device=self.device, key=self.key)
        last_layer = len(self.captured.graph.layers) - 1
        self.modules: list[StageModule] = []
        for place, program, holdings in zip(self.places, self.programs, divided, strict=True):
            again = self.layout.plan.stages[place.stage].recompute
            recompute = [again and last_layer not in unit.layers for unit in program.units]
            self.modules.append(builder.stage(program, recompute, holdings))
        self.holdings = builder.holdings
        buffers = {name: buffer for module in self.modules for name, buffer in module.buffers_by_name().items()}
        self.evaluated = prepare_evaluation(
            self.evaluated_programs,
            self.layout,
            self.rank,
            self.captured,
            buffers,
            lambda captured: InitialState(captured, model),
            self.device,
        )
        return True

    def _shard(self) -> None:
        """Shard over lanes what only one layer uses and lanes hold alike."""
        meshes = make_meshes(self.layout, self.device)
        shared = shared_parameters(self.captured)
        self.sharded: dict[str, Place] = {}
        for place, module in zip(self.places, self.modules, strict=True):
            if not self.layout.plan.stages[place.stage].sharded:
                continue
            names = module.parameters_by_name()
            whole = {name for name in names if name in shared or name in self.lane_divided or not names[name].dim()}
            self.sharded.update(dict.fromkeys(names.keys() - whole, place))
            ends_model = place.stage == len(self.layout.plan.stages) - 1
            shard_stage(module, meshes[place.stage, place.tensor], {names[name] for name in whole}, ends_model=ends_model)

    def _agree_on_parts(self) -> list[Part]:
        """What is added up among whom, for all parameters of all ranks but those that sharding takes care of."""
        own = []
        for place, module in zip(self.places, self.modules, strict=True):
            tensor = self.layout.plan.stages[place.stage].tensor
            lane = tuple(self.layout.rank(dataclasses.replace(place, tensor=i)) for i in range(tensor))
            for name, parameter in module.parameters_by_name().items():
                if parameter.requires_grad and name not in self.sharded:
                    holding = self.holdings[name]
                    own.append(Share(rank=self.rank, stage=place.stage, tensor=place.tensor, lane=lane, holding=holding))
        shares: dict[str, list[Share]] = {}
        for share in (share for row in Ranks(dist.group.WORLD).gather(own, list[Share]) for share in row):
            shares.setdefault(share.holding.name, []).append(share)
        return [part for name in self.order if name in shares for part in shares_of(shares[name])]

    def _owned(self, name: str) -> Owned:
        parameter, holding = self.parameters[name], self.holdings[name]
        if name not in self.sharded:
            return Owned(name, holding, parameter, parameter)
        place = self.sharded[name]
        return owned_shard(name, holding, parameter, place.lane, self.layout.plan.stages[place.stage].lanes)

    def _counted(self) -> list[Counted]:
        counted = [Counted(owned.leaf, self._holders_of_shard(owned)) for owned in self.owned if owned.sharded and owned.leaf.requires_grad]
        for part in self.parts:
            if self.rank not in part.ranks:
                continue
            parameter, holding = self.parameters[part.name], self.holdings[part.name]
            if part.dim is None:
                counted.append(Counted(parameter, part.holders))
                continue
            offset = 0
            for start, stop in holding.parts if holding.dim is not None else ((0, holding.shape[part.dim]),):
                first, last = max(start, part.start), min(stop, part.stop)
                if first < last:
                    counted.append(Counted(parameter, part.holders, part.dim, offset + first - start, offset + last - start))
                offset += stop - start
        return counted

    def _holders_of_shard(self, owned: Owned) -> int:
        stage = self.layout.plan.stages[self.sharded[owned.name].stage]
        return len(stage.replicas) * (stage.tensor if owned.holding.dim is None else 1)

    def _gradients(self, bucket_bytes: int) -> Gradients:
        whole: dict[str, nn.Parameter] = {n: p for n, p in self.parameters.items() if p.requires_grad and n not in self.sharded}
        uses = Counter(name for module in self.modules for name in module.parameters_by_name())
        late = frozenset(name for name in whole if uses[name] > 1)
        return Gradients(self.rank, self.parts, whole, self.holdings, bucket_bytes=bucket_bytes, ready_late=late)

    def rank_work(self, bucket_bytes: int, doing: Callable[[object, int], None]) -> RankWork:
        """Everything together."""
        divided = any(part.dim is not None for part in self.parts) or any(stage.sharded for stage in self.layout.plan.stages)
        if divided:
            check_elementwise(self.job.build_optimizer)
        if divided or len(self.layout.plan.stages) > 1:
            check_separable(self.job.build_optimizer)
        gradients = self._gradients(bucket_bytes)
        stages = [
            StageWork(place, program, module, list(module.parameters_by_name().values()), BackwardPhases(module), lanes)
            for place, program, module, lanes in zip(self.places, self.programs, self.modules, self.lanes, strict=True)
        ]
        schedule = make_plan_schedule(self.layout)
        actions = schedule[self.layout.worker_of(self.rank)]
        feed = PieceFeed(
            self.job.samples,
            self.layout,
            actions,
            stages,
            self.sizes,
            self.device,
            last_step=self.job.total_steps,
            ahead=_AHEAD,
            lock=self.key.lock,
        )
        executor = Executor(
            self.layout,
            self.rank,
            actions,
            stages,
            program=self.captured.program,
            sizes=self.sizes,
            channels=Channels(self.rank, self.device),
            gradients=gradients,
            feed=feed,
            key=self.key,
            autocast=lambda: self.job.autocast(self.device),
            doing=doing,
        )
        return RankWork(
            layout=self.layout,
            rank=self.rank,
            schedule=schedule,
            executor=executor,
            feed=feed,
            stages=stages,
            owned=self.owned,
            counted=self._counted(),
            trainable_parameters=self.trainable,
            other=self._other(),
            buffers=self._buffers(),
            evaluation=self._evaluation(doing),
            callbacks=self.callbacks,
            doing=doing,
        )

    def _evaluation(self, doing: Callable[[object, int], None]) -> Evaluation | None:
        if not self.evaluated:
            return None
        return Evaluation(self.job, self.layout, self.rank, self.device, self.evaluated, self.owned, self.lane_divided, doing)

    def _buffers(self) -> ChangedBuffers:
        """Training's own tensors first; evaluation mostly has the same ones."""
        held: dict[str, list[Tensor]] = {}
        changed: dict[str, Place] = {}
        for place, module in zip(self.places, self.modules, strict=True):
            for name, buffer in module.buffers_by_name().items():
                held.setdefault(name, []).append(buffer)
            for name in module.changed_buffers():
                changed.setdefault(name, place)
        for name, buffer in buffers_read(self.evaluated):
            held.setdefault(name, []).append(buffer)
        distinct = {name: list({id(copy): copy for copy in copies}.values()) for name, copies in held.items()}
        return ChangedBuffers(self.rank, distinct, changed)

    def _other(self) -> OtherState:
        """Buffers are saved by the first that reads them and loaded by all; after every step all that read one have it alike."""
        to_save: list[Held] = []
        to_load: list[Held] = []
        for place, module in zip(self.places, self.modules, strict=True):
            first = (place.replica, place.lane, place.tensor) == (0, 0, 0)
            for name, buffer in module.buffers_by_name().items():
                if name in self.persistent and not any(held.name == name for held in to_load):
                    to_load.append(Held(Holding(name=name, shape=tuple(buffer.shape)), buffer))
                    to_save += to_load[-1:] if first else []
        if self.rank == 0:
            unread = [Held(Holding(name=name, shape=tuple(value.shape)), value) for name, value in self.unread.items()]
            to_save, to_load = to_save + unread, to_load + unread
        return OtherState(to_save, to_load, self.tied, self.config)


def _config_of(model: nn.Module) -> dict[str, Any] | None:
    """The configuration a Hugging Face model is loaded by, if it is one."""
    to_text = getattr(getattr(model, "config", None), "to_json_string", None)
    return msgspec.json.decode(to_text(), type=dict[str, Any]) if to_text is not None else None
