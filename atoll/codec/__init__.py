"""Codec: what a tensor looks like on a link."""

from atoll.codec.codec import CODECS, CodecSpec, codec_spec

__all__ = ["CODECS", "CodecSpec", "codec_spec"]
