"""Tensor parallelism: a layer's program rewritten so that each device computes its part of the products.

`atoll.graph.sharding` says what divides; here it is done to a copy of the program, for one device. Shares may be unequal. Numbers are those
of the undivided program: random ones are drawn for the whole and the device takes its part.

Of a vocabulary each device holds some rows: for the cross-entropy a row's maximum, its sum of exponentials and its target's logit are
exchanged, never the logits. Everything after that is the arithmetic of `torch.nn.functional.cross_entropy`, the same on every device (of
lanes: for their own samples).
"""

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from atoll.errors import PlanError
from atoll.graph.sharding_rewrites import (
    ByDepth,
    Cut,
    DivideDraw,
    DivideLoss,
    DivideNormalisation,
    Gathering,
    Lookup,
    Operand,
    Scale,
    Sharding,
    deal,
)
from atoll.runtime.stage.collectives import Lanes, Ranks, Samples
from atoll.runtime.stage.shard_spec import ShardSpec

__all__ = ["split_tensors"]


@dataclass(frozen=True)
class VocabularyPart:
    """Rows `start` to `stop` of a vocabulary of `size`, held by this device; other devices hold the others."""

    ranks: Ranks
    start: int
    stop: int
    size: int
    dim: int  # of logits that runs over the vocabulary
    samples: Samples  # of a row of logits' results: indices, targets, losses

    def embedding(self, weight: Tensor, indices: Tensor, padding_idx: int = -1) -> Tensor:
        """`torch.nn.functional.embedding`; the indices are those of all samples."""
        held, local = self._locate(indices)
        self._refuse_unknown(indices, torch.zeros_like(held))
        padding = padding_idx - self.start if self.start <= padding_idx < self.stop else None
        rows = functional.embedding(local, weight, padding)
        return self.ranks.leave(rows.masked_fill(~held.unsqueeze(-1), 0), self.samples)

    def log_softmax(self, logits: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """`torch.nn.functional.log_softmax` over the vocabulary."""
        return _LogSoftmax.apply(_in_autocast_precision(logits, dtype), self)  # type: ignore[no-any-return, no-untyped-call]

    def nll_loss(
        self, logarithms: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100
    ) -> Tensor:
        """`torch.nn.functional.nll_loss`; the targets are those of all samples."""
        held, local = self._locate(target)
        picked = _in_autocast_precision(logarithms).gather(self.dim, local.unsqueeze(self.dim)).squeeze(self.dim)
        losses = -self.ranks.leave(picked.masked_fill(~held, 0), self.samples)
        rows = self._weights(target, weight, ignore_index, losses.dtype)
        return _reduce(rows.weigh(losses), rows, reduction)

    def cross_entropy(
        self,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = 1,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:
        """`torch.nn.functional.cross_entropy` with class numbers as targets, those of all samples."""
        logits = _in_autocast_precision(logits)
        held, local = self._locate(target)
        classes = weight[self.start : self.stop].to(logits.dtype) if weight is not None and label_smoothing else None
        logarithm, chosen, weighed = _Statistics.apply(logits, local, held, classes, bool(label_smoothing), self)  # type: ignore[no-untyped-call]
        rows = self._weights(target, weight, ignore_index, logits.dtype)
        loss = _reduce(rows.weigh(logarithm - chosen), rows, reduction)
        if not label_smoothing:
            return loss
        everything = self.size if weight is None else weight.to(logits.dtype).sum()
        smooth = _reduce(torch.where(rows.counted, logarithm * everything - weighed, 0), rows, reduction)
        return (1 - label_smoothing) * loss + label_smoothing / self.size * smooth

    def _locate(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Which of them this device holds, and where."""
        held = (indices >= self.start) & (indices < self.stop)
        return held, torch.where(held, indices - self.start, 0)

    def _refuse_unknown(self, indices: Tensor, ignored: Tensor) -> None:
        """Numbers outside the vocabulary are errors, as in one process; only CPUs ask, others would have to wait for the answer."""
        if indices.device.type == "cpu" and bool((((indices < 0) | (indices >= self.size)) & ~ignored).any()):
            raise IndexError(f"index out of range: a number outside 0 to {self.size - 1} in a vocabulary of {self.size}")

    def _weights(self, target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> "_Rows":
        """The weight of each of the device's own rows; 0 for those that are ignored."""
        target = self.ranks.own(target, self.samples)
        counted = target != ignore_index
        self._refuse_unknown(target, ~counted)
        if weight is None:
            return _Rows(counted, counted.to(dtype))
        chosen = weight.to(dtype)[torch.where(counted, target, 0)]
        return _Rows(counted, torch.where(counted, chosen, 0))


@dataclass(frozen=True)
class _Rows:
    counted: Tensor
    weights: Tensor

    def weigh(self, losses: Tensor) -> Tensor:
        """Losses of rows by their weights; what is ignored is 0 even where its loss is not a number."""
        return torch.where(self.counted, losses, 0) * self.weights


def _reduce(losses: Tensor, rows: _Rows, reduction: int) -> Tensor:
    if reduction == 0:
        return losses
    return losses.sum() / rows.weights.sum() if reduction == 1 else losses.sum()


def _in_autocast_precision(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Under autocast losses are computed in fp32, as PyTorch does."""
    if dtype is None and torch.is_autocast_enabled(x.device.type) and x.dtype in (torch.bfloat16, torch.float16):
        dtype = torch.float32
    return x if dtype is None else x.to(dtype)


def _largest(logits: Tensor, part: VocabularyPart) -> Tensor:
    """Of every row, over all devices. The dimension is kept."""
    return part.ranks.largest(logits.amax(part.dim, keepdim=True).contiguous())


class _Statistics(Function):
    """Of every row: logarithm of the sum of exponentials, the target's logit, and the sum of logits weighed by class (for smoothing)."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, local: Tensor, held: Tensor, classes: Tensor | None, smooth: bool, part: VocabularyPart
    ) -> tuple[Tensor, Tensor, Tensor]:
        dim, ranks = part.dim, part.ranks
        largest = _largest(logits, part)
        chosen = logits.gather(dim, local.unsqueeze(dim)).squeeze(dim).masked_fill(~held, 0)
        found = [(logits - largest).exp_().sum(dim), chosen]
        if smooth:
            found.append((logits if classes is None else logits * _along(classes, logits, dim)).sum(dim))
        summed = ranks.add_up(torch.stack(found))
        logarithm = summed[0].log() + largest.squeeze(dim)
        ctx.save_for_backward(logits, logarithm, local, held, classes)
        ctx.part, ctx.smooth = part, smooth
        results = [logarithm, summed[1], summed[2] if smooth else logarithm]
        return tuple(ranks.own(value, part.samples).clone() for value in results)  # type: ignore[return-value]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        logits, logarithm, local, held, classes = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        dim = part.dim
        of_sum, of_chosen, *of_weighed = [part.ranks.spread(one, part.samples) for one in gradients[: 3 if ctx.smooth else 2]]
        result = (logits - logarithm.unsqueeze(dim)).exp_().mul_(of_sum.unsqueeze(dim))
        result.scatter_add_(dim, local.unsqueeze(dim), of_chosen.masked_fill(~held, 0).unsqueeze(dim))
        for gradient in of_weighed:
            result += gradient.unsqueeze(dim) * (1 if classes is None else _along(classes, logits, dim))
        return result, None, None, None, None, None


def _along(classes: Tensor, logits: Tensor, dim: int) -> Tensor:
    """A value a class, in the shape of logits."""
    return classes.view([-1 if d == dim else 1 for d in range(logits.dim())])


class _LogSoftmax(Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, part: VocabularyPart) -> Tensor:
        shifted = logits - _largest(logits, part)
        sums = part.ranks.add_up(shifted.exp().sum(part.dim, keepdim=True).contiguous())
        result = shifted - sums.log()
        ctx.save_for_backward(result)
        ctx.part = part
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        part: VocabularyPart = ctx.part
        total = part.ranks.add_up(gradient.sum(part.dim, keepdim=True).contiguous())
        return gradient - result.exp() * total, None


aten = torch.ops.aten


def split_tensors(
    graph: fx.Graph, nodes: dict[fx.Node, fx.Node], sharding: Sharding, shares: tuple[int, ...], index: int, ranks: Ranks
) -> dict[str, ShardSpec]:
    """Rewrite a layer's copy for device `index` of those that divide it in the proportion `shares`; what it holds of divided parameters.

    `graph` is changed in place; `nodes` maps the captured program's nodes to the copy's, parameters included, and stays true. Parameters
    that are not among the results are whole on every device, and so are their gradients (between lanes: like those of any other layer that
    is data parallel, so losses must have their weights before backward). Nothing is changed and nothing returned for a layer that does
    not divide. Raises `PlanError` where lanes cannot divide what tensor ranks could.
    """
    gathering = sharding.gathering if ranks.gathers else Gathering({}, ())
    if gathering.refused:
        raise PlanError(f"lanes cannot divide this layer: {gathering.refused}. Take it out of the stage's `split`.")
    rewriter = _Rewriter(graph, nodes, shares, index, ranks, gathering)
    rewriter.count_samples_of_all_lanes()
    for rewrite in sharding.rewrites:
        rewriter.handle(rewrite)
    return {
        one.name: ShardSpec(name=one.name, shape=one.shape, dim=one.cut.dim, parts=one.cut.parts(shares, index))
        for one in sharding.divided.values()
    }


class _Rewriter:
    """Changes one layer's copy for device `index`."""

    def __init__(
        self, graph: fx.Graph, nodes: dict[fx.Node, fx.Node], shares: tuple[int, ...], index: int, ranks: Ranks, gathering: Gathering
    ) -> None:
        self.graph, self.nodes, self.shares, self.index, self.ranks, self.gathering = graph, nodes, shares, index, ranks, gathering
        self.totals: dict[tuple[fx.Node, fx.Node], fx.Node] = {}  # operator, size → the size for all lanes' samples
        self.entered: dict[fx.Node, fx.Node] = {}
        self.taken: dict[tuple[fx.Node, Cut], fx.Node] = {}
        self.handlers: dict[type, Callable[[Any], None]] = {
            Operand: self._operand,
            Scale: self._scale,
            ByDepth: self._by_depth,
            DivideDraw: self._draw,
            DivideNormalisation: self._normalise,
            DivideLoss: self._loss,
            Lookup: self._look_up,
        }

    def handle(self, rewrite: Any) -> None:
        self.handlers[type(rewrite)](rewrite)

    def _parts(self, cut: Cut) -> tuple[tuple[int, int], ...]:
        return cut.parts(self.shares, self.index)

    def count_samples_of_all_lanes(self) -> None:
        """Sizes inside divided regions."""
        for node, size, per_sample in self.gathering.sizes:
            assert isinstance(self.ranks, Lanes)
            reader = self.nodes[node]
            self.totals[node, size] = self._insert(reader, self.ranks.total, per_sample)
            reader.replace_input_with(self.nodes[size], self.totals[node, size])

    def _insert(self, before: fx.Node, function: Callable[..., Any], *args: Any) -> fx.Node:
        with self.graph.inserting_before(before):
            return self.graph.call_function(function, args)

    def _operand(self, rewrite: Operand) -> None:
        reader, whole = self.nodes[rewrite.node], self.nodes[rewrite.value]
        value = whole
        samples = self.gathering.samples.get(rewrite.value)
        if samples is not None if self.ranks.gathers else rewrite.gradient:
            if whole not in self.entered:
                self.entered[whole] = self._insert(reader, self.ranks.enter, whole, samples)
            value = self.entered[whole]
        if rewrite.cut is not None:
            key = (whole, rewrite.cut)
            if key not in self.taken:
                cut = rewrite.cut
                self.taken[key] = self._insert(reader, take_part, value, cut.dim, cut.size, self._parts(cut))
            value = self.taken[key]
        reader.replace_input_with(whole, value)

    def _scale(self, rewrite: Scale) -> None:
        node = self.nodes[rewrite.node]
        own = deal(rewrite.units, self.shares)[self.index]
        if isinstance(rewrite.size, fx.Node):
            whole = self.totals.get((rewrite.node, rewrite.size), self.nodes[rewrite.size])
            times = self._insert(node, operator.mul, whole, own)
            size: int | fx.Node = self._insert(node, operator.floordiv, times, rewrite.units)
        else:
            size = rewrite.size * own // rewrite.units
        args: list[Any] = list(node.args)
        while len(args) <= rewrite.position:
            args.append(None)
        if rewrite.index is None:
            args[rewrite.position] = size
        else:
            sizes = list(args[rewrite.position])
            sizes[rewrite.index] = size
            args[rewrite.position] = sizes
        node.args = tuple(args)

    def _by_depth(self, rewrite: ByDepth) -> None:
        node, samples = self.nodes[rewrite.node], self.gathering.samples.get(rewrite.node)
        if node.target is aten.linear.default:
            node.target, node.args = self.ranks.linear, (*node.args, *(None,) * (3 - len(node.args)), samples)
        elif node.target is aten.addmm.default:
            bias, x, weight = node.args
            node.target, node.args = self.ranks.matmul, (x, weight, bias, samples)
        else:
            node.target, node.args = self.ranks.matmul, (*node.args, None, samples)

    def _draw(self, rewrite: DivideDraw) -> None:
        node, cut = self.nodes[rewrite.node], rewrite.cut
        node.kwargs = {**node.kwargs, "dim": cut.dim, "size": cut.size, "parts": self._parts(cut)}
        if node.target is aten.dropout.default:
            node.target, node.kwargs = dropout_part, {**node.kwargs, "order": rewrite.order}
        else:
            node.target = attention_part

    def _vocabulary(self, cut: Cut, rows: Any = None) -> VocabularyPart:
        ((start, stop),) = self._parts(cut)
        return VocabularyPart(self.ranks, start, stop, cut.size, cut.dim, self.gathering.samples.get(rows))

    def _normalise(self, rewrite: DivideNormalisation) -> None:
        self.nodes[rewrite.node].target = self._vocabulary(rewrite.cut).log_softmax

    def _loss(self, rewrite: DivideLoss) -> None:
        node, part = self.nodes[rewrite.node], self._vocabulary(rewrite.cut, rewrite.node.args[1])
        node.target = part.cross_entropy if node.target is aten.cross_entropy_loss.default else part.nll_loss

    def _look_up(self, rewrite: Lookup) -> None:
        node = self.nodes[rewrite.node]
        node.target, node.args = self._vocabulary(rewrite.cut, rewrite.node).embedding, node.args[:3]


def take_part(x: Tensor, dim: int, size: int, parts: tuple[tuple[int, int], ...]) -> Tensor:
    """The ranges `parts` of dimension `dim`, which is `size` long or repeats that many."""
    if x.shape[dim] != size:
        repeated = x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :])
        return take_part(repeated, dim + 1, size, parts).flatten(dim, dim + 1)
    pieces = [x.narrow(dim, start, stop - start) for start, stop in parts]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)


