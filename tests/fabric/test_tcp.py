"""Real sockets: TLS, malformed bytes refused on both sides, nothing left behind."""

import gc
import math
import os
import socket
import ssl
import threading
import time
from pathlib import Path

import pytest
import torch

from atoll.errors import FabricError, PeerLostError, RefusedError
from atoll.events import AnyEvent, PeerChanged, PeerRetried
from atoll.fabric import Backoff, CallingPeer, ConnectionSettings, Fabric, LivenessRule, Remote, TcpCarrier
from atoll.fabric.address import split_address
from atoll.fabric.frame import CallMessage, Hello, Kind, Open, Ping, encode_frame, pack_prefix
from atoll.fabric.pump import TcpPump
from tests.fabric.certificates import make_certificate
from tests.fabric.services import Named, Store
from tests.fabric.test_fabric import eventually

HELLO = encode_frame(Kind.HELLO, 0, Hello("mallory", "worker", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1.0))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n", b"not a frame of Atoll"),
        (encode_frame(Kind.PING, 0), b"PING before HELLO"),
        (HELLO + HELLO, b"a second HELLO"),
        (HELLO + pack_prefix(Kind.CHUNK, 77, 0, 10) + bytes(10), b"stream 77, which was never opened"),
        (HELLO + pack_prefix(Kind.CREDIT, 0, 4, 0) + b"\xc1\xc1\xc1\xc1", b"a header that is no Credit"),
        (HELLO + pack_prefix(Kind.CHUNK, 1, 0, 2**31), b"a body of 2147483648 bytes; at most"),
        (encode_frame(Kind.HELLO, 0, Hello("mallory", "worker", 1, 1, 1, 1, math.inf)), b"a header that is no Hello"),
        (HELLO + encode_frame(Kind.OPEN, 1, Open("Store.echo", math.inf, CallMessage(0))), b"a header that is no Open"),
        (HELLO + encode_frame(Kind.OPEN, 1, Open("Store.echo", math.nan, CallMessage(0))), b"a header that is no Open"),
        (HELLO + encode_frame(Kind.PING, 0, Ping(1, math.inf)), b"a header that is no Ping"),
    ],
    ids=["http", "no hello", "two hellos", "chunk of nothing", "bad header", "too long", "never late", "for ever", "no time", "no rate"],
)
def test_malformed_bytes_are_refused_with_a_reason_and_harm_nobody(data: bytes, said: bytes) -> None:
    with Fabric("rome", services=[Store()]) as rome, Fabric("oslo") as oslo:
        address = rome.listen()
        honest = oslo.connect(address)
        honest.call_sync(Store.echo, Named("before"))
        with socket.create_connection(split_address(address), timeout=20) as sock:
            sock.sendall(data)
            answer = b""
            while part := sock.recv(65536):
                answer += part
        assert said in answer
        assert honest.call_sync(Store.echo, Named("after", [torch.ones(50_000)])).name == "oslo:after"


def test_a_fabric_that_dials_something_else_says_so() -> None:
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listening.accept()
        with sock:
            sock.sendall(b"SSH-2.0-OpenSSH_9.9 some server\r\n")
            while sock.recv(65536):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    with Fabric("oslo") as oslo:
        remote = oslo.connect(f"127.0.0.1:{listening.getsockname()[1]}")
        with pytest.raises(FabricError, match="not a frame of Atoll: it begins with b'SS'"):
            remote.call_sync(Store.echo, Named("x"))
    thread.join()
    listening.close()


