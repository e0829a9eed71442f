"""Authority: who may take part in a run. It lives in the run's directory, where only its owner may read, and outlives its process.

```
run/authority/authority.key   its private key
              authority.crt   its certificate
              ledger.json     tokens (digests only), certificates, revocations
```

Every change of the ledger is made under a lock and put in place whole, so that several processes may use it and a crash loses nothing that
was promised. Decisions are pure; only `LedgerFile` touches the disk.
"""

import contextlib
import fcntl
import hmac
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.errors import FabricError, RefusedError
from atoll.fabric.security.certificates import (
    Identity,
    Revocations,
    Revoked,
    Role,
    SignedRevocations,
    check_name,
    check_role,
    is_reserved,
    key_digest,
    make_authority_certificate,
    make_certificate,
    private_pem,
    public_bytes,
    read_request,
    run_of,
    sign_revocations,
)
from atoll.fabric.security.credentials import Credentials, load_private_key, make_private_directory, read_private, write_private
from atoll.fabric.security.token import Token, secret_digest
from atoll.units import format_seconds

__all__ = ["Authority", "Certified"]

_REMEMBER_SECONDS = 7 * 86400.0  # what has expired, so that it is refused for the right reason
_NOBODY = secret_digest(b"")


class TokenRecord(msgspec.Struct):
    """A token that was issued; of its secret a digest only."""

    digest: str
    role: Role
    uses: int
    uses_left: int
    expires_unix_seconds: float
    cancelled: bool = False  # somebody who enrolled with it was shut out
    own: bool = False  # for a process that the run's launcher starts, by which names of the run's own are free


class Issued(msgspec.Struct, frozen=True):
    """A certificate that was issued."""

    serial: str  # hexadecimal
    name: str
    role: Role
    key_digest: str
    expires_unix_seconds: float
    token: str = ""  # with which its member enrolled


class Ledger(msgspec.Struct):
    """The state. Methods refuse with RefusedError and change nothing then."""

    tokens: dict[str, TokenRecord] = {}
    issued: list[Issued] = []
    revocations: Revocations = Revocations()

    def check_token(self, token_id: str, secret: bytes, now: float) -> TokenRecord:
        """The token, if it is one and may be used. Takes as long whether or not there is such a token."""
        record = self.tokens.get(token_id)
        same = hmac.compare_digest(secret_digest(secret), _NOBODY if record is None else record.digest)
        if record is None or not same:
            raise RefusedError("the token is not one that this run's authority issued")
        if record.cancelled:
            raise RefusedError("the token was cancelled: a member that enrolled with it was shut out; ask for a new one")
        if now >= record.expires_unix_seconds:
            raise RefusedError(f"the token expired {now - record.expires_unix_seconds:.0f} s ago; ask for a new one")
        if not record.uses_left:
            raise RefusedError(f"the token is used up: it was good for {record.uses} and as many have enrolled with it; ask for a new one")
        return record

    def check_new(self, name: str, key_digest: str, now: float) -> None:
        """A name and a key that nobody has. A request that was recorded and sent again has a key that is known."""
        for issued in self.issued:
            if issued.key_digest == key_digest:
                raise RefusedError("this enrolment was made before: its key has a certificate already. A new one needs a new key")
            if issued.name == name and issued.expires_unix_seconds > now and not self.is_revoked(issued):
                left = format_seconds(issued.expires_unix_seconds - now)
                raise RefusedError(f"the name {name!r} belongs to a member whose certificate ends in {left}; choose another name")

    def check_renewable(self, name: str, role: str, now: float) -> Issued:
        """A member that still is one: the certificate it has."""
        for issued in self.issued:
            if issued.name == name and issued.role == role and issued.expires_unix_seconds > now and not self.is_revoked(issued):
                return issued
        raise RefusedError(f"{name} has no certificate of this run that is valid; it must enrol with a token")

    def is_revoked(self, issued: Issued) -> bool:
        """Whether it was shut out."""
        return any(entry.serial == issued.serial for entry in self.revocations.entries)

    def revoke(self, name: str, reason: str, now: float) -> int:
        """Shuts out every certificate a member has, and cancels the token it enrolled with; returns how many certificates those are."""
        serials = [item for item in self.issued if item.name == name and item.expires_unix_seconds > now and not self.is_revoked(item)]
        if not serials:
            raise RefusedError(f"no member {name!r} has a certificate that is valid")
        for token in {item.token for item in serials} & self.tokens.keys():
            self.tokens[token].cancelled = True
        kept = tuple(entry for entry in self.revocations.entries if entry.expires_unix_seconds > now - _REMEMBER_SECONDS)
        new = tuple(Revoked(item.serial, name, reason, now, item.expires_unix_seconds) for item in serials)
        self.revocations = Revocations(self.revocations.number + 1, kept + new)
        return len(new)

    def forget(self, now: float) -> None:
        """Drops what ended long ago."""
        self.tokens = {key: token for key, token in self.tokens.items() if token.expires_unix_seconds > now - _REMEMBER_SECONDS}
        self.issued = [item for item in self.issued if item.expires_unix_seconds > now - _REMEMBER_SECONDS]


class LedgerFile:
    """The ledger on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Ledger:
        """As it is now."""
        try:
            return msgspec.json.decode(read_private(self.path), type=Ledger)
        except msgspec.DecodeError as error:
            raise FabricError(f"{self.path}: not the ledger of an authority: {error}") from None

    @contextlib.contextmanager
    def change(self, now: float) -> Iterator[Ledger]:
        """The ledger to change: kept if the block ends well, else left as it was. One at a time, across threads and processes."""
        with self._locked():
            ledger = self.read() if self.path.exists() else Ledger()
            yield ledger
            ledger.forget(now)
            write_private(self.path, msgspec.json.encode(ledger))

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = os.open(self.path.with_suffix(".lock"), os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)


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

    def issue_token(self, role: str = "worker", *, uses: int = 1, lifetime_seconds: float = 3600.0, own: bool = False) -> str:
        """The text of a token with which `uses` members may enrol in a role before it expires. It is shown here and kept nowhere.

        `own` is for processes of the run's launcher: they alone may have the names it gives (coordinator, feeder, worker-0, …).
        """
        checked = check_role(role)
        if checked == "coordinator":
            raise RefusedError("a token for a coordinator would let its holder run the run; coordinators open the run's directory instead")
        if uses < 1 or lifetime_seconds <= 0:
            raise RefusedError(f"a token for {uses} uses within {lifetime_seconds:.0f} s lets nobody in")
        token, now = Token.make(self.public_key), self._clock()
        with self._ledger.change(now) as ledger:
            ledger.tokens[token.id] = TokenRecord(token.digest, checked, uses, uses, now + lifetime_seconds, own=own)
        return token.text

    # ---- certificates

    def enrol(self, token_id: str, secret: bytes, name: str, request: bytes) -> Certified:
        """A certificate for whoever has a token; uses it up by one. RefusedError says why not, and then nothing is used up."""
        now = self._clock()
        with self._ledger.change(now) as ledger:
            token = ledger.check_token(token_id, secret, now)
            key = read_request(request)
            if is_reserved(check_name(name)) and not token.own:
                raise RefusedError(f"{name!r} is a name of the run's own processes; choose another with --name")
            ledger.check_new(name, key_digest(key), now)
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
