"""Weights that are not trained and that the job makes again, from its seed or from files: no checkpoint stores them, a digest knows them.

A digest is a sum over all numbers, each mixed with its place in the tensor, so that ranks add up what they hold of a tensor under any plan.
A number that changes, however little, or that changes places, changes the sum.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from atoll.errors import CheckpointError, RebuiltWeightsError
from atoll.runtime.checkpoint.assignment import Agreement, Assigned, outlines
from atoll.runtime.checkpoint.exchange import CheckpointRanks
from atoll.runtime.checkpoint.local_shard import LocalShard, Piece, pieces, whole_shards
from atoll.runtime.checkpoint.manifest import Rebuilt
from atoll.runtime.checkpoint.rectangles import Rectangle, intersect, outside

__all__ = ["OwnPart", "check_rebuilt", "digests", "own_digests", "own_part", "tensor_digests"]

_BLOCK = 1 << 18  # numbers that are mixed at a time
_MASK = (1 << 64) - 1
_PLACE, _FIRST, _SECOND = -1640531535, -2048144789, -1028477387  # odd: multiplying by them loses nothing

OwnPart = Sequence[Piece]
"""What a rank digests of the tensors that all ranks have: every number is in one rank's part."""


def own_part(agreement: Agreement, shards: Sequence[LocalShard]) -> OwnPart:
    """This rank's. All ranks call it together."""
    keyed = [(shard.name, shard) for shard in shards]
    held = pieces(keyed)
    return [piece for one in agreement.reach(outlines(keyed, held), None) for piece in _within(one, held)]


def _within(one: Assigned, held: Sequence[Piece]) -> Iterable[Piece]:
    """The memory of what is assigned: it may be in several pieces that do not overlap."""
    left = [one.rectangle]
    for piece in held:
        if piece.key != one.key:
            continue
        rest: list[Rectangle] = []
        for wanted in left:
            common = intersect(wanted, piece.rectangle)
            if common is not None:
                yield Piece(piece.key, piece.shape, common, piece.view[common.relative_to(piece.rectangle).slices()])
            rest += [wanted] if common is None else outside(wanted, common)
        left = rest


def own_digests(part: OwnPart) -> dict[str, int]:
    """What a rank adds to the digests, by tensor."""
    found: dict[str, int] = {}
    for piece in part:
        found[piece.key] = (found.get(piece.key, 0) + _mixed(piece)) & _MASK
    return found


def digests(agreement: Agreement, said: Iterable[Mapping[str, int]]) -> dict[str, Rebuilt]:
    """Of whole tensors, from what all ranks said; the agreement knows their shapes."""
    total = dict.fromkeys(agreement.everything, 0)
    for one in said:
        for name, number in one.items():
            total[name] = (total[name] + number) & _MASK
    known = agreement.everything
    return {name: Rebuilt(shape=known[name].shape, dtype=known[name].dtype, digest=f"{number:016x}") for name, number in total.items()}


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, Rebuilt]:
    """Of tensors that are whole in this process."""
    agreement = Agreement(CheckpointRanks(None))
    part = own_part(agreement, whole_shards(tensors))
    return digests(agreement, [own_digests(part)])


def check_rebuilt(where: str, stored: Mapping[str, Rebuilt], found: Mapping[str, Rebuilt]) -> None:
    """CheckpointError where the weights the job made are not those that were left out."""
    wrong = [name for name, one in stored.items() if found.get(name) != one]
    if not wrong:
        return
    name, more = wrong[0], f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    if name in found and found[name].shape != stored[name].shape:
        raise CheckpointError(f"{where}: {name!r} has the shape {list(stored[name].shape)} there and {list(found[name].shape)} in the job")
    raise RebuiltWeightsError(
        f"{where}: it leaves out the weights that are not trained, which the job makes again, and {name!r}{more} came out otherwise "
        "than when it was saved. Give the job the weights (weights=, or what its callable loads), seed and library versions it had; "
        "Job(store_frozen=True) stores such weights too"
    )


@torch.no_grad()
def _mixed(piece: Piece) -> int:
    """The sum over a piece's numbers."""
    sizes = piece.rectangle.sizes or (1,)
    strides = _strides(piece.shape or (1,))
    offsets = piece.rectangle.offsets or (0,)
    columns = sizes[-1]
    lines = piece.view.reshape(-1, columns) if piece.view.numel() else piece.view.reshape(0, max(1, columns))
    base = _starts(offsets[:-1], sizes[:-1], strides[:-1], piece.view.device) + offsets[-1]
    total, wide = 0, min(columns, _BLOCK)
    high = max(1, _BLOCK // max(1, wide))
    for row in range(0, lines.shape[0], high):
        for column in range(0, columns, wide):
            block = lines[row : row + high, column : column + wide]
            places = base[row : row + high, None] + torch.arange(column, column + block.shape[1], device=block.device)
            total += _sum(block, places)
    return total & _MASK


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def _starts(offsets: Sequence[int], sizes: Sequence[int], strides: Sequence[int], device: torch.device) -> Tensor:
    """Where in the whole tensor each line of a rectangle begins, but for its last dimension."""
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for offset, size, stride in zip(offsets, sizes, strides, strict=True):
        found = (found[:, None] + (torch.arange(offset, offset + size, device=device) * stride)).reshape(-1)
    return found


def _sum(block: Tensor, places: Tensor) -> int:
    total = 0
    for lane, bits in enumerate(_bits(block)):
        mixed = bits ^ ((places * 4 + lane).to(torch.int32) * _PLACE)
        mixed = mixed * _FIRST
        mixed = mixed ^ ((mixed >> 15) & 0x1FFFF)
        mixed = mixed * _SECOND
        mixed = mixed ^ ((mixed >> 13) & 0x7FFFF)
        total += int(mixed.sum(dtype=torch.int64))
    return total


def _bits(block: Tensor) -> list[Tensor]:
    """As whole numbers of 32 bits, bit for bit: one tensor of the same shape, or two where numbers have more bits."""
    if block.is_complex():
        return [bits for part in (block.real, block.imag) for bits in _bits(part)]
    block = block.contiguous()
    match block.element_size():
        case 8:
            halves = block.view(torch.int32).view(*block.shape, 2)
            return [halves[..., 0], halves[..., 1]]
        case 4:
            return [block.view(torch.int32)]
        case 2:
            return [block.view(torch.int16).to(torch.int32)]
        case _:
            return [block.view(torch.uint8).to(torch.int32)]
