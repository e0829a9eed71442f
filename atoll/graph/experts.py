"""Mixture of experts in the captured program: what the experts compute, and what a rewrite must know to divide them among lanes.

A region is a run of operators between products with expert parameters, which have one slice an expert along their first dimension. There
are two kinds. In a *routed* region a row is a token on its way to one expert, whose number stands in `ids`: weights are picked row by
row (`weights[ids]`). In a *dense* region values have an expert dimension: every expert computes every row, or those that were put in its
buffer. Either way operators act on each row (and each expert) alone, so rows can be computed where their expert lives: what enters is
sent there, what leaves is sent back. What does not act so is not in a region, and experts that cannot be divided are not counted.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from atoll.graph.axes import Axes, find_axes, operator_name
from atoll.graph.fake import is_symbolic
from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable
from atoll.graph.regions import draws_in, is_random, written

__all__ = ["RegionBoundary", "ExpertRegion", "LayerExperts", "ExpertTag", "find_experts"]

_PRODUCTS = ("bmm", "matmul", "baddbmm", "einsum", "_grouped_mm")
_PICKS = ("index", "index_select")
_SIZED = ("view", "reshape", "_unsafe_view", "expand")  # they name the size of every dimension


@dataclass(frozen=True)
class ExpertTag:
    """Which dimensions of a value are experts and rows."""

    expert: int | None = None
    rows: int | None = None
    choices: int | None = None  # routed: where every row goes to several experts, the dimension of these
    partial: bool = False  # summed over the experts a lane has: what all lanes have must be added


@dataclass(frozen=True)
class RegionBoundary:
    """A value that enters or leaves a region."""

    value: fx.Node
    tag: ExpertTag


@dataclass(frozen=True)
class ExpertRegion:
    """Operators that run where their expert lives. All nodes are the program's."""

    experts: int
    ids: fx.Node | None  # routed: the expert of every row, [rows], or its experts, [rows, choices]; None: dense
    parameters: tuple[fx.Node, ...]
    weights: tuple[fx.Node, ...]  # parameters picked, transposed or otherwise made ready, in program order
    nodes: tuple[fx.Node, ...]  # what the experts compute, in program order
    entries: tuple[RegionBoundary, ...]
    exits: tuple[RegionBoundary, ...]
    sized: dict[fx.Node, ExpertTag]  # operators that name sizes of their result, some of which change


@dataclass
class LayerExperts:
    """The experts of one layer."""

    count: int = 0
    parameters: set[fx.Node] = field(default_factory=set)  # one slice an expert, along their first dimension
    positions: set[int] = field(default_factory=set)  # operators that experts compute
    dispatched_bytes: float = 0.0  # sent to experts, of the whole captured batch
    regions: tuple[ExpertRegion, ...] = ()
    refusal: str = ""  # why parameters that look like experts cannot be divided


class _NoRuleError(Exception):
    """These operators are not a region; says why."""


@dataclass(frozen=True)
class _Weight:
    """A value made of one parameter alone."""

    parameter: fx.Node
    tag: ExpertTag
    ids: fx.Node | None = None


def find_experts(table: OperatorTable, start: int, stop: int) -> LayerExperts:
    """Experts among operators `start` to `stop`; `count` is 0 when there are none, or none that can be divided: then `refusal` says why."""
    finder = _Finder(table, start, stop)
    regions = finder.regions()
    if regions and len({region.experts for region in regions}) > 1:
        return LayerExperts(refusal="its mixtures have different numbers of experts")
    if not regions:
        return LayerExperts(refusal=finder.refusal)
    nodes = [node for region in regions for node in region.nodes]
    boundaries = [boundary for region in regions for boundary in (*region.entries, *region.exits)]
    return LayerExperts(
        count=regions[0].experts,
        parameters={parameter for region in regions for parameter in region.parameters},
        positions={table.position[node] for node in nodes},
        dispatched_bytes=sum(float(table.specs[boundary.value].bytes) for boundary in boundaries) / 2,
        regions=tuple(regions),
    )


