"""Peers that cannot be dialled: reached over the connection they made, and through a relay that cannot read what it forwards."""

import ctypes
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from atoll.errors import DeadlineError, FabricError, RefusedError
from atoll.events import AnyEvent, PeerChanged
from atoll.fabric import Backoff, CallingPeer
from atoll.fabric.address import split_address
from atoll.fabric.relay import Relay, RelayedPiece
from atoll.fabric.security import Authority, RunMember, enrol, serve
from atoll.fabric.service import allowed
from tests.fabric.services import Count, Named
from tests.fabric.test_fabric import eventually

Result = TypeVar("Result")
_CLONE_NEWNET = 0x40000000
PATIENT = Backoff(first_seconds=0.02, largest_seconds=0.2, attempts=200)


class Store:
    """What is called through the relay."""

    @allowed("worker", "coordinator")
    async def echo(self, request: Named, peer: CallingPeer) -> Named:
        return Named(f"{peer.name}:{request.name}", request.tensors)

    @allowed("worker")
    async def count(self, request: Count, peer: CallingPeer) -> AsyncIterator[Count]:
        for number in range(request.number):
            yield Count(number)


class Listening(Relay):
    """A relay that keeps what passes."""

    def __init__(self) -> None:
        super().__init__(pairs_per_peer=2)
        self.seen: list[bytes] = []

    async def _forward(self, pieces: AsyncIterator[RelayedPiece]) -> AsyncIterator[RelayedPiece]:  # type: ignore[override]
        async for piece in super()._forward(pieces):
            self.seen.append(piece.data)
            yield piece


class World:
    """A hub and two members; neither of the two listens."""

    def __init__(self, directory: Path, relay: Relay) -> None:
        self.relay, self.events = relay, list[AnyEvent]()
        self.authority = Authority.create(directory)
        with ExitStack() as stack:
            self.hub, self.address = serve(self.authority, "127.0.0.1:0", relay=relay)
            stack.enter_context(self.hub)
            self.rome = stack.enter_context(RunMember(self.authority.credentials("rome", "worker"), services=[Store()], backoff=PATIENT))
            self.oslo = stack.enter_context(
                RunMember(self.authority.credentials("oslo", "worker"), backoff=PATIENT, observer=self.events.append)
            )
            self.hub_of_oslo, self.hub_of_rome = self.oslo.join(self.address), self.rome.join(self.address)
            self._stack = stack.pop_all()

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, Listening())
    yield world
    world.close()


def test_two_that_nobody_can_dial_reach_each_other_and_the_relay_reads_nothing(world: World) -> None:
    rome = world.oslo.reach("rome", world.hub_of_oslo)
    tensors = [torch.randn(700_000), torch.arange(7)]
    secret = "nobody else is to read this"
    futures = [rome.call_soon(Store.echo, Named(secret, tensors)) for _ in range(3)]
    for future in futures:
        reply = future.result()
        assert reply.name == f"oslo:{secret}"
        assert all(torch.equal(a, b) for a, b in zip(reply.tensors, tensors, strict=True))

    async def stream() -> list[int]:
        return [reply.number async for reply in rome.stream(Store.count, Count(50))]

    assert world.oslo.fabric.run(stream()) == list(range(50))
    assert (rome.name, rome.role) == ("rome", "worker")
    assert isinstance(world.relay, Listening)
    passed = b"".join(world.relay.seen)
    assert len(passed) > 2 * 3 * 2_800_000
    assert secret.encode() not in passed
    assert tensors[0].numpy().tobytes()[:64] not in passed


