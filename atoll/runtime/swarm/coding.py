"""Coding: activations and their gradients in fewer bytes on slow links. What is summed into weights' gradients and states travels as it is.

A tensor in a payload becomes a header and the parts that follow it; who receives needs no settings, since the header says everything.
"""

import time
from collections.abc import Callable
from typing import Any, Protocol, get_args

import msgspec
import torch
from torch import Tensor

from atoll.codec import SwarmCodec
from atoll.codec.tensors import Codec, Encoded, Header, Role, decode, make_codec
from atoll.control.messages import Backward, Forward, Message
from atoll.errors import CodecError, RefusedError
from atoll.events import Observer
from atoll.fabric.collective.link_codecs import AdaptiveCodecs
from atoll.fabric.deadline import LinkEstimate
from atoll.runtime.swarm.parcel import Parcel

__all__ = [
    "CODEC_CHOICES",
    "AdaptiveCoding",
    "Coding",
    "FixedCoding",
    "check_codec",
    "coded",
    "coded_bytes",
    "coding_of",
    "decoded",
    "is_coded",
]

CODEC_CHOICES: tuple[str, ...] = get_args(SwarmCodec)
_HEADER, _PARTS = "coded", "parts"


def check_codec(name: str) -> None:
    """CodecError for a codec that activations are not sent with."""
    if name not in CODEC_CHOICES:
        raise CodecError(f"--codec {name}: activations are sent with one of {', '.join(CODEC_CHOICES)}")


class Coding(Protocol):
    """Which codec a message is sent with."""

    def choose(self, to: str, message: Message, nbytes: int) -> Codec | None:
        """None: as it is."""


class FixedCoding:
    """The same on every link."""

    def __init__(self, name: str) -> None:
        check_codec(name)
        self._codec = make_codec(name) if name != "none" else None

    def choose(self, to: str, message: Message, nbytes: int) -> Codec | None:
        """The one there is."""
        return self._codec


class AdaptiveCoding:
    """A controller for every link and direction, fed with what the fabric measures."""

    def __init__(
        self,
        estimate: Callable[[str], LinkEstimate | None],
        observer: Observer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._estimate, self._observer, self._clock = estimate, observer, clock
        self._codecs: dict[Role, AdaptiveCodecs] = {}

    def choose(self, to: str, message: Message, nbytes: int) -> Codec | None:
        """What the link's controller says now."""
        role: Role = "activation" if isinstance(message, Forward) else "gradient"
        if role not in self._codecs:
            self._codecs[role] = AdaptiveCodecs(
                self._estimate, self._clock, self._observer, role=role, nbytes=float(max(nbytes, 1)), first="none"
            )
        codec = self._codecs[role].towards(to, near=False)
        return None if codec.name == "none" else codec


def coding_of(name: str, estimate: Callable[[str], LinkEstimate | None], observer: Observer | None = None) -> Coding:
    """What a codec's name asks for; `auto`: what each link asks for."""
    return AdaptiveCoding(estimate, observer) if name == "auto" else FixedCoding(name)


def coded_bytes(message: Message) -> int:
    """What codecs may make smaller."""
    return sum(value.nbytes for value in _values(message) if _helps(value))


def coded(message: Message, codec: Codec | None) -> Message:
    """The message with its activations or their gradients encoded."""
    if codec is None:
        return message
    return _with_values(message, [_code(value, codec) if _helps(value) else value for value in _values(message)])


def is_coded(message: Message) -> bool:
    """Whether something in it is to be decoded."""
    return any(isinstance(value, dict) for value in _values(message))


def decoded(message: Message) -> Message:
    """The message as it was before it was coded, nearly; RefusedError where it is not what `coded` makes."""
    try:
        return _with_values(message, [_decode(value) for value in _values(message)])
    except (CodecError, msgspec.ValidationError, TypeError, ValueError, KeyError) as error:
        raise RefusedError(f"a {type(message).__name__} whose tensors cannot be read: {error}") from None


def _values(message: Message) -> list[Any]:
    """The tensors, coded or not; nothing where it is no message that has them."""
    match message:
        case Forward(payload=Parcel(values=values)) | Forward(payload=[_, _, values]) | Backward(payload=values):
            return list(values) if isinstance(values, (list, tuple)) else []
    return []


def _with_values(message: Message, values: list[Any]) -> Message:
    if isinstance(message, Forward):
        payload = message.payload
        binding, leaves = (payload.binding, payload.leaves) if isinstance(payload, Parcel) else payload[:2]
        return msgspec.structs.replace(message, payload=Parcel(tuple(binding), leaves, values))
    return msgspec.structs.replace(message, payload=values)


def _helps(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32 and value.numel() > 0


def _code(value: Tensor, codec: Codec) -> dict[str, Any]:
    encoded = codec.encode(value)
    return {_HEADER: msgspec.to_builtins(encoded.header), _PARTS: list(encoded.parts)}


def _decode(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    header = msgspec.convert(value[_HEADER], Header)
    if header.codec not in CODEC_CHOICES:
        raise CodecError(f"activations are not sent as {header.codec!r}")
    return decode(Encoded(header, value[_PARTS]))
