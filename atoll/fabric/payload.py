"""Typed values as messages: msgspec structs in msgpack, with the tensors inside them beside the payload, untouched."""

import struct
from collections.abc import Sequence
from typing import Any

import msgspec
import torch

from atoll.errors import FabricError, RefusedError
from atoll.fabric.headers import Message, TensorHeader
from atoll.fabric.tensors import tensor_bytes, tensor_header, tensor_size

__all__ = ["Payload", "decode_payload", "encode_payload"]

_TENSOR = 1  # the code of msgpack's extension type: data is the tensor's place among the message's tensors
_INDEX = struct.Struct("<I")


class Payload(msgspec.Struct, frozen=True):
    """A value ready to be sent: its msgpack bytes, and the tensors that were in it."""

    data: bytes
    tensors: tuple[torch.Tensor, ...] = ()
    headers: tuple[TensorHeader, ...] = ()  # of the tensors
    size_bytes: int = 0

    def header(self, end: bool) -> Message:
        """How it is announced."""
        return Message(len(self.data), self.headers, end)

    def buffers(self) -> list[memoryview]:
        """Its bytes, in the order they travel."""
        return [memoryview(self.data), *(tensor_bytes(tensor) for tensor in self.tensors)]


def encode_payload(value: object) -> Payload:
    """Any value msgspec knows, tensors anywhere inside it."""
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
    return Payload(data, tuple(tensors), headers, len(data) + sum(map(tensor_size, headers)))


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
