"""Credentials: a member's key and certificate, and the TLS they make. The key never leaves the machine it was made on.

Its files only their owner may read, and they are written whole or not at all.
"""

import contextlib
import functools
import os
import secrets
import ssl
import stat
import tempfile
import time
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    load_pem_private_key,
)

from atoll.errors import FabricError, RefusedError
from atoll.fabric.security.certificates import Identity, check_issued, load_certificate, private_pem, public_bytes

__all__ = ["ENROL_PROTOCOL", "Credentials", "load_private_key", "make_private_directory", "read_private", "write_private"]


def make_private_directory(path: Path) -> None:
    """A directory that only its owner may enter; it may exist already, but then its permissions are narrowed."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        path.chmod(0o700)
    except OSError as error:
        raise FabricError(f"{path}: cannot keep keys there: {error.strerror or error}") from error


def write_private(path: Path, data: bytes) -> None:
    """Puts a file in place in one move, readable by its owner only from its first byte on (mkstemp makes it so)."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise FabricError(f"{path}: cannot write it: {error.strerror or error}") from error


def read_private(path: Path) -> bytes:
    """Reads a file that holds a secret; FabricError if it is not there, or if others may read it."""
    try:
        mode = path.stat().st_mode
        data = path.read_bytes()
    except OSError as error:
        raise FabricError(f"{path}: cannot read it: {error.strerror or error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise FabricError(f"{path}: others than its owner may read it, so it is no secret any more; `chmod 600 {path}` if nobody did")
    return data


PEER_PROTOCOL, ENROL_PROTOCOL = "atoll", "atoll-enrol"
"""What a TLS connection is for (ALPN): a peer with a certificate, or somebody who has a token only."""


class Credentials:
    """What a member proves itself with. Raises RefusedError if the parts do not belong together or the certificate has ended."""

    def __init__(self, key: Ed25519PrivateKey, certificate: bytes, authority: bytes, *, now: float | None = None) -> None:
        self.certificate_der, self.authority_der = certificate, authority
        self.certificate, self.authority = load_certificate(certificate), load_certificate(authority)
        self._key = key
        authority_key = self.authority.public_key()
        if not isinstance(authority_key, Ed25519PublicKey):
            raise RefusedError("the certificate of the authority has no Ed25519 key")
        self.authority_key = public_bytes(authority_key)
        self.identity: Identity = check_issued(self.certificate, self.authority_key, time.time() if now is None else now)
        if self.certificate.public_key() != key.public_key():
            raise RefusedError("the certificate is for another key")

    def __repr__(self) -> str:
        return f"Credentials({self.identity.uri!r})"

    @property
    def name(self) -> str:
        """The member's name."""
        return self.identity.name

    @property
    def role(self) -> str:
        """What it may do."""
        return self.identity.role

    @property
    def expires_unix_seconds(self) -> float:
        """When the certificate ends."""
        return self.certificate.not_valid_after_utc.timestamp()

    # ---- TLS

    @functools.cached_property
    def client_context(self) -> ssl.SSLContext:
        """For dialling: TLS 1.3, our certificate shown, the run's authority and nobody else trusted."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False  # members are known by name and role, not by where they are: `identify` looks at those
        context.set_alpn_protocols([PEER_PROTOCOL])
        return context

    @functools.cached_property
    def server_context(self) -> ssl.SSLContext:
        """For accepting members: as for dialling, and whoever comes must show a certificate."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols([PEER_PROTOCOL])
        return context

    @functools.cached_property
    def door_context(self) -> ssl.SSLContext:
        """For the authority: as for accepting, but somebody without a certificate is let as far as the door, to enrol."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.set_alpn_protocols([PEER_PROTOCOL, ENROL_PROTOCOL])
        return context

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.authority_der)
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # a resumed session would not show its certificate again
        _load(context, self._key, self.certificate)
        return context

    # ---- files

    def save(self, directory: Path) -> None:
        """Keeps them in a directory that only its owner may read."""
        make_private_directory(directory)
        write_private(directory / "member.key", private_pem(self._key))
        write_private(directory / "member.crt", self.certificate.public_bytes(Encoding.PEM))
        write_private(directory / "authority.crt", self.authority.public_bytes(Encoding.PEM))

    @staticmethod
    def load(directory: Path) -> "Credentials":
        """What `save` kept; FabricError if it is not there or no longer valid."""
        key = load_private_key(read_private(directory / "member.key"), directory / "member.key")
        return Credentials(key, *(_pem(directory / name).public_bytes(Encoding.DER) for name in ("member.crt", "authority.crt")))


def load_private_key(data: bytes, path: Path) -> Ed25519PrivateKey:
    """A private key from PEM; FabricError names the file it should have been in."""
    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError) as error:
        raise FabricError(f"{path}: no private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise FabricError(f"{path}: a private key of another kind than Ed25519")
    return key


def _pem(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        raise FabricError(f"{path}: cannot read it: {error.strerror or error}") from error
    except ValueError as error:
        raise FabricError(f"{path}: no certificate: {error}") from None


def _load(context: ssl.SSLContext, key: Ed25519PrivateKey, certificate: x509.Certificate) -> None:
    """Python's ssl reads keys from files only: it gets one that is encrypted with a password nobody else ever has, for a moment."""
    password = secrets.token_bytes(16).hex().encode()
    encrypted = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password))
    descriptor, path = tempfile.mkstemp(prefix="atoll-", suffix=".pem")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(encrypted + certificate.public_bytes(Encoding.PEM))
        context.load_cert_chain(path, password=password)
    finally:
        os.unlink(path)
