"""How somebody with a token becomes a member: one question and one answer over TLS, at the same address where members meet.

The joiner looks at the certificate it is shown before it says anything: the token carries the authority's public key, and only a
certificate of a coordinator signed with that key will do. It makes its own key, which never leaves it, and sends a signing request.
"""

import itertools
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias, TypeVar

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.errors import FabricError, PeerLostError, RefusedError
from atoll.events import Observer, PeerRetried
from atoll.fabric.address import split_address
from atoll.fabric.security.authority import Authority, Certified
from atoll.fabric.security.certificates import check_issued, check_name, load_certificate, make_request
from atoll.fabric.security.credentials import ENROL_PROTOCOL, Credentials
from atoll.fabric.security.token import Token
from atoll.fabric.tls import shake_hands, tls_failure
from atoll.units import format_seconds

__all__ = ["Door", "Welcome", "enrol"]

_LENGTH = struct.Struct("<I")
_MOST_BYTES = 16 * 1024
_DOOR_SECONDS = 10.0
_AGAIN_SECONDS = 0.2


class Ask(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let me in."""

    token_id: str
    secret: bytes
    name: str
    request: bytes  # for signing (DER)


class Leave(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Never mind: the joiner does not trust whom it found, and says no more than that."""

    reason: str


class Welcome(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Come in."""

    certificate: bytes
    authority: bytes


class Refusal(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No, because."""

    reason: str


Question: TypeAlias = Ask | Leave
Answer: TypeAlias = Welcome | Refusal
Heard = TypeVar("Heard")
_QUESTIONS: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_ANSWERS: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


# ---- the joiner


def enrol(
    address: str,
    token: str,
    name: str,
    *,
    timeout_seconds: float = 20.0,
    patience_seconds: float = 0.0,
    observer: Observer = lambda event: None,
) -> Credentials:
    """Enrols with a token at the address of a run's authority. Errors are sentences; nothing secret is sent to anybody else.

    Several addresses, with commas between, are tried in turn: only the one that coordinates answers. With patience they are tried again
    where nobody answers, as a coordinator may just be starting; `observer` hears of it once.
    """
    parsed = Token.parse(token)
    check_name(name)
    key = Ed25519PrivateKey.generate()
    secured, address = _reach(address.split(","), timeout_seconds, patience_seconds, observer)
    with secured:
        _check_authority(secured, parsed, address)
        _say(secured, Ask(parsed.id, parsed.secret, name, make_request(key)))
        answer = _guard(address, lambda: _hear(secured, _ANSWERS))
    if isinstance(answer, Refusal):
        raise RefusedError(f"{address} refused to enrol {name}: {answer.reason}")
    credentials = Credentials(key, answer.certificate, answer.authority)
    if credentials.authority_key != parsed.authority_key or credentials.name != name:
        raise RefusedError(f"{address} answered with a certificate that is not what was asked for")
    return credentials


def _reach(addresses: Sequence[str], timeout_seconds: float, patience_seconds: float, observer: Observer) -> tuple[ssl.SSLSocket, str]:
    """A connection with the first that answers, and where that is."""
    until, said = time.monotonic() + patience_seconds, False
    for attempt in itertools.count(1):
        address = addresses[(attempt - 1) % len(addresses)]
        try:
            return _connect(address, timeout_seconds), address
        except PeerLostError as error:
            if attempt < len(addresses):
                continue
            left = until - time.monotonic()
            if left <= 0:
                raise PeerLostError(f"{error}; is the run still going, and does it listen there for other machines (--listen)?") from error
            if not said:
                reason = f"{error}; retrying for {format_seconds(patience_seconds)}"
                observer(PeerRetried(peer=address, attempt=attempt, delay_seconds=_AGAIN_SECONDS, reason=reason))
                said = True
            time.sleep(min(_AGAIN_SECONDS, left))
    raise AssertionError("it counts for ever")


def _connect(address: str, timeout_seconds: float) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # what it shows is checked against the token's key, by `_check_authority`
    context.set_alpn_protocols([ENROL_PROTOCOL])

    def connect() -> ssl.SSLSocket:
        return shake_hands(socket.create_connection(split_address(address), timeout=timeout_seconds), context, server_side=False)

    return _guard(address, connect)


def _check_authority(secured: ssl.SSLSocket, token: Token, address: str) -> None:
    """RefusedError unless the other side holds a coordinator's certificate signed with the key in the token."""
    try:
        shown = secured.getpeercert(binary_form=True)
        identity = check_issued(load_certificate(shown or b""), token.authority_key, time.time())
    except RefusedError as error:
        _say(secured, Leave("it has a token of another authority"))
        text = f"whoever answers at {address} is not the authority this token is for: {error}. The token was not sent"
        raise RefusedError(f"{text}; check the address, and if it is right ask for a token of that run") from None
    if identity.role != "coordinator" or secured.selected_alpn_protocol() != ENROL_PROTOCOL:
        who = f"{identity.name} ({identity.role})"
        raise RefusedError(f"{address} is {who}, which enrols nobody; use the address of the run's coordinator")


def _guard(address: str, action: Callable[[], Heard]) -> Heard:
    """What goes wrong on the way, in words."""
    try:
        return action()
    except ssl.SSLError as error:
        raise tls_failure(error, address) from None
    except socket.gaierror as error:
        raise RefusedError(f"{address}: there is no such host ({error.strerror}); check the address") from None
    except OSError as error:
        raise PeerLostError(f"{address}: {error.strerror or error or type(error).__name__}") from None


# ---- the authority


class Door:
    """Answers those who come with a token, for a carrier's `door`. `issued` and `refused` are told in the thread that serves it."""

    def __init__(self, authority: Authority, issued: Callable[[Certified], None], refused: Callable[[str, str], None]) -> None:
        self._authority, self._issued, self._refused = authority, issued, refused

    def __call__(self, secured: ssl.SSLSocket) -> bool:
        """Whether it was somebody who enrols; then it has its answer."""
        if secured.selected_alpn_protocol() != ENROL_PROTOCOL:
            return False
        secured.settimeout(_DOOR_SECONDS)
        host, port = secured.getpeername()[:2]
        who = f"{host}:{port}"
        try:
            question = _hear(secured, _QUESTIONS)
            if isinstance(question, Leave):
                raise RefusedError(question.reason[:200])
            who = f"{question.name[:80]} ({who})"
            certified = self._authority.enrol(question.token_id, question.secret, question.name, question.request)
            _say(secured, Welcome(certified.certificate, self._authority.certificate_der))
        except OSError as error:
            self._refused(who, f"it left before it was answered: {error.strerror or error}")
        except FabricError as error:
            self._refused(who, str(error))
            _say(secured, Refusal(str(error)))
        else:
            self._issued(certified)
        return True


# ---- both


def _say(secured: ssl.SSLSocket, message: msgspec.Struct) -> None:
    data = msgspec.msgpack.encode(message)
    try:
        secured.sendall(_LENGTH.pack(len(data)) + data)
    except OSError:  # it is gone: there is nobody to tell
        return


def _hear(secured: ssl.SSLSocket, decoder: "msgspec.msgpack.Decoder[Heard]") -> Heard:
    """One message; RefusedError if it is none or too long, which is known before anything is set aside for it."""
    size = _LENGTH.unpack(_exactly(secured, _LENGTH.size))[0]
    if size > _MOST_BYTES:
        raise RefusedError(f"a message of {size} bytes at the door; at most {_MOST_BYTES} are read")
    try:
        return decoder.decode(_exactly(secured, size))
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise RefusedError(f"no message of an enrolment: {error}") from None


def _exactly(secured: ssl.SSLSocket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = secured.recv(size - len(data))
        if not part:
            raise RefusedError("the other side closed the connection without an answer")
        data += part
    return data
