"""Calls between two fabrics, over every carrier."""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from atoll.errors import DeadlineError, FabricError, PeerLostError, RefusedError, RemoteError
from atoll.fabric import ConnectionSettings, Fabric, Remote, ShapedLink, TcpCarrier
from atoll.fabric.carrier import Carrier
from tests.fabric.memory_carrier import MemoryCarrier
from tests.fabric.services import Count, Named, Store

Pair = tuple[Fabric, Remote, Store]


def carriers() -> dict[str, Callable[[], Carrier]]:
    return {
        "tcp": TcpCarrier,
        "memory": MemoryCarrier,
        "shaped": lambda: TcpCarrier(link=ShapedLink(50e6, 0.002)),
        "shaped memory": lambda: MemoryCarrier(ShapedLink(50e6, 0.002)),
    }


@pytest.fixture(params=sorted(carriers()))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    carrier, store = carriers()[request.param](), Store()
    with Fabric("rome", services=[store], carrier=carrier) as rome, Fabric("oslo", carrier=carrier) as oslo:
        remote = oslo.connect(rome.listen())
        yield oslo, remote, store


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.005)


def test_a_call_carries_tensors_both_ways(pair: Pair) -> None:
    _, remote, _ = pair
    tensors = [torch.randn(300_000), torch.arange(6).reshape(2, 3).T, torch.empty(0, 5), torch.tensor(3.5)]
    reply = remote.call_sync(Store.echo, Named("hello", tensors))
    assert reply.name == "oslo:hello"
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(reply.tensors, tensors, strict=True))
    assert remote.name == "rome"


def test_streams_of_replies_of_requests_and_of_both(pair: Pair) -> None:
    oslo, remote, _ = pair

    async def numbers() -> AsyncIterator[Count]:
        for number in range(20):
            yield Count(number)

    async def every_way() -> None:
        replies = [reply async for reply in remote.stream(Store.count, Count(5, size=50_000))]
        assert [int(reply.tensors[0][-1]) for reply in replies] == list(range(5))
        assert await remote.call(Store.total, numbers()) == Count(190)
        assert [reply.number async for reply in remote.stream(Store.double, numbers())] == list(range(0, 40, 2))

    oslo.run(every_way())


def test_many_calls_at_once(pair: Pair) -> None:
    _, remote, _ = pair
    futures = [remote.call_soon(Store.echo, Named(str(i), [torch.full((i * 500,), i)])) for i in range(60)]
    for i, future in enumerate(futures):
        reply = future.result()
        assert reply.name == f"oslo:{i}"
        assert torch.equal(reply.tensors[0], torch.full((i * 500,), i))


def test_errors_travel_with_their_kind_and_text(pair: Pair) -> None:
    _, remote, _ = pair
    with pytest.raises(RemoteError, match=r"rome: KeyError: 'no such'") as caught:
        remote.call_sync(Store.fail, Named("no such"))
    assert caught.value.kind == "KeyError"
    assert remote.call_sync(Store.echo, Named("still here")).name == "oslo:still here"


def test_what_is_not_there_or_of_another_type_is_refused(pair: Pair) -> None:
    _, remote, _ = pair

    class Shop:
        async def buy(self, request: int, peer: object) -> int:
            return request

    with pytest.raises(RefusedError, match=r"rome has no method 'Shop.buy'; it has .*Store.echo"):
        remote.call_sync(Shop.buy, 1)
    with pytest.raises(RefusedError, match="a message that is no Named: Expected"):
        remote.call_sync(Store.echo, 5)  # type: ignore[arg-type]
    with pytest.raises(FabricError, match="a object cannot be sent"):
        remote.call_sync(Store.echo, Named(object()))  # type: ignore[arg-type]
    assert remote.call_sync(Store.echo, Named("still here")).name == "oslo:still here"


def test_cancelling_a_call_cancels_the_method(pair: Pair) -> None:
    oslo, remote, store = pair
    future = remote.call_soon(Store.sleep, Count(1, seconds=1000))
    eventually(lambda: store.running == 1)
    future.cancel()
    eventually(lambda: store.cancelled == 1 and store.running == 0)
    eventually(lambda: streams_of(oslo) == 0)


def test_leaving_a_stream_cancels_its_source(pair: Pair) -> None:
    oslo, remote, store = pair

    async def leave() -> None:
        replies = remote.stream(Store.count, Count(100_000, size=10_000))
        async for _ in replies:
            break
        await replies.aclose()  # type: ignore[attr-defined]

    oslo.run(leave())
    eventually(lambda: store.cancelled == 1 and streams_of(oslo) == 0)


