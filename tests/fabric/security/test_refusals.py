"""Over real sockets: everything that is refused is refused with a sentence on both sides and an event, and the run goes on."""

import contextlib
import re
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from atoll.errors import FabricError, RefusedError
from atoll.events import AnyEvent, CertificateIssued, CertificateRevoked, PeerRefused
from atoll.fabric import Backoff, CallingPeer, Fabric, TcpCarrier
from atoll.fabric.address import split_address
from atoll.fabric.frame import CallMessage, Kind, Open, encode_frame, pack_prefix
from atoll.fabric.security import Authority, Credentials, RunMember, enrol, serve
from atoll.fabric.security.certificates import Identity, make_certificate, make_request, public_bytes
from atoll.fabric.security.enrolment import Ask, Welcome
from atoll.fabric.security.token import Token
from atoll.fabric.service import allowed
from tests.fabric.services import Named
from tests.fabric.test_fabric import eventually

QUICK = Backoff(first_seconds=0.01, largest_seconds=0.05, attempts=3)


class Board:
    """A service with roles."""

    @allowed("worker", "coordinator")
    async def post(self, request: Named, peer: CallingPeer) -> Named:
        return Named(f"{peer.name} the {peer.role}: {request.name}", request.tensors)

    @allowed("coordinator")
    async def clear(self, request: int, peer: CallingPeer) -> int:
        return request

    async def forgotten(self, request: int, peer: CallingPeer) -> int:
        return request


class Run:
    """A run with its authority served, and an honest worker in it."""

    def __init__(self, directory: Path) -> None:
        self.events: list[AnyEvent] = []
        self.authority = Authority.create(directory)
        self.coordinator, self.address = serve(self.authority, "127.0.0.1:0", services=[Board()], observer=self.events.append)
        self.honest = RunMember(enrol(self.address, self.authority.issue_token(), "honest"))
        self.remote = self.honest.join(self.address)
        assert self.goes_on()

    def goes_on(self) -> bool:
        return self.remote.call_sync(Board.post, Named("hello", [torch.ones(3)])).name == "honest the worker: hello"

    def enrolled(self, name: str, role: str = "worker") -> Credentials:
        return enrol(self.address, self.authority.issue_token(role), name)

    def refused(self, text: str, what: str = "connection") -> PeerRefused:
        """The event of a refusal, once it is there."""

        def found() -> list[PeerRefused]:
            return [event for event in self.events if isinstance(event, PeerRefused) and text in event.reason and event.what == what]

        eventually(lambda: bool(found()))
        return found()[0]

    def close(self) -> None:
        self.honest.close()
        self.coordinator.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    run = Run(tmp_path / "run")
    yield run
    assert run.goes_on(), "whatever was refused, the run is unharmed"
    run.close()


def refusal_of(credentials: Credentials, address: str, *, member: bool = True) -> tuple[str, list[AnyEvent]]:
    """What somebody with these credentials hears when it calls, and its own events."""
    events: list[AnyEvent] = []
    with RunMember(credentials, backoff=QUICK, observer=events.append) as joiner, pytest.raises(FabricError) as caught:
        joiner.fabric.connect(address).call_sync(Board.post, Named("x"))
    assert any(isinstance(event, PeerRefused) for event in events), "its own side has the event too"
    return str(caught.value), events


# ---- enrolment


def test_a_wrong_token_is_refused(run: Run) -> None:
    forged = Token.make(run.authority.public_key).text
    with pytest.raises(RefusedError, match=r"refused to enrol mallory: the token is not one that this run's authority issued"):
        enrol(run.address, forged, "mallory")
    assert "mallory" in run.refused("not one that this run's authority issued", "enrolment").peer
    right = Token.parse(run.authority.issue_token())
    with pytest.raises(RefusedError, match="not one that this run's authority issued"):
        enrol(run.address, msgspec.structs.replace(right, secret=bytes(16)).text, "mallory")


def test_a_token_is_good_for_as_many_as_it_says(run: Run) -> None:
    token = run.authority.issue_token("feeder", uses=2)
    assert [enrol(run.address, token, name).role for name in ("one", "two")] == ["feeder", "feeder"]
    with pytest.raises(RefusedError, match="the token is used up: it was good for 2"):
        enrol(run.address, token, "three")
    run.refused("the token is used up", "enrolment")
    assert sum(isinstance(event, CertificateIssued) and event.role == "feeder" for event in run.events) == 2


