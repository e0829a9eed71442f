"""Updates as small whole numbers under a scale that all sites agree on, added in a ring and packed without a bit between them.

A masked number looks like any other of its ring, so it cannot be compressed and no site may choose a scale of its own. With k bits an
update is whole numbers of magnitudes below 2^(k-1); sums of M of them fit a ring of w = k + ⌈log2 M⌉ bits, and w bits a value is what
travels.

The scale is agreed block by block from what all sites know: the mean of the round before (`agreed_limits`). What a number could not say,
rounding and values beyond the limit, is the residual, which error feedback sends later.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from atoll.codec.blocks import BLOCK, block_count
from atoll.errors import AtollError, NonFiniteTensorError

__all__ = [
    "PIECE",
    "Quantised",
    "Words",
    "agreed_limits",
    "default_bits",
    "dequantise",
    "pack",
    "packed_bytes",
    "quantise",
    "ring_bits",
    "split_pieces",
    "unpack",
]

Words = npt.NDArray[np.uint32]

PIECE = 1 << 18
"""Values that are packed, and masked, together; part of the wire format."""

_MOST_RING_BITS = 24
_SMALLEST_LIMIT, _LARGEST_LIMIT = 2.0**-100, 2.0**100


def ring_bits(bits: int, sites: int) -> int:
    """The width of a ring in which so many sites' numbers of `bits` bits add up without wrapping round."""
    width = bits + (sites - 1).bit_length()
    if not 2 <= bits <= 16 or width > _MOST_RING_BITS:
        raise AtollError(f"numbers of {bits} bits of {sites} sites cannot be masked: 2 to 16 bits, and {_MOST_RING_BITS} with ⌈log2 sites⌉")
    return width


def default_bits(sites: int) -> int:
    """The widest numbers, up to 8 bits, whose sums take no more than 10 bits: within 1.3 times of unmasked int8."""
    return max(2, min(8, 10 - (sites - 1).bit_length()))


class Quantised(NamedTuple):
    """An update as whole numbers, int32 of shape (elements,), and what they leave out of it."""

    numbers: torch.Tensor
    residual: torch.Tensor


def agreed_limits(mean: torch.Tensor, margin: float = 4.0) -> torch.Tensor:
    """The largest magnitude of each block of 256 that numbers can say, fp32, from a mean all sites have: the same for all, to the bit.

    `margin` times the block's largest magnitude, as one site's update is larger than the mean of several; at least a 64th of the largest
    block's, so that what stood still may move again.
    """
    blocks = block_count(mean.numel())
    padded = torch.zeros(blocks * BLOCK, dtype=torch.float32)
    padded[: mean.numel()] = mean.detach().reshape(-1).abs()
    peaks = padded.view(blocks, BLOCK).amax(1)
    largest = float(peaks.amax()) if blocks else 0.0
    if not 0 < largest <= _LARGEST_LIMIT / margin:
        raise AtollError(
            f"no scale follows from a mean whose largest magnitude is {largest}; give limits, such as torch.full(({blocks},), 1e-3)"
        )
    return torch.mul(peaks.clamp_min(largest / 64), margin)


def _steps(limits: torch.Tensor, elements: int, bits: int) -> torch.Tensor:
    """What a number of 1 stands for, for every element."""
    if limits.shape != (block_count(elements),) or limits.dtype != torch.float32:
        raise AtollError(f"{elements} elements have {block_count(elements)} limits in fp32, got {list(limits.shape)} of {limits.dtype}")
    if not bool(((limits >= _SMALLEST_LIMIT) & (limits <= _LARGEST_LIMIT)).all()):
        raise AtollError(f"limits are finite and between {_SMALLEST_LIMIT:.0e} and {_LARGEST_LIMIT:.0e}")
    steps: torch.Tensor = limits / (2 ** (bits - 1) - 1)
    return steps.repeat_interleave(BLOCK)[:elements]


def quantise(update: torch.Tensor, limits: torch.Tensor, bits: int, share: float = 1.0) -> Quantised:
    """A flat fp32 update times `share` (its weight over the largest) in whole numbers, and what of the update itself they leave out.

    NonFiniteTensorError where it is not finite: nothing could be said of it.
    """
    if not 0 < share <= 1:
        raise AtollError(f"the share of a site is its weight over the largest one: above 0 and at most 1, got {share}")
    with torch.no_grad():
        if not bool(torch.isfinite(update).all()):
            raise NonFiniteTensorError("an update that is not finite cannot be added to others'; leave the round out")
        steps, most = _steps(limits, update.numel(), bits), 2 ** (bits - 1) - 1
        numbers = (update * share / steps).round_().clamp_(-most, most)
        return Quantised(numbers.to(torch.int32), update - numbers * steps / share)


def dequantise(sums: torch.Tensor, limits: torch.Tensor, bits: int, factor: float) -> torch.Tensor:
    """What sums of numbers stand for, times `factor`, in fp32: the same at all sites, to the bit."""
    with torch.no_grad():
        return sums.to(torch.float32).mul_(_steps(limits, sums.numel(), bits)).mul_(factor)


def packed_bytes(elements: int, width: int) -> int:
    """What so many numbers of a ring take when packed."""
    whole, rest = divmod(elements, PIECE)
    return whole * (PIECE // 8) * width + -(-rest // 8) * width


def split_pieces(elements: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Where each piece's numbers and its bytes lie."""
    for start in range(0, elements, PIECE):
        stop = min(start + PIECE, elements)
        yield slice(start, stop), slice(packed_bytes(start, width), packed_bytes(stop, width))


def pack(words: Words, width: int) -> bytes:
    """Numbers of a ring, of one piece, as bytes. With G = ⌈values/8⌉, values j, G + j, … 7G + j make the bytes j, G + j, … ."""
    groups = -(-len(words) // 8)
    padded = np.zeros(groups * 8, dtype=np.uint32)
    padded[: len(words)] = words
    values, found = padded.reshape(8, groups), np.zeros((width, groups), dtype=np.uint8)
    for row, byte, shift in _overlaps(width):
        part = values[row] >> shift if shift >= 0 else values[row] << -shift
        found[byte] |= (part & 0xFF).astype(np.uint8)
    return found.tobytes()


def unpack(data: bytes | memoryview, values: int, width: int) -> Words:
    """The numbers that `pack` made, or those a stream of random bytes stands for."""
    groups = -(-values // 8)
    given = np.frombuffer(data, dtype=np.uint8).reshape(width, groups).astype(np.uint32)
    found = np.zeros((8, groups), dtype=np.uint32)
    for row, byte, shift in _overlaps(width):
        found[row] |= given[byte] << shift if shift >= 0 else given[byte] >> -shift
    found &= np.uint32((1 << width) - 1)
    return found.reshape(-1)[:values]


def _overlaps(width: int) -> Iterator[tuple[int, int, int]]:
    """(which of eight values, which of `width` bytes, by how much the value's bits are above the byte's) wherever they share bits."""
    for row in range(8):
        first = row * width
        for byte in range(first // 8, (first + width - 1) // 8 + 1):
            yield row, byte, byte * 8 - first
