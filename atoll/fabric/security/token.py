"""Join tokens: a secret, and the key of the authority it is for, so that a joiner knows whom it talks to before it says anything.

`atoll1.` and base64 of: 8 bytes that name the token, 16 of secret, 32 of the authority's public key (Ed25519), 4 of checksum.
The authority keeps a digest of the secret only.
"""

import base64
import binascii
import hashlib
import secrets
import zlib

import msgspec

from atoll.errors import RefusedError

__all__ = ["Token", "secret_digest"]

_PREFIX = "atoll1."
_ID, _SECRET, _KEY, _SUM = 8, 16, 32, 4


class Token(msgspec.Struct, frozen=True):
    """A token taken apart. Its `repr` does not show the secret."""

    id: str
    secret: bytes
    authority_key: bytes

    @staticmethod
    def make(authority_key: bytes) -> "Token":
        """A new one."""
        return Token(secrets.token_hex(_ID), secrets.token_bytes(_SECRET), authority_key)

    @staticmethod
    def parse(text: str) -> "Token":
        """From its text; RefusedError if it was not copied whole."""
        wrong = RefusedError("this is no join token, or not all of one: it begins with 'atoll1.' and is copied as it was printed")
        text = text.strip()
        if not text.startswith(_PREFIX):
            raise wrong
        try:
            data = base64.b64decode(text[len(_PREFIX) :], altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise wrong from None
        body, checksum = data[:-_SUM], data[-_SUM:]
        if len(body) != _ID + _SECRET + _KEY or zlib.crc32(body).to_bytes(_SUM, "big") != checksum:
            raise wrong
        token = Token(body[:_ID].hex(), body[_ID : _ID + _SECRET], body[_ID + _SECRET :])
        if token.text != text:  # Python reads `+` and `/` as `-` and `_`
            raise wrong
        return token

    @property
    def text(self) -> str:
        """As people copy it."""
        body = bytes.fromhex(self.id) + self.secret + self.authority_key
        return _PREFIX + base64.urlsafe_b64encode(body + zlib.crc32(body).to_bytes(_SUM, "big")).decode()

    @property
    def digest(self) -> str:
        """All that is kept of the secret. It is random and long, so a plain digest cannot be turned back."""
        return secret_digest(self.secret)

    def __repr__(self) -> str:
        return f"Token(id={self.id!r})"


def secret_digest(secret: bytes) -> str:
    """What the authority keeps of a token's secret."""
    return hashlib.sha256(b"atoll join token\0" + secret).hexdigest()
