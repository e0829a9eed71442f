"""Expert parallelism: the experts of a layer divided among lanes, in a graph copied from the captured program.

Each lane works on its own samples and holds some of the experts, whole. What enters a region of experts travels to the lanes that hold
them, is computed there and comes back, in forward and (its gradient, the other way) in backward. Nothing is dropped, padded or
scaled: a lane that gets no rows computes with none, and the gradient of an expert is the sum over the rows of all lanes.
Every lane must run the same graph in the same order, whatever it received, because each exchange needs all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx
from torch.distributed import ProcessGroup
from torch.utils import _pytree as pytree

from atoll.graph.axes import operator_name
from atoll.graph.experts import Boundary, ExpertRegion, Experts, Tag
from atoll.graph.flops import TensorSpec
from atoll.graph.operators import OperatorTable
from atoll.runtime.stage.expert_exchange import ExpertLanes
from atoll.runtime.stage.holding import Holding

__all__ = ["expert_counts", "split_experts"]


def expert_counts(experts: int, lanes: int) -> tuple[int, ...]:
    """How many experts each lane holds, as equal as can be: rows go where their expert is, so a lane's samples do not matter."""
    assert 1 <= lanes <= experts, f"{lanes} lanes cannot divide {experts} experts"
    each, more = divmod(experts, lanes)
    return (each + 1,) * more + (each,) * (lanes - more)


def split_experts(
    graph: fx.Graph,
    nodes: Mapping[fx.Node, fx.Node],
    experts: Experts,
    table: OperatorTable,
    counts: Sequence[int],
    index: int,
    group: ProcessGroup | None,
) -> dict[str, Holding]:
    """Rewrite a layer's copied graph for lane `index`, which holds `counts[index]` consecutive experts; its part of each divided parameter.

    `nodes` leads from the program's nodes to the graph's. `group` joins the lanes in their order; it may be None where there is one.
    With one lane nothing is exchanged, but rows that were routed are still computed expert by expert, without copies of weights.
    """
    assert sum(counts) == experts.count
    assert group is not None or len(counts) == 1
    holdings: dict[str, Holding] = {}
    for region in experts.regions:
        lanes = ExpertLanes(tuple(counts), index, group)
        _Rewrite(graph, nodes, region, table, lanes).run()
        for parameter in region.parameters if len(counts) > 1 else ():
            name, shape = table.parameters[parameter], tuple(table.specs[parameter].shape)
            holdings[name] = Holding(name=name, shape=shape, dim=0, parts=((lanes.first, lanes.first + lanes.own),))
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
        first = min((self.nodes[node] for node in picks), key=_order(self.graph))
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

    def _arrival(self, value: fx.Node, own: fx.Node, tag: Tag, reader: fx.Node) -> fx.Node:
        if value not in self.arrived:
            self.arrived[value] = self._exchange(value, own, tag, reader)
        return self.arrived[value]

    def _exchange(self, value: fx.Node, own: fx.Node, tag: Tag, reader: fx.Node) -> fx.Node:
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

    def _return(self, boundary: Boundary) -> None:
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

    def _resize(self, node: fx.Node, tag: Tag) -> None:
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


def _order(graph: fx.Graph) -> Callable[[fx.Node], int]:
    places = {node: place for place, node in enumerate(graph.nodes)}
    return lambda node: places[node]
