"""Where masks come from: keys two sites agree on, seeds for one purpose each, and streams of ring numbers out of ChaCha20.

All of it is `cryptography`'s: X25519, HKDF-SHA256, ChaCha20, ChaCha20-Poly1305. Every key is for one session and one use; a purpose names
both, with everything that two sites must see alike, so that who saw something else has another key.
"""

from typing import TypeAlias

import msgspec
import numpy as np
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from atoll.errors import AtollError
from atoll.privacy.fixed_point import Words, packed_bytes, unpack

__all__ = ["Purpose", "add_stream", "common_secret", "derive", "public_key_of"]

Purpose: TypeAlias = tuple[str | bytes, ...]


def public_key_of(private: bytes) -> bytes:
    """The public key of a private one."""
    key = X25519PrivateKey.from_private_bytes(private).public_key()
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


def common_secret(private: bytes, public: bytes, whose: str) -> bytes:
    """The secret that two sites have in common; AtollError names whose public key gives none."""
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise AtollError(f"{whose} gave a public key that is none") from None


def derive(secret: bytes, purpose: Purpose) -> bytes:
    """A key of 32 bytes for one purpose."""
    return HKDF(hashes.SHA256(), 32, salt=None, info=msgspec.msgpack.encode(purpose)).derive(secret)


def add_stream(words: Words, piece: int, width: int, seed: bytes, sign: int) -> None:
    """Adds the numbers a seed gives for a piece to `words`, or takes them away, in the ring; every piece has numbers of its own."""
    nonce = bytes(4) + piece.to_bytes(12, "little")  # the first four bytes are ChaCha20's counter of blocks
    stream = Cipher(algorithms.ChaCha20(seed, nonce), mode=None).encryptor().update(bytes(packed_bytes(len(words), width)))
    numbers = unpack(stream, len(words), width)
    np.add(words, numbers, out=words) if sign > 0 else np.subtract(words, numbers, out=words)
    words &= (1 << width) - 1