def test_an_expired_token_is_refused(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    token = run.authority.issue_token(lifetime_seconds=100)
    monkeypatch.setattr(run.authority, "_clock", lambda: time.time() + 160)
    with pytest.raises(RefusedError, match="the token expired 60 s ago; ask for a new one"):
        enrol(run.address, token, "late")
    run.refused("the token expired", "enrolment")


def test_a_token_of_another_authority_is_not_even_sent(run: Run, tmp_path: Path) -> None:
    elsewhere = Authority.create(tmp_path / "elsewhere").issue_token()
    with pytest.raises(RefusedError, match=r"is not the authority this token is for: its certificate was signed by another.*not sent"):
        enrol(run.address, elsewhere, "lost")
    run.refused("it has a token of another authority", "enrolment")


def test_a_man_in_the_middle_learns_nothing(run: Run, tmp_path: Path) -> None:
    """He has a certificate, even one of a coordinator, but of an authority of his own; all he hears is that he is not trusted."""
    heard: list[bytes] = []
    his = Authority.create(tmp_path / "his").credentials()
    listening = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        sock, _ = listening.accept()
        with sock, his.door_context.wrap_socket(sock, server_side=True) as secured:
            while data := secured.recv(65536):
                heard.append(data)

    thread = threading.Thread(target=listen)
    thread.start()
    token = run.authority.issue_token()
    with pytest.raises(RefusedError, match="The token was not sent"):
        enrol(f"127.0.0.1:{listening.getsockname()[1]}", token, "careful")
    thread.join()
    listening.close()
    assert b"another authority" in b"".join(heard)
    assert Token.parse(token).secret not in b"".join(heard)
    assert enrol(run.address, token, "careful").name == "careful", "the token is still good"


def at_the_door(run: Run) -> ssl.SSLSocket:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["atoll-enrol"])
    return context.wrap_socket(socket.create_connection(split_address(run.address), timeout=20))


def answer_to(run: Run, message: bytes) -> bytes:
    answer = b""
    with at_the_door(run) as secured:
        secured.sendall(message)
        while part := secured.recv(65536):
            answer += part
    return answer


def test_a_replayed_enrolment_is_refused(run: Run) -> None:
    """The same bytes again, with a token that is good for more: nobody gets a second certificate for a key."""
    token = Token.parse(run.authority.issue_token(uses=5))
    ask = msgspec.msgpack.encode(Ask(token.id, token.secret, "twice", make_request(Ed25519PrivateKey.generate())))
    message = struct.pack("<I", len(ask)) + ask
    assert isinstance(msgspec.msgpack.decode(answer_to(run, message)[4:], type=Welcome), Welcome)
    assert b"this enrolment was made before" in answer_to(run, message)
    run.refused("this enrolment was made before", "enrolment")
    assert run.authority._ledger.read().tokens[token.id].uses_left == 4


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (struct.pack("<I", 1 << 31), "a message of 2147483648 bytes at the door; at most 16384"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "no message of an enrolment"),
        (struct.pack("<I", 9) + b"\x91" * 9, "no message of an enrolment"),
    ],
    ids=["too long", "no msgpack", "nested"],
)
def test_nonsense_at_the_door_is_refused(run: Run, message: bytes, said: str) -> None:
    assert said.encode() in answer_to(run, message)
    run.refused(said, "enrolment")


def test_a_name_that_is_taken_is_refused_and_the_token_stays_good(run: Run) -> None:
    token = run.authority.issue_token()
    with pytest.raises(RefusedError, match="the name 'honest' belongs to a member"):
        enrol(run.address, token, "honest")
    with pytest.raises(RefusedError, match="'coordinator' is a name of the run's own processes"):
        enrol(run.address, token, "coordinator")
    with pytest.raises(RefusedError, match="is no name for a member"):
        enrol(run.address, token, "../etc")
    assert enrol(run.address, token, "other").name == "other"


# ---- connections


def test_a_member_of_another_run_is_refused(run: Run, tmp_path: Path) -> None:
    """Neither accepts the other: whoever dials, and whoever is dialled."""
    stranger = Authority.create(tmp_path / "other").credentials("stranger", "worker")
    text, _ = refusal_of(stranger, run.address)
    assert "the peer's certificate is refused" in text
    run.refused("refused the certificate of this side: another authority signed it")


def forge(run: Run, name: str, role: str, seconds: float) -> Credentials:
    """What only the authority's own key can make."""
    key = Ed25519PrivateKey.generate()
    identity = Identity(run.authority.run, role, name)  # type: ignore[arg-type]
    now = time.time()
    made = make_certificate(run.authority.certificate, run.authority._key, key.public_key(), identity, now, seconds)
    return Credentials(key, made.public_bytes(Encoding.DER), run.authority.certificate_der, now=min(now, now + seconds) - 1)


