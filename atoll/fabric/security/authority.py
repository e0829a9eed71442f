"""Authority: who may take part in a run. It lives in the run's directory, where only its owner may read, and outlives its process.

```
run/authority/authority.key   its private key
              authority.crt   its certificate
              ledger.json     tokens (digests only), certificates, revocations
```
"""

import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.errors import FabricError, RefusedError
from atoll.fabric.security.certificates import (
    key_digest,
    make_authority_certificate,
    make_certificate,
    private_pem,
    public_bytes,
    read_request,
    run_of,
)
from atoll.fabric.security.credentials import Credentials, load_private_key
from atoll.fabric.security.files import make_private_directory, read_private, write_private
from atoll.fabric.security.identity import Identity, Role, check_name, check_role
from atoll.fabric.security.ledger import Issued, Ledger, LedgerFile, TokenRecord
from atoll.fabric.security.revocations import Revocations, SignedRevocations, sign_revocations
from atoll.fabric.security.token import Token

__all__ = ["Authority", "Certified"]

_DAYS = 730


class Certified(msgspec.Struct, frozen=True):
    """A certificate that was issued."""

    certificate: bytes  # DER
    identity: Identity
    serial: str
    lifetime_seconds: float


class Authority:
    """A run's own certificate authority. Every method may be called from any thread and, on one directory, from several processes.

    What a method promised is on disk when it returns: a token that was used stays used after a crash.
    """

    def __init__(self, directory: Path, key: Ed25519PrivateKey, certificate: x509.Certificate, clock: Callable[[], float]) -> None:
        self.directory, self.certificate = directory, certificate
        self.certificate_seconds = 3600.0  # of those it issues
        self._key, self._clock = key, clock
        self._ledger = LedgerFile(directory / "ledger.json")

    @staticmethod
    def create(run_directory: Path | str, *, clock: Callable[[], float] = time.time) -> "Authority":
        """A new one in a run's directory; FabricError if there is one already."""
        directory = Path(run_directory) / "authority"
        if (directory / "authority.key").exists():
            raise FabricError(f"{directory}: there is an authority already; a run has one, so open it or choose a new directory")
        make_private_directory(directory)
        key = Ed25519PrivateKey.generate()
        certificate = make_authority_certificate(key, clock(), _DAYS)
        write_private(directory / "authority.crt", certificate.public_bytes(Encoding.PEM))
        authority = Authority(directory, key, certificate, clock)
        with authority._ledger.change(clock()):
            pass
        write_private(directory / "authority.key", private_pem(key))  # last: with it, everything is there
        return authority

    @staticmethod
    def open(run_directory: Path | str, *, clock: Callable[[], float] = time.time) -> "Authority":
        """The one that is there; FabricError if there is none, or if its key can be read by others."""
        directory = Path(run_directory) / "authority"
        key = load_private_key(read_private(directory / "authority.key"), directory / "authority.key")
        try:
            certificate = x509.load_pem_x509_certificate(read_private(directory / "authority.crt"))
        except ValueError as error:
            raise FabricError(f"{directory / 'authority.crt'}: no certificate: {error}") from None
        return Authority(directory, key, certificate, clock)

    @property
    def public_key(self) -> bytes:
        """What tokens carry and members trust."""
        return public_bytes(self._key.public_key())

    @property
    def run(self) -> str:
        """The run it is for."""
        return run_of(self.public_key)

    @property
    def certificate_der(self) -> bytes:
        """Its certificate as it travels."""
        return self.certificate.public_bytes(Encoding.DER)

    # ---- tokens

    def issue_token(self, role: str = "worker", *, uses: int = 1, lifetime_seconds: float = 3600.0) -> str:
        """The text of a token with which `uses` members may enrol in a role before it expires. It is shown here and kept nowhere."""
        checked = check_role(role)
        if checked == "coordinator":
            raise RefusedError("a token for a coordinator would let its holder run the run; coordinators open the run's directory instead")
        if uses < 1 or lifetime_seconds <= 0:
            raise RefusedError(f"a token for {uses} uses within {lifetime_seconds:.0f} s lets nobody in")
        token, now = Token.make(self.public_key), self._clock()
        with self._ledger.change(now) as ledger:
            ledger.tokens[token.id] = TokenRecord(token.digest, checked, uses, uses, now + lifetime_seconds)
        return token.text

    # ---- certificates

    def enrol(self, token_id: str, secret: bytes, name: str, request: bytes) -> Certified:
        """A certificate for whoever has a token; uses it up by one. RefusedError says why not, and then nothing is used up."""
        now = self._clock()
        with self._ledger.change(now) as ledger:
            token = ledger.check_token(token_id, secret, now)
            key = read_request(request)
            ledger.check_new(check_name(name), key_digest(key), now)
            token.uses_left -= 1
            return self._certify(ledger, key, Identity(self.run, token.role, name), now, token_id)

    def renew(self, name: str, role: str, request: bytes) -> Certified:
        """A new certificate for a member that proved, by TLS, to be who it is; same name and role."""
        now = self._clock()
        with self._ledger.change(now) as ledger:
            token = ledger.check_renewable(name, role, now).token
            return self._certify(ledger, read_request(request), Identity(self.run, check_role(role), name), now, token)

    def credentials(self, name: str = "coordinator", role: Role = "coordinator") -> Credentials:
        """For a process that has this directory open: it needs no token."""
        key, now = Ed25519PrivateKey.generate(), self._clock()
        with self._ledger.change(now) as ledger:
            issued = self._certify(ledger, key.public_key(), Identity(self.run, role, check_name(name)), now)
        return Credentials(key, issued.certificate, self.certificate_der, now=now)

    def _certify(self, ledger: Ledger, key: Ed25519PublicKey, identity: Identity, now: float, token: str = "") -> Certified:
        certificate = make_certificate(self.certificate, self._key, key, identity, now, self.certificate_seconds)
        serial, expires = f"{certificate.serial_number:x}", certificate.not_valid_after_utc.timestamp()
        ledger.issued.append(Issued(serial, identity.name, identity.role, key_digest(key), expires, token))
        return Certified(certificate.public_bytes(Encoding.DER), identity, serial, expires - now)

    # ---- revocation

    def revoke(self, name: str, reason: str) -> int:
        """Shuts a member out, and whoever else would enrol with its token; returns how many certificates it had.

        Whoever serves this authority tells the members within a second.
        """
        now = self._clock()
        with self._ledger.change(now) as ledger:
            return ledger.revoke(name, reason, now)

    def revocations(self) -> Revocations:
        """Who is shut out now."""
        return self._ledger.read().revocations

    def signed_revocations(self) -> SignedRevocations:
        """The same, for others."""
        return sign_revocations(self.revocations(), self._key)

    def members(self) -> list[Issued]:
        """Every certificate that is valid now."""
        ledger, now = self._ledger.read(), self._clock()
        return [issued for issued in ledger.issued if issued.expires_unix_seconds > now and not ledger.is_revoked(issued)]
