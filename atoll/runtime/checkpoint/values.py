"""Small values as JSON and back: counters, hyperparameters, schedules, random state. Nothing here can run code when it is read.

JSON has no tuples, dictionaries by number, NaN or tensors; such a value is written as an object with one key that says what it is, like
`{"$tuple": [0.9, 0.999]}`.
"""

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from atoll.errors import CheckpointError

__all__ = ["data_state", "from_plain", "to_plain"]

_LARGEST_BYTES = 2**20  # of a tensor among small values; more belongs with the tensors


def data_state(state: Mapping[str, Any] | None) -> Any:
    """Where a stream is (`StreamState`), as a checkpoint keeps it; None where it does not say."""
    return None if state is None or state["state"] is None else to_plain(dict(state), "the data's state_dict")


def to_plain(value: object, where: str) -> Any:
    """The value as what JSON can say; `where` begins the error when it cannot."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)):
        return _number(value)
    if isinstance(value, (Tensor, np.ndarray, np.generic)):
        return _array(torch.as_tensor(value), where)
    if isinstance(value, (torch.dtype, torch.device)):
        return {f"${type(value).__name__}": str(value).removeprefix("torch.")}
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, Mapping):
        return _mapping(value, where)
    if isinstance(value, (list, tuple, deque, set, frozenset)):
        items = [to_plain(item, f"{where}[{number}]") for number, item in enumerate(value)]
        return items if isinstance(value, list) else {f"${type(value).__name__ if type(value) in _SEQUENCES.values() else 'tuple'}": items}
    raise CheckpointError(f"{where}: a {type(value).__name__} cannot be saved; use numbers, texts, lists, dictionaries and tensors")


def _number(value: int | float) -> Any:
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    return int(value) if -(2**63) <= value < 2**64 else {"$int": str(int(value))}


def _array(tensor: Tensor, where: str) -> Any:
    if tensor.nbytes > _LARGEST_BYTES:
        raise CheckpointError(f"{where}: a tensor of {tensor.nbytes} bytes is too large to be saved among small values")
    raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    kind = str(tensor.dtype).removeprefix("torch.")
    return {"$tensor": [kind, list(tensor.shape), base64.b64encode(raw).decode()]}


def _mapping(value: Mapping[Any, Any], where: str) -> Any:
    plain = isinstance(value, (dict, OrderedDict)) and not isinstance(value, Counter)
    if plain and all(isinstance(key, str) and not key.startswith("$") for key in value):
        return {key: to_plain(item, f"{where}.{key}") for key, item in value.items()}
    pairs = [[to_plain(key, where), to_plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
    return {"$Counter" if isinstance(value, Counter) else "$dict": pairs}


def from_plain(value: Any, where: str) -> Any:
    """The value that `to_plain` wrote."""
    if isinstance(value, list):
        return [from_plain(item, where) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and next(iter(value)).startswith("$"):
        kind, content = next(iter(value.items()))
        try:
            return _special(kind[1:], content, where)
        except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
            raise CheckpointError(f"{where}: cannot read a {kind[1:]!r}: {error}") from error
    return {key: from_plain(item, f"{where}.{key}") for key, item in value.items()}


_SEQUENCES: dict[str, type[Any]] = {"tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def _special(kind: str, content: Any, where: str) -> Any:
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](from_plain(item, where) for item in content)
    if kind in ("dict", "Counter"):
        pairs = {from_plain(key, where): from_plain(item, where) for key, item in content}
        return Counter(pairs) if kind == "Counter" else pairs
    if kind == "float":
        return float(content)
    if kind == "int":
        return int(content)
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "device":
        return torch.device(content)
    if kind == "dtype":
        return _dtype(content)
    if kind == "tensor":
        name, shape, text = content
        raw = bytearray(base64.b64decode(text, validate=True))
        flat = torch.frombuffer(raw, dtype=_dtype(name)) if raw else torch.empty(0, dtype=_dtype(name))
        return flat.reshape(shape).clone()
    raise CheckpointError(f"{where}: unknown kind of value {kind!r}; was it written by a later Atoll?")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is not a dtype")
    return found
