"""A stage as a module: the units of a StageProgram with the parameters a rank holds, run one after another for a micro-batch.

A unit's graph, and the regions inside it, are changed before it runs: `_own_region` and what follows.
"""

import copy
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from atoll.graph.regions import arguments_of, draws_in, regions_of, shared_memory, written
from atoll.runtime.stage.compilation import Compiler
from atoll.runtime.stage.program import StageProgram, Unit
from atoll.runtime.stage.rng import Draw, DrawKey
from atoll.runtime.stage.shard_spec import ShardSpec
from atoll.runtime.stage.state import InitialState

__all__ = ["EvaluationBuilder", "SharingBuilder", "StageBuilder", "StageModule", "UnitModule"]

aten = torch.ops.aten
_NOT_KEPT = (torch.ops.higher_order.wrap_with_set_grad_enabled,)  # with False as its first argument: nothing inside is kept for backward


class UnitModule(nn.Module):
    """One unit with its state. With `recompute` its activations are not kept: backward runs it again."""

    def __init__(self, unit: Unit, graph_module: fx.GraphModule, buffers: dict[str, str], recompute: bool) -> None:
        super().__init__()
        self.inputs, self.outputs = unit.inputs, unit.outputs
        self.parameter_names = dict(unit.parameters)  # attribute → the user's name
        self.buffer_names = buffers
        self.graph_module = graph_module
        self.recompute = recompute
        self.has_backward = unit.has_backward
        self.changes = unit.changes  # attributes of buffers
        self._undifferentiated = unit.undifferentiated
        self._run: Callable[..., Any] | None = None  # the graph, compiled

    def compile_with(self, compiler: Compiler) -> None:
        """Run it compiled from now on; nothing may change its graph any more."""
        self._run = self._run or compiler.unit(self.graph_module, self._undifferentiated)

    def forward(self, *inputs: Any) -> tuple[Any, ...]:
        run = self._run or self.graph_module
        if not self.recompute:
            return run(*inputs)  # type: ignore[no-any-return]
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=self._contexts)
        return again(run, *inputs)  # type: ignore[no-any-return]

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For the first run and the second. By the time of the second, other micro-batches may have changed buffers further."""
        seen = [getattr(self.graph_module, name).clone() for name in self.changes]
        return nullcontext(), self._starting_from(seen) if seen else nullcontext()

    @contextmanager
    def holding(self, whole: Callable[[str], Tensor]) -> Iterator[None]:
        """While it runs, the parameters are what `whole` says of their names; for units that hold none."""
        for attribute, name in self.parameter_names.items():
            setattr(self.graph_module, attribute, whole(name))
        yield
        for attribute in self.parameter_names:
            setattr(self.graph_module, attribute, torch.empty(0, device=getattr(self.graph_module, attribute).device))

    @contextmanager
    def _starting_from(self, seen: list[Tensor]) -> Iterator[None]:
        """Running a unit again reads the buffers as the first run found them, and does not move its running statistics again."""
        buffers = [getattr(self.graph_module, name) for name in self.changes]
        now = [buffer.clone() for buffer in buffers]
        try:
            torch._foreach_copy_(buffers, seen)
            yield
        finally:
            torch._foreach_copy_(buffers, now)


class StageModule(nn.Module):
    """All units of a stage. Called with the values it receives and the batch's leaves, by name; returns what it sends, or its results."""

    def __init__(self, program: StageProgram, prologue: UnitModule, units: Sequence[UnitModule]) -> None:
        super().__init__()
        self.prologue = prologue
        self.units = nn.ModuleList(units)
        self._sends = [crossing.name for crossing in program.sends]
        self._results = program.results
        self._dead = _last_uses(program)
        self.around: Callable[[UnitModule], AbstractContextManager[None]] | None = None  # entered around each unit's run

    def forward(self, values: dict[str, Any]) -> tuple[Any, ...]:
        """Run the micro-batch whose values these are; the dict is used up."""
        with torch.no_grad():
            self._run(self.prologue, values)
        for unit, dead in zip(self._own_units(), self._dead, strict=True):
            self._run(unit, values)
            for name in dead:
                values.pop(name, None)
        wanted = self._results or self._sends
        return tuple(values[name] if isinstance(name, str) else name for name in wanted)

    def _run(self, unit: UnitModule, values: dict[str, Any]) -> None:
        with nullcontext() if self.around is None else self.around(unit):
            made = unit(*[values[name] for name in unit.inputs])
        values.update(zip(unit.outputs, made, strict=True))

    def _own_units(self) -> list[UnitModule]:
        return list(self.units)  # type: ignore[arg-type]

    def all_units(self) -> list[UnitModule]:
        """In the order they run, the prologue first."""
        return [self.prologue, *self._own_units()]

    def compile_with(self, compiler: Compiler) -> None:
        """Run its units compiled from now on; the prologue, which no gradient flows through, stays as it is."""
        for unit in self._own_units():
            unit.compile_with(compiler)

    @property
    def recomputes(self) -> bool:
        """Whether backward runs some of its units again."""
        return any(unit.recompute for unit in self._own_units())

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """What the rank holds of each parameter, by the user's name."""
        units = self._own_units()
        return {name: getattr(unit.graph_module, attribute) for unit in units for attribute, name in unit.parameter_names.items()}

    def share_parameters(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Uses these from now on, by the user's names, instead of its own."""
        for unit in self._own_units():
            for attribute, name in unit.parameter_names.items():
                setattr(unit.graph_module, attribute, parameters[name])

    def buffers_by_name(self) -> dict[str, Tensor]:
        """Buffers the rank's units read, by the user's name."""
        units = self.all_units()
        return {name: getattr(unit.graph_module, attribute) for unit in units for attribute, name in unit.buffer_names.items()}

    def changed_buffers(self) -> list[str]:
        """Names of the buffers that running the stage changes, such as running statistics."""
        units = self.all_units()
        return [unit.buffer_names[attribute] for unit in units for attribute in unit.changes if attribute in unit.buffer_names]


def _last_uses(program: StageProgram) -> list[list[str]]:
    """For every unit the values nobody needs after it."""
    kept = {crossing.name for crossing in program.sends} | {name for name in program.results if isinstance(name, str)}
    dead: list[list[str]] = []
    for unit in reversed(program.units):
        dead.append([name for name in (*unit.inputs, *unit.outputs) if name not in kept])
        kept |= set(unit.inputs)
    return dead[::-1]


class StageBuilder:
    """Makes the stages of one rank. A parameter that several of its stages use is one object."""

    def __init__(self, state: InitialState, *, device: torch.device, key: DrawKey, on_meta: Container[str] = ()) -> None:
        """Parameters whose names are `on_meta` get no memory: they are to be divided first."""
        self._state, self._key, self._device, self._on_meta = state, key, device, on_meta
        self.holdings: dict[str, ShardSpec] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._buffers: dict[str, Tensor] = {}

    def stage(self, program: StageProgram, recompute: Sequence[bool] = (), holdings: Mapping[str, ShardSpec] | None = None) -> StageModule:
        """The stage with the parameters (or the parts that `holdings` name) that the rank holds; `recompute` says it for every unit."""
        for name, holding in (holdings or {}).items():
            known = self.holdings.setdefault(name, holding)
            assert known == holding, f"{name} is held in two ways by one rank"
        flags = recompute or [False] * len(program.units)
        prologue = self._unit(program.prologue, False)
        units = [self._unit(unit, flag) for unit, flag in zip(program.units, flags, strict=True)]
        return StageModule(program, prologue, units)

    def _unit(self, unit: Unit, recompute: bool) -> UnitModule:
        root = nn.Module()
        for attribute, name in unit.parameters.items():
            self._put_parameter(root, attribute, name)
        for attribute, placeholder in unit.buffers.items():
            root.register_buffer(attribute, self.buffer(placeholder), persistent=False)
        for attribute, module in unit.modules.items():
            setattr(root, attribute, _own_region(module) if isinstance(module, fx.GraphModule) else module)
        graph_module = fx.GraphModule(root, unit.graph)
        _place_on(graph_module, self._device)
        _seed_draws(graph_module, unit.draws, Draw(self._key, self._device))
        _keep_what_is_read(graph_module, unit.changes)
        graph_module.recompile()
        names = {attribute: self._state.buffer_name(placeholder) for attribute, placeholder in unit.buffers.items()}
        buffers = {attribute: name for attribute, name in names.items() if name is not None}
        return UnitModule(unit, graph_module, buffers, recompute)

    def _put_parameter(self, root: nn.Module, attribute: str, name: str) -> None:
        root.register_parameter(attribute, self._parameter(name))

    def _parameter(self, name: str) -> nn.Parameter:
        if name not in self.parameters:
            whole = self._state.parameter(name)
            holding = self.holdings.setdefault(name, ShardSpec(name=name, shape=tuple(whole.shape)))
            if name in self._on_meta:
                own = torch.empty(holding.local_shape, dtype=whole.dtype, device="meta")
            else:
                own = holding.take(whole.detach()).to(self._device, copy=True).contiguous()
            self.parameters[name] = nn.Parameter(own, requires_grad=whole.requires_grad)
        return self.parameters[name]

    def buffer(self, placeholder: str) -> Tensor:
        """The one copy of a buffer or constant of the program that this rank's stages read."""
        if placeholder not in self._buffers:
            self._buffers[placeholder] = self._state.value(placeholder).to(self._device, copy=True)
        return self._buffers[placeholder]


class SharingBuilder(StageBuilder):
    """Makes stages of the model's own parameters and buffers: running them trains the model itself."""

    def _put_parameter(self, root: nn.Module, attribute: str, name: str) -> None:
        root.register_parameter(attribute, self._state.parameter(name))

    def buffer(self, placeholder: str) -> Tensor:
        """The model's own; a constant of the program is put on the device."""
        own = self._state.buffer_name(placeholder) is not None
        return self._state.value(placeholder) if own else super().buffer(placeholder)


class EvaluationBuilder(StageBuilder):
    """Makes stages that hold no parameters, which are put in place while a unit runs, and whose buffers are those of training."""

    def __init__(self, state: InitialState, buffers: Mapping[str, Tensor], *, device: torch.device, key: DrawKey) -> None:
        super().__init__(state, device=device, key=key)
        self._trained = buffers  # by the user's names

    def _put_parameter(self, root: nn.Module, attribute: str, name: str) -> None:
        root.register_buffer(attribute, torch.empty(0, device=self._device), persistent=False)

    def buffer(self, placeholder: str) -> Tensor:
        """Training's own, where training has it."""
        name = self._state.buffer_name(placeholder)
        return self._trained[name] if name is not None and name in self._trained else super().buffer(placeholder)


def _own_region(region: fx.GraphModule) -> fx.GraphModule:
    """A copy of a region with those inside it: the captured program stays as it is."""
    twin = fx.GraphModule(region, copy.deepcopy(region.graph))
    for name, inner in region.named_children():
        if isinstance(inner, fx.GraphModule):
            setattr(twin, name, _own_region(inner))
    return twin


def _place_on(module: fx.GraphModule, device: torch.device) -> None:
    """Capture ran on the CPU; what the program creates is to be created where the stage runs."""
    for node in module.graph.nodes:
        if any(isinstance(value, torch.device) for value in (*node.args, *node.kwargs.values())):
            node.args = tuple(device if isinstance(value, torch.device) else value for value in node.args)
            node.kwargs = {name: device if isinstance(value, torch.device) else value for name, value in node.kwargs.items()}
        for region in regions_of(node, module).values():
            _place_on(region, device)
    module.recompile()


def _seed_draws(module: fx.GraphModule, first: Mapping[str, int], draw: Draw) -> None:
    """Let `draw` seed the generator before every random operator; `first` has the number of a node's first draw."""
    if first:
        module.add_module("draw", draw)
    for node in list(module.graph.nodes):
        if node.name not in first:
            continue
        regions = regions_of(node, module)
        for region in regions.values():
            _seed_draws(region, _numbered(region, first[node.name]), draw)
        if not regions:
            with module.graph.inserting_before(node):
                module.graph.call_module("draw", (first[node.name],))
    module.recompile()


def _numbered(region: fx.GraphModule, number: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for node in region.graph.nodes:
        draws = draws_in(node, region) if node.op == "call_function" else 0
        if draws:
            found[node.name], number = number, number + draws
    return found


def _keep_what_is_read(module: fx.GraphModule, changed: Iterable[str]) -> None:
    """Let operators read copies of the buffers that the unit changes.

    What autograd keeps of such a buffer must be as the operator saw it, but other micro-batches change it before this one's backward.
    """
    names = set(changed)
    _keep(module, {node for node in module.graph.nodes if node.op == "get_attr" and node.target in names})


def _keep(module: fx.GraphModule, changed: set[fx.Node]) -> None:
    if not changed:
        return
    nodes = list(module.graph.nodes)
    memory = shared_memory(nodes, module, {node: frozenset([node]) for node in changed})
    for node in nodes:
        regions = regions_of(node, module)
        for region in regions.values() if not _keeps_nothing(node) else ():
            _keep(region, {inside for inside, value in arguments_of(node, region, module).items() if memory.get(value)})
        if regions or node.op != "call_function" or node.target is operator.getitem or memory[node]:
            continue  # a view of it, or a part of several results: what reads that gets the copy
        left = set(written(node, module))
        for value in [value for value in node.all_input_nodes if memory.get(value) and value not in left]:
            with module.graph.inserting_before(node):
                node.replace_input_with(value, module.graph.call_function(aten.clone.default, (value,)))
    module.recompile()


def _keeps_nothing(node: fx.Node) -> bool:
    return node.target in _NOT_KEPT and node.args[0] is False
