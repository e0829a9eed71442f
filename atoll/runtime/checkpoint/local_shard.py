"""LocalShard: a tensor in this rank's memory, and which part of the user's tensor it is."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from atoll.runtime.checkpoint.rectangles import Rectangle, flat_range, whole
from atoll.runtime.stage.shard_spec import ShardSpec

__all__ = ["Keyed", "LocalShard", "Piece", "pieces", "whole_shards"]


@dataclass(frozen=True, eq=False)
class LocalShard:
    """What a rank has of one parameter or buffer.

    `tensor` has the shape `holding.local_shape`. With `flat=(start, stop)` it is only those elements of that part laid out flat, in any
    shape: that is how sharded data parallelism divides it (a shard of rows is such a range too).
    """

    holding: ShardSpec
    tensor: Tensor
    flat: tuple[int, int] | None = None
    parameter: Tensor | None = field(default=None, repr=False)
    """What the optimizer knows it as, when that is another object than `tensor` (a DTensor, of which `tensor` is the local part)."""

    def __post_init__(self) -> None:
        name, shape = self.holding.name, tuple(self.tensor.shape)
        if self.flat is None:
            assert shape == self.holding.local_shape, f"{name}: holds {self.holding.local_shape}, the tensor is {shape}"
        else:
            start, stop = self.flat
            assert 0 <= start <= stop <= self.holding.elements, f"{name}: elements {start} to {stop} of {self.holding.elements}"
            assert math.prod(shape) == stop - start, f"{name}: elements {start} to {stop}, the tensor is {shape}"
            assert self.tensor.is_contiguous(), f"{name}: a flat part must be contiguous"

    @property
    def name(self) -> str:
        """The user's."""
        return self.holding.name

    @property
    def known_as(self) -> Tensor:
        """The optimizer's object for it."""
        return self.tensor if self.parameter is None else self.parameter

    def like(self, tensor: Tensor) -> "LocalShard":
        """Another tensor divided in the same way, such as a moment of the optimizer."""
        return LocalShard(self.holding, tensor, self.flat)


def whole_shards(tensors: Mapping[str, Tensor]) -> list[LocalShard]:
    """What a device has all of, by the user's names; the optimizer knows parameters as these very objects."""
    return [
        LocalShard(
            ShardSpec(name=name, shape=tuple(value.shape)), value.detach(), parameter=value if isinstance(value, nn.Parameter) else None
        )
        for name, value in tensors.items()
    ]


Keyed = tuple[str, LocalShard]
"""What a stored tensor is called, and what this rank has of it. A rank that runs several stages may have the same tensor in each."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A rectangle of a stored tensor and the memory that holds it: writing into `view` writes into the rank's tensor."""

    key: str
    shape: tuple[int, ...]  # of the whole tensor
    rectangle: Rectangle
    view: Tensor


def pieces(tensors: Sequence[Keyed]) -> list[Piece]:
    """The rectangles that a rank holds, each with its memory."""
    return [piece for key, held in tensors for piece in _pieces(key, held)]


def _pieces(key: str, held: LocalShard) -> list[Piece]:
    holding, tensor = held.holding, held.tensor.detach()
    local = _local_views(tensor, holding.local_shape, held.flat)
    return [
        Piece(key, holding.shape, placed, view[inner.slices()])
        for rectangle, view in local
        for placed, inner in _placed(holding, rectangle)
        if placed.elements
    ]


def _local_views(tensor: Tensor, shape: tuple[int, ...], flat: tuple[int, int] | None) -> Iterator[tuple[Rectangle, Tensor]]:
    """Rectangles in the rank's own part, with their memory."""
    if flat is None:
        yield whole(shape), tensor
        return
    line, used = tensor.view(-1), 0
    for rectangle in flat_range(shape, *flat):
        yield rectangle, line[used : used + rectangle.elements].view(rectangle.sizes)
        used += rectangle.elements


def _placed(holding: ShardSpec, local: Rectangle) -> Iterator[tuple[Rectangle, Rectangle]]:
    """Where a rectangle of the rank's part lies in the whole tensor: one for each of the holding's ranges it touches.

    The second of each pair is the same rectangle, counted from `local`.
    """
    if holding.dim is None:
        yield local, local.relative_to(local)
        return
    dim, passed = holding.dim, 0
    first, last = local.offsets[dim], local.offsets[dim] + local.sizes[dim]
    for start, stop in holding.parts:
        low, high = max(first, passed), min(last, passed + stop - start)
        if low < high:
            yield local.with_range(dim, start + low - passed, high - low), local.with_range(dim, low, high - low).relative_to(local)
        passed += stop - start
