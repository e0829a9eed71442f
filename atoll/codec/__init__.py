"""Codec: what a tensor looks like on a link.

What planning needs to know of codecs is here, without PyTorch; the codecs themselves are in `atoll.codec.registry` and what it names.
"""

from atoll.codec.spec import CODECS, CodecChoice, CodecSpec, codec_spec

__all__ = ["CODECS", "CodecChoice", "CodecSpec", "codec_spec"]
