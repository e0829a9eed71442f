"""Top logits: of every row the k largest values and what the others are on average, which is what a softmax of it needs.

Made for logits that one model learns from another: a row is a position, its last dimension the vocabulary. What arrives is the row up to a
constant, which a softmax does not see: the largest value is 0, the next k - 1 have 8 bits each of the distance between it and the k-th,
and all others have one value, so that their probabilities add up to what they did. An index takes as many bits as the vocabulary needs.
"""

import numpy as np
import torch
from torch import Tensor

from atoll.codec import CodecSpec
from atoll.codec.base import Codec, EncodedPart, Given, Header, Parts
from atoll.errors import CodecError, NonFiniteTensorError

__all__ = ["TopLogits"]

_LEVELS = 255.0
_FARTHEST = 128.0  # below the largest; a probability of e⁻¹²⁸ is none
_CHUNK = 2**20


class TopLogits(Codec):
    """`top-logits:16`: so many values of every row of the last dimension. NaN and +Inf are refused; -Inf is a probability of nothing."""

    name = "top-logits"

    def __init__(self, kept: int) -> None:
        if not 1 <= kept <= 4096:
            raise CodecError(f"top-logits keeps from 1 to 4096 values of a row, got {kept}")
        self.kept = kept

    @property
    def text(self) -> str:
        return f"{self.name}:{self.kept}"

    @property
    def spec(self) -> CodecSpec:
        """There is none: what it takes and loses depends on the vocabulary, so no plan or controller chooses it."""
        raise CodecError("top-logits: what it takes of a tensor depends on its last dimension; it is for logits alone")

    def _ordinary_header(self, shape: tuple[int, ...], dtype: str) -> Header | None:
        if not shape or shape[-1] <= self.kept:
            return None
        return Header(codec=self.name, dtype=dtype, shape=shape, kept=self.kept)

    def _encode(self, header: Header, given: Given) -> tuple[Header, dict[str, Tensor]]:
        rows = given.tensor.view(-1, header.shape[-1])
        pieces = [_encoded_rows(chunk, header.kept) for chunk in torch.split(rows, max(1, _CHUNK // header.shape[-1]))]
        codes, indices, scales, rests = (torch.cat(found) for found in zip(*pieces, strict=True))
        packed = _packed(indices, _index_bits(header))
        return header, {"scales": scales, "rests": rests, "codes": codes, "indices": packed}

    @classmethod
    def parts(cls, header: Header) -> tuple[EncodedPart, ...]:
        if not header.shape or not 1 <= header.kept < header.shape[-1]:
            raise CodecError(f"top-logits: a header keeps {header.kept} values of rows of a tensor {list(header.shape)}")
        rows = header.elements // header.shape[-1]
        return (
            EncodedPart("scales", torch.float16, rows),
            EncodedPart("rests", torch.float16, rows),
            EncodedPart("codes", torch.uint8, rows * (header.kept - 1)),
            EncodedPart("indices", torch.uint8, -(-rows * header.kept * _index_bits(header) // 8)),
        )

    @classmethod
    def decode_flat(cls, header: Header, parts: Parts, flat: Tensor) -> None:
        columns, kept = header.shape[-1], header.kept
        scales, rests = (parts[name].float().unsqueeze(1) for name in ("scales", "rests"))
        if not (bool(scales.isfinite().all()) and bool(rests.isfinite().all())):
            raise CodecError("top-logits: a scale that arrived is not finite")
        indices = _unpacked(parts["indices"].cpu(), len(scales) * kept, _index_bits(header)).view(-1, kept).to(flat.device)
        if int(indices.max()) >= columns:
            raise CodecError(f"top-logits: an index that arrived is beyond the {columns} values of a row")
        values = torch.zeros(len(scales), kept, device=flat.device)
        values[:, 1:] = -parts["codes"].view(len(scales), kept - 1).float() * scales
        rows = flat.view(-1, columns)
        rows.copy_(rests.expand(-1, columns))
        rows.scatter_(1, indices, values.to(flat.dtype))


def _index_bits(header: Header) -> int:
    return max(1, (header.shape[-1] - 1).bit_length())


def _encoded_rows(rows: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes of all kept values but the largest, indices of all, scales, and what the others are on average."""
    work = rows.to(torch.float64 if rows.dtype == torch.float64 else torch.float32)
    largest = work.amax(1, keepdim=True)
    if not bool(largest.isfinite().all()):  # NaN is larger than everything
        raise NonFiniteTensorError("top-logits: a row has NaN, +Inf or nothing but -Inf; send it with a block-wise codec or none")
    below = (largest - work).clamp_(max=_FARTHEST)
    distances, indices = torch.topk(below, kept, dim=1, largest=False, sorted=True)
    scales = (distances[:, -1:] / _LEVELS).to(torch.float16)
    steps = torch.where(scales > 0, scales.to(work.dtype), 1.0)
    codes = (distances[:, 1:] / steps).round_().clamp_(max=_LEVELS).to(torch.uint8)
    others = (-below).scatter_(1, indices, -torch.inf).logsumexp(1) - float(np.log(rows.shape[1] - kept))
    return codes.reshape(-1), indices.reshape(-1), scales.view(-1), others.to(torch.float16)


def _packed(indices: Tensor, bits: int) -> Tensor:
    """So many bits of each, the highest first."""
    places = np.arange(bits - 1, -1, -1)
    planes = (indices.cpu().numpy()[:, None] >> places) & 1
    return torch.from_numpy(np.packbits(planes.astype(np.uint8).reshape(-1)))


def _unpacked(packed: Tensor, count: int, bits: int) -> Tensor:
    planes = np.unpackbits(packed.numpy(), count=count * bits).reshape(count, bits)
    found = np.zeros(count, dtype=np.int64)
    for place in range(bits):
        found = (found << 1) | planes[:, place]
    return torch.from_numpy(found)
