"""Packing: a stage's state as bytes and back, and flat sums cut into chunks. No pickle: tensors as safetensors, the rest as JSON."""

from typing import Any

import msgspec
import torch
from safetensors.torch import load, save
from torch import Tensor

from atoll.errors import JobFailedError

__all__ = ["chunk_range", "pack", "unpack"]

_REST = "atoll.rest"


def chunk_range(length: int, chunks: int, chunk: int) -> tuple[int, int]:
    """Where a chunk begins and ends; chunks differ by one at most."""
    return length * chunk // chunks, length * (chunk + 1) // chunks


def pack(value: Any) -> Tensor:
    """Nested dicts, lists and tuples of tensors and plain values, as a tensor of bytes."""
    tensors: dict[str, Tensor] = {}

    def take(item: Any) -> Any:
        if isinstance(item, Tensor):
            tensors[str(len(tensors))] = item.detach().cpu().contiguous().clone()
            return {"tensor": len(tensors) - 1}
        if isinstance(item, dict):
            return {"items": [[take(key), take(inner)] for key, inner in item.items()]}
        if isinstance(item, (list, tuple)):
            return {"list" if isinstance(item, list) else "tuple": [take(inner) for inner in item]}
        if item is None or isinstance(item, (bool, int, float, str)):
            return {"is": item} if not isinstance(item, float) else {"float": item.hex()}
        raise JobFailedError(f"a {type(item).__qualname__} in the state of the optimizer or the schedule cannot be sent to other machines")

    rest = msgspec.json.encode(take(value))
    tensors[_REST] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
    return torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)


def unpack(packed: Tensor) -> Any:
    """What was packed."""
    tensors = load(packed.contiguous().numpy().tobytes())

    def give(item: Any) -> Any:
        (kind, inner), *_ = item.items()
        match kind:
            case "tensor":
                return tensors[str(inner)]
            case "items":
                return {give(key): give(one) for key, one in inner}
            case "list":
                return [give(one) for one in inner]
            case "tuple":
                return tuple(give(one) for one in inner)
            case "float":
                return float.fromhex(inner)
            case _:
                return inner

    return give(msgspec.json.decode(tensors[_REST].numpy().tobytes()))
