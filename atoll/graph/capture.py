"""Job → Graph. `capture(job)` is what the planner wants; `capture_program(job)` also keeps what the runtime needs to run it in stages."""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import msgspec
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.utils import _pytree as pytree

from atoll.errors import CaptureError, JobError
from atoll.graph.annotations import annotations_of
from atoll.graph.constraints import resolve
from atoll.graph.experts import find_experts
from atoll.graph.export import ExportedJob, TrainingJob, export_job
from atoll.graph.fake import Assumption, is_symbolic, quiet_torch
from atoll.graph.flops import TensorSpec
from atoll.graph.graph import Graph, Layer, Node, Precision, SharedParameter
from atoll.graph.layers import Segment, group_into_segments
from atoll.graph.liveness import Liveness, StagePart
from atoll.graph.loss_weight import LossForm
from atoll.graph.operators import OperatorTable, build_table
from atoll.graph.sharding import Sharding, find_shardings
from atoll.graph.work import work_of_layer
from atoll.job import read_loss

__all__ = ["Captured", "TrainingJob", "capture", "capture_program"]


@dataclass(frozen=True)
class Captured:
    """A captured job: the Graph, and the program with what must be known to cut and run it."""

    graph: Graph
    program: ExportedProgram  # of `loss(model, batch)`; names of parameters have the prefix "model."
    samples: int  # in the captured batch
    varying: dict[str, tuple[int, ...]]  # batch tensor → dimensions that may have another size when the program runs
    fixed: dict[str, tuple[int, ...]]  # batch tensor → dimensions that grow with the batch but must keep the captured size
    assumptions: tuple[Assumption, ...]  # values the program takes for granted, and checks
    notes: tuple[str, ...]  # what was estimated or done differently, in sentences
    liveness: Liveness
    loss_form: LossForm = field(default_factory=LossForm)  # what the loss is a mean over
    shardings: tuple[Sharding, ...] = ()  # by layer: how tensor parallelism divides it

    def digest(self) -> str:
        """Of layers, operators with their arguments, sizes and constants: processes that differ in any of them cannot train together."""
        sizes = self.samples, sorted(self.varying.items()), sorted(self.fixed.items())
        digest = hashlib.sha256(msgspec.json.encode((self.graph.layers, self.graph.nodes, self.graph.shared, sizes)))
        digest.update(str(self.program.graph_module.code).encode())
        for name, value in sorted(self.program.constants.items()):
            digest.update(name.encode())
            if isinstance(value, torch.Tensor) and not isinstance(value, FakeTensor):  # others are the built model's own
                digest.update(value.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def stage(self, start: int, stop: int) -> StagePart:
        """Layers `start` to `stop` as one stage: what it receives, runs and sends, by names of the program's nodes."""
        layers = self.graph.layers
        return self.liveness.stage(layers[start].nodes[0], layers[stop - 1].nodes[1])


def capture(job: TrainingJob) -> Graph:
    """The job's training graph, its loss included, without allocating the model.

    Raises `CaptureError` naming the module and the reason when the model's code cannot be captured.
    """
    return capture_program(job).graph


def capture_program(job: TrainingJob, *, training: bool = True, divided: bool = False, check: bool = False) -> Captured:
    """As `capture`, with the program for the runtime. Without `training`, the model is in evaluation mode and no gradient has to flow.

    `divided` is for pieces of a batch, whose losses add up to the batch's; `check` compares them, which is enough for one process to do.
    """
    exported = export_job(job, training=training, divided=divided, check=check)
    with quiet_torch():  # an operator whose sizes are only known when it runs cannot be measured
        table = build_table(exported, job.precision)
    if training or exported.loss_form.kind != "terms":
        _check_loss(exported.program, table, training)
    liveness = Liveness(table)
    _check_assumptions(job.name, liveness)
    _charge_to_makers(table, liveness)
    segments = group_into_segments(table, liveness, exported.model)
    assembly = _Assembly(job.name, job.precision, exported, table, liveness, segments)
    return Captured(
        graph=assembly.graph(),
        program=exported.program,
        samples=exported.samples,
        varying=exported.varying,
        fixed=exported.fixed,
        assumptions=exported.assumptions,
        notes=(*exported.notes, *_assumed(exported.assumptions), *dict.fromkeys(table.notes)),
        liveness=liveness,
        loss_form=exported.loss_form,
        shardings=tuple(assembly.shardings),
    )


def _assumed(assumptions: Sequence[Assumption]) -> list[str]:
    """A sentence for each place in the model's code where a value was taken for granted."""
    values: dict[tuple[str, bool], dict[str, int]] = {}
    for one in assumptions:
        found = values.setdefault((one.where, one.seen), {})
        found[one.value[:60]] = found.get(one.value[:60], 0) + 1
    sentences = []
    for (where, seen), found in values.items():
        taken = ", ".join(value if times == 1 else f"{value} ({times} times)" for value, times in list(found.items())[:4])
        source = "as on the first samples" if seen else "unseen"
        sentences.append(
            f"{where} asks a tensor for its value: {taken} is taken for granted, {source}; a run stops where that does not hold"
        )
    return sentences


def _check_loss(program: ExportedProgram, table: OperatorTable, training: bool) -> None:
    """The program returns what can be trained on: one floating number, or (total, weight), that a gradient flows from."""
    results = next(node for node in program.graph.nodes if node.op == "output").args[0]
    outputs = zip(program.graph_signature.output_specs, results, strict=True)
    returned = [value for spec, value in outputs if spec.kind is OutputKind.USER_OUTPUT]
    if isinstance(returned[0], fx.Node) and not isinstance(table.specs[returned[0]], TensorSpec):
        raise JobError("Job: loss: it must return a tensor, it returned a plain number (from `.item()`?), from which no gradient flows")
    read_loss(pytree.tree_unflatten([_stand_in(value, table) for value in returned], program.call_spec.out_spec))
    if not training:
        return
    spec = table.specs[returned[0]]
    if not spec.dtype.is_floating_point:
        raise JobError(f"Job: loss: it must return a floating-point number, it returned {spec.dtype}")
    if not spec.requires_grad:
        raise JobError("Job: loss: no gradient flows from it to the model; is it computed under no_grad, or detached?")


def _check_assumptions(job: str, liveness: Liveness) -> None:
    """What is taken for granted must not be a count that the program itself changes: it would not hold in the second step."""
    table = liveness.table
    for value, name in table.parameters.items():
        if liveness.is_changed(value):
            raise CaptureError(
                f"job {job!r} cannot be captured: the forward changes the parameter {name!r} in place, which devices would do each for "
                "itself. Make it a buffer, whose changes are shared (a momentum encoder: `register_buffer` instead of `Parameter`)"
            )
    for node in (entry.node for entry in table.operators if entry.node.target is torch.ops.aten._assert_async.msg):
        sources = _sources_of(node)
        changed = [table.buffers[value] for value in sources if value in table.buffers and liveness.is_changed(value)]
        if changed and all(value in table.buffers for value in sources):
            where = str(node.args[1]).rpartition(" at ")[2]
            raise CaptureError(
                f"job {job!r} cannot be captured: {where} asks for the value of the buffer {changed[0]!r}, which every step changes. "
                "Compute with it as a tensor instead; a BatchNorm needs a number as its `momentum`, not None"
            )


def _sources_of(node: fx.Node) -> set[fx.Node]:
    """The program's inputs that a value is computed from."""
    seen, wanted = set[fx.Node](), [node]
    while wanted:
        value = wanted.pop()
        if value not in seen:
            seen.add(value)
            wanted += value.all_input_nodes
    return {value for value in seen if value.op == "placeholder"}


def _stand_in(value: object, table: OperatorTable) -> object:
    """What the program returns at this place, at the sizes of the captured batch and without memory."""
    known = table.specs[value] if isinstance(value, fx.Node) else value
    return torch.empty(known.shape, dtype=known.dtype, device="meta") if isinstance(known, TensorSpec) else known


def _charge_to_makers(table: OperatorTable, liveness: Liveness) -> None:
    """Masks and the like are kept once, not by the first block that uses them: so equal blocks stay equal."""
    for entry in table.operators:
        for value in [value for value in entry.saved if value.op == "call_function" and liveness.recomputable(value)]:
            amount = entry.saved.pop(value)
            table.operators[table.position[value]].saved[value] = amount


class _Assembly:
    def __init__(
        self, name: str, precision: Precision, exported: ExportedJob, table: OperatorTable, liveness: Liveness, segments: list[Segment]
    ):
        self.name, self.precision, self.exported = name, precision, exported
        self.table, self.liveness, self.segments = table, liveness, segments
        self.samples = table.samples
        self.layer_of = [index for index, segment in enumerate(segments) for _ in range(segment.start, segment.stop)]
        self.shardings = find_shardings(table, [(segment.start, segment.stop) for segment in segments])
        self.experts = [find_experts(table, segment.start, segment.stop) for segment in segments]
        self.users = self._users_of_parameters()
        self.units = max((sharding.units for sharding in self.shardings), default=0)

    def _users_of_parameters(self) -> dict[fx.Node, list[int]]:
        """Parameter → layers that read it, in order."""
        users: dict[fx.Node, set[int]] = defaultdict(set)
        for position, entry in enumerate(self.table.operators):
            for value in entry.node.all_input_nodes:
                if value in self.table.parameters:
                    users[value].add(self.layer_of[position])
        return {value: sorted(layers) for value, layers in users.items()}

    def graph(self) -> Graph:
        layers = [self._layer(index) for index in range(len(self.segments))]
        return Graph(
            name=self.name,
            layers=tuple(self._signed(layer) for layer in self._with_unused(layers)),
            precision="bf16" if self.precision == "bf16-true" else self.precision,  # as devices know it
            master_weights=self.precision != "bf16-true",
            tokens_per_sample=self._tokens(),
            shared=self._shared(),
            constraints=resolve(annotations_of(self.exported.model), self._modules_of_layers()),
            nodes=tuple(self._node(position) for position in range(len(self.table.operators))),
            input_bytes=self.liveness.bytes_of(self._batch_tensors()) / self.samples,
            fixed_samples=None if self._takes_any_samples() else self.samples,
        )

    def _takes_any_samples(self) -> bool:
        """Whether the number of samples is a size that may be another when the program runs."""
        if any(0 in dims for dims in self.exported.fixed.values()):  # of one tensor it is not: `len(x)` is a number at once
            return False
        values = [node.meta["val"] for node in self._batch_tensors()]
        return any(is_symbolic(size) and size.node.hint == self.samples for value in values for size in value.shape)

    def _batch_tensors(self) -> list[fx.Node]:
        return [node for node in self.table.batch if isinstance(self.table.specs[node], TensorSpec)]

    def _count(self, parameters: "set[fx.Node] | list[fx.Node]", index: int, *, trainable: bool = True) -> int:
        """Elements of those parameters that are counted in this layer: it is the first to read them."""
        specs = [self.table.specs[value] for value in parameters if self.users.get(value, [-1])[0] == index]
        return sum(math.prod(spec.shape) for spec in specs if spec.requires_grad is trainable)

    def _layer(self, index: int) -> Layer:
        segment, sharding, experts = self.segments[index], self.shardings[index], self.experts[index]
        own = [value for value in self.users if self.users[value][0] == index]
        last = index == len(self.segments) - 1
        crossing = [] if last else self.liveness.crossing(segment.stop)
        saved, split_saved = self._saved(segment, sharding)
        live = self.liveness
        return Layer(
            name=segment.name,
            work=work_of_layer(self.table, segment.start, segment.stop, sharding, experts),
            parameters=self._count(own, index),
            split_parameters=self._count(sharding.parameters - experts.parameters, index),
            expert_parameters=self._count(experts.parameters, index),
            frozen_parameters=self._count(own, index, trainable=False),
            frozen_split_parameters=self._count(sharding.parameters - experts.parameters, index, trainable=False),
            frozen_expert_parameters=self._count(experts.parameters, index, trainable=False),
            frozen_bytes=sum(spec.bytes for value in own if not (spec := self.table.specs[value]).requires_grad),
            saved_bytes=saved,
            split_saved_bytes=split_saved,
            input_bytes=live.bytes_of(live.needed_by(segment.start, segment.stop)) / self.samples,
            output_bytes=live.bytes_of(crossing) / self.samples,
            gradient_bytes=live.bytes_of(value for value in crossing if live.wants_gradient(value)) / self.samples,
            cut=not last and segment.stop not in live.illegal,
            tensor_units=self._tensor_units(sharding),
            tensor_bytes=sharding.reduced_bytes / self.samples,
            tensor_reductions=sharding.reductions,
            tensor_backward=sharding.backward,
            experts=experts.count,
            expert_bytes=experts.dispatched_bytes / self.samples,
            nodes=(segment.start, segment.stop),
            tensors=tuple(math.prod(spec.shape) for value in own if (spec := self.table.specs[value]).requires_grad),
        )

    def _tensor_units(self, sharding: Sharding) -> int:
        """Rows of a vocabulary can be dealt out in any number, so such a layer follows the others."""
        if not sharding.parameters:
            return 1
        if sharding.units:
            return int(sharding.units)
        return self.units or int(min(self.table.specs[value].shape[0] for value in sharding.parameters))

    def _saved(self, segment: Segment, sharding: Sharding) -> tuple[float, float]:
        saved = split = 0.0
        for position in range(segment.start, segment.stop):
            entry = self.table.operators[position]
            for value, amount in entry.saved.items():
                saved += amount
                split += amount if value in sharding.values else 0.0
            saved += entry.saved_fresh
            split += entry.saved_fresh if sharding.split.get(position) == "rows" else 0.0
        return saved / self.samples, split / self.samples

    def _with_unused(self, layers: list[Layer]) -> list[Layer]:
        """Parameters no operator reads still occupy memory: they go to the layer with the nearest name."""
        read = {name for value, name in self.table.parameters.items() if value in self.users}
        seen = {id(parameter) for name, parameter in self.exported.model.named_parameters(remove_duplicate=False) if name in read}
        for name, parameter in self.exported.model.named_parameters():
            if id(parameter) in seen:
                continue
            index = max(range(len(layers)), key=lambda i: (_common_parts(layers[i].name, name), i))
            layer, count = layers[index], parameter.numel()
            if parameter.requires_grad:
                layers[index] = msgspec.structs.replace(layer, parameters=layer.parameters + count)
            else:
                frozen_bytes = layer.frozen_bytes + count * parameter.element_size()
                layers[index] = msgspec.structs.replace(layer, frozen_parameters=layer.frozen_parameters + count, frozen_bytes=frozen_bytes)
        return layers

    @staticmethod
    def _signed(layer: Layer) -> Layer:
        """Layers that are equal in all but name and place get the same signature."""
        plain = msgspec.structs.replace(layer, name="", nodes=(0, 0))
        return msgspec.structs.replace(layer, signature=hashlib.sha256(msgspec.json.encode(plain)).hexdigest()[:16])

    def _shared(self) -> tuple[SharedParameter, ...]:
        table = self.table
        return tuple(
            SharedParameter(
                name=table.parameters[value],
                parameters=math.prod(table.specs[value].shape),
                layers=tuple(layers),
                trained=table.specs[value].requires_grad,
            )
            for value, layers in self.users.items()
            if len(layers) > 1
        )

    def _modules_of_layers(self) -> list[frozenset[str]]:
        """For every layer the modules whose parameters it reads; of a tied parameter's modules, the one that is running."""
        owners: dict[str, set[str]] = defaultdict(set)
        first = {id(parameter): name for name, parameter in self.exported.model.named_parameters()}
        for name, parameter in self.exported.model.named_parameters(remove_duplicate=False):
            owners[first[id(parameter)]].add(name.rpartition(".")[0])
        modules: list[set[str]] = [set() for _ in self.segments]
        for position, entry in enumerate(self.table.operators):
            for value in entry.node.all_input_nodes:
                if value in self.table.parameters:
                    own = owners[self.table.parameters[value]]
                    modules[self.layer_of[position]] |= {entry.module} if entry.module in own else own
        return [frozenset(paths) for paths in modules]

    def _tokens(self) -> int:
        """Length of the longest sequence of token numbers in the batch; 1 when there is none."""
        specs = [self.table.specs[node] for node in self._batch_tensors()]
        lengths = [math.prod(spec.shape) // self.samples for spec in specs if len(spec.shape) == 2 and not spec.dtype.is_floating_point]
        return int(max([1, *lengths]))

    def _node(self, position: int) -> Node:
        entry, samples = self.table.operators[position], self.samples
        parameters = [self.table.specs[value] for value in entry.node.all_input_nodes if value in self.table.parameters]
        target = entry.node.target
        return Node(
            name=entry.node.name,
            operator=str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target)),
            module=entry.module,
            layer=self.layer_of[position],
            flops=entry.cost.flops / samples,
            backward_flops=entry.cost.backward_flops / samples,
            parameter_bytes=float(sum(spec.bytes for spec in parameters)),
            output_bytes=sum(spec.bytes for spec in entry.outputs) / samples,
            saved_bytes=entry.saved_bytes / samples,
            requires_grad=entry.requires_grad,
        )


def _common_parts(first: str, second: str) -> int:
    pairs = zip(first.split("."), second.split("."), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
