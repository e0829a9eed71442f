"""Codec: what a tensor looks like on a link.

What planning needs to know of codecs is here, without PyTorch; the codecs themselves are in `atoll.codec.tensors`.
"""

from atoll.codec.codec import CODECS, CodecSpec, SwarmCodec, codec_spec

__all__ = ["CODECS", "CodecSpec", "SwarmCodec", "codec_spec"]