class _Finder:
    """Collects the operators of a layer that read expert parameters, and joins them into regions."""

    def __init__(self, table: OperatorTable, start: int, stop: int):
        self.table = table
        self.nodes = [entry.node for entry in table.operators[start:stop]]
        self.weights = self._weights()
        self.fixed = _independent_of_the_batch(table, start, stop)
        self.refusal = ""
        self.reason = ""  # why the first product that does not belong to the region before it does not

    def _weights(self) -> dict[fx.Node, _Weight]:
        """Parameters with an expert dimension and what is made of one of them alone."""
        table = self.table
        found = {node: _Weight(node, ExpertTag(expert=0)) for node in table.parameters if len(table.specs[node].shape) >= 1}
        for node in self.nodes:
            tensors = [value for value in node.all_input_nodes if isinstance(table.specs[value], TensorSpec)]
            if tensors and tensors[0] in found:
                made = self._made_of(found[tensors[0]], node, len(tensors))
                if made is not None:
                    found[node] = made
        return found

    def _made_of(self, source: _Weight, node: fx.Node, tensors: int) -> _Weight | None:
        """What an operator makes of a weight; None where its experts (or rows) are no longer told apart."""
        if source.ids is None and operator_name(node) in _PICKS:
            ids = _ids_of(self.table, node)
            if ids is None or source.tag.expert != 0:
                return None
            return _Weight(source.parameter, ExpertTag(rows=0, choices=1 if len(self.table.specs[ids].shape) > 1 else None), ids)
        if tensors > 1 or operator_name(node) in _PRODUCTS:
            return None
        tag = _moved_tag(find_axes(self.table, node), source.tag)
        return None if tag is None else _Weight(source.parameter, tag, source.ids)

    def regions(self) -> list[ExpertRegion]:
        """Every region of the layer that has a chain of products, its biases included."""
        seeds = [node for node in self.nodes if self._is_expert_product(node)]
        groups: list[list[fx.Node]] = []
        for node in [node for node in self.nodes if node not in self.weights and self._read(node)]:
            if groups and self._may_join(groups[-1], node, seeds):
                groups[-1].append(node)
            elif node in seeds and self._holds([node]):
                groups.append([node])
        found = [region for group in groups if (region := self._region(group)) is not None]
        inside = {node for region in found for node in region.nodes}
        if any(node not in inside for node in seeds) and not self.refusal and len(seeds) > 1:
            self.refusal = self.reason or "its products with experts are not chained"
        return [] if self.refusal else found

    def _read(self, node: fx.Node) -> list[_Weight]:
        return [self.weights[value] for value in node.all_input_nodes if value in self.weights]

    def _is_expert_product(self, node: fx.Node) -> bool:
        if operator_name(node) not in _PRODUCTS or node in self.weights:
            return False
        return any(len(self.table.specs[weight.parameter].shape) == 3 for weight in self._read(node))

    def _may_join(self, group: list[fx.Node], node: fx.Node, seeds: list[fx.Node]) -> bool:
        """A product or a bias belongs to a region when everything in between does, too."""
        if node not in seeds and not any(value in self._reach(group) for value in node.all_input_nodes):
            return False
        return self._holds([*group, node])

    def _reach(self, group: list[fx.Node]) -> set[fx.Node]:
        """The group and what is computed from it."""
        reached = set(group)
        for node in self.nodes:
            if any(value in reached for value in node.all_input_nodes):
                reached.add(node)
        return reached

    def _holds(self, group: list[fx.Node]) -> bool:
        try:
            _Walk(self, group).run()
        except _NoRuleError as error:
            if self._is_expert_product(group[-1]):
                self.reason = self.reason or str(error)
            return False
        return True

    def _region(self, group: list[fx.Node]) -> ExpertRegion | None:
        """The region of a group; None where it is no mixture of experts or cannot be divided, which `refusal` tells apart."""
        walk = _Walk(self, group)
        walk.run()
        if walk.ids is None and not self._is_chain(walk, group):
            return None  # one product with stacked matrices: heads of attention, say
        try:
            return walk.region()
        except _NoRuleError as error:
            self.refusal = self.refusal or str(error)
            return None

    def _is_chain(self, walk: "_Walk", group: list[fx.Node]) -> bool:
        products = [node for node in group if self._is_expert_product(node)]
        reached = self._reach(products[:1])
        return any(value in reached and value in walk.tags for node in products[1:] for value in node.all_input_nodes)