def test_a_relayed_connection_that_is_lost_is_made_again(world: World) -> None:
    rome = world.oslo.reach("rome", world.hub_of_oslo)
    rome.call_sync(Store.echo, Named("x"))
    rome.close("for the test")
    eventually(lambda: any(isinstance(event, PeerChanged) and event.peer == "rome" and event.state == "dead" for event in world.events))
    assert rome.call_sync(Store.echo, Named("y")).name == "oslo:y"
    world.rome.close()
    eventually(lambda: rome.state == "dead")
    with pytest.raises(FabricError):
        rome.call_sync(Store.echo, Named("z"), timeout_seconds=0.3)
    with RunMember(world.authority.credentials("rome", "worker"), services=[Store()]) as again:
        again.join(world.address)
        assert rome.call_sync(Store.echo, Named("z"), timeout_seconds=30).name == "oslo:z", "it came back, and is found"
    assert isinstance(world.relay, Listening)
    eventually(lambda: not world.relay._open)


def test_a_relay_says_no_in_words(world: World) -> None:
    with pytest.raises(DeadlineError, match="coordinator knows no peer 'bern'; there are oslo, rome"):
        world.oslo.reach("bern", world.hub_of_oslo).call_sync(Store.echo, Named("x"), timeout_seconds=1)
    kept = [world.oslo.reach("rome", world.hub_of_oslo) for _ in range(2)]
    for remote in kept:
        remote.call_sync(Store.echo, Named("x"))
    with pytest.raises(DeadlineError, match="relays 2 connections for oslo and accepts no more"):
        world.oslo.reach("rome", world.hub_of_oslo).call_sync(Store.echo, Named("x"), timeout_seconds=1)


def test_a_relay_cannot_pass_itself_off_as_another(world: World, tmp_path: Path) -> None:
    """It joins whoever it likes, but only the one who was meant has the certificate."""
    with RunMember(world.authority.credentials("mallory", "worker"), services=[Store()]) as mallory:
        mallory.join(world.address)
        eventually(lambda: "mallory" in world.hub.fabric.peers)
        world.hub.fabric._peers["turin"] = world.hub.fabric._peers["mallory"]
        with pytest.raises(RefusedError, match="turin was to be reached there, but it is mallory"):
            world.oslo.reach("turin", world.hub_of_oslo).call_sync(Store.echo, Named("x"))


def test_closing_leaves_nothing_of_relayed_connections(tmp_path: Path) -> None:
    before = threading.active_count(), len(os.listdir("/proc/self/fd")) if os.path.exists("/proc/self/fd") else 0
    for number in range(3):
        world = World(tmp_path / str(number), Relay())
        world.oslo.reach("rome", world.hub_of_oslo).call_sync(Store.echo, Named("x", [torch.zeros(100_000)]))
        world.close()
    eventually(lambda: threading.active_count() <= before[0])
    eventually(lambda: not before[1] or len(os.listdir("/proc/self/fd")) <= before[1])


# ---- a network that drops incoming connections


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


def tc(namespace: str, *arguments: str) -> None:
    subprocess.run(["tc", "-n", namespace, *arguments], check=True, capture_output=True, text=True, timeout=30)