def test_a_deadline_fails_the_call_on_both_sides(pair: Pair) -> None:
    oslo, remote, store = pair
    remote.call_sync(Store.echo, Named("connected"))
    with pytest.raises(DeadlineError, match=r"Store.sleep of rome.*no answer within 50 ms \(the limit its caller set\)"):
        remote.call_sync(Store.sleep, Count(1, seconds=1000), timeout_seconds=0.05)
    eventually(lambda: store.running == 0 and streams_of(oslo) == 0)


def test_a_slow_reader_bounds_what_its_sender_makes(pair: Pair) -> None:
    """The method yields 20,000 tensors of 40 KB; its reader takes 3. Windows (shrunk here) bound what was made meanwhile."""
    oslo, remote, store = pair

    async def read_three() -> int:
        replies = remote.stream(Store.count, Count(20_000, size=50_000), timeout_seconds=60)
        for _ in range(3):
            await anext(replies)
        before = -1
        while before != len(store.order):  # until nothing more is made
            before = len(store.order)
            await asyncio.sleep(0.3)
        await replies.aclose()  # type: ignore[attr-defined]
        return before

    oslo.settings  # noqa: B018 - the default window of a stream is 64 MiB: 167 messages of 400 KB
    assert oslo.run(read_three()) <= 3 + 167 + 2


def test_slow_methods_bound_what_callers_send() -> None:
    """Requests stay accounted for until their method returns: with a window of 8 MB, eight of 1 MB are there and the rest wait."""
    store = Store()
    settings = ConnectionSettings(name="rome", bulk_window_bytes=8 << 20)
    with Fabric("rome", services=[store], settings=settings) as rome, Fabric("oslo") as oslo:
        remote = oslo.connect(rome.listen())
        futures = [remote.call_soon(Store.hold, Named("x", [torch.zeros((1 << 18) - 100)])) for _ in range(30)]
        eventually(lambda: store.running == 8)
        assert remote.call_sync(Store.echo, Named("small ones pass")).name == "oslo:small ones pass"
        assert store.running == 8
        rome.submit(open_gate(store)).result()
        assert [future.result() for future in futures] == [1] * 30


async def open_gate(store: Store) -> None:
    store.gate.set()


def test_what_a_peer_would_not_accept_is_refused_before_it_is_sent() -> None:
    settings = ConnectionSettings(name="rome", message_bytes=1 << 20)
    with Fabric("rome", services=[Store()], settings=settings) as rome, Fabric("oslo") as oslo:
        remote = oslo.connect(rome.listen())
        with pytest.raises(RefusedError, match=r"a message of 2.1 MB; rome accepts at most 1.05 MB"):
            remote.call_sync(Store.echo, Named("x", [torch.zeros(1 << 19)]))
        assert remote.call_sync(Store.echo, Named("still here")).name == "oslo:still here"


def test_both_ends_can_call_over_the_one_connection() -> None:
    ours, theirs = Store(), Store()
    with Fabric("rome", services=[theirs]) as rome, Fabric("oslo", services=[ours]) as oslo:
        oslo.connect(rome.listen()).call_sync(Store.echo, Named("a"))
        assert rome.peer("oslo").call_sync(Store.echo, Named("b")).name == "rome:b"
        with pytest.raises(RefusedError, match="rome knows no peer 'bern'; there are oslo"):
            rome.peer("bern")


def test_peers_and_roles_can_be_refused() -> None:
    def authorise(role: str, method: str) -> None:
        if role == "observer" and method == "Store.echo":
            raise RefusedError("an observer may not call Store.echo")

    def identify(hello: object, certificate: bytes | None) -> None:
        if getattr(hello, "name", "") == "mallory":
            raise RefusedError("mallory is not of this run")

    with ExitStack() as stack:
        rome = stack.enter_context(Fabric("rome", services=[Store()], authorise=authorise, identify=identify))
        address = rome.listen()
        watcher = stack.enter_context(Fabric("watcher", role="observer")).connect(address)
        with pytest.raises(RefusedError, match=r"rome refused the call: an observer may not call Store.echo"):
            watcher.call_sync(Store.echo, Named("x"))
        assert watcher.call_sync(Store.sleep, Count(1)) == Count(1)
        mallory = stack.enter_context(Fabric("mallory")).connect(address)
        with pytest.raises(RefusedError, match="mallory is not of this run"):
            mallory.call_sync(Store.echo, Named("x"))


