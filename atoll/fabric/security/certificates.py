"""Keys and certificates of a run, by `cryptography`: Ed25519 throughout. Pure: time comes from outside, nothing is written."""

import datetime
import hashlib

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll.errors import RefusedError
from atoll.fabric.security.identity import Identity, identity_of

__all__ = [
    "check_issued",
    "key_digest",
    "load_certificate",
    "make_authority_certificate",
    "make_certificate",
    "make_request",
    "private_pem",
    "public_bytes",
    "read_request",
    "run_of",
]

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
