"""A batch of any make on a device."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["Batch", "to_device"]

Batch: TypeAlias = Any  # whatever collate_fn makes of samples: tensors in dicts, lists, tuples…


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor in it on the device; dicts, lists, tuples, dataclasses and things with a `.to` method are followed."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping) and not hasattr(batch, "to"):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = {field.name: to_device(getattr(batch, field.name), device) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **fields)
    return batch.to(device) if hasattr(batch, "to") else batch
