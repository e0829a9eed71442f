"""What the parts of a run say to each other and to the hub, the process that started them."""

from typing import TypeAlias

import msgspec
from torch import Tensor

from atoll.codec.base import Encoded, Header
from atoll.codec.registry import decode, make_codec, parts_of
from atoll.errors import CodecError, RefusedError
from atoll.events import CheckpointFailed, CheckpointSaved, Evaluated, NonFinite, Note, RunFinished, Warned

__all__ = [
    "SentTensor",
    "PartEntry",
    "Instruction",
    "Missed",
    "HubQuestion",
    "PartEvent",
    "PartStep",
    "PartsSpec",
    "Place",
    "Begin",
    "Told",
    "Use",
    "Wanted",
    "sent_tensor",
    "opened",
]

_MOST_BYTES = 1 << 32  # that a tensor which arrives may take


class HubQuestion(msgspec.Struct, frozen=True):
    """A request that asks for all there is."""


class PartsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What a part's process must know of the run."""

    script_name: str
    script: str  # its text
    arguments: tuple[str, ...]
    fingerprint: dict[str, str]
    credits: int
    checkpoint_every: int
    keep_last: int
    directory: str  # the run's name


class PartEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A part is ready: where it is reached, and what it could go on from."""

    address: str
    steps: tuple[int, ...] = ()  # of which it has checkpoints
    parameters: int = 0  # that it trains
    frozen_parameters: int = 0
    device: str = ""
    samples: int = 0  # of its training data


class Begin(msgspec.Struct, frozen=True):
    """After which step it goes on; -1: not all are ready yet, ask again."""

    step: int


class Place(msgspec.Struct, frozen=True):
    """Where a part is reached, under which name; no address: nobody knows yet, or it is gone."""

    address: str = ""
    member: str = ""
    gone: bool = False


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for what a step sends under a name, or for its gradient."""

    name: str
    step: int
    gradient: bool = False
    taken: int = 0  # all of steps up to this one have arrived


class SentTensor(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor on its way; without a header it is not there yet."""

    header: Header | None = None
    parts: tuple[Tensor, ...] = ()
    loss: float | None = None  # that a gradient is of, where it trains the sender alone


class PartStep(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="part_step"):
    """A part has made a step."""

    step: int
    loss: float | None
    weight: float
    seconds: float
    waited_seconds: float
    learning_rate: float | None
    gradient_norm: float | None = None
    memory_bytes: int | None = None
    data_seconds: float | None = None
    loading_seconds: float | None = None


class Missed(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="missed"):
    """A part makes its steps without what another sends, from a step on, or has it again."""

    name: str
    step: int
    again: bool = False


class Use(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="use"):
    """What crossed to a part so far under one name, as what the tensors were encoded to."""

    name: str
    gradient: bool
    sender: str
    receiver: str
    messages: int = 0
    bytes: int = 0
    positions: int = 0  # rows of the last dimension; of integers every one
    missed: int = 0  # steps made without it
    waited_seconds: float = 0.0
    link_bytes: int = 0  # that came over the connection with the sender, everything included


PartEvent: TypeAlias = PartStep | Missed | Use | Evaluated | CheckpointSaved | CheckpointFailed | NonFinite | Note | Warned | RunFinished


class Told(msgspec.Struct, frozen=True):
    """What happened in a part, in order."""

    events: tuple[PartEvent, ...]


class Instruction(msgspec.Struct, frozen=True):
    """After which step all parts stop; None: after the last."""

    stop_after: int | None = None


def sent_tensor(value: Tensor, codec: str, loss: float | None = None) -> SentTensor:
    """A tensor as it travels; a copy, so that the sender may go on."""
    encoded = make_codec(codec).encode(value)
    parts = encoded.parts
    if encoded.header.codec == "none":  # it may be the tensor's own memory
        parts = tuple(part.clone() for part in parts)
    return SentTensor(header=encoded.header, parts=parts, loss=loss)


def opened(name: str, found: SentTensor, codec: str) -> Tensor:
    """The tensor that arrived; RefusedError where it is not what the sender may send."""
    header = found.header
    assert header is not None
    allowed = ("none", codec.partition(":")[0])
    try:
        sizes = [part.elements for part in parts_of(header)]
        if header.codec not in allowed or header.decoded_bytes > _MOST_BYTES:
            raise CodecError(f"it is sent as {header.codec!r} with the shape {list(header.shape)}")
        if sizes != [part.numel() for part in found.parts]:
            raise CodecError("its parts have other sizes than it says")
        return decode(Encoded(header, found.parts))
    except CodecError as error:
        raise RefusedError(f"{name!r} arrived and cannot be meant: {error}") from None