def test_calls_to_a_closed_fabric_and_to_nobody_say_so() -> None:
    with Fabric("oslo") as oslo:
        nobody = oslo.connect("127.0.0.1:1")
        with pytest.raises(DeadlineError, match=r"127.0.0.1:1 could not be reached within 0.1 s: Connection refused"):
            nobody.call_sync(Store.echo, Named("x"), timeout_seconds=0.1)
    with pytest.raises(FabricError, match="the fabric of oslo is closed"):
        nobody.call_sync(Store.echo, Named("x"))


def test_calls_under_way_fail_when_the_peer_leaves(pair: Pair) -> None:
    store = Store()
    carrier = MemoryCarrier()
    rome, oslo = Fabric("rome", services=[store], carrier=carrier), Fabric("oslo", carrier=carrier)
    with oslo:
        future = oslo.connect(rome.listen("rome")).call_soon(Store.sleep, Count(1, seconds=1000))
        eventually(lambda: store.running == 1)
        rome.close()
        with pytest.raises((PeerLostError, RefusedError), match="rome"):
            future.result()
    gc.collect()


def streams_of(fabric: Fabric) -> int:
    return sum(len(link.connection._streams) for link in list(fabric._links))


def test_a_stream_goes_on_for_as_long_as_items_flow() -> None:
    """Its limit is for each item: the whole takes several times as long, either way, and a reader may take its time."""
    carrier, store = MemoryCarrier(), Store()
    with Fabric("rome", services=[store], carrier=carrier) as rome, Fabric("oslo", carrier=carrier) as oslo:
        remote = oslo.connect(rome.listen("rome"))

        async def slowly() -> AsyncIterator[Count]:
            for number in range(9):
                await asyncio.sleep(0.25)
                yield Count(number)

        async def send() -> None:
            assert await remote.call(Store.total, slowly(), timeout_seconds=2.0) == Count(36)

        async def both() -> None:
            assert [reply.number async for reply in remote.stream(Store.double, slowly(), timeout_seconds=2.0)] == list(range(0, 18, 2))

        async def receive() -> None:
            replies = remote.stream(Store.pace, Count(9, seconds=0.25), timeout_seconds=2.0)
            assert [reply.number async for reply in replies] == list(range(9))

        async def read_late() -> None:
            taken = 0
            async for _ in remote.stream(Store.count, Count(9, size=50_000), timeout_seconds=2.0):
                await asyncio.sleep(0.25)
                taken += 1
            assert taken == 9

        async def every_way() -> None:
            await asyncio.gather(send(), both(), receive(), read_late())

        oslo.run(every_way())


def test_an_item_of_a_stream_that_takes_too_long_fails_it_on_both_sides(pair: Pair) -> None:
    oslo, remote, store = pair

    async def read() -> None:
        async for _ in remote.stream(Store.pace, Count(2, seconds=1000), timeout_seconds=0.1):
            pass

    async def feed() -> AsyncIterator[Count]:
        yield Count(1)
        await asyncio.sleep(1000)

    with pytest.raises(DeadlineError, match=r"Store.pace of rome.*no answer within 100 ms"):
        oslo.run(read())
    with pytest.raises(DeadlineError, match=r"Store.total of rome.*no answer within 100 ms"):
        oslo.run(remote.call(Store.total, feed(), timeout_seconds=0.1))
    eventually(lambda: store.running == 0 and streams_of(oslo) == 0)


def test_a_storm_of_cancelled_calls_leaves_nothing_and_harms_nobody(pair: Pair) -> None:
    """Small and large, before and after they were sent: every method ends, every stream is gone, all credit is back."""
    oslo, remote, store = pair
    bulk = torch.zeros(100_000)

    async def storm() -> None:
        for number in range(6):
            calls = [asyncio.ensure_future(remote.call(Store.sleep, Count(1, seconds=1000), timeout_seconds=1000)) for _ in range(100)]
            calls += [asyncio.ensure_future(remote.call(Store.echo, Named("x", [bulk]), timeout_seconds=1000)) for _ in range(5)]
            await asyncio.sleep(0.002 * number)
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    oslo.run(storm())
    eventually(lambda: store.running == 0 and streams_of(oslo) == 0)
    assert torch.equal(remote.call_sync(Store.echo, Named("after", [bulk])).tensors[0], bulk)
    eventually(lambda: unread_of(oslo) == 0)


def unread_of(fabric: Fabric) -> int:
    """Bytes a fabric has sent that nobody took."""
    windows = [window for link in list(fabric._links) for window in link.connection._queue._windows.values()]
    return sum(window.used_bytes for window in windows if window.limit_bytes)
