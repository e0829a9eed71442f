"""Typed values as messages: msgspec structs in msgpack, with the tensors inside them beside the payload, untouched.

Tensors travel as bytes: no pickle, and no copy where the tensor lies contiguous in the host's memory.
"""

import math
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from atoll.codec.base import DTYPES
from atoll.errors import FabricError, FrameError, RefusedError
from atoll.fabric.frame import CallMessage, TensorHeader
from atoll.privacy.border import Content

__all__ = ["Payload", "allocate", "decode_payload", "encode_payload", "tensor_bytes", "tensor_header", "tensor_size"]

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


_TENSOR = 1  # the code of msgpack's extension type: data is the tensor's place among the message's tensors
_INDEX = struct.Struct("<I")


class Payload(msgspec.Struct, frozen=True):
    """A value ready to be sent: its msgpack bytes, and the tensors that were in it."""

    data: bytes
    tensors: tuple[torch.Tensor, ...] = ()
    headers: tuple[TensorHeader, ...] = ()  # of the tensors
    size_bytes: int = 0
    content: Content | None = None  # what its sender declares it to be

    def header(self, end: bool) -> CallMessage:
        """How it is announced."""
        return CallMessage(len(self.data), self.headers, end)

    def buffers(self) -> list[memoryview]:
        """Its bytes, in the order they travel."""
        return [memoryview(self.data), *(tensor_bytes(tensor) for tensor in self.tensors)]


def encode_payload(value: object, content: Content | None = None) -> Payload:
    """Any value msgspec knows, tensors anywhere inside it; `content` says what they are."""
    tensors: list[torch.Tensor] = []

    def take_tensor(item: object) -> msgspec.msgpack.Ext:
        if not isinstance(item, torch.Tensor):
            raise FabricError(f"a {type(item).__qualname__} cannot be sent; send msgspec structs, plain values and tensors")
        tensors.append(item)
        return msgspec.msgpack.Ext(_TENSOR, _INDEX.pack(len(tensors) - 1))

    try:
        data = msgspec.msgpack.encode(value, enc_hook=take_tensor)
    except (TypeError, OverflowError, RecursionError) as error:
        raise FabricError(f"a {type(value).__qualname__} cannot be sent: {error}") from None
    headers = tuple(map(tensor_header, tensors))
    return Payload(data, tuple(tensors), headers, len(data) + sum(map(tensor_size, headers)), content)


def decode_payload(data: bytes | bytearray | memoryview, tensors: Sequence[torch.Tensor], type_: Any) -> Any:
    """The value, checked to be of `type_`; RefusedError says where it is not."""

    def find_tensor(code: int, place: memoryview) -> torch.Tensor:
        if code != _TENSOR or len(place) != _INDEX.size or _INDEX.unpack(place)[0] >= len(tensors):
            raise ValueError("an extension that is no tensor of this message")
        index: int = _INDEX.unpack(place)[0]
        return tensors[index]

    def check(expected: type, value: object) -> object:
        if isinstance(value, expected):
            return value
        raise ValueError(f"expected {expected.__name__}, got {type(value).__name__}")

    try:
        return msgspec.msgpack.decode(data, type=type_, ext_hook=find_tensor, dec_hook=check)
    except (msgspec.DecodeError, ValueError, TypeError, RecursionError) as error:
        raise RefusedError(f"a message that is no {getattr(type_, '__name__', type_)}: {error}") from None
