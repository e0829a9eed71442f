"""What is bounded before anything is set aside: strangers, the first frame, what a role may send, and tensors however small."""

import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import atoll.fabric.fabric
from atoll.errors import FrameError, RefusedError
from atoll.events import AnyEvent, PeerRefused
from atoll.fabric import Fabric
from atoll.fabric.address import split_address
from atoll.fabric.frame import CallMessage, Hello, Kind, Open, TensorHeader, encode_frame, pack_prefix
from atoll.fabric.security import Authority, RunMember, serve
from atoll.fabric.service import CallingPeer, allowed
from tests.fabric.parsing import feed_in_pieces, listening_connection
from tests.fabric.services import Named, Store
from tests.fabric.test_fabric import eventually

HELLO = encode_frame(Kind.HELLO, 0, Hello("mallory", "worker", 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1.0))


class Scale:
    """Everybody may."""

    @allowed("worker", "observer")
    async def echo(self, request: Named, peer: CallingPeer) -> int:
        return sum(tensor.nbytes for tensor in request.tensors)


def test_there_are_few_who_have_not_said_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atoll.fabric.fabric, "_MOST_STRANGERS", 3)
    with Fabric("rome", services=[Store()]) as rome, Fabric("oslo") as oslo:
        address = rome.listen()
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(socket.create_connection(split_address(address), timeout=20))
            eventually(lambda: len(rome._strangers) == 3)
            with socket.create_connection(split_address(address), timeout=20) as fourth:
                assert fourth.recv(1) == b"", "one too many is closed at once"
        assert oslo.connect(address).call_sync(Store.echo, Named("x")).name == "oslo:x", "they left: there is room again"


def test_whoever_does_not_say_who_it_is_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atoll.fabric.fabric, "_HELLO_SECONDS", 0.2)
    events: list[AnyEvent] = []
    with Fabric("rome", observer=events.append) as rome, socket.create_connection(split_address(rome.listen()), timeout=20) as silent:
        heard = b""
        while part := silent.recv(4096):
            heard += part
        assert b"it connected and did not say who it is" in heard
        eventually(lambda: any(isinstance(event, PeerRefused) for event in events))


def test_before_hello_nothing_large_is_accepted() -> None:
    for prefix in (pack_prefix(Kind.HELLO, 0, 100_000, 0), pack_prefix(Kind.OPEN, 1, 10, 1)):
        connection, _ = listening_connection()
        with pytest.raises(FrameError, match="are accepted"):
            feed_in_pieces(connection, prefix)


def test_empty_tensors_take_credit_too() -> None:
    """A thousand of them are a thousand objects; with a window of 256 KiB they travel alone, and not twice."""
    connection, _ = listening_connection()
    feed_in_pieces(connection, HELLO)
    empty = CallMessage(0, tuple(TensorHeader("int8", (0,)) for _ in range(400)), False)
    feed_in_pieces(connection, encode_frame(Kind.OPEN, 1, Open("Store.echo", 1.0, empty)))
    with pytest.raises(FrameError, match="sent without credit"):
        feed_in_pieces(connection, b"".join(encode_frame(Kind.OPEN, stream, Open("Store.echo", 1.0, empty)) for stream in (3, 5)))


def test_more_tensors_than_a_header_holds_are_refused_by_their_sender() -> None:
    with Fabric("rome", services=[Store()]) as rome, Fabric("oslo") as oslo:
        remote = oslo.connect(rome.listen())
        many = [torch.zeros(0)] * 5000
        assert len(remote.call_sync(Store.echo, Named("x", many)).tensors) == 5000
        with pytest.raises(RefusedError, match="200000 tensors is too many for one header; send it in parts"):
            remote.call_sync(Store.echo, Named("x", many * 40))
        assert remote.call_sync(Store.echo, Named("still here")).name == "oslo:still here"


def test_who_only_looks_may_not_send_much(tmp_path: Path) -> None:
    authority = Authority.create(tmp_path)
    coordinator, address = serve(authority, "127.0.0.1:0", services=[Scale()])
    large = Named("x", [torch.zeros(1 << 20)])
    with (
        coordinator,
        RunMember(authority.credentials("eve", "observer")) as eve,
        RunMember(authority.credentials("rome", "worker")) as rome,
    ):
        assert rome.join(address).call_sync(Scale.echo, large) == 4 << 20
        watching = eve.join(address)
        with pytest.raises(RefusedError, match=r"a message of 4.19 MB; coordinator accepts at most 1.05 MB"):
            watching.call_sync(Scale.echo, large)
        assert watching.call_sync(Scale.echo, Named("x", [torch.zeros(10)])) == 40
