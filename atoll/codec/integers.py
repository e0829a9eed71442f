"""int8 and int4: every block of 256 elements becomes small integers and one fp32 scale.

With m the largest magnitude of a block, |x - x̂| ≤ m/254 for int8 and m/14 for int4 (and float rounding: a factor of 1 + 2⁻¹⁶).
"""

from typing import ClassVar

import torch

from atoll.codec.blocks import BlockCodec, work_dtype
from atoll.codec.chunks import BLOCK, row_chunks

__all__ = ["Int4", "Int8"]

_SMALLEST, _LARGEST = 2.0**-100, 2.0**126
"""Largest magnitudes for which the scale, its inverse and every product are ordinary fp32 numbers, with room to spare."""


class _Quantiser:
    """Buffers for the steps from a chunk to whole numbers, made once and used for every chunk of the same size."""

    def __init__(self, source: torch.Tensor, levels: float) -> None:
        work = work_dtype(source.dtype)
        self.shape = source.shape
        self._converted = source.new_empty(source.shape, dtype=work) if source.dtype != work else None
        self._scaled = source.new_empty(source.shape, dtype=work)
        self._inverse = source.new_empty((source.shape[0], 1), dtype=work)
        self._levels = torch.full_like(self._inverse, levels)

    def whole_numbers(self, source: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
        """Write the largest magnitudes of the rows; return the rows divided by them, times the levels, rounded. Valid until the next call.

        One operator after the other, each exact or correctly rounded: fused ones would round differently on different processors.
        """
        if self._converted is not None:
            source = self._converted.copy_(source)
        torch.abs(source, out=self._scaled)
        torch.amax(self._scaled, 1, keepdim=True, out=peak)
        torch.clamp_min(peak, _SMALLEST, out=self._inverse)
        torch.div(self._levels, self._inverse, out=self._inverse)
        return torch.mul(source, self._inverse, out=self._scaled).round_()


class _Integers(BlockCodec):
    code_dtype = torch.int8
    scaled = True
    smallest: ClassVar[float] = _SMALLEST
    largest: ClassVar[float] = _LARGEST


class Int8(_Integers):
    """`int8`: -127 … 127 times the scale; about a quarter of fp32's bytes."""

    name = "int8"
    codes_per_block = BLOCK

    def encode_rows(self, rows: torch.Tensor, peaks: torch.Tensor, codes: torch.Tensor) -> None:
        quantiser = None
        for source, peak, code in row_chunks((rows, peaks, codes)):
            if quantiser is None or quantiser.shape != source.shape:
                quantiser = _Quantiser(source, 127.0)
            code.copy_(quantiser.whole_numbers(source, peak))

    @staticmethod
    def scales(peaks: torch.Tensor) -> torch.Tensor:
        return peaks / 127

    @classmethod
    def decode_rows(cls, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        scratch = scales.new_empty(0)
        for row, code, scale in row_chunks((rows, codes, scales)):
            if scratch.shape != row.shape:
                scratch = scales.new_empty(row.shape)
            _multiply(scratch.copy_(code), scale, row)


class Int4(_Integers):
    """`int4`: -7 … 7 times the scale; about an eighth of fp32's bytes.

    A byte is a + 16·b, with a from the first half of the block and b from the second, so that no operator works on single nibbles.
    """

    name = "int4"
    codes_per_block = BLOCK // 2

    def encode_rows(self, rows: torch.Tensor, peaks: torch.Tensor, codes: torch.Tensor) -> None:
        quantiser, halves = None, codes
        for source, peak, code in row_chunks((rows, peaks, codes)):
            if quantiser is None or quantiser.shape != source.shape:
                quantiser = _Quantiser(source, 7.0)
                halves = codes.new_empty(source.shape[0], 2, BLOCK // 2)
            halves.view(source.shape).copy_(quantiser.whole_numbers(source, peak))
            torch.add(halves[:, 0], halves[:, 1], alpha=16, out=code)

    @staticmethod
    def scales(peaks: torch.Tensor) -> torch.Tensor:
        return peaks / 7

    @classmethod
    def decode_rows(cls, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        halves = codes.new_empty(0, 2, BLOCK // 2)
        scratch = scales.new_empty(0)
        for row, code, scale in row_chunks((rows, codes, scales)):
            if halves.shape[0] != code.shape[0]:
                halves = codes.new_empty(code.shape[0], 2, BLOCK // 2)
                scratch = scales.new_empty(row.shape)
            low, high = halves[:, 0], halves[:, 1]
            torch.add(code, 8, out=high).bitwise_right_shift_(4)
            torch.sub(code, high, alpha=16, out=low)
            _multiply(scratch.copy_(halves.view(row.shape)), scale, row)


def _multiply(numbers: torch.Tensor, scale: torch.Tensor, row: torch.Tensor) -> None:
    if row.dtype == numbers.dtype:
        torch.mul(numbers, scale, out=row)
    else:
        row.copy_(numbers.mul_(scale))
