"""Block-wise codecs: 256 elements at a time, and blocks that a narrow type cannot hold travel exactly.

A block with NaN, Inf or values outside the codec's range goes beside the others as it is: nothing is poisoned, nothing is lost.
"""

from abc import abstractmethod
from typing import ClassVar

import msgspec
import torch

from atoll.codec.base import Codec, Given, Parts
from atoll.codec.chunks import BLOCK, as_blocks, block_count, padded_tail
from atoll.codec.encoded import Header, Part, dtype_of
from atoll.errors import CodecError

__all__ = ["BlockCodec", "work_dtype"]


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a codec computes in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class BlockCodec(Codec):
    """A codec that writes the same number of codes for every block of 256 elements; the last block is filled up with zeros."""

    code_dtype: ClassVar[torch.dtype]
    codes_per_block: ClassVar[int]
    scaled: ClassVar[bool]  # every block has an fp32 scale
    smallest: ClassVar[float]  # largest magnitudes of a block between these (or 0) can be encoded
    largest: ClassVar[float]

    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header:
        return Header(codec=self.name, dtype=dtype, shape=shape)

    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        flat = given.tensor.view(-1)
        blocks = block_count(flat.numel())
        peaks = flat.new_empty((blocks, 1), dtype=work_dtype(flat.dtype))
        codes = given.room((blocks, self.codes_per_block), self.code_dtype)
        self.encode_rows(as_blocks(flat), peaks, codes)
        if (tail := padded_tail(flat)) is not None:
            self.encode_rows(tail, peaks[-1:], codes[-1:])
        exact = (((peaks < self.smallest) & (peaks != 0)) | ~(peaks <= self.largest)).view(-1).nonzero().view(-1)
        parts = {"exact_index": exact, "exact_values": _gather_blocks(flat, exact), "codes": codes}
        if exact.numel():  # what rows were made of NaN is not the same everywhere
            codes[exact], peaks[exact] = 0, 0
        if self.scaled:
            parts["scales"] = self.scales(peaks).to(torch.float32)
        return msgspec.structs.replace(header, exact_blocks=exact.numel()), parts

    @classmethod
    def parts(cls, header: Header) -> tuple[Part, ...]:
        blocks = block_count(header.elements)
        if not 0 <= header.exact_blocks <= blocks:
            raise CodecError(f"{cls.name}: a header announces {header.exact_blocks} exact blocks of {blocks}")
        found = [
            Part("exact_index", torch.int64, header.exact_blocks),
            Part("exact_values", dtype_of(header), header.exact_blocks * BLOCK),
            *([Part("scales", torch.float32, blocks)] if cls.scaled else []),
            Part("codes", cls.code_dtype, blocks * cls.codes_per_block),
        ]
        return tuple(sorted(found, key=lambda part: -part.dtype.itemsize))

    @classmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: torch.Tensor) -> None:
        if not flat.is_floating_point():
            raise CodecError(f"{cls.name}: a header announces {header.dtype}, which travels as it is")
        blocks = block_count(header.elements)
        codes = parts["codes"].view(blocks, cls.codes_per_block)
        scales = parts["scales"].view(blocks, 1) if cls.scaled else codes[:, :1]
        cls.decode_rows(codes, scales, as_blocks(flat))
        if rest := flat.numel() % BLOCK:
            tail = flat.new_empty(1, BLOCK)
            cls.decode_rows(codes[-1:], scales[-1:], tail)
            flat[-rest:] = tail[0, :rest]
        _put_blocks(flat, _checked(parts["exact_index"], blocks, cls.name), parts["exact_values"].view(-1, BLOCK))

    @abstractmethod
    def encode_rows(self, rows: torch.Tensor, peaks: torch.Tensor, codes: torch.Tensor) -> None:
        """Write the largest magnitude of each row (NaN if it has one) and the row's codes, which may be anything for rows out of range."""

    @staticmethod
    def scales(peaks: torch.Tensor) -> torch.Tensor:
        """What a code of 1 stands for, from the largest magnitude of each block."""
        return peaks

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
