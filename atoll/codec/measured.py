"""Measured error: how far a decoded tensor is from what was encoded."""

import math

import torch

from atoll.codec.base import Codec
from atoll.errors import CodecError

__all__ = ["relative_error", "sampled_error"]

_CHUNK = 2**16


def relative_error(original: torch.Tensor, decoded: torch.Tensor) -> float:
    """Root mean square of the difference over that of the original, over finite elements; 0 where nothing differs."""
    if original.shape != decoded.shape:
        raise CodecError(f"a tensor {list(original.shape)} cannot be compared with one {list(decoded.shape)}")
    lost = whole = 0.0
    flat = (tensor.detach().reshape(-1) for tensor in (original, decoded))
    for before, after in zip(*(torch.split(tensor, _CHUNK) for tensor in flat), strict=True):
        exact = before.to(torch.float64)
        finite = exact.isfinite()
        whole += float(exact[finite].square().sum())
        lost += float((exact - after.to(torch.float64))[finite].square().sum())
    return math.sqrt(lost / whole) if whole else (0.0 if not lost else math.inf)


def sampled_error(codec: Codec, tensor: torch.Tensor, elements: int = 2**16) -> float:
    """The codec's error on some of the tensor, cheap enough to try codecs not in use: rows, or runs of blocks, spread evenly.

    Low rank takes the whole tensor: a smaller matrix would flatter it.
    """
    sample = _sample(tensor.detach(), elements) if codec.local else tensor.detach()
    return relative_error(sample, codec.decode(codec.encode(sample)))


def _sample(tensor: torch.Tensor, elements: int) -> torch.Tensor:
    if tensor.numel() <= elements:
        return tensor
    rows = tensor.reshape(tensor.shape[0], -1) if tensor.dim() > 1 else tensor[: tensor.numel() // 1024 * 1024].view(-1, 1024)
    step = max(1, round(tensor.numel() / elements))
    return rows[::step] if rows.shape[0] >= 2 * step else rows[:, : max(1, elements // rows.shape[0])]
