"""Two bits for a value: its sign, and whether its magnitude is one of the larger ones of its block; a block has a magnitude for each kind.

`2-bit` writes all values of a block of 256. `top-k-2-bit:64` writes the 64 largest of every block of 4,096, each with a place of 12 bits,
as SparseLoCo does (Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", 2025). Both lose much, so they are for updates
with error feedback. A magnitude stands for the mean of those it replaces, rounded to bf16.

Means must be the same on every processor, however it divides a sum. So magnitudes are counted in whole numbers, 4,095 of which make the
largest: sums of so few whole numbers are exact in fp32 in any order.
"""

import numpy as np
import torch

from atoll.codec import CodecSpec, sparse_two_bit_spec
from atoll.codec.base import Codec, EncodedPart, Given, Header, Parts, dtype_of
from atoll.codec.blocks import BLOCK, LARGEST, SMALLEST, BlockCodec, row_chunks, work_dtype
from atoll.errors import CodecError, NonFiniteTensorError

__all__ = ["SparseTwoBit", "TwoBit"]

_WHOLE = 4095.0
_LARGER = 1.25  # times the mean: between the two groups of a normal distribution that lose least


class TwoBit(BlockCodec):
    """`2-bit`: ±low or ±high for every value; about a fifteenth of fp32's bytes.

    A byte is a + 4·b + 16·c + 64·d, from the four quarters of the block, so that no operator works on single pairs of bits.
    """

    name = "2-bit"
    code_dtype = torch.uint8
    codes_per_block = BLOCK // 4
    scaled = True
    scales_per_block = 2
    scale_dtype = torch.bfloat16
    marks_per_block = 3
    smallest = SMALLEST
    largest = LARGEST

    def encode_rows(self, rows: torch.Tensor, marks: torch.Tensor, codes: torch.Tensor) -> None:
        for source, mark, code in row_chunks((rows, marks, codes)):
            values = source.to(work_dtype(source.dtype))
            larger = _marks(values, mark, _LARGER)
            quarters = _codes(values, larger).view(-1, 4, BLOCK // 4)
            code.copy_(_packed(quarters))

    @staticmethod
    def scales(marks: torch.Tensor) -> torch.Tensor:
        return marks[:, 1:]

    @classmethod
    def decode_rows(cls, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        for row, code, scale in row_chunks((rows, codes, scales)):
            row.copy_(_values(_unpacked(code).view(row.shape), scale, row.dtype))


class SparseTwoBit(Codec):
    """`top-k-2-bit:64`: so many of every 4,096 values are sent, in two bits each; a 141st of fp32's bytes. NaN and Inf are refused."""

    name = "top-k-2-bit"
    block = 4096

    def __init__(self, kept: int) -> None:
        if not 1 <= kept <= self.block:
            raise CodecError(f"top-k-2-bit keeps 1 to {self.block} values of every {self.block}, got {kept}")
        self.kept = kept

    @property
    def text(self) -> str:
        return f"{self.name}:{self.kept}"

    @property
    def spec(self) -> CodecSpec:
        return sparse_two_bit_spec(self.kept)

    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header:
        return Header(codec=self.name, dtype=dtype, shape=shape, kept=self.kept)

    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        flat = given.tensor.view(-1).cpu()
        places, codes, levels = [], [], []
        for rows, kept in _rows_and_kept(flat, self.kept):
            for chunk in torch.split(rows, _CHUNK_ROWS):
                values = chunk.to(work_dtype(chunk.dtype))
                place = _largest(values, kept)
                chosen = values.gather(1, place)
                mark = chosen.new_empty(len(chosen), 3)
                larger = _marks(chosen, mark, 1.0)
                places.append(place.view(-1))
                codes.append(_codes(chosen, larger).view(-1))
                levels.append(mark[:, 1:].clamp_max(_BF16_LARGEST).to(torch.bfloat16).view(-1))
        return header, {"levels": torch.cat(levels), "index": _packed_places(torch.cat(places)), "codes": _packed_codes(torch.cat(codes))}

    @classmethod
    def parts(cls, header: Header) -> tuple[EncodedPart, ...]:
        if not 1 <= header.kept <= cls.block:
            raise CodecError(f"{cls.name}: a header keeps {header.kept} of every {cls.block} values")
        kept = _kept_in_all(header.elements, header.kept)
        return (
            EncodedPart("levels", torch.bfloat16, 2 * -(-header.elements // cls.block)),
            EncodedPart("index", torch.uint8, 3 * -(-kept // 2)),
            EncodedPart("codes", torch.uint8, -(-kept // 4)),
        )

    @classmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: torch.Tensor) -> None:
        if not dtype_of(header).is_floating_point:
            raise CodecError(f"{cls.name}: a header announces {header.dtype}, which travels as it is")
        places = _unpacked_places(parts["index"])
        codes = _unpacked(parts["codes"].view(1, -1)).view(-1)
        levels = parts["levels"].view(-1, 2)
        flat.zero_()
        done = first = 0
        for rows, kept in _rows_and_kept(flat, header.kept):
            several = len(rows) * kept
            place = places[done : done + several].view(-1, kept)
            if int(place[:, -1].max()) >= rows.shape[1] or not bool((place[:, 1:] > place[:, :-1]).all()):
                raise CodecError(f"{cls.name}: the places that arrived are not ascending or beyond their block")
            level = levels[first : first + len(rows)]
            rows.scatter_(1, place, _values(codes[done : done + several].view(-1, kept), level, flat.dtype))
            done, first = done + several, first + len(rows)


_CHUNK_ROWS = 32
_BF16_LARGEST = torch.finfo(torch.bfloat16).max


def _marks(values: torch.Tensor, marks: torch.Tensor, larger_than: float) -> torch.Tensor:
    """Write (largest, mean of the smaller, mean of the larger) magnitudes of each row; return where they are larger
    than so many times the mean, as ones."""
    magnitudes = values.abs()
    peak = torch.amax(magnitudes, 1, keepdim=True)
    whole = magnitudes.div_(peak.clamp(SMALLEST, None)).mul_(_WHOLE).round_().to(torch.float32)
    total = whole.sum(1, keepdim=True)
    larger = torch.gt(whole, total * (larger_than / values.shape[1]), out=torch.empty_like(whole))
    above = whole.mul_(larger).sum(1, keepdim=True)
    count = larger.sum(1, keepdim=True)
    unit = peak / _WHOLE
    marks[:, :1] = peak
    marks[:, 1:2] = (total - above).div_((values.shape[1] - count).clamp_min_(1.0)).to(unit.dtype).mul_(unit)
    marks[:, 2:3] = above.div_(count.clamp_min_(1.0)).to(unit.dtype).mul_(unit)
    return larger


def _codes(values: torch.Tensor, larger: torch.Tensor) -> torch.Tensor:
    """1 for the larger magnitudes and 2 for negative values, added up."""
    return larger.to(torch.uint8).add_(torch.signbit(values).to(torch.uint8), alpha=2)


def _packed(quarters: torch.Tensor) -> torch.Tensor:
    """(rows, 4, n) codes of two bits in (rows, n) bytes."""
    return quarters[:, 0] + 4 * quarters[:, 1] + 16 * quarters[:, 2] + 64 * quarters[:, 3]


def _unpacked(codes: torch.Tensor) -> torch.Tensor:
    """(rows, n) bytes as (rows, 4, n) codes of two bits."""
    return torch.stack([codes & 3, (codes >> 2) & 3, (codes >> 4) & 3, codes >> 6], 1)


def _values(codes: torch.Tensor, levels: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What codes stand for; a magnitude that bf16 rounded beyond the type's largest is cut there."""
    low, high = torch.split(levels.to(work_dtype(dtype)).clamp_max(torch.finfo(dtype).max), 1, 1)
    found = (codes & 1).to(low.dtype).mul_(high - low).add_(low)
    return found.mul_((1 - (codes & 2).view(torch.int8)).to(low.dtype)).to(dtype)


def _rows_and_kept(flat: torch.Tensor, kept: int) -> list[tuple[torch.Tensor, int]]:
    """The full blocks and how many values of each are sent; the last block where it is not full, of which as large a share is."""
    block = SparseTwoBit.block
    full, rest = divmod(flat.numel(), block)
    found = [(flat[: full * block].view(-1, block), kept)] if full else []
    return [*found, (flat[full * block :].view(1, rest), _kept_of_rest(rest, kept))] if rest else found


def _kept_of_rest(rest: int, kept: int) -> int:
    return -(-kept * rest // SparseTwoBit.block)


def _kept_in_all(elements: int, kept: int) -> int:
    full, rest = divmod(elements, SparseTwoBit.block)
    return full * kept + _kept_of_rest(rest, kept)


def _largest(values: torch.Tensor, kept: int) -> torch.Tensor:
    """Places of the `kept` largest magnitudes of each row, ascending; the first ones where magnitudes are equal."""
    magnitudes = values.abs().numpy()
    if not bool(np.isfinite(magnitudes.max(initial=0.0))):
        raise NonFiniteTensorError(
            "top-k-2-bit: the tensor has NaN or Inf among its values; skip this round, or send it with a block-wise codec or none"
        )
    thresholds = np.partition(magnitudes, -kept, axis=1)[:, -kept, None]
    chosen = magnitudes >= thresholds
    for row in np.flatnonzero(chosen.sum(1) > kept):
        equal = np.flatnonzero(magnitudes[row] == thresholds[row])
        chosen[row, equal[kept - int((magnitudes[row] > thresholds[row]).sum()) :]] = False
    return torch.from_numpy(np.nonzero(chosen)[1].reshape(len(magnitudes), kept))


def _packed_places(places: torch.Tensor) -> torch.Tensor:
    """Two places of 12 bits in three bytes; an odd one is followed by a zero."""
    pairs = torch.nn.functional.pad(places, (0, len(places) % 2)).view(-1, 2)
    first, second = pairs[:, 0], pairs[:, 1]
    return torch.stack([first & 255, (first >> 8) + ((second & 15) << 4), second >> 4], 1).to(torch.uint8).view(-1)


def _unpacked_places(found: torch.Tensor) -> torch.Tensor:
    triples = found.view(-1, 3).long()
    low, middle, high = triples[:, 0], triples[:, 1], triples[:, 2]
    return torch.stack([low + ((middle & 15) << 8), (middle >> 4) + (high << 4)], 1).view(-1)


def _packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Four codes of two bits in a byte, one from each quarter; the last quarter is filled up with zeros."""
    return _packed(torch.nn.functional.pad(codes, (0, -len(codes) % 4)).view(1, 4, -1)).view(-1)
