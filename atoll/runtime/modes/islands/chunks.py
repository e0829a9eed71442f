"""Updates and common states as they travel: rows of numbers in chunks, each checked before anything is made of it."""

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from atoll.codec.base import Encoded, Header
from atoll.codec.registry import decode, parts_of
from atoll.control.messages import Message
from atoll.control.rounds.messages import GlobalChunk, UpdateChunk
from atoll.errors import CodecError

__all__ = ["ChunkForm", "digest_of_tensors", "packed", "unpacked"]


def packed(encoded: Encoded) -> list[Any]:
    """A chunk of an update as a message has it."""
    return [msgspec.json.encode(encoded.header), *encoded.parts]


def unpacked(payload: Any) -> Encoded:
    """What was packed; CodecError where it is nothing of that kind."""
    if not isinstance(payload, list | tuple) or not payload or not isinstance(payload[0], bytes):
        raise CodecError("it is no chunk of an update")
    if not all(isinstance(part, Tensor) for part in payload[1:]):
        raise CodecError("it is no chunk of an update")
    try:
        header = msgspec.json.decode(payload[0], type=Header)
    except msgspec.MsgspecError as error:
        raise CodecError(f"its header cannot be read: {error}") from None
    return Encoded(header, payload[1:])


def digest_of_tensors(tensors: Sequence[Tensor]) -> str:
    """Of their bytes, one after another."""
    total = hashlib.blake2b(digest_size=20)
    for tensor in tensors:
        total.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


class ChunkForm:
    """How a row of so many numbers is cut, and what a chunk of it must be."""

    def __init__(self, elements: int, chunks: int) -> None:
        self.elements = elements
        size = math.ceil(elements / chunks)
        self.bounds = [(min(elements, i * size), min(elements, (i + 1) * size)) for i in range(chunks)]
        self._sizes = {stop - start for start, stop in self.bounds}

    def parts(self, row: Tensor) -> list[Tensor]:
        """The chunks of a row, in its memory."""
        return [row[start:stop] for start, stop in self.bounds]

    def why_unfit(self, message: Message) -> str | None:
        """What is wrong with the numbers in a message; None: it can be meant."""
        if isinstance(message, UpdateChunk):
            return self.why_no_update(message.payload, *self.bounds[message.chunk])
        if isinstance(message, GlobalChunk):
            start, stop = self.bounds[message.chunk]
            return None if self.is_state(message.payload, stop - start) else "it is no chunk of a state"
        return None

    def why_no_update(self, payload: Any, start: int, stop: int) -> str | None:
        """What is wrong with a chunk of an update: its form, or numbers that are not finite."""
        try:
            encoded = unpacked(payload)
            header = encoded.header
            if header.dtype != "float32" or header.shape != (stop - start,):
                return f"it has the form {list(header.shape)} of {header.dtype}, not {stop - start} numbers in float32"
            parts_of(header)
            values = decode(encoded)
        except CodecError as error:
            return str(error)
        return None if bool(torch.isfinite(values).all()) else "its numbers are not finite"

    def is_update(self, payload: Any) -> bool:
        """Whether something has the form of a chunk of an update, whichever it is. Its numbers were looked at when it came in."""
        try:
            header = unpacked(payload).header
        except CodecError:
            return False
        return header.dtype == "float32" and len(header.shape) == 1 and header.shape[0] in self._sizes

    def is_state(self, payload: Any, size: int | None = None) -> bool:
        """Whether something is a chunk of a state: weights and momentum."""
        if not isinstance(payload, list | tuple) or len(payload) != 2:
            return False
        sizes = self._sizes if size is None else {size}
        return all(
            isinstance(part, Tensor) and part.dtype == torch.float32 and part.dim() == 1 and part.numel() in sizes for part in payload
        ) and all(bool(torch.isfinite(part).all()) for part in payload)
