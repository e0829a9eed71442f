"""TLS hand-shakes over a socket that blocks, and what their failures mean in words. Both sides hear why."""

import contextlib
import socket
import ssl
import time

from atoll.errors import FabricError, PeerLostError, RefusedError

__all__ = ["shake_hands", "tls_failure"]

_LAST_WORDS_SECONDS = 1.0

_BECAUSE = {
    "TLSV1_ALERT_UNKNOWN_CA": "another authority signed it than the one of its run",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it has expired",
    "SSLV3_ALERT_CERTIFICATE_REVOKED": "it was revoked",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it is no certificate of its run",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it is no certificate of its run",
    "SSLV3_ALERT_UNSUPPORTED_CERTIFICATE": "it is of a kind that is not accepted",
    "TLSV1_ALERT_DECRYPT_ERROR": "its signature does not hold",
}
_NO_CERTIFICATE = ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "PEER_DID_NOT_RETURN_A_CERTIFICATE")
_TAMPERED = ("DECRYPTION_FAILED_OR_BAD_RECORD_MAC", "SSLV3_ALERT_BAD_RECORD_MAC", "UNEXPECTED_RECORD", "BAD_RECORD_TYPE")
_OTHER_VERSIONS = ("UNSUPPORTED_PROTOCOL", "TLSV1_ALERT_PROTOCOL_VERSION", "VERSION_TOO_LOW")


def shake_hands(sock: socket.socket, context: ssl.SSLContext, *, server_side: bool, hostname: str | None = None) -> ssl.SSLSocket:
    """The socket with TLS on it. When the two do not agree the other side is left time to read why, and the socket is closed."""
    secured = context.wrap_socket(sock, server_side=server_side, server_hostname=hostname, do_handshake_on_connect=False)
    try:
        secured.do_handshake()
    except BaseException as error:
        if isinstance(error, ssl.SSLError):
            _let_it_read(secured)
        secured.close()
        raise
    return secured


def _let_it_read(secured: ssl.SSLSocket) -> None:
    """Bytes that nobody read make the kernel reset a connection that is closed, and the other side lose the alert it was sent."""
    rest = bytearray(16384)
    end = time.monotonic() + _LAST_WORDS_SECONDS
    with contextlib.suppress(OSError):
        socket.socket.shutdown(secured, socket.SHUT_WR)
        secured.settimeout(_LAST_WORDS_SECONDS)
        while time.monotonic() < end and socket.socket.recv_into(secured, rest):
            pass


def tls_failure(error: ssl.SSLError, address: str) -> FabricError:
    """What a failure of TLS with whoever is at `address` means; RefusedError where trying again would not help."""
    who = address or "the peer"
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return RefusedError(f"{who}: the peer's certificate is refused: {error.verify_message}")
    if reason in _BECAUSE:
        return RefusedError(f"{who} refused the certificate of this side: {_BECAUSE[reason]}")
    if reason in _NO_CERTIFICATE:
        return RefusedError(f"{who}: connected without a certificate, which every member of a run must have; enrol with a token first")
    if reason in _OTHER_VERSIONS:
        return RefusedError(f"{who}: speaks another version of TLS; only TLS 1.3 is accepted")
    if reason in _TAMPERED:
        return PeerLostError(f"{who}: bytes on the way were changed, repeated or lost, which TLS does not let pass")
    return PeerLostError(f"{who}: TLS failed: {(reason or str(error)).replace('_', ' ').lower()}")
