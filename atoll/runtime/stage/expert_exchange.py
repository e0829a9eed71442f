"""What lanes that divide experts say to each other: rows to their expert and back, with gradients on the reverse way."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

__all__ = ["ExpertLanes", "Route"]


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
