"""What an authority remembers: tokens, certificates, revocations. One JSON file; every change is made under a lock and put in place whole,
so that several processes may use it and a crash loses nothing that was promised. Decisions are pure; only `LedgerFile` touches the disk."""

import contextlib
import fcntl
import hmac
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from atoll.errors import FabricError, RefusedError
from atoll.fabric.security.files import read_private, write_private
from atoll.fabric.security.identity import Role
from atoll.fabric.security.revocations import Revocations, Revoked
from atoll.fabric.security.token import secret_digest
from atoll.units import format_seconds

__all__ = ["Issued", "Ledger", "LedgerFile", "TokenRecord"]

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