class _Walk:
    """One attempt to see a group of operators and all that lies between them as a region."""

    def __init__(self, finder: _Finder, group: list[fx.Node]):
        self.finder, self.table, self.weights = finder, finder.table, finder.weights
        self.nodes = self._between(group)
        self.inside = set(self.nodes)
        self.tags: dict[fx.Node, ExpertTag] = {}
        self.entries: dict[fx.Node, ExpertTag] = {}
        self.ids: fx.Node | None = None
        self.experts = 0

    def _between(self, group: list[fx.Node]) -> list[fx.Node]:
        """The group and every operator on a path from one of it to another."""
        marked = set(group)
        after: set[fx.Node] = set()
        for node in self.finder.nodes:
            if node in marked or any(value in after for value in node.all_input_nodes):
                after.add(node)
        before: set[fx.Node] = set()
        for node in reversed(self.finder.nodes):
            if node in marked or any(user in before for user in node.users):
                before.add(node)
        return [node for node in self.finder.nodes if node in after and node in before]

    def run(self) -> None:
        used = [weight for node in self.nodes for weight in self.finder._read(node)]
        three = [weight for weight in used if len(self.table.specs[weight.parameter].shape) == 3]
        self.ids = next((weight.ids for weight in three if weight.ids is not None), None)
        self.experts = self.table.specs[three[0].parameter].shape[0] if three else 0
        for node in self.nodes:
            self._check_operator(node)
            axes = find_axes(self.table, node)
            if axes is None:
                raise _NoRuleError(f"{node.name} ({operator_name(node)}) lies between the experts' products and is not computed row by row")
            self.tags[node] = self._follow(node, axes)

    def _check_operator(self, node: fx.Node) -> None:
        if draws_in(node, self.table.module):
            raise _NoRuleError(f"{node.name} draws random numbers between the experts' products")
        if any(value not in self.inside for value in written(node, self.table.module)):
            raise _NoRuleError(f"{node.name} changes in place what enters the experts")
        sizes = set(_size_arguments(node))
        for value in node.all_input_nodes:
            number = not isinstance(self.table.specs[value], (TensorSpec, list, tuple))
            if number and value not in sizes and value not in self.finder.fixed:
                raise _NoRuleError(f"{node.name} reads a number that depends on the batch")

    def _tag_of(self, value: fx.Node) -> ExpertTag | None:
        """The tag of a value of the region or of an expert parameter; other parameters have none."""
        if value in self.tags:
            return self.tags[value]
        weight = self.weights.get(value)
        if weight is None or self.table.specs[weight.parameter].shape[0] != self.experts:
            return None
        if weight.ids is not None and weight.ids is not self.ids:
            raise _NoRuleError("experts are picked by different routes")
        return weight.tag if weight.ids is not None or self.ids is None else None

    def _follow(self, node: fx.Node, axes: Axes) -> ExpertTag:
        tagged = [(labels, tag) for value, labels in axes.operands if (tag := self._tag_of(value)) is not None]
        if any(tag.partial for _, tag in tagged):
            raise _NoRuleError(f"{node.name} uses a sum over experts that lanes have only in part")
        expert = _one(node, [labels[tag.expert] for labels, tag in tagged if tag.expert is not None])
        rows = _one(node, [labels[tag.rows] for labels, tag in tagged if tag.rows is not None])
        choices = _one(node, [labels[tag.choices] for labels, tag in tagged if tag.choices is not None])
        if rows is None:
            rows = self._choose_rows(axes, expert)
        kept = [rows] if choices is None else [rows, choices]
        if rows is None or {expert, *kept} & axes.mixed or any(label not in axes.result for label in kept):
            raise _NoRuleError(f"{node.name} ({operator_name(node)}) does not act on each row and each expert alone")
        for value, labels in axes.operands:
            self._operand(node, value, _tag(labels, expert, rows, choices))
        if expert is not None and expert not in axes.result:
            if not axes.sums:
                raise _NoRuleError(f"{node.name} ({operator_name(node)}) does not act on each expert alone")
            return ExpertTag(rows=axes.result.index(rows), partial=True)
        return _tag(axes.result, expert, rows, choices)

    def _operand(self, node: fx.Node, value: fx.Node, own: ExpertTag) -> None:
        known = self._tag_of(value)
        if known is not None:
            if own != known:
                raise _NoRuleError(f"{node.name} mixes experts or rows of {value.name}")
        elif value in self.finder.fixed:
            if own.rows is not None or own.choices is not None:
                raise _NoRuleError(f"{value.name} has a number for every row without depending on the batch")
            if own.expert is not None:
                self._enter(value, own)
        elif own.rows is None:
            raise _NoRuleError(f"{value.name} depends on the batch and enters {node.name} without rows")
        else:
            self._enter(value, own)

    def _enter(self, value: fx.Node, tag: ExpertTag) -> None:
        if self.ids is not None and (tag.rows != 0 or tag.choices not in (None, 1)):
            raise _NoRuleError(f"{value.name} enters the experts with rows that are not its first dimension")
        if self.entries.setdefault(value, tag) != tag:
            raise _NoRuleError(f"{value.name} enters the experts in two ways")

    def _choose_rows(self, axes: Axes, expert: object) -> object:
        """The axis along which rows of several lanes are joined: of those the experts do not mix, one that grows with the batch."""
        weights = {label for value, labels in axes.operands if self._tag_of(value) is not None for label in labels}
        chosen: list[tuple[bool, object]] = []
        for value, labels in axes.operands:
            if self._tag_of(value) is None and value not in self.finder.fixed:
                free = [d for d, label in enumerate(labels) if label not in weights and label in axes.result and label is not None]
                chosen += [(_grows(value, d), labels[d]) for d in free]
        growing = {label for grows, label in chosen if grows}
        if len(growing) > 1:
            raise _NoRuleError("several dimensions of what enters the experts grow with the batch")
        return next(iter(growing)) if growing else chosen[0][1] if chosen else None

    def region(self) -> ExpertRegion:
        """The region that was walked, checked for what else reads its parameters and values."""
        weights = self._own_weights()
        parameters = tuple(dict.fromkeys(self.weights[value].parameter for value in weights))
        own = {*weights, *self.nodes}
        for value in weights:
            if any(user not in own for user in value.users):
                raise _NoRuleError(
                    f"the experts' parameter {self.table.parameters[self.weights[value].parameter]!r} is read elsewhere, too"
                )
        exits = [node for node in self.nodes if any(user not in self.inside for user in node.users)]
        self._check_exits(exits)
        self._take_in_expansions()
        made = tuple(value for value in weights if value not in self.table.parameters)
        tags = {**self.tags, **{value: self.weights[value].tag for value in made}}
        return ExpertRegion(
            experts=self.experts,
            ids=self.ids,
            parameters=parameters,
            weights=made,
            nodes=tuple(sorted(self.nodes, key=lambda node: self.table.position[node])),
            entries=tuple(RegionBoundary(value, tag) for value, tag in self.entries.items()),
            exits=tuple(RegionBoundary(value, self.tags[value]) for value in exits),
            sized={node: tag for node, tag in tags.items() if operator_name(node) in _SIZED},
        )

    def _own_weights(self) -> list[fx.Node]:
        """Values made of expert parameters that the region reads, and what they are made of, in program order."""
        found: set[fx.Node] = set()
        waiting = [value for node in self.nodes for value in node.all_input_nodes if value in self.weights and self._tag_of(value)]
        while waiting:
            value = waiting.pop()
            if value not in found:
                found.add(value)
                waiting += [source for source in value.all_input_nodes if source in self.weights]
        return [value for value in (*self.table.parameters, *self.finder.nodes) if value in found]

    def _check_exits(self, exits: list[fx.Node]) -> None:
        for value in exits:
            if not isinstance(self.table.specs[value], TensorSpec):
                raise _NoRuleError(f"{value.name} leaves the experts as several tensors")
            if self.ids is not None and (self.tags[value].rows != 0 or self.tags[value].choices not in (None, 1)):
                raise _NoRuleError(f"{value.name} leaves the experts with rows that are not its first dimension")
        others = [node for node in self.finder.nodes if node not in self.inside]
        touched = [
            node for node in others if any(self.table.memory.get(value) in self.inside for value in written(node, self.table.module))
        ]
        if touched and len(exits) > 1:
            raise _NoRuleError(f"{touched[0].name} changes in place one of several values that leave the experts")

    def _take_in_expansions(self) -> None:
        """Rows that are repeated for every expert are repeated where the experts live."""
        for value, tag in list(self.entries.items()):
            axes = find_axes(self.table, value) if operator_name(value) == "expand" else None
            if axes is None or tag.expert is None or tag.rows is None or any(user not in self.inside for user in value.users):
                continue
            source, labels = axes.operands[0]
            if axes.result[tag.expert] in labels or axes.result[tag.rows] not in labels or source in self.entries:
                continue
            del self.entries[value]
            self.entries[source] = ExpertTag(rows=labels.index(axes.result[tag.rows]))
            self.nodes.append(value)
            self.inside.add(value)
            self.tags[value] = tag


