"""bf16 and fp16: half of fp32's bytes, rounded to nearest, ties to even.

|x - x̂| ≤ 2⁻⁸·|x| for bf16; for fp16 ≤ max(2⁻¹¹·|x|, 2⁻²⁵), because fp16 is even in steps below 6·10⁻⁵.
"""

from typing import ClassVar

import torch

from atoll.codec.blocks import BlockCodec, work_dtype
from atoll.codec.chunks import BLOCK, row_chunks

__all__ = ["Bf16", "Fp16"]


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
