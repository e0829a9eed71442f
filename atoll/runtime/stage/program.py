"""The captured program cut into a stage: what it receives, the units it runs one after another, and what it sends.

A unit is a layer (several, where values are changed in place across them). What can be made from the batch alone — masks, positions,
rotary tables — is made once a micro-batch in a prologue. Everything is still described by names of the program's values; nothing
here holds a parameter.
"""

from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import OutputKind

from atoll.graph.capture import Captured
from atoll.graph.flops import TensorSpec
from atoll.graph.regions import draws_in

__all__ = ["Crossing", "StageProgram", "Unit", "cut_stage", "shared_parameters"]

aten = torch.ops.aten


@dataclass(frozen=True)
class Crossing:
    """A value on its way from one stage to the next."""

    name: str
    dtype: torch.dtype
    shape: tuple[Any, ...]  # numbers, and symbolic expressions of the batch's sizes
    wants_gradient: bool


@dataclass
class Unit:
    """Some operators as a graph of their own. Parameters and buffers are `get_attr` nodes; `state` says what stands behind each."""

    name: str
    layers: range
    graph: fx.Graph
    copies: dict[fx.Node, fx.Node]  # the program's nodes → this graph's
    inputs: tuple[str, ...]  # values it takes, in order
    outputs: tuple[str, ...]  # values it returns, in order
    parameters: dict[str, str] = field(default_factory=dict)  # attribute → the user's name
    buffers: dict[str, str] = field(default_factory=dict)  # attribute → the program's name of the buffer or constant
    modules: dict[str, Any] = field(default_factory=dict)  # attribute → region (`no_grad` and the like), or what a custom function is given
    draws: dict[str, int] = field(default_factory=dict)  # random node → the number of its first draw among the program's
    changes: tuple[str, ...] = ()  # attributes of buffers that running the unit changes
    undifferentiated: frozenset[str] = frozenset()  # values of its graph that could have a gradient and get none
    has_backward: bool = True  # whether a gradient flows through it; not where it and all before it are frozen


@dataclass
class StageProgram:
    """A run of layers as one rank executes it for a micro-batch."""

    receives: tuple[Crossing, ...]
    prologue: Unit
    units: list[Unit]
    sends: tuple[Crossing, ...]
    numbers: dict[str, Any]  # sizes that earlier stages computed: symbolic expressions of the batch's sizes, so nobody sends them
    results: tuple[Any, ...]  # of the last stage: names of values, or plain numbers, as the loss returned them
    batch: tuple[str, ...]  # names of the batch's leaves, in the order pytree flattens them
    last: bool