def contexts(directory: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    make_certificate(directory / "rome.pem")
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.minimum_version = ssl.TLSVersion.TLSv1_3
    server.load_cert_chain(directory / "rome.pem")
    return ssl.create_default_context(cafile=str(directory / "rome.pem")), server


def test_calls_over_tls(tmp_path: Path) -> None:
    client, server = contexts(tmp_path)
    with (
        Fabric("rome", services=[Store()], carrier=TcpCarrier(server=server)) as rome,
        Fabric("oslo", carrier=TcpCarrier(client=client)) as oslo,
    ):
        remote = oslo.connect(rome.listen())
        tensors = [torch.randn(2_000_000), torch.arange(7), torch.randn(30_001)]
        futures = [remote.call_soon(Store.echo, Named(str(i), tensors)) for i in range(6)]
        for future in futures:
            assert all(torch.equal(a, b) for a, b in zip(future.result().tensors, tensors, strict=True))


@pytest.mark.parametrize("tls", [False, True])
def test_the_loop_listens_while_only_small_things_come(tmp_path: Path, tls: bool) -> None:
    client, server = contexts(tmp_path) if tls else (None, None)
    with (
        Fabric("rome", services=[Store()], carrier=TcpCarrier(server=server)) as rome,
        Fabric("oslo", services=[Store()], carrier=TcpCarrier(client=client)) as oslo,
    ):
        remote = oslo.connect(rome.listen())
        tensor = torch.randn(200_000)
        for number in range(4):
            assert remote.call_sync(Store.echo, Named(str(number))).name == f"oslo:{number}"
            pump = pump_of(remote)
            eventually(lambda pump=pump: pump._loop_listens and pump._registered)
            mixed = [remote.call_soon(Store.echo, Named("x", [tensor] * (i % 3))) for i in range(9)]
            assert all(torch.equal(got, tensor) for one in mixed for got in one.result().tensors)


def pump_of(remote: Remote) -> TcpPump:
    assert remote._link is not None
    assert isinstance(remote._link.wire, TcpPump)
    return remote._link.wire


class Rude:
    """A service that blocks its loop, which no service should."""

    async def block(self, seconds: float, peer: CallingPeer) -> float:
        time.sleep(seconds)
        return seconds


def test_a_loop_that_is_blocked_does_not_make_its_peers_look_stopped() -> None:
    events: list[AnyEvent] = []
    often = LivenessRule(heartbeat_seconds=0.2)
    with (
        Fabric("rome", services=[Rude()], settings=ConnectionSettings(name="rome", liveness=often), observer=events.append) as rome,
        Fabric("oslo", settings=ConnectionSettings(name="oslo", liveness=often)) as oslo,
    ):
        remote = oslo.connect(rome.listen())
        assert remote.call_sync(Rude.block, 0.0, timeout_seconds=60) == 0.0
        eventually(lambda: pump_of(remote)._registered and rome_listens(rome))
        assert remote.call_sync(Rude.block, 2.5, timeout_seconds=60) == 2.5
        assert remote.call_sync(Rude.block, 0.0, timeout_seconds=60) == 0.0
        assert not [event for event in events if isinstance(event, PeerChanged) and event.state in ("stopped", "unreachable")]


def rome_listens(rome: Fabric) -> bool:
    return all(isinstance(link.wire, TcpPump) and link.wire._registered for link in rome._links)


def test_tls_and_plain_do_not_mix_and_a_wrong_authority_is_refused(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    _, server = contexts(tmp_path)
    stranger, _ = contexts(tmp_path / "other")
    quick = Backoff(first_seconds=0.001, attempts=2)
    with Fabric("rome", services=[Store()], carrier=TcpCarrier(server=server)) as rome:
        address = rome.listen()
        refused = pytest.raises(RefusedError, match="the peer's certificate is refused: self-signed certificate")
        with Fabric("oslo", carrier=TcpCarrier(client=stranger), backoff=quick) as oslo, refused:
            oslo.connect(address).call_sync(Store.echo, Named("x"))
        with Fabric("bern", backoff=quick) as bern, pytest.raises(FabricError):
            bern.connect(address).call_sync(Store.echo, Named("x"))


def test_a_lost_peer_is_dialled_again_and_every_change_is_an_event() -> None:
    events: list[AnyEvent] = []
    rome = Fabric("rome", services=[Store()])
    address = rome.listen()
    with Fabric("oslo", observer=events.append, backoff=Backoff(first_seconds=0.02, largest_seconds=0.1, attempts=200)) as oslo:
        remote = oslo.connect(address)
        remote.call_sync(Store.echo, Named("x"))
        rome.close()
        eventually(lambda: remote.state == "dead")
        with Fabric("rome", services=[Store()]) as again:
            again.listen(address)
            assert remote.call_sync(Store.echo, Named("y")).name == "oslo:y"
        changes = [(event.before, event.state) for event in events if isinstance(event, PeerChanged)]
        assert changes[:3] == [("new", "alive"), ("alive", "dead"), ("dead", "alive")]
        assert any(isinstance(event, PeerRetried) and event.delay_seconds for event in events)


def test_whoever_closes_hears_of_no_deaths() -> None:
    events: list[AnyEvent] = []
    with Fabric("rome", services=[Store()]) as rome, Fabric("bern", services=[Store()]) as bern:
        with Fabric("oslo", observer=events.append) as oslo:
            for other in (rome, bern):
                oslo.connect(other.listen()).call_sync(Store.echo, Named("x"))
            bern.close()
            eventually(lambda: oslo.peer("bern").state == "dead")
        assert oslo.peer("rome").state == "dead"
    dead = [event.peer for event in events if isinstance(event, PeerChanged) and event.state == "dead"]
    assert dead == ["bern"]  # it closed first


def test_a_peer_is_given_up_after_a_bounded_number_of_attempts() -> None:
    events: list[AnyEvent] = []
    given_up = pytest.raises(PeerLostError, match="was given up after 4 attempts: Connection refused")
    with Fabric("oslo", observer=events.append, backoff=Backoff(first_seconds=0.001, attempts=4)) as oslo, given_up:
        oslo.connect("127.0.0.1:1").call_sync(Store.echo, Named("x"))
    assert [event.delay_seconds is None for event in events if isinstance(event, PeerRetried)] == [False, False, False, True]


def resources() -> tuple[int, int]:
    gc.collect()
    return len(os.listdir("/proc/self/fd")), threading.active_count()


def cycle(address: str, times: int) -> None:
    """Connections that come and go, properly and rudely."""
    for number in range(times):
        with socket.create_connection(split_address(address), timeout=20) as sock:
            if number % 3:
                sock.sendall(HELLO)
                sock.recv(20)
            if number % 3 == 2:
                sock.sendall(encode_frame(Kind.GOODBYE, 0))


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts files through /proc")
def test_connections_that_come_and_go_leave_nothing_behind() -> None:
    already = threading.active_count()  # what other tests of this process keep for as long as it lives
    with Fabric("rome", services=[Store()], settings=ConnectionSettings(name="rome")) as rome:
        address = rome.listen()
        cycle(address, 10)
        eventually(lambda: not rome._links and threading.active_count() <= already + 2)
        before = resources()
        cycle(address, 1000)
        eventually(lambda: not rome._links)
        eventually(lambda: resources() <= before)
        assert not rome._tasks
    before = resources()
    for _ in range(30):
        with Fabric("rome", services=[Store()]) as rome, Fabric("oslo") as oslo:
            oslo.connect(rome.listen()).call_sync(Store.echo, Named("x"))
    eventually(lambda: resources() <= before)


def test_close_does_not_wait_for_a_peer_that_does_not_read() -> None:
    with Fabric("rome", services=[Store()]) as rome:
        address = rome.listen()
        with socket.create_connection(split_address(address)) as sock:
            sock.sendall(HELLO)
            eventually(lambda: "mallory" in rome.peers)
            future = rome.peer("mallory").call_soon(Store.echo, Named("x", [torch.zeros(200_000)]))
            time.sleep(0.05)
            rome.close()
            assert future.cancelled() or future.exception() is not None
