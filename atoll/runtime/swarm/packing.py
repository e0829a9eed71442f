"""Packing: a stage's state as bytes and back, and flat sums cut into chunks. No pickle: the nesting as JSON, then the tensors' bytes."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.errors import JobFailedError

__all__ = ["Packing", "chunk_range", "pack", "unpack"]

_MAGIC = b"atoll-1\n"  # grows when the format changes
_SIZE = 8  # of the number before the JSON: its length


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    """A tensor among the bytes."""

    dtype: str
    shape: tuple[int, ...]
    start: int  # after the JSON


def chunk_range(length: int, chunks: int, chunk: int) -> tuple[int, int]:
    """Where a chunk begins and ends; chunks differ by one at most."""
    return length * chunk // chunks, length * (chunk + 1) // chunks


class Packing:
    """Nested dicts, lists and tuples of tensors and plain values as bytes, read in any order and copied only then.

    What the tensors hold must not change before the last byte is read.
    """

    def __init__(self, value: Any) -> None:
        self._tensors: list[Tensor] = []
        self._stored: list[_Stored] = []
        self._end = 0
        described = msgspec.json.encode((self._take(value), self._stored))
        head = _MAGIC + len(described).to_bytes(_SIZE, "little") + described
        self._pieces = [(0, torch.frombuffer(bytearray(head), dtype=torch.uint8))]
        self._pieces += [(len(head) + at.start, tensor) for at, tensor in zip(self._stored, self._tensors, strict=True)]
        self.length = len(head) + self._end

    def _take(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            self._stored.append(_Stored(str(item.dtype).removeprefix("torch."), tuple(item.shape), self._end))
            self._tensors.append(item.detach().resolve_conj().resolve_neg())
            self._end += item.numel() * item.element_size()
            return {"tensor": len(self._tensors) - 1}
        if isinstance(item, dict):
            return {"items": [[self._take(key), self._take(inner)] for key, inner in item.items()]}
        if isinstance(item, (list, tuple)):
            return {"list" if isinstance(item, list) else "tuple": [self._take(inner) for inner in item]}
        if item is None or isinstance(item, (bool, int, float, str)):
            return {"is": item} if not isinstance(item, float) else {"float": item.hex()}
        raise JobFailedError(f"a {type(item).__qualname__} in the state of the optimizer or the schedule cannot be sent to other machines")

    def read(self, start: int, stop: int) -> Tensor:
        """A copy of some of the bytes."""
        found = torch.empty(stop - start, dtype=torch.uint8)
        for at, tensor in self._pieces:
            first, end = max(start, at), min(stop, at + tensor.numel() * tensor.element_size())
            if first < end:
                found[first - start : end - start] = tensor.reshape(-1).view(torch.uint8)[first - at : end - at]
        return found


def pack(value: Any) -> Tensor:
    """All bytes of it."""
    packing = Packing(value)
    return packing.read(0, packing.length)


def unpack(packed: Tensor) -> Any:
    """What was packed. Its tensors are copies."""
    try:
        return _unpacked(packed)
    except (msgspec.MsgspecError, ValueError, LookupError, TypeError, AttributeError, RecursionError, RuntimeError) as error:
        raise JobFailedError(f"a stage's state cannot be read; it is damaged, or of another version of Atoll ({error})") from error


def _unpacked(packed: Tensor) -> Any:
    begin = len(_MAGIC) + _SIZE
    if packed[: len(_MAGIC)].numpy().tobytes() != _MAGIC:
        raise ValueError("it does not begin as one")
    length = int.from_bytes(packed[len(_MAGIC) : begin].numpy().tobytes(), "little")
    nested, listed = msgspec.json.decode(packed[begin : begin + length].numpy().data)
    begin += length
    tensors = [_tensor(packed[begin:], stored) for stored in msgspec.convert(listed, list[_Stored])]
    return _give(nested, tensors)


def _tensor(content: Tensor, stored: _Stored) -> Tensor:
    dtype = getattr(torch, stored.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"tensors of {stored.dtype}, which this version of PyTorch does not know")
    size = math.prod(stored.shape) * dtype.itemsize
    if min(stored.shape, default=0) < 0 or stored.start < 0 or stored.start + size > content.numel():
        raise ValueError("a tensor is not all there")
    found = torch.empty(stored.shape, dtype=dtype)
    found.reshape(-1).view(torch.uint8).copy_(content[stored.start : stored.start + size])
    return found


def _give(item: Any, tensors: Sequence[Tensor]) -> Any:
    (kind, inner), *_ = item.items()
    match kind:
        case "tensor":
            return tensors[inner]
        case "items":
            return {_give(key, tensors): _give(one, tensors) for key, one in inner}
        case "list":
            return [_give(one, tensors) for one in inner]
        case "tuple":
            return tuple(_give(one, tensors) for one in inner)
        case "float":
            return float.fromhex(inner)
        case _:
            return inner
