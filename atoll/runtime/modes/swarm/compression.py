"""Compression: activations and their gradients in fewer bytes on slow links. Sums and states travel as they are.

A tensor in a payload becomes a header and the parts that follow it; who receives needs no settings, since the header says everything.
"""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, get_args

import msgspec
import torch
from torch import Tensor

from atoll.codec import CodecChoice
from atoll.codec.base import Codec, Encoded, Header, Role
from atoll.codec.registry import decode, make_codec
from atoll.control.messages import Backward, Forward, Message
from atoll.errors import CodecError, RefusedError
from atoll.events import CodecChosen, Observer
from atoll.fabric.collective.link_codecs import AdaptiveCodecs
from atoll.fabric.deadline import LinkEstimate
from atoll.runtime.activations import Activations

__all__ = [
    "CODEC_CHOICES",
    "AdaptiveCompression",
    "Compression",
    "FixedCompression",
    "PlannedCompression",
    "check_codec",
    "compressed",
    "compressed_bytes",
    "compression_of",
    "decompressed",
    "is_compressed",
    "planned_number",
]

CODEC_CHOICES: tuple[str, ...] = get_args(CodecChoice)
_HEADER, _PARTS = "compressed", "parts"
_PLANNED = re.compile(r"worker-(\d+)(-r\d+)?(-\d+)?")  # as the supervisor names them: of the run's n-th start, started again m times


def check_codec(name: str) -> None:
    """CodecError for a codec that activations are not sent with."""
    if name not in CODEC_CHOICES:
        raise CodecError(f"--codec {name}: activations are sent with one of {', '.join(CODEC_CHOICES)}")


class Compression(Protocol):
    """Which codec a message is sent with."""

    def choose(self, to: str, message: Message, nbytes: int) -> Codec | None:
        """None: as it is."""


class FixedCompression:
    """The same on every link."""

    def __init__(self, name: str) -> None:
        check_codec(name)
        self._codec = make_codec(name) if name != "none" else None

    def choose(self, to: str, message: Message, nbytes: int) -> Codec | None:
        """The one there is."""
        return self._codec


class PlannedCompression:
    """As the plan says between its own workers, whose names tell their numbers; else as `others` does. Of every peer that something is
    sent to with the plan's codec, `observer` is told once."""

    def __init__(
        self,
        own: str,
        sites: Sequence[str],
        site_codecs: Sequence[tuple[str, str, str]],
        others: Compression,
        observer: Observer = lambda event: None,
    ) -> None:
        self._sites, self._others, self._observer = sites, others, observer
        self._told: set[str] = set()
        self._own = self._site(own)
        self._codecs = {pair: make_codec(codec) for a, b, codec in site_codecs for pair in ((a, b), (b, a))}

    def choose(self, to: str, message: Message, nbytes: int) -> Codec | None:
        """The plan's codec of the link between two sites of the plan's; what the others use on any link the plan names none for."""
        own, there = self._own, self._site(to)
        planned = self._codecs.get((own, there)) if own is not None and there is not None else None
        if planned is None:
            return self._others.choose(to, message, nbytes)
        if to not in self._told:
            self._told.add(to)
            reason = "the plan names it; losses are near those of one process, not equal to float tolerance"
            self._observer(CodecChosen(at_seconds=time.monotonic(), link=to, codec=planned.name, before="", reason=reason))
        return planned

    def _site(self, name: str) -> str | None:
        number = planned_number(name)
        return self._sites[number] if number is not None and number < len(self._sites) else None


def planned_number(name: str) -> int | None:
    """Which of the plan's workers a member is, started again or not; None for those who joined."""
    found = _PLANNED.fullmatch(name)
    return int(found[1]) if found else None


class AdaptiveCompression:
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
        codec = self._codecs[role].towards(to)
        return None if codec.name == "none" else codec


def compression_of(name: str, estimate: Callable[[str], LinkEstimate | None], observer: Observer | None = None) -> Compression:
    """What a codec's name asks for; `auto`: what each link asks for."""
    return AdaptiveCompression(estimate, observer) if name == "auto" else FixedCompression(name)


def compressed_bytes(message: Message) -> int:
    """What codecs may make smaller."""
    return sum(value.nbytes for value in _values(message) if _helps(value))


def compressed(message: Message, codec: Codec | None) -> Message:
    """The message with its activations or their gradients encoded."""
    if codec is None:
        return message
    return _with_values(message, [_code(value, codec) if _helps(value) else value for value in _values(message)])


def is_compressed(message: Message) -> bool:
    """Whether something in it is to be decoded."""
    return any(isinstance(value, dict) for value in _values(message))


def decompressed(message: Message) -> Message:
    """The message as it was before it was coded, nearly; RefusedError where it is not what `coded` makes."""
    try:
        return _with_values(message, [_decode(value) for value in _values(message)])
    except (CodecError, msgspec.ValidationError, TypeError, ValueError, KeyError) as error:
        raise RefusedError(f"a {type(message).__name__} whose tensors cannot be read: {error}") from None


def _values(message: Message) -> list[Any]:
    """The tensors, coded or not; nothing where it is no message that has them."""
    match message:
        case Forward(payload=Activations(values=values)) | Forward(payload=[_, _, values]) | Backward(payload=values):
            return list(values) if isinstance(values, (list, tuple)) else []
    return []


def _with_values(message: Message, values: list[Any]) -> Message:
    if isinstance(message, Forward):
        payload = message.payload
        binding, leaves = (payload.binding, payload.leaves) if isinstance(payload, Activations) else payload[:2]
        return msgspec.structs.replace(message, payload=Activations(tuple(binding), leaves, values))
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