def test_an_expired_certificate_is_refused(run: Run) -> None:
    text, _ = refusal_of(forge(run, "old", "worker", -30), run.address)
    assert "refused the certificate of this side: it has expired" in text
    run.refused("the peer's certificate is refused: certificate has expired")


def test_whoever_shows_no_certificate_is_refused(run: Run) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with Fabric("nobody", carrier=TcpCarrier(client=context), backoff=QUICK) as nobody:
        with pytest.raises(RefusedError, match="showed no certificate, which every member of a run must have"):
            nobody.connect(run.address).call_sync(Board.post, Named("x"))
        run.refused("it showed no certificate")
        plain_member = run.honest.fabric.listen()  # no authority: it wants a certificate in the hand-shake
        with pytest.raises(RefusedError, match="without a certificate"):
            nobody.connect(plain_member).call_sync(Board.post, Named("x"))


def test_only_tls_1_3_is_spoken(run: Run) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(split_address(run.address), timeout=20) as sock, pytest.raises(ssl.SSLError):
        context.wrap_socket(sock)
    run.refused("only TLS 1.3 is accepted")


def test_what_a_peer_says_of_itself_must_be_what_its_certificate_says(run: Run) -> None:
    credentials = run.enrolled("oslo", "observer")
    for name, role in (("oslo", "coordinator"), ("honest", "observer")):
        carrier = TcpCarrier(client=credentials.client_context)
        with Fabric(name, role=role, carrier=carrier, backoff=QUICK) as liar:
            text = f"it says it is {name} ({role}), but its certificate is for oslo (observer)"
            with pytest.raises(RefusedError, match=re.escape(text)):
                liar.connect(run.address).call_sync(Board.post, Named("x"))
            run.refused(text)


def test_a_revoked_member_is_cut_off_everywhere_and_not_let_in_again(run: Run) -> None:
    """By the coordinator, and by a member it has a connection with, which hears of it from the coordinator."""
    events: list[AnyEvent] = []
    with RunMember(run.enrolled("mallory"), backoff=QUICK, observer=events.append) as mallory:
        to_honest = mallory.fabric.connect(run.honest.fabric.listen(), name="honest")
        to_run = mallory.join(run.address)
        assert to_run.call_sync(Board.post, Named("x")).name == "mallory the worker: x"
        eventually(lambda: to_honest.state == "alive")
        assert run.authority.revoke("mallory", "it sent wrong gradients") == 1
        eventually(lambda: to_run.given_up is not None and to_honest.given_up is not None)
        for remote in (to_run, to_honest):
            assert "the certificate of mallory was revoked" in str(remote.given_up)
            assert "it sent wrong gradients" in str(remote.given_up)
        with pytest.raises(RefusedError, match="the certificate of mallory was revoked"):
            mallory.fabric.connect(run.address).call_sync(Board.post, Named("x"))
    run.refused("the certificate of mallory was revoked")
    assert [event.peer for event in run.events if isinstance(event, CertificateRevoked)] == ["mallory"]
    assert any(isinstance(event, PeerRefused) and "revoked" in event.reason for event in events)


# ---- calls


def test_a_role_that_may_not_call_is_refused_and_so_is_what_states_no_roles(run: Run) -> None:
    with RunMember(run.enrolled("eve", "observer")) as eve:
        remote = eve.join(run.address)
        with pytest.raises(RefusedError, match=r"observers may not call Board.post: only coordinators and workers may"):
            remote.call_sync(Board.post, Named("x"))
        with pytest.raises(RefusedError, match=r"Board.clear: only coordinators may"):
            run.remote.call_sync(Board.clear, 1)
        with pytest.raises(RefusedError, match=r"Board.forgotten: it states no roles, so nobody may"):
            run.remote.call_sync(Board.forgotten, 1)
        assert remote.state == "alive", "the call alone is refused"
    assert run.refused("observers may not call Board.post", "call").peer == "eve"


def test_another_job_is_refused_and_both_are_told_what_differs(tmp_path: Path) -> None:
    events: list[AnyEvent] = []
    authority = Authority.create(tmp_path)
    ours = {"code train.py": "aaaa", "config": "1111", "torch": "2.13.0"}
    coordinator, address = serve(authority, "127.0.0.1:0", services=[Board()], observer=events.append, fingerprint=ours)
    credentials = enrol(address, authority.issue_token(), "rome")
    with coordinator:
        other = {"code train.py": "bbbb", "config": "1111", "torch": "2.12.1"}
        there = "code train.py is bbbb there and aaaa here; torch is 2.12.1 there and 2.13.0 here"
        here = "code train.py is aaaa there and bbbb here; torch is 2.13.0 there and 2.12.1 here"
        with RunMember(credentials, fingerprint=other, backoff=QUICK) as rome, pytest.raises(RefusedError) as caught:
            rome.join(address).call_sync(Board.post, Named("x"))
        assert here in str(caught.value) or there in str(caught.value)
        eventually(lambda: any(isinstance(event, PeerRefused) and (here in event.reason or there in event.reason) for event in events))
        with RunMember(credentials, fingerprint=ours) as rome:
            assert rome.join(address).call_sync(Board.post, Named("x")).name == "rome the worker: x"


