"""Keys and certificates of a run, by `cryptography`: Ed25519 throughout. Pure: time comes from outside, nothing is written.

Who a member is (its run, role and name) is one URI inside its certificate; what a peer says of itself counts for nothing. Who is shut out
is a numbered list, signed by the authority, that members pass on and check at every connection.
"""

import datetime
import hashlib
import re
import time
from typing import Literal, TypeAlias, get_args

import msgspec
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import RefusedError

__all__ = [
    "ROLES",
    "Identity",
    "Revocations",
    "Revoked",
    "Role",
    "SignedRevocations",
    "check_issued",
    "check_name",
    "check_role",
    "identity_of",
    "key_digest",
    "load_certificate",
    "make_authority_certificate",
    "make_certificate",
    "make_request",
    "private_pem",
    "public_bytes",
    "read_request",
    "read_revocations",
    "run_of",
    "sign_revocations",
]

Role: TypeAlias = Literal["worker", "feeder", "observer", "coordinator"]
ROLES: tuple[Role, ...] = get_args(Role)
"""What a member may be. `coordinator` is never given for a token."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_RESERVED = re.compile(r"(authority|coordinator|feeder|worker-\d{1,4})(-r\d{1,4})?(-\d{1,4})?")
_URI = re.compile(r"atoll://([0-9a-f]{16})/([a-z]+)/([A-Za-z0-9._-]+)")


class Identity(msgspec.Struct, frozen=True):
    """A member: of which run, as what, under which name."""

    run: str  # the digest of its authority's key
    role: Role
    name: str

    @property
    def uri(self) -> str:
        """As it stands in a certificate."""
        return f"atoll://{self.run}/{self.role}/{self.name}"


def check_name(name: str) -> str:
    """A name a member may have; RefusedError if not."""
    if not _NAME.fullmatch(name):
        raise RefusedError(f"{name[:80]!r} is no name for a member: use up to 63 letters, digits, '.', '_', '-', a letter or digit first")
    return name


def is_reserved(name: str) -> bool:
    """Whether a name is one of a run's own processes, as its launcher calls them: nobody who joins may be called so."""
    return _RESERVED.fullmatch(name.lower()) is not None


def check_role(role: str) -> Role:
    """A role there is; RefusedError if not."""
    for known in ROLES:
        if role == known:
            return known
    raise RefusedError(f"{role[:80]!r} is no role; there are {', '.join(ROLES)}")


def identity_of(certificate: x509.Certificate) -> Identity:
    """What a certificate says; RefusedError if it is not a member's. Its signature was checked by TLS."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except (x509.ExtensionNotFound, ValueError):
        uris = []
    found = _URI.fullmatch(uris[0]) if len(uris) == 1 else None
    if found is None:
        raise RefusedError("its certificate does not say which member of which run it is for")
    return Identity(found[1], check_role(found[2]), check_name(found[3]))


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


_SKEW = datetime.timedelta(minutes=5)  # that clocks may differ
_REQUEST_BYTES = 4096


def public_bytes(key: Ed25519PublicKey) -> bytes:
    """The 32 bytes of a public key."""
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def run_of(authority_key: bytes) -> str:
    """The run an authority is for: a digest of its public key."""
    return hashlib.sha256(b"atoll run\0" + authority_key).hexdigest()[:16]


def key_digest(key: Ed25519PublicKey) -> str:
    """Tells keys apart."""
    return hashlib.sha256(public_bytes(key)).hexdigest()


def make_authority_certificate(key: Ed25519PrivateKey, now: float, days: int) -> x509.Certificate:
    """The self-signed certificate of a run's authority."""
    name = _name(f"atoll run {run_of(public_bytes(key.public_key()))}")
    builder = _builder(key.public_key(), name, name, now, days * 86400.0)
    return (
        builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(authority=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, None)
    )


def make_certificate(
    authority: x509.Certificate, key: Ed25519PrivateKey, member_key: Ed25519PublicKey, identity: Identity, now: float, seconds: float
) -> x509.Certificate:
    """A member's certificate, signed with the authority's key, from now (and a little before, as clocks differ) for so many seconds."""
    builder = _builder(member_key, _name(identity.name), authority.subject, now, seconds)
    purposes = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())
    return (
        builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(authority=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(identity.uri)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(member_key), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(key, None)
    )


def make_request(key: Ed25519PrivateKey) -> bytes:
    """A signing request: nothing but the public key and the proof that its private key is there."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, None).public_bytes(Encoding.DER)


def read_request(data: bytes) -> Ed25519PublicKey:
    """The key of a signing request; RefusedError if it proves nothing. All else that may be in it is passed over."""
    if len(data) > _REQUEST_BYTES:
        raise RefusedError(f"a signing request of {len(data)} bytes; at most {_REQUEST_BYTES} are read")
    try:
        request = x509.load_der_x509_csr(data)
        key = request.public_key()
        valid = request.is_signature_valid
    except Exception as error:  # cryptography raises many kinds for bytes of a stranger's making
        raise RefusedError(f"no signing request: {type(error).__name__}") from None
    if not isinstance(key, Ed25519PublicKey) or not valid:
        raise RefusedError("a signing request that is not signed by an Ed25519 key of its own")
    return key


def load_certificate(data: bytes) -> x509.Certificate:
    """A certificate from DER; RefusedError if it is none."""
    try:
        return x509.load_der_x509_certificate(data)
    except ValueError as error:
        raise RefusedError(f"no certificate: {error}") from None


def check_issued(certificate: x509.Certificate, authority_key: bytes, now: float) -> Identity:
    """Who a certificate is for, if the authority with that key signed it and it is valid now; RefusedError if not."""
    try:
        Ed25519PublicKey.from_public_bytes(authority_key).verify(certificate.signature, certificate.tbs_certificate_bytes)
    except (InvalidSignature, ValueError):
        raise RefusedError("its certificate was signed by another authority than the run's") from None
    if not certificate.not_valid_before_utc.timestamp() <= now <= certificate.not_valid_after_utc.timestamp():
        ends = certificate.not_valid_after_utc
        raise RefusedError(f"its certificate is not valid now (it ends at {ends:%Y-%m-%d %H:%M:%S} UTC); are the clocks right?")
    identity = identity_of(certificate)
    if identity.run != run_of(authority_key):
        raise RefusedError("its certificate is for another run")
    return identity


def private_pem(key: Ed25519PrivateKey) -> bytes:
    """A private key as it is kept in a file that only its owner may read."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _builder(key: Ed25519PublicKey, subject: x509.Name, issuer: x509.Name, now: float, seconds: float) -> x509.CertificateBuilder:
    start = datetime.datetime.fromtimestamp(int(now), datetime.UTC)
    end = start + datetime.timedelta(seconds=int(seconds))
    return x509.CertificateBuilder(issuer, subject, key, x509.random_serial_number(), min(start, end) - _SKEW, end)


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not authority,
        key_cert_sign=authority,
        crl_sign=authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