def _tag(labels: tuple[object, ...], *axes: object) -> ExpertTag:
    """Where the axes of experts, rows and choices are among the labels of a value."""
    expert, rows, choices = (labels.index(axis) if axis is not None and axis in labels else None for axis in axes)
    return ExpertTag(expert=expert, rows=rows, choices=choices)


def _one(node: fx.Node, labels: list[object]) -> object:
    found = set(labels)
    if len(found) > 1 or None in found:
        raise _NoRuleError(f"{node.name} mixes experts or rows")
    return found.pop() if found else None


def _moved_tag(axes: Axes | None, tag: ExpertTag) -> ExpertTag | None:
    """Where the dimensions of the only operand are in the result; None when one is lost or mixed."""
    if axes is None:
        return None
    labels = axes.operands[0][1]
    wanted = [label for d in (tag.expert, tag.rows, tag.choices) if d is not None for label in [labels[d]]]
    if any(label not in axes.result or label in axes.mixed for label in wanted):
        return None
    places = [None if d is None else axes.result.index(labels[d]) for d in (tag.expert, tag.rows, tag.choices)]
    return ExpertTag(expert=places[0], rows=places[1], choices=places[2])


def _ids_of(table: OperatorTable, node: fx.Node) -> fx.Node | None:
    """The numbers by which slices of the first dimension are picked, if they are integers: one for each row, or several."""
    given: Any = node.args[1]
    if operator_name(node) == "index_select":
        given = [node.args[2]] if given == 0 else []
    if len(given) != 1 or not isinstance(given[0], fx.Node):
        return None
    spec = table.specs[given[0]]
    return given[0] if len(spec.shape) in (1, 2) and spec.dtype in (torch.int64, torch.int32) else None


def _grows(value: fx.Node, dim: int) -> bool:
    """Whether a dimension's size depends on the batch."""
    traced = value.meta.get("val")
    return isinstance(traced, torch.Tensor) and is_symbolic(traced.shape[dim])


def _independent_of_the_batch(table: OperatorTable, start: int, stop: int) -> set[fx.Node]:
    """Values every lane has alike: made of parameters, buffers and constants, with nothing random."""
    batch = set(table.batch)
    found: set[fx.Node] = {node for node in (*table.parameters, *table.buffers) if node not in batch}
    for entry in table.operators[:stop]:
        node = entry.node
        sources = [value for value in node.all_input_nodes if value.op != "get_attr"]
        if all(value in found for value in sources) and not is_random(node):
            found.add(node)
    return found


def _size_arguments(node: fx.Node) -> list[fx.Node]:
    """Sizes a reshape or an expansion names: those of rows are named anew by whoever moves rows."""
    given: Any = node.args[1] if operator_name(node) in _SIZED and len(node.args) > 1 else ()
    return [size for size in given if isinstance(size, fx.Node)]
