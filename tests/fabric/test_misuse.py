"""Calls that end early, are given up, come at the wrong moment or cannot be: they fail alone, and nothing is used up by them."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from atoll.errors import DeadlineError, FabricError, RefusedError
from atoll.fabric import CallingPeer, ConnectionSettings, Fabric, LivenessRule, Remote
from atoll.fabric.connection import Connection
from tests.fabric.services import Count, Named, Store
from tests.fabric.test_fabric import eventually


class Impatient:
    async def first(self, requests: AsyncIterator[Named], peer: CallingPeer) -> str:
        async for request in requests:
            return request.name
        return "nothing"


@pytest.fixture
def ends() -> Iterator[tuple[Fabric, Remote]]:
    often = LivenessRule(heartbeat_seconds=0.2)
    with (
        Fabric("rome", services=[Store(), Impatient()], settings=ConnectionSettings(name="rome", liveness=often)) as rome,
        Fabric("oslo", settings=ConnectionSettings(name="oslo", liveness=often)) as oslo,
    ):
        remote = oslo.connect(rome.listen())
        oslo.run(remote.connected())
        yield rome, remote


def connections(rome: Fabric, remote: Remote) -> list[Connection]:
    assert remote._link is not None
    return [remote._link.connection, *(link.connection for link in rome._links)]


def nothing_is_used_up(rome: Fabric, remote: Remote) -> None:
    def clean() -> bool:
        return all(
            not one._streams
            and not any(window.used_bytes for window in one._unread.values())
            and not sum(window.used_bytes for window in one._queue._windows.values()) - one_owed(connections(rome, remote), one)
            for one in connections(rome, remote)
        )

    eventually(clean)


def one_owed(all_of: list[Connection], one: Connection) -> int:
    """Credit for small messages that the other end has not given back yet, as it is little."""
    return sum(other._owed for other in all_of if other is not one)


async def nobody() -> AsyncIterator[Count]:
    for number in range(0):
        yield Count(number)


def test_a_stream_of_nothing_ends_nothing_else(ends: tuple[Fabric, Remote]) -> None:
    rome, remote = ends
    bulk = [torch.ones(2_000_000)]
    others = [remote.call_soon(Store.echo, Named("x", bulk)) for _ in range(4)]
    for _ in range(20):
        assert remote._owner.submit(remote.call(Store.total, nobody())).result().number == 0
    assert all(torch.equal(other.result().tensors[0], bulk[0]) for other in others)
    nothing_is_used_up(rome, remote)


def test_a_method_that_does_not_read_all_it_is_sent_uses_nothing_up(ends: tuple[Fabric, Remote]) -> None:
    rome, remote = ends

    async def many() -> AsyncIterator[Named]:
        for number in range(20):
            yield Named(str(number), [torch.zeros(4000)])

    for _ in range(50):
        assert remote._owner.submit(remote.call(Impatient.first, many())).result() == "0"
    nothing_is_used_up(rome, remote)


@pytest.mark.parametrize("size", [10, 4000, 200_000])
def test_calls_that_are_given_up_give_their_credit_back(ends: tuple[Fabric, Remote], size: int) -> None:
    rome, remote = ends
    request = Named("x", [torch.zeros(size)])

    async def give_up() -> None:
        for number in range(100):
            task = asyncio.create_task(remote.call(Store.echo, request))
            for _ in range(number % 7):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
        for _ in range(100):
            with contextlib.suppress(DeadlineError):
                await remote.call(Store.echo, request, timeout_seconds=0.0005)

    remote._owner.submit(give_up()).result()
    assert remote.call_sync(Store.echo, Named("still here")).name == "oslo:still here"
    nothing_is_used_up(rome, remote)


def test_small_messages_that_fill_the_window_each_go_one_after_another() -> None:
    settings = [ConnectionSettings(name=name, control_window_bytes=65536) for name in ("rome", "oslo")]
    with Fabric("rome", services=[Store()], settings=settings[0]) as rome, Fabric("oslo", settings=settings[1]) as oslo:
        remote = oslo.connect(rome.listen())
        for number in range(20):
            assert remote.call_sync(Store.echo, Named("x" * 60_000), timeout_seconds=30).name.endswith("x"), number


def test_calls_while_the_fabric_is_closed_fail_and_do_not_wait(ends: tuple[Fabric, Remote]) -> None:
    _, remote = ends
    said: list[str] = []
    begun = threading.Barrier(4)

    def call() -> None:
        begun.wait()
        try:
            while True:
                remote.call_sync(Store.echo, Named("x"))
        except FabricError as error:
            said.append(str(error))

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    begun.wait()
    closing = [threading.Thread(target=remote._owner.close) for _ in range(2)]
    for thread in [*closing, *threads]:
        if thread in closing:
            thread.start()
    for thread in [*closing, *threads]:
        thread.join(60)
        assert not thread.is_alive()
    assert len(said) == 3
    assert all("closed" in one or "closes" in one for one in said), said


@pytest.mark.parametrize("address", ["nonsense", "host:99999", "a,b", ""])
def test_what_is_no_address_is_said_and_harms_nothing(address: str) -> None:
    with Fabric("oslo") as oslo:
        remote = oslo.connect(address)
        with pytest.raises(FabricError, match="is no address; write it like 'host:port'"):
            remote.call_sync(Store.echo, Named("x"))
    assert not oslo.thread.is_alive()


def test_a_tensor_without_bytes_fails_its_call_alone(ends: tuple[Fabric, Remote]) -> None:
    rome, remote = ends
    with FakeTensorMode():
        fake = torch.empty(5)
    for _ in range(3):
        with pytest.raises(RefusedError, match="cannot be read as bytes"):
            remote.call_sync(Store.echo, Named("x", [fake]))
    assert remote.call_sync(Store.echo, Named("y")).name == "oslo:y"
    nothing_is_used_up(rome, remote)


def test_who_cannot_decide_allows_nothing() -> None:
    def undecided(role: str, method: str) -> None:
        raise KeyError(method)

    with Fabric("rome", services=[Store()], authorise=undecided) as rome, Fabric("oslo") as oslo:
        remote = oslo.connect(rome.listen())
        for _ in range(2):
            with pytest.raises(RefusedError, match="could not decide whether it is allowed: KeyError"):
                remote.call_sync(Store.echo, Named("x"))