def dropout_part(
    x: Tensor, p: float, train: bool, *, dim: int, size: int, parts: tuple[tuple[int, int], ...], order: tuple[int, ...]
) -> Tensor:
    """Dropout of a part: what is dropped is drawn for the whole, in the whole's order in memory."""
    held = sum(stop - start for start, stop in parts)
    shape = [length // held * size if d == dim else length for d, length in enumerate(x.shape)]
    ones = torch.ones([shape[d] for d in order], dtype=x.dtype, device=x.device).permute([order.index(d) for d in range(x.dim())])
    return x * take_part(functional.dropout(ones, p, train), dim, size, parts)


def attention_part(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    dim: int,
    size: int,
    parts: tuple[tuple[int, int], ...],
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention of some heads with dropout of scores. On CPUs scores are dropped as they would be in one process.

    Elsewhere the fused kernel draws for itself: how it numbers scores is its own affair.
    """
    if query.device.type != "cpu":
        return functional.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale, enable_gqa=enable_gqa)
    held = sum(stop - start for start, stop in parts)
    shape = [length // held * size if d == dim else length for d, length in enumerate((*query.shape[:-1], key.shape[-2]))]
    drawn = take_part(functional.dropout(torch.ones(shape, dtype=query.dtype), dropout), dim, size, parts)
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype).masked_fill(~mask, -math.inf)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores if mask is None else scores + mask
    return (torch._safe_softmax(scores, -1) * drawn) @ value
