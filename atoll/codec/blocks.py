"""Block-wise codecs, 256 elements at a time: bf16, fp16, int8 and int4; `two_bit.py` has the narrowest.

A block with NaN, Inf or values outside the codec's range goes beside the others as it is: nothing is poisoned, nothing is lost.

bf16 and fp16: half of fp32's bytes, rounded to nearest, ties to even. |x - x̂| ≤ 2⁻⁸·|x| for bf16; for fp16 ≤ max(2⁻¹¹·|x|, 2⁻²⁵), because
fp16 is even in steps below 6·10⁻⁵. int8 and int4: every block becomes small integers and one fp32 scale. With m the largest magnitude of a
block, |x - x̂| ≤ m/254 for int8 and m/14 for int4 (and float rounding: a factor of 1 + 2⁻¹⁶).

Every step of a codec is one PyTorch operator. Over a whole tensor each would read and write main memory; over a chunk of rows, one block
each, that stays in cache only the first read and the last write do. A chunk is large enough that the operators' own start-up costs little.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

import msgspec
import torch

from atoll.codec.base import Codec, EncodedPart, Given, Header, Parts, dtype_of
from atoll.errors import CodecError

__all__ = ["Bf16", "Fp16", "Int4", "Int8"]

BLOCK = 256
"""Elements that share one scale; part of the wire format."""

_ROWS = 512
"""Half a megabyte of fp32: of 63 to 511 rows the largest were the fastest on processors with 512 KB of second-level cache a core."""


def chunk_rows(device: torch.device) -> int:
    """How many blocks to work on at once; GPUs take all."""
    return _ROWS if device.type == "cpu" else 2**22


def block_count(elements: int) -> int:
    """Blocks of a tensor, the last one perhaps not full."""
    return -(-elements // BLOCK)


def as_blocks(flat: torch.Tensor) -> torch.Tensor:
    """The full blocks of a flat tensor: (blocks, BLOCK), a view."""
    return flat[: flat.numel() // BLOCK * BLOCK].view(-1, BLOCK)


def padded_tail(flat: torch.Tensor) -> torch.Tensor | None:
    """The last block where it is not full, filled up with zeros: (1, BLOCK), a copy."""
    rest = flat.numel() % BLOCK
    if not rest:
        return None
    tail = flat.new_zeros(1, BLOCK)
    tail[0, :rest] = flat[-rest:]
    return tail


def row_chunks(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, ...]]:
    """The same rows of several tensors, a chunk at a time. Tensors may have more rows than the first one has; those are left out."""
    first = tensors[0]
    if not first.shape[0]:
        return
    rows = chunk_rows(first.device)
    yield from zip(*(torch.split(tensor[: first.shape[0]], rows) for tensor in tensors), strict=True)


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a codec computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockCodec(Codec):
    """A codec that writes the same number of codes for every block of 256 elements; the last block is filled up with zeros."""

    code_dtype: ClassVar[torch.dtype]
    codes_per_block: ClassVar[int]
    scaled: ClassVar[bool]  # every block has scales
    scales_per_block: ClassVar[int] = 1
    scale_dtype: ClassVar[torch.dtype] = torch.float32
    marks_per_block: ClassVar[int] = 1
    smallest: ClassVar[float]  # largest magnitudes of a block between these (or 0) can be encoded
    largest: ClassVar[float]

    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header:
        return Header(codec=self.name, dtype=dtype, shape=shape)

    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        flat = given.tensor.view(-1)
        blocks = block_count(flat.numel())
        marks = flat.new_empty((blocks, self.marks_per_block), dtype=work_dtype(flat.dtype))
        peaks = marks[:, :1]
        codes = given.room((blocks, self.codes_per_block), self.code_dtype)
        self.encode_rows(as_blocks(flat), marks, codes)
        if (tail := padded_tail(flat)) is not None:
            self.encode_rows(tail, marks[-1:], codes[-1:])
        exact = (((peaks < self.smallest) & (peaks != 0)) | ~(peaks <= self.largest)).view(-1).nonzero().view(-1)
        parts = {"exact_index": exact, "exact_values": _gather_blocks(flat, exact), "codes": codes}
        if exact.numel():  # what rows were made of NaN is not the same everywhere
            codes[exact], marks[exact] = 0, 0
        if self.scaled:
            parts["scales"] = self.scales(marks).to(self.scale_dtype)
        return msgspec.structs.replace(header, exact_blocks=exact.numel()), parts

    @classmethod
    def parts(cls, header: Header) -> tuple[EncodedPart, ...]:
        blocks = block_count(header.elements)
        if not 0 <= header.exact_blocks <= blocks:
            raise CodecError(f"{cls.name}: a header announces {header.exact_blocks} exact blocks of {blocks}")
        found = [
            EncodedPart("exact_index", torch.int64, header.exact_blocks),
            EncodedPart("exact_values", dtype_of(header), header.exact_blocks * BLOCK),
            *([EncodedPart("scales", cls.scale_dtype, blocks * cls.scales_per_block)] if cls.scaled else []),
            EncodedPart("codes", cls.code_dtype, blocks * cls.codes_per_block),
        ]
        return tuple(sorted(found, key=lambda part: -part.dtype.itemsize))

    @classmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: torch.Tensor) -> None:
        if not flat.is_floating_point():
            raise CodecError(f"{cls.name}: a header announces {header.dtype}, which travels as it is")
        blocks = block_count(header.elements)
        codes = parts["codes"].view(blocks, cls.codes_per_block)
        scales = parts["scales"].view(blocks, cls.scales_per_block) if cls.scaled else codes[:, :1]
        cls.decode_rows(codes, scales, as_blocks(flat))
        if rest := flat.numel() % BLOCK:
            tail = flat.new_empty(1, BLOCK)
            cls.decode_rows(codes[-1:], scales[-1:], tail)
            flat[-rest:] = tail[0, :rest]
        _put_blocks(flat, _checked(parts["exact_index"], blocks, cls.name), parts["exact_values"].view(-1, BLOCK))

    @abstractmethod
    def encode_rows(self, rows: torch.Tensor, marks: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the largest magnitude of each row (NaN if it has one) and the row's codes, which may be anything for rows out of range.

        `marks` has `marks_per_block` columns; the magnitude is the first, what else a codec's scales are made of follows it.
        """

    @staticmethod
    def scales(marks: torch.Tensor) -> torch.Tensor:
        """What codes stand for, from the marks of each block; of those that have one scale, what a code of 1 stands for."""
        return marks

    @classmethod
    @abstractmethod
    def decode_rows(cls, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        """Write the rows that codes and scales stand for."""


def _gather_blocks(flat: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Blocks of a flat tensor by index, the last one filled up with zeros."""
    if not index.numel():
        return flat.new_empty(0)
    full = flat.numel() // BLOCK
    found = flat.new_zeros(index.numel(), BLOCK)
    inside = index < full
    found[inside] = as_blocks(flat)[index[inside]]
    if not inside[-1]:
        found[-1, : flat.numel() % BLOCK] = flat[full * BLOCK :]
    return found


def _put_blocks(flat: torch.Tensor, index: torch.Tensor, values: torch.Tensor) -> None:
    if not index.numel():
        return
    full = flat.numel() // BLOCK
    inside = index < full
    as_blocks(flat)[index[inside]] = values[inside]
    if not inside[-1]:
        flat[full * BLOCK :] = values[-1, : flat.numel() % BLOCK]


def _checked(index: torch.Tensor, blocks: int, name: str) -> torch.Tensor:
    """Block numbers that arrived: inside the tensor and in ascending order."""
    if index.numel() and (int(index[0]) < 0 or int(index[-1]) >= blocks or not bool((index[1:] > index[:-1]).all())):
        raise CodecError(f"{name}: the numbers of exact blocks that arrived are not ascending or beyond the tensor's {blocks} blocks")
    return index


class _Half(BlockCodec):
    codes_per_block = BLOCK
    scaled = False
    smallest = 0.0

    def encode_rows(self, rows: torch.Tensor, peaks: torch.Tensor, codes: torch.Tensor) -> None:
        scratch = rows.new_empty(0, dtype=work_dtype(rows.dtype))
        for source, peak, code in row_chunks((rows, peaks, codes)):
            if scratch.shape != source.shape:
                scratch = source.new_empty(source.shape, dtype=scratch.dtype)
            magnitudes = torch.abs(source, out=scratch) if source.dtype == scratch.dtype else scratch.copy_(source).abs_()
            torch.amax(magnitudes, 1, keepdim=True, out=peak)
            code.copy_(source)

    @classmethod
    def decode_rows(cls, codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor) -> None:
        for row, code in row_chunks((rows, codes)):
            row.copy_(code)


class Bf16(_Half):
    """`bf16`: fp32's range with 8 bits of precision."""

    name = "bf16"
    code_dtype = torch.bfloat16
    largest: ClassVar[float] = torch.finfo(torch.bfloat16).max


class Fp16(_Half):
    """`fp16`: 11 bits of precision for magnitudes between 6·10⁻⁵ and 65504; blocks with larger ones travel exactly."""

    name = "fp16"
    code_dtype = torch.float16
    largest: ClassVar[float] = torch.finfo(torch.float16).max


SMALLEST, LARGEST = 2.0**-100, 2.0**126
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
        torch.clamp_min(peak, SMALLEST, out=self._inverse)
        torch.div(self._levels, self._inverse, out=self._inverse)
        return torch.mul(source, self._inverse, out=self._scaled).round_()


class _Integers(BlockCodec):
    code_dtype = torch.int8
    scaled = True
    smallest: ClassVar[float] = SMALLEST
    largest: ClassVar[float] = LARGEST


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
