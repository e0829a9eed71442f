"""Tensors as bytes and back: no pickle, and no copy where the tensor lies contiguous in the host's memory."""

import math
import sys
from typing import Any

import torch

from atoll.errors import FabricError, FrameError
from atoll.fabric.headers import TensorHeader

__all__ = ["DTYPES", "allocate", "tensor_bytes", "tensor_header", "tensor_size"]

_NAMES = (
    "float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu",
    "complex32", "complex64", "complex128", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""What travels, by name."""

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_header(tensor: torch.Tensor) -> TensorHeader:
    """How a tensor is announced; FabricError if it is of a kind that does not travel."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.dtype not in _DTYPE_NAMES:
        raise FabricError(f"a tensor of {tensor.dtype}, {tensor.layout}, cannot be sent; send its parts as dense tensors")
    if tensor.device.type == "meta":
        raise FabricError("a tensor on the meta device has no values to send; materialise it first")
    return TensorHeader(_DTYPE_NAMES[tensor.dtype], tuple(tensor.shape))


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The tensor's bytes in order. The same memory where it lies contiguous on the host; the sender must then leave it alone until sent."""
    assert sys.byteorder == "little", "tensors travel in little-endian order"
    if not tensor.numel():
        return memoryview(b"")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))  # one element may be contiguous whatever its stride, which `view` does not accept
    return _view(flat.view(torch.uint8))


def _view(plain: torch.Tensor) -> memoryview:
    """The memory of a flat tensor of bytes."""
    array: Any = plain.numpy()  # NumPy's stubs know the buffer protocol only from Python 3.12 on
    return memoryview(array)


def tensor_size(header: TensorHeader) -> int:
    """Bytes of an announced tensor; FrameError if there is no such tensor."""
    dtype = DTYPES.get(header.dtype)
    if dtype is None:
        raise FrameError(f"a tensor of unknown dtype {header.dtype!r}")
    return math.prod(header.shape) * dtype.itemsize


def allocate(header: TensorHeader) -> tuple[torch.Tensor, memoryview]:
    """Memory for an announced tensor, and the view its bytes go to. The caller has checked the size."""
    dtype = DTYPES[header.dtype]
    try:
        if not math.prod(header.shape):
            return torch.empty(header.shape, dtype=dtype), memoryview(bytearray())
        buffer = torch.empty(math.prod(header.shape) * dtype.itemsize, dtype=torch.uint8)
        return buffer.view(dtype).reshape(header.shape), _view(buffer)
    except (RuntimeError, TypeError) as error:  # a shape PyTorch cannot represent; out of memory
        raise FrameError(f"a tensor of shape {list(header.shape)} cannot be made: {str(error).splitlines()[0]}") from None