class _Cutter:
    def __init__(self, captured: Captured, start: int, stop: int) -> None:
        self.captured = captured
        self.live = captured.liveness
        self.table = captured.liveness.table
        self.first, self.end = start, stop
        layers = captured.graph.layers
        self.part = captured.stage(start, stop)
        self.nodes: dict[str, fx.Node] = {node.name: node for node in captured.program.graph.nodes}
        self.run = [self.nodes[name] for name in self.part.run]
        self.last = stop == len(layers)
        self.canonical = {node: self.nodes[name] for node_name, name in self.live.aliases().items() if (node := self.nodes[node_name])}
        self.random = _random_nodes(captured)

    def stage(self) -> StageProgram:
        groups = self._groups()
        again = [node for node in self.run if self.live.recomputable(node)]
        results = self._results() if self.last else ()
        wanted = {self.nodes[name] for name in self.part.sends if not self._is_number(name)} | {
            value for value in results if isinstance(value, fx.Node)
        }
        units, later = [], wanted
        for layers, nodes in reversed(groups):
            unit = self._unit(self.captured.graph.layers[layers.start].name, layers, nodes, later)
            units.append(unit)
            later = later | {self.nodes[name] for name in unit.inputs}
        prologue = self._unit("prologue", range(self.first, self.first), again, later)
        return StageProgram(
            receives=tuple(self._crossing(name) for name in self.part.receives if not self._is_number(name)),
            prologue=prologue,
            units=units[::-1],
            sends=tuple(self._crossing(name) for name in self.part.sends if not self._is_number(name)),
            numbers={name: self._expression(name) for name in self.part.receives if self._is_number(name)},
            results=tuple(value.name if isinstance(value, fx.Node) else value for value in results),
            batch=tuple(str(name) for name in self.captured.program.graph_signature.user_inputs),
            last=self.last,
        )

    def _groups(self) -> list[tuple[range, list[fx.Node]]]:
        """Operators by unit: layers that may not be cut apart are one."""
        layers = self.captured.graph.layers
        bounds = [self.first] + [i for i in range(self.first + 1, self.end) if layers[i - 1].cut] + [self.end]
        groups = []
        for a, b in pairwise(bounds):
            start, stop = layers[a].nodes[0], layers[b - 1].nodes[1]
            groups.append((range(a, b), [n for n in self.run if not self.live.recomputable(n) and start <= self.live.place(n) < stop]))
        return groups

    def _results(self) -> tuple[Any, ...]:
        program = self.captured.program
        returned = next(node for node in program.graph.nodes if node.op == "output").args[0]
        outputs = zip(program.graph_signature.output_specs, returned, strict=True)
        return tuple(self._same(value) if isinstance(value, fx.Node) else value for s, value in outputs if s.kind is OutputKind.USER_OUTPUT)

    def _same(self, node: fx.Node) -> fx.Node:
        """The value that is kept and sent for this one: itself, or what it is an alias of."""
        return self.canonical.get(node, node)

    def _is_number(self, name: str) -> bool:
        return not isinstance(self.nodes[name].meta.get("val"), torch.Tensor)

    def _expression(self, name: str) -> Any:
        value = self.nodes[name].meta.get("val")
        return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value

    def _crossing(self, name: str) -> Crossing:
        node = self.nodes[name]
        value = node.meta["val"]
        shape = tuple(size if isinstance(size, int) else size.node.expr for size in value.shape)
        return Crossing(name, value.dtype, shape, self.live.wants_gradient(node))

    def _unit(self, name: str, layers: range, nodes: list[fx.Node], later: set[fx.Node]) -> Unit:
        unit = Unit(name, layers, fx.Graph(), {}, (), ())
        own = set(nodes)
        inputs: dict[fx.Node, fx.Node] = {}
        for value in self._read_from_outside(nodes, own):
            inputs[value] = unit.copies[value] = unit.graph.placeholder(value.name)
            if "val" in value.meta:
                unit.copies[value].meta["val"] = value.meta["val"]
        for value in dict.fromkeys(value for node in nodes for value in node.all_input_nodes if value.op in ("placeholder", "get_attr")):
            if value not in inputs:
                unit.copies[value] = self._attribute(unit, value)
        for value in {value for node in nodes for value in node.all_input_nodes} - own - unit.copies.keys():
            unit.copies[value] = unit.copies[self._same(value)]
        for node in nodes:
            unit.copies[node] = unit.graph.node_copy(node, unit.copies.__getitem__)
            if node in self.random:
                unit.draws[unit.copies[node].name] = self.random[node]
        made = {self._same(node) for node in nodes if self._same(node) in own}
        returned = [node for node in nodes if node in made and node in later]
        unit.graph.output(tuple(unit.copies[node] for node in returned))
        unit.inputs, unit.outputs = tuple(value.name for value in inputs), tuple(node.name for node in returned)
        unit.undifferentiated = frozenset(unit.copies[node].name for node in nodes if self.live.gets_none(node))
        unit.has_backward = any(self._has_gradient(node) for node in nodes)
        unit.changes = tuple(attribute for attribute, name in unit.buffers.items() if self.live.is_changed(self.nodes[name]))
        return unit

    def _has_gradient(self, node: fx.Node) -> bool:
        spec = self.table.specs.get(node)
        return isinstance(spec, TensorSpec) and spec.requires_grad

    def _read_from_outside(self, nodes: list[fx.Node], own: set[fx.Node]) -> list[fx.Node]:
        """Values made elsewhere and leaves of the batch, in the order they are first read."""
        batch = set(self.table.batch)
        found: dict[fx.Node, None] = {}
        for node in nodes:
            for value in node.all_input_nodes:
                if value in own:
                    continue
                if value.op == "call_function":
                    found[self._same(value)] = None
                elif value in batch:
                    found[value] = None
        return list(found)

    def _attribute(self, unit: Unit, value: fx.Node) -> fx.Node:
        if value in self.table.parameters:
            name = self.table.parameters[value]
            attribute = next((key for key, known in unit.parameters.items() if known == name), f"p{len(unit.parameters)}")
            unit.parameters[attribute] = name
        elif value in self.table.buffers:
            attribute = f"b{len(unit.buffers)}"
            unit.buffers[attribute] = value.name
        else:
            attribute = f"m{len(unit.modules)}"
            unit.modules[attribute] = self.table.specs[value]
        copy = unit.graph.create_node("get_attr", attribute)
        if "val" in value.meta:
            copy.meta["val"] = value.meta["val"]
        return copy


def _random_nodes(captured: Captured) -> dict[fx.Node, int]:
    """Every node that really draws random numbers → the number of its first draw in program order: the same whatever the cuts."""
    root, numbers, count = captured.program.graph_module, dict[fx.Node, int](), 0
    for node in captured.program.graph.nodes:
        draws = draws_in(node, root) if node.op == "call_function" else 0
        if draws:
            numbers[node], count = count, count + draws
    return numbers


def shared_parameters(captured: Captured) -> frozenset[str]:
    """Names of the parameters that more than one layer reads."""
    table, live = captured.liveness.table, captured.liveness
    starts = [layer.nodes[0] for layer in captured.graph.layers]
    users: dict[str, set[int]] = {}
    for value, name in table.parameters.items():
        places = [live.place(user) for user in value.users if user.op == "call_function"]
        users.setdefault(name, set()).update(bisect_right(starts, place) for place in places)
    return frozenset(name for name, layers in users.items() if len(layers) > 1)


def cut_stage(captured: Captured, start: int, stop: int) -> StageProgram:
    """Layers `start` to `stop` as a stage of their own."""
    return _Cutter(captured, start, stop).stage()
