"""Candidates: what a link's controller chooses among, with what each would cost and lose."""

import math
from collections.abc import Mapping, Sequence

import msgspec

from atoll.codec.codec import CodecSpec
from atoll.codec.decoding import make_codec
from atoll.codec.encoded import Role

__all__ = ["CODECS_FOR", "ERROR_BUDGETS", "LinkState", "Message", "codec_specs", "message_seconds"]

CODECS_FOR: Mapping[Role, tuple[str, ...]] = {
    "activation": ("none", "bf16", "int8", "int4"),
    "parameter": ("none", "bf16", "int8"),
    "gradient": (
        "none", "bf16", "int8", "int4",
        "top-k:0.1", "top-k:0.03", "top-k:0.01", "top-k:0.003",
        "low-rank:16", "low-rank:8", "low-rank:4", "low-rank:2",
    ),
}  # fmt: skip
"""Sparse and low-rank codecs leave so much out that only error feedback makes up for it, and only gradients may come late."""

ERROR_BUDGETS: Mapping[Role, float] = {"activation": 0.01, "parameter": 0.002, "gradient": 0.2}
"""Relative errors allowed where the user says nothing: int8 for activations, bf16 for parameters, int4 with feedback for gradients."""


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """What a link carries again and again."""

    role: Role
    nbytes: float  # in memory
    element_bytes: float = 4.0
    hidden_s: float = 0.0  # how long a message may take without anybody waiting for it, because computing goes on meanwhile


class LinkState(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a link and of the compute beside it."""

    bytes_per_s: float
    round_trip_s: float
    codec_bytes_per_s: float  # memory rate left to codecs on the slower of the two hosts

    def valid(self) -> bool:
        """Whether these are numbers one can decide by."""
        return 0 < self.bytes_per_s < math.inf and 0 <= self.round_trip_s < math.inf and 0 < self.codec_bytes_per_s < math.inf


def codec_specs(codecs: Sequence[str]) -> dict[str, CodecSpec]:
    """The statements of codecs by their text."""
    return {text: make_codec(text).spec for text in codecs}


def message_seconds(spec: CodecSpec, message: Message, link: LinkState) -> float:
    """From the start of encoding to the end of decoding, one step after the other: chunks of a large message may overlap them."""
    wire = message.nbytes * spec.ratio(message.element_bytes) / link.bytes_per_s
    return link.round_trip_s / 2 + wire + spec.memory_passes * message.nbytes / link.codec_bytes_per_s
