"""Who is shut out of a run: a numbered list, signed by the authority, that members pass on and check at every connection."""

import time

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from atoll.errors import RefusedError

__all__ = ["Revocations", "Revoked", "SignedRevocations", "read_revocations", "sign_revocations"]

_CONTEXT = b"atoll revocations\0"  # what the authority's key signs here can be taken for nothing else it signs


class Revoked(msgspec.Struct, frozen=True):
    """A certificate that no longer counts."""

    serial: str  # hexadecimal
    name: str
    reason: str
    unix_seconds: float  # when
    expires_unix_seconds: float  # when the certificate would have ended anyway, and this can be forgotten


class Revocations(msgspec.Struct, frozen=True):
    """All of them. A higher number is newer."""

    number: int = 0
    entries: tuple[Revoked, ...] = ()

    def check(self, serial: int) -> None:
        """RefusedError if the certificate was revoked."""
        written = f"{serial:x}"
        for entry in self.entries:
            if entry.serial == written:
                when = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(entry.unix_seconds))
                raise RefusedError(f"the certificate of {entry.name} was revoked at {when} UTC: {entry.reason}")


class SignedRevocations(msgspec.Struct, frozen=True):
    """The list as it travels and lies in files."""

    data: bytes
    signature: bytes


def sign_revocations(revocations: Revocations, key: Ed25519PrivateKey) -> SignedRevocations:
    """The authority's word for it."""
    data = msgspec.msgpack.encode(revocations)
    return SignedRevocations(data, key.sign(_CONTEXT + data))


def read_revocations(signed: SignedRevocations, authority_key: bytes) -> Revocations:
    """The list, if the authority signed it; RefusedError if not."""
    try:
        Ed25519PublicKey.from_public_bytes(authority_key).verify(signed.signature, _CONTEXT + signed.data)
        return msgspec.msgpack.decode(signed.data, type=Revocations)
    except (InvalidSignature, ValueError, msgspec.DecodeError):
        raise RefusedError("a list of revocations that the run's authority did not sign") from None