class Nat:
    """A hub's namespace and one for each peer behind it. What the peers' routers let in is answers: a SYN from outside is dropped."""

    def __init__(self) -> None:
        mark = f"at{os.getpid() % 100_000}"
        self.hub, self.peers = f"{mark}h", {"oslo": f"{mark}o", "rome": f"{mark}r"}
        self.addresses = {"oslo": "10.213.1.2", "rome": "10.213.2.2"}
        try:
            ip("netns", "add", self.hub)
            ip("-n", self.hub, "link", "set", "lo", "up")
            for place, (name, namespace) in enumerate(self.peers.items(), start=1):
                self._attach(namespace, f"10.213.{place}", f"{mark}{name[0]}")
            self.inside(self.hub, lambda: Path("/proc/sys/net/ipv4/ip_forward").write_text("1"))
        except BaseException:
            self.remove()
            raise

    def _attach(self, namespace: str, net: str, port: str) -> None:
        ip("netns", "add", namespace)
        ip("link", "add", port, "netns", self.hub, "type", "veth", "peer", "name", "v0", "netns", namespace)
        ip("-n", self.hub, "addr", "add", f"{net}.1/24", "dev", port)
        ip("-n", namespace, "addr", "add", f"{net}.2/24", "dev", "v0")
        ip("-n", self.hub, "link", "set", port, "up")
        ip("-n", namespace, "link", "set", "v0", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "route", "add", "default", "via", f"{net}.1")
        # What goes to the peer and begins a connection falls into a queue without room.
        tc(self.hub, "qdisc", "add", "dev", port, "root", "handle", "1:", "htb", "default", "1", "r2q", "1000")
        tc(self.hub, "class", "add", "dev", port, "parent", "1:", "classid", "1:1", "htb", "rate", "10gbit")
        tc(self.hub, "class", "add", "dev", port, "parent", "1:", "classid", "1:2", "htb", "rate", "8bit", "quantum", "1500")
        tc(self.hub, "qdisc", "add", "dev", port, "parent", "1:2", "bfifo", "limit", "1")
        syn_without_ack = ["match", "ip", "protocol", "6", "0xff", "match", "u8", "0x02", "0x12", "at", "33"]
        tc(self.hub, "filter", "add", "dev", port, "parent", "1:", "protocol", "ip", "u32", *syn_without_ack, "flowid", "1:2")

    def inside(self, namespace: str, action: Callable[[], Result]) -> Result:
        """Does something in a namespace: a thread enters it, and the threads it starts are there too."""
        results: list[Result] = []

        def act() -> None:
            with open(f"/var/run/netns/{namespace}") as there:
                assert ctypes.CDLL(None, use_errno=True).setns(there.fileno(), _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
            results.append(action())

        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        return results[0]

    def can_dial(self, namespace: str, address: str) -> bool:
        def dial() -> bool:
            try:
                socket.create_connection(split_address(address), timeout=1).close()
            except TimeoutError:
                return False
            return True

        return self.inside(namespace, dial)

    def remove(self) -> None:
        for namespace in (self.hub, *self.peers.values()):
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=30)


@pytest.fixture
def nat() -> Iterator[Nat]:
    if os.name != "posix" or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("network namespaces need root and iproute2")
    try:
        nat = Nat()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"this machine makes no network namespaces with filters: {error.stderr.strip()}")
    yield nat
    nat.remove()


def test_peers_behind_networks_that_drop_incoming_connections(nat: Nat, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    token = authority.issue_token(uses=2)
    with ExitStack() as stack:
        hub, _ = nat.inside(nat.hub, lambda: serve(authority, "0.0.0.0:7000"))
        stack.enter_context(hub)
        rome = nat.inside(nat.peers["rome"], lambda: RunMember(enrol("10.213.2.1:7000", token, "rome"), services=[Store()]))
        stack.enter_context(rome)
        rome.fabric.listen("0.0.0.0:7001")
        rome.join("10.213.2.1:7000")
        oslo = nat.inside(nat.peers["oslo"], lambda: RunMember(enrol("10.213.1.1:7000", token, "oslo"), services=[Store()]))
        stack.enter_context(oslo)
        hub_of_oslo = oslo.join("10.213.1.1:7000")
        assert nat.can_dial(nat.peers["oslo"], "10.213.1.1:7000"), "it can dial"
        assert nat.can_dial(nat.peers["rome"], "10.213.2.2:7001"), "rome listens"
        assert not nat.can_dial(nat.hub, "10.213.2.2:7001"), "and yet cannot be dialled from outside"
        assert not nat.can_dial(nat.peers["oslo"], "10.213.2.2:7001")
        eventually(lambda: "rome" in hub.fabric.peers)
        reply = hub.fabric.peer("rome").call_sync(Store.echo, Named("over the connection it made"))
        assert reply.name == "coordinator:over the connection it made"
        tensor = torch.arange(1_000_000, dtype=torch.float32)
        through = oslo.reach("rome", hub_of_oslo).call_sync(Store.echo, Named("through the hub", [tensor]))
        assert through.name == "oslo:through the hub"
        assert torch.equal(through.tensors[0], tensor)
