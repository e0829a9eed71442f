"""Top-k: the values of largest magnitude and where they stand; all others are left out.

Made for gradients with error feedback, where what is left out is sent later. The k values are exact; among equal magnitudes those with the
lowest index are kept, so that the choice is the same everywhere. An index is 16 bits inside its segment of 65536 elements.
"""

import math

import numpy as np
import torch

from atoll.codec import CodecSpec
from atoll.codec.base import Codec, EncodedPart, Given, Header, Parts, dtype_of
from atoll.errors import CodecError, NonFiniteTensorError

__all__ = ["TopK"]

_SEGMENT = 2**16
_CHUNK = 2**17
_SAMPLE = 2**14


class TopK(Codec):
    """`top-k:0.01`: the share of the values that is sent, at least one. Tensors with NaN or Inf are refused."""

    name = "top-k"

    def __init__(self, share: float) -> None:
        if not 0 < share <= 1:
            raise CodecError(f"top-k keeps a share of the values between 0 and 1, got {share}")
        self.share = share

    @property
    def text(self) -> str:
        return f"top-k:{self.share:g}"

    @property
    def spec(self) -> CodecSpec:
        """For fp32 values that are normally distributed: the share of their energy beyond the k-th is what the error says."""
        threshold = _normal_quantile(self.share)
        captured = self.share + 2 * threshold * math.exp(-threshold * threshold / 2) / math.sqrt(2 * math.pi)
        return CodecSpec(
            name=self.text, bits=48 * self.share, memory_passes=13 + 330 * self.share, relative_error=math.sqrt(max(0.0, 1 - captured))
        )

    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header:
        kept = max(1, round(self.share * math.prod(shape)))
        return Header(codec=self.name, dtype=dtype, shape=shape, kept=kept)

    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, torch.Tensor]]:
        flat = given.tensor.view(-1)
        index = _largest(flat, header.kept)
        segments = _segments(header.elements)
        return header, {
            "values": flat[index],
            "counts": torch.bincount(index >> 16, minlength=segments).to(torch.int32),
            "index": ((index & (_SEGMENT - 1)) - _SEGMENT // 2).to(torch.int16),
        }

    @classmethod
    def parts(cls, header: Header) -> tuple[EncodedPart, ...]:
        if not 0 <= header.kept <= header.elements:
            raise CodecError(f"top-k: a header keeps {header.kept} of {header.elements} values")
        found = [
            EncodedPart("values", dtype_of(header), header.kept),
            EncodedPart("counts", torch.int32, _segments(header.elements)),
            EncodedPart("index", torch.int16, header.kept),
        ]
        return tuple(sorted(found, key=lambda part: -part.dtype.itemsize))

    @classmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: torch.Tensor) -> None:
        counts = parts["counts"].long()
        if bool((counts < 0).any()) or int(counts.sum()) != header.kept:
            raise CodecError(f"top-k: the segments' counts that arrived do not add up to {header.kept} values")
        segments = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)
        index = segments * _SEGMENT + parts["index"].long() + _SEGMENT // 2
        if header.kept and (int(index[-1]) >= header.elements or not bool((index[1:] > index[:-1]).all())):
            raise CodecError(f"top-k: the indices that arrived are not ascending or beyond the tensor's {header.elements} values")
        flat.zero_()[index] = parts["values"]


def _segments(elements: int) -> int:
    return -(-elements // _SEGMENT)


def _largest(flat: torch.Tensor, kept: int) -> torch.Tensor:
    """Indices of the `kept` largest magnitudes, ascending; the lowest indices where magnitudes are equal."""
    candidates, magnitudes = _above(flat, _sampled_threshold(flat, kept))
    if candidates.numel() < kept:  # the sample misled: all are candidates
        candidates, magnitudes = _above(flat, -1.0)
    threshold = torch.kthvalue(magnitudes, magnitudes.numel() - kept + 1).values
    chosen = magnitudes > threshold
    equal = (magnitudes == threshold).nonzero().view(-1)
    chosen[equal[: kept - int(chosen.sum())]] = True
    return candidates[chosen]


def _sampled_threshold(flat: torch.Tensor, kept: int) -> float:
    """A magnitude that somewhat more than `kept` values probably reach, from a sample: only a guess, the choice stays exact."""
    step = flat.numel() // _SAMPLE
    if step < 4:
        return -1.0
    sample = flat[::step].abs().to(torch.float64)
    expected = kept / step
    rank = min(sample.numel(), math.ceil(expected + 4 * math.sqrt(expected) + 4))
    return float(torch.kthvalue(sample, sample.numel() - rank + 1).values)


def _above(flat: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices and magnitudes of the values that reach a threshold. Raises where one is NaN or Inf."""
    work = torch.float64 if flat.dtype == torch.float64 else torch.float32
    scratch = flat.new_empty(min(_CHUNK, flat.numel()), dtype=work)
    indices, found = [], []
    for number, chunk in enumerate(torch.split(flat, _CHUNK)):
        magnitudes = scratch[: len(chunk)].copy_(chunk).abs_()
        if not bool(magnitudes.amax() < math.inf):
            raise NonFiniteTensorError(
                f"top-k: the tensor has NaN or Inf among its values {number * _CHUNK} to {number * _CHUNK + len(chunk) - 1}; "
                "skip this step, or send it with a block-wise codec or none"
            )
        index = _reaching(magnitudes, threshold)
        indices.append(index + number * _CHUNK)
        found.append(magnitudes[index])
    return torch.cat(indices), torch.cat(found)


def _reaching(magnitudes: torch.Tensor, threshold: float) -> torch.Tensor:
    """Indices of magnitudes of at least a threshold. NumPy compares and counts five times as fast as PyTorch does on a CPU."""
    if magnitudes.device.type == "cpu":
        return torch.from_numpy(np.flatnonzero(magnitudes.numpy() >= threshold))
    return (magnitudes >= threshold).nonzero().view(-1)


def _normal_quantile(share: float) -> float:
    """The magnitude that this share of normally distributed values exceeds."""
    return float(torch.special.ndtri(torch.tensor(1 - share / 2, dtype=torch.float64))) if share < 1 else 0.0