# ---- bytes


class Wiretap:
    """Between a member and the coordinator, on the wire: `repeat` sends again what it saw last."""

    def __init__(self, address: str) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listening.getsockname()[1]}"
        self._target = split_address(address)
        self._last = b""
        self._server: socket.socket | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        client, _ = self.listening.accept()
        with client, socket.create_connection(self._target) as server:
            self._server = server
            back = threading.Thread(target=self._copy, args=(server, client))
            back.start()
            self._copy(client, server)
            back.join()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                if target is self._server:
                    self._last = data
                target.sendall(data)
        except OSError:
            pass
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def repeat(self) -> None:
        assert self._server is not None
        self._server.sendall(self._last)

    def close(self) -> None:
        self.listening.close()
        self._thread.join()


def test_bytes_that_are_repeated_on_the_wire_end_that_connection_only(run: Run) -> None:
    tap = Wiretap(run.address)
    with RunMember(run.enrolled("tapped"), backoff=QUICK) as tapped:
        remote = tapped.fabric.connect(tap.address)
        assert remote.call_sync(Board.post, Named("x")).name == "tapped the worker: x"
        tap.repeat()
        eventually(lambda: remote.state == "dead")
        said = "bytes on the way were changed, repeated or lost"
        eventually(lambda: any(said in getattr(event, "reason", "") for event in run.events))
        assert "bytes on the way were changed" in remote.lost_because
    tap.close()


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (lambda: [open_frame(1), open_frame(1)], "stream 1 cannot be opened: it was already"),
        (lambda: [b"GET / HTTP/1.1\r\n\r\n" * 3], "not a frame of Atoll"),
        (lambda: [pack_prefix(Kind.OPEN, 1, 2**31, 0)], "a header of 2147483648 bytes; at most"),
        (lambda: [pack_prefix(Kind.CHUNK, 1, 0, 2**31)], "a body of 2147483648 bytes; at most"),
    ],
    ids=["replayed", "no frame", "long header", "long body"],
)
def test_replayed_and_malformed_frames_of_a_member_are_refused(run: Run, frames: Callable[[], list[bytes]], said: str) -> None:
    """By somebody with a good certificate: TLS is no protection against those."""
    credentials = run.enrolled("mallory")
    hello = RunMember(credentials)
    hello.close()
    with credentials.client_context.wrap_socket(socket.create_connection(split_address(run.address), timeout=20)) as secured:
        secured.sendall(encode_frame(Kind.HELLO, 0, hello.fabric.settings.hello()) + b"".join(frames()))
        answer = b""
        try:
            while part := secured.recv(65536):
                answer += part
        except ssl.SSLError:  # the end of TLS that a connection which is cut does not have
            pass
    assert said.encode() in answer
    assert run.refused(said).peer == "mallory"


def open_frame(stream: int) -> bytes:
    payload = msgspec.msgpack.encode(Named("x"))
    return encode_frame(Kind.OPEN, stream, Open("Board.post", 10.0, CallMessage(len(payload))), payload)


def test_the_authoritys_key_is_its_tokens_pin(run: Run) -> None:
    assert Token.parse(run.authority.issue_token()).authority_key == public_bytes(run.authority._key.public_key())


@pytest.mark.parametrize("name", ["coordinator", "feeder", "Authority", "worker-0", "worker-12-r3", "worker-0-r1-2", "feeder-1"])
def test_names_of_a_runs_own_processes_are_free_only_to_those_its_launcher_starts(run: Run, name: str) -> None:
    token = run.authority.issue_token("worker", uses=2)
    with pytest.raises(RefusedError, match="is a name of the run's own processes; choose another with --name"):
        enrol(run.address, token, name)
    assert enrol(run.address, token, f"{name}.oslo").name == f"{name}.oslo"
    assert enrol(run.address, token, "worker-1-a1b2c3").name == "worker-1-a1b2c3", "a machine's own name with something random behind it"
    if name != "coordinator":  # who is there already
        assert enrol(run.address, run.authority.issue_token("worker", own=True), name).name == name
