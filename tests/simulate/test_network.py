"""Links whose connections share the bandwidth of their hosts."""

import random

import pytest

from atoll.simulate.loop import Loop, Process
from atoll.simulate.network import Port, SimulatedLinks, SimulatedNetwork


def test_a_connection_alone_has_all_of_the_link_and_sends_one_message_after_another() -> None:
    links = SimulatedLinks(10.0)
    assert links.arrives_at(0.0, "a", "b", 50.0) == 5.0
    assert links.arrives_at(1.0, "a", "b", 50.0) == 10.0
    assert links.arrives_at(20.0, "a", "b", 50.0) == 25.0


@pytest.mark.parametrize("fan_out", [True, False])
def test_connections_share_the_link_up_and_down(fan_out: bool) -> None:
    links = SimulatedLinks(10.0)
    ends = [links.arrives_at(0.0, *(("a", name) if fan_out else (name, "a")), 50.0) for name in "bcd"]
    assert ends == [5.0, 10.0, 15.0]
    assert links.arrives_at(0.0, "x", "y", 50.0) == 5.0


def test_what_a_process_sends_itself_crosses_no_link() -> None:
    loop = Loop()
    network = SimulatedNetwork(loop, random.Random(0), latency_seconds=0.0, jitter_seconds=0.0, sizes={str: 50.0}, bytes_per_s=10.0)
    ports = [network.open(Process(name, loop), name) for name in "ab"]
    heard: list[tuple[str, float]] = []

    async def listen(port: Port) -> None:
        while True:
            heard.append((await port.inbox.take(), loop.now))

    for port in ports:
        port.process.spawn(listen(port))
    ports[0].send("a", "to itself")
    ports[0].send("b", "to another")
    loop.run(20.0)
    assert heard == [("to itself", 0.0), ("to another", 5.0)]
