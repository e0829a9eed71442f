"""Expert parallelism: the experts of a layer divided among lanes, in a graph copied from the captured program.

Each lane works on its own samples and holds some of the experts, whole. What enters a region of experts travels to the lanes that hold
them, is computed there and comes back, in forward and (its gradient, the other way) in backward. Nothing is dropped, padded or
scaled: a lane that gets no rows computes with none, and the gradient of an expert is the sum over the rows of all lanes.
Every lane must run the same graph in the same order, whatever it received, because each exchange needs all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from atoll.graph.axes import operator_name
from atoll.graph.experts import ExpertRegion, ExpertTag, LayerExperts, RegionBoundary
from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable
from atoll.runtime.stage.shard_spec import ShardSpec

__all__ = ["expert_counts", "split_experts"]


@dataclass(frozen=True)
class Route:
    """How rows travel: put in the order `before`, cut into pieces of `send` rows, one for each lane; what arrives, `receive` rows from
    each, is put in the order `after`. An order is a permutation, kept with its inverse.
    """

    before: tuple[Tensor, Tensor]
    send: list[int]
    receive: list[int]
    after: tuple[Tensor, Tensor]
    rows_of_experts: list[int]  # of the experts held here, as arrived

    def reversed(self) -> "Route":
        """The way back."""
        return Route(self.after[::-1], self.receive, self.send, self.before[::-1], self.rows_of_experts)


class ExpertLanes:
    """Lane `index` of several that divide experts: its exchanges with the others. All lanes must call the same ones in the same order."""

    def __init__(self, counts: tuple[int, ...], index: int, group: dist.ProcessGroup | None) -> None:
        self.counts, self.index, self.group = counts, index, group
        self.first = sum(counts[:index])  # of the experts held here
        self.own = counts[index]  # how many

    # Routed rows ------------------------------------------------------------------------------------------------------------------------

    def route(self, ids: Tensor) -> Route:
        """Where rows go whose experts are `ids` [rows] or [rows, choices]; a row that goes to several experts goes several times.

        Rows are sorted by expert, and so by lane, and on arrival by expert again.
        """
        numbers = ids.long().flatten()
        here = torch.bincount(numbers, minlength=sum(self.counts))
        table = self._of_all_lanes(here)  # [lanes, experts]
        mine = table[:, self.first : self.first + self.own]
        arrived = torch.arange(self.own, device=ids.device).repeat(len(self.counts)).repeat_interleave(mine.flatten())
        before, after = torch.argsort(numbers, stable=True), torch.argsort(arrived, stable=True)
        edges = [0, *accumulate(self.counts)]
        known = torch.cat([table[self.index], mine.sum(1), mine.sum(0)]).tolist()  # one wait for the device
        sent, received = known[: edges[-1]], known[edges[-1] : edges[-1] + len(self.counts)]
        return Route(
            before=(before, torch.argsort(before)),
            send=[sum(sent[a:b]) for a, b in pairwise(edges)],
            receive=received,
            after=(after, torch.argsort(after)),
            rows_of_experts=known[edges[-1] + len(self.counts) :],
        )

    def local_ids(self, route: Route) -> Tensor:
        """The expert of every row that arrived, counted from the first one held here."""
        sizes = torch.tensor(route.rows_of_experts, device=route.before[0].device)
        return torch.arange(self.own, device=sizes.device).repeat_interleave(sizes)

    def local_choices(self, route: Route) -> Tensor:
        """As `local_ids`, [rows, 1]: of several choices, each arrives as a row with one."""
        return self.local_ids(route).unsqueeze(1)

    def send_rows(self, rows: Tensor, route: Route) -> Tensor:
        """The rows of all lanes whose expert is here, of `rows` [rows, …] that each lane gives."""
        return _travelled(rows, route, self.group)

    def return_rows(self, rows: Tensor, route: Route) -> Tensor:
        """What became of the rows that this lane sent, in the order in which it gave them."""
        return _travelled(rows, route.reversed(), self.group)

    def send_alike(self, rows: Tensor, route: Route, choices: int) -> Tensor:
        """As `send_rows`, of [rows, …] that are the same for all choices."""
        return self.send_rows(rows.repeat_interleave(choices, 0), route)

    def send_choices(self, rows: Tensor, route: Route) -> Tensor:
        """As `send_rows`, of [rows, choices, …]; [rows, 1, …] arrive."""
        return self.send_rows(rows.flatten(0, 1), route).unsqueeze(1)

    def return_choices(self, rows: Tensor, route: Route, choices: int) -> Tensor:
        """As `return_rows`, [rows, choices, …] of [rows, 1, …]."""
        returned = self.return_rows(rows.squeeze(1), route)
        return returned.reshape(returned.shape[0] // choices, choices, *returned.shape[1:])

    def rows_times_weight(self, weights: Tensor, rows: Tensor, route: Route) -> Tensor:
        """`bmm(rows, weights[ids])`, expert by expert: weights [experts, depth, columns], rows [rows, n, depth]."""
        pieces = torch.split(rows, route.rows_of_experts)
        return torch.cat([torch.matmul(piece, weight) for piece, weight in zip(pieces, weights.unbind(0), strict=True)])

    def weight_times_rows(self, weights: Tensor, rows: Tensor, route: Route) -> Tensor:
        """`bmm(weights[ids], rows)`, expert by expert: weights [experts, columns, depth], rows [rows, depth, n]."""
        return self.rows_times_weight(weights.mT, rows.mT, route).mT.contiguous()

    # Experts along a dimension ----------------------------------------------------------------------------------------------------------

    def rows_of_lanes(self, values: Tensor, rows: int) -> list[int]:
        """How many rows each lane has."""
        own = torch.tensor([values.shape[rows]], device=values.device)
        return self._of_all_lanes(own).flatten().tolist()

    def own_part(self, values: Tensor, expert: int) -> Tensor:
        """Of something every lane has alike, the part that belongs to the experts here."""
        return values.narrow(expert, self.first, self.own)

    def dispatch(self, values: Tensor, rows_of_lanes: list[int], expert: int, rows: int) -> Tensor:
        """The rows of all lanes, one lane after another, for the experts here, of values that have an expert dimension."""
        shapes = [_with(values.shape, {expert: self.own, rows: count}) for count in rows_of_lanes]
        return torch.cat(self._exchange(torch.split(values, list(self.counts), expert), shapes), rows)

    def gather(self, values: Tensor, rows_of_lanes: list[int], rows: int) -> Tensor:
        """The rows of all lanes, one lane after another, of values that are the same for all experts."""
        shapes = [_with(values.shape, {rows: count}) for count in rows_of_lanes]
        return torch.cat(self._exchange([values] * len(shapes), shapes), rows)

    def collect(self, values: Tensor, rows_of_lanes: list[int], expert: int, rows: int) -> Tensor:
        """The rows of this lane for all experts, of what lanes have computed for the experts they hold and the rows of all."""
        shapes = [_with(values.shape, {expert: count, rows: rows_of_lanes[self.index]}) for count in self.counts]
        return torch.cat(self._exchange(torch.split(values, rows_of_lanes, rows), shapes), expert)

    def add_parts(self, values: Tensor, rows_of_lanes: list[int], rows: int) -> Tensor:
        """The rows of this lane, of what lanes have summed over the experts they hold."""
        shapes = [_with(values.shape, {rows: rows_of_lanes[self.index]})] * len(self.counts)
        return torch.stack(self._exchange(torch.split(values, rows_of_lanes, rows), shapes)).sum(0)

    def _exchange(self, pieces: Sequence[Tensor], shapes: list[tuple[int, ...]]) -> list[Tensor]:
        """Piece j goes to lane j; what comes from lane j has shape j."""
        if self.group is None:
            return list(pieces)
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        sizes = [torch.Size(shape).numel() for shape in shapes]
        arrived = _AllToAll.apply(flat, [piece.numel() for piece in pieces], sizes, self.group)  # type: ignore[no-untyped-call]
        return [part.reshape(shape) for part, shape in zip(torch.split(arrived, sizes), shapes, strict=True)]

    def _of_all_lanes(self, numbers: Tensor) -> Tensor:
        """[lanes, …]: what every lane has counted."""
        if self.group is None:
            return numbers.unsqueeze(0)
        found = [torch.empty_like(numbers) for _ in self.counts]
        dist.all_gather(found, numbers, group=self.group)
        return torch.stack(found)


def _with(shape: Sequence[int], sizes: dict[int, int]) -> tuple[int, ...]:
    return tuple(sizes.get(d, size) for d, size in enumerate(shape))


def _all_to_all(values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
    """Pieces along the first dimension, of any sizes."""
    arrived = values.new_empty((sum(receive), *values.shape[1:]))
    dist.all_to_all_single(arrived, values.contiguous(), receive, send, group=group)
    return arrived


class _AllToAll(torch.autograd.Function):
    """An exchange whose gradient goes back the way its values came, unscaled."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = (send, receive, group)
        return _all_to_all(values, send, receive, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        send, receive, group = ctx.way
        return _all_to_all(gradient, receive, send, group), None, None, None


def _travel(rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    ready = rows.index_select(0, route.before[0])
    arrived = ready if group is None else _all_to_all(ready, route.send, route.receive, group)
    return arrived.index_select(0, route.after[0])


def _travelled(rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
    travelled: Tensor = _Travel.apply(rows, route, group)  # type: ignore[no-untyped-call]
    return travelled


class _Travel(torch.autograd.Function):
    """Rows on a route; their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: Route, group: dist.ProcessGroup | None) -> Tensor:
        ctx.route, ctx.group = route, group
        return _travel(rows, route, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _travel(gradient, ctx.route.reversed(), ctx.group), None, None


def expert_counts(experts: int, lanes: int) -> tuple[int, ...]:
    """How many experts each lane holds, as equal as can be: rows go where their expert is, so a lane's samples do not matter."""
    assert 1 <= lanes <= experts, f"{lanes} lanes cannot divide {experts} experts"
    each, more = divmod(experts, lanes)
    return (each + 1,) * more + (each,) * (lanes - more)


def split_experts(
    graph: fx.Graph,
    nodes: Mapping[fx.Node, fx.Node],
    experts: LayerExperts,
    table: OperatorTable,
    counts: Sequence[int],
    index: int,
    group: ProcessGroup | None,
) -> dict[str, ShardSpec]:
    """Rewrite a layer's copied graph for lane `index`, which holds `counts[index]` consecutive experts; its part of each divided parameter.

    `nodes` leads from the program's nodes to the graph's. `group` joins the lanes in their order; it may be None where there is one.
    With one lane nothing is exchanged, but rows that were routed are still computed expert by expert, without copies of weights.
    """
    assert sum(counts) == experts.count
    assert group is not None or len(counts) == 1
    holdings: dict[str, ShardSpec] = {}
    for region in experts.regions:
        lanes = ExpertLanes(tuple(counts), index, group)
        _Rewrite(graph, nodes, region, table, lanes).run()
        for parameter in region.parameters if len(counts) > 1 else ():
            name, shape = table.parameters[parameter], tuple(table.specs[parameter].shape)
            holdings[name] = ShardSpec(name=name, shape=shape, dim=0, parts=((lanes.first, lanes.first + lanes.own),))
    return holdings


class _Rewrite:
    """One region in one graph."""

    def __init__(self, graph: fx.Graph, nodes: Mapping[fx.Node, fx.Node], region: ExpertRegion, table: OperatorTable, lanes: ExpertLanes):
        self.graph, self.nodes, self.region, self.table, self.lanes = graph, nodes, region, table, lanes
        self.copies = [nodes[node] for node in region.nodes]
        self.route: fx.Node | None = None  # routed: where every row goes; dense: how many rows each lane has
        self.choices = _choices(table, region)
        self.arrived: dict[fx.Node, fx.Node] = {}  # entry → what arrived of all lanes

    def run(self) -> None:
        picks = [node for node in self.region.weights if operator_name(node) in ("index", "index_select")]
        if self.region.ids is not None:
            self._route(picks)
        entries = {boundary.value: boundary.tag for boundary in self.region.entries}
        for node, copy in zip(self.region.nodes, self.copies, strict=True):
            for value, own in _arguments(node, copy):
                if value in entries:
                    copy.replace_input_with(own, self._arrival(value, own, entries[value], copy))
        for node, tag in self.region.sized.items():
            self._resize(node, tag)
        for boundary in self.region.exits:
            self._return(boundary)
        for node in picks:
            self._group_products(self.nodes[node])

    def _insert(self, before: fx.Node, function: Callable[..., Any], *arguments: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            return self.graph.call_function(function, arguments)

    def _route(self, picks: list[fx.Node]) -> None:
        """Weights are picked by the numbers that the experts of arrived rows have here."""
        copies = {self.nodes[node] for node in picks}
        first = next(node for node in self.graph.nodes if node in copies)
        ids = next(own for value, own in _arguments(picks[0], self.nodes[picks[0]]) if value is self.region.ids)
        self.route = self._insert(first, self.lanes.route, ids)
        local = self._insert(first, self.lanes.local_choices if self.choices else self.lanes.local_ids, self.route)
        for node in picks:
            self.nodes[node].replace_input_with(ids, local)

    def _group_products(self, pick: fx.Node) -> None:
        """Products with picked weights go expert by expert instead, so that no weight is copied for every row."""
        for node, product in zip(self.region.nodes, self.copies, strict=True):
            if product in pick.users and self._is_batched_product(node):
                left, right = product.args
                product.target = self.lanes.weight_times_rows if left is pick else self.lanes.rows_times_weight
                product.args = (pick.args[0], right if left is pick else left, self.route)
        if not pick.users:
            self.graph.erase_node(pick)

    def _is_batched_product(self, node: fx.Node) -> bool:
        """One matrix for every row on both sides: `bmm`, or `matmul` used as such."""
        shapes = [self.table.specs[value].shape for value in node.all_input_nodes]
        return operator_name(node) in ("bmm", "matmul") and [len(shape) for shape in shapes] == [3, 3] and shapes[0][0] == shapes[1][0]

    def _arrival(self, value: fx.Node, own: fx.Node, tag: ExpertTag, reader: fx.Node) -> fx.Node:
        if value not in self.arrived:
            self.arrived[value] = self._exchange(value, own, tag, reader)
        return self.arrived[value]

    def _exchange(self, value: fx.Node, own: fx.Node, tag: ExpertTag, reader: fx.Node) -> fx.Node:
        if tag.rows is None:
            return self._insert(reader, self.lanes.own_part, own, tag.expert)
        if self.region.ids is not None:
            if tag.choices is not None:
                return self._insert(reader, self.lanes.send_choices, own, self.route)
            if self.choices:
                return self._insert(reader, self.lanes.send_alike, own, self.route, self.choices)
            return self._insert(reader, self.lanes.send_rows, own, self.route)
        if self.route is None:
            self.route = self._insert(reader, self.lanes.rows_of_lanes, own, tag.rows)
        if tag.expert is None:
            return self._insert(reader, self.lanes.gather, own, self.route, tag.rows)
        return self._insert(reader, self.lanes.dispatch, own, self.route, tag.expert, tag.rows)

    def _return(self, boundary: RegionBoundary) -> None:
        copy, tag = self.nodes[boundary.value], boundary.tag
        inside = set(self.copies)
        with self.graph.inserting_after(copy):
            if self.choices:
                back = self.graph.call_function(self.lanes.return_choices, (copy, self.route, self.choices))
            elif self.region.ids is not None:
                back = self.graph.call_function(self.lanes.return_rows, (copy, self.route))
            elif tag.partial:
                back = self.graph.call_function(self.lanes.add_parts, (copy, self.route, tag.rows))
            else:
                back = self.graph.call_function(self.lanes.collect, (copy, self.route, tag.expert, tag.rows))
        back.meta = dict(copy.meta)
        copy.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back and user not in inside)

    def _resize(self, node: fx.Node, tag: ExpertTag) -> None:
        """Where an operator names the sizes of its result: the experts are fewer, the rows as many as arrived."""
        spec = self.table.specs[node]
        assert isinstance(spec, TensorSpec)
        copy = self.nodes[node]
        given: Any = copy.args[1]
        sizes = [spec.shape[d] if size == -1 and not isinstance(size, fx.Node) else size for d, size in enumerate(given)]
        if tag.expert is not None:
            sizes[tag.expert] = self.lanes.own
        if tag.rows is not None:
            sizes[tag.rows] = -1
        if tag.choices is not None:
            sizes[tag.choices] = 1
        copy.args = (copy.args[0], sizes, *copy.args[2:])


def _arguments(node: fx.Node, copy: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """The nodes among the arguments of one of the program's operators, each with what stands in its place in the copy."""
    pairs = zip(pytree.tree_leaves((node.args, node.kwargs)), pytree.tree_leaves((copy.args, copy.kwargs)), strict=True)
    return [(value, own) for value, own in pairs if isinstance(value, fx.Node) and isinstance(own, fx.Node)]


def _choices(table: OperatorTable, region: ExpertRegion) -> int:
    """How many experts a row goes to, where the program has a dimension for them; else 0."""
    shape: tuple[int, ...] = () if region.ids is None else table.specs[region.ids].shape
    return shape[1] if len(shape) > 1 else 0
