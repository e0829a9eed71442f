"""The codecs, on tensors: all that encodes, decodes, measures and chooses."""

from atoll.codec.base import Codec, NoCodec
from atoll.codec.candidates import LinkState, Message
from atoll.codec.decoding import decode, empty_encoded, encoded_from, make_codec, parts_of
from atoll.codec.encoded import Encoded, Header, Part, Role
from atoll.codec.feedback import ErrorFeedback
from atoll.codec.halves import Bf16, Fp16
from atoll.codec.integers import Int4, Int8
from atoll.codec.link_controller import Decision, LinkController
from atoll.codec.low_rank import LowRank
from atoll.codec.measured import relative_error, sampled_error
from atoll.codec.top_k import TopK

__all__ = [
    "Bf16",
    "Codec",
    "Decision",
    "Encoded",
    "ErrorFeedback",
    "Fp16",
    "Header",
    "Int4",
    "Int8",
    "LinkController",
    "LinkState",
    "LowRank",
    "Message",
    "NoCodec",
    "Part",
    "Role",
    "TopK",
    "decode",
    "empty_encoded",
    "encoded_from",
    "make_codec",
    "parts_of",
    "relative_error",
    "sampled_error",
]
