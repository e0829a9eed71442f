"""Fabrics of one process with collectives on them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from atoll.events import AnyEvent
from atoll.fabric import ConnectionSettings, Fabric, LivenessRule, ShapedLink, TcpCarrier
from atoll.fabric.collective import Collective, FixedCodecs, LinkCodecs
from tests.fabric.memory_carrier import MemoryCarrier

NAMES = ("a", "b", "c", "d")


class Party:
    """Peers that all know each other."""

    def __init__(self) -> None:
        self.fabrics: dict[str, Fabric] = {}
        self.collectives: dict[str, Collective] = {}
        self.events: dict[str, list[AnyEvent]] = {}


@contextmanager
def party(
    names: Sequence[str] = NAMES,
    *,
    tcp: bool = False,
    link: ShapedLink | None = None,
    codecs: LinkCodecs | None = None,
    adaptive: bool = False,
) -> Iterator[Party]:
    found = Party()
    memory = MemoryCarrier(link)
    with ExitStack() as stack:
        addresses = []
        for name in names:
            events: list[AnyEvent] = []
            chosen = None if adaptive else codecs or FixedCodecs("none")
            collective = Collective(name, codecs=chosen, observer=events.append, threads=1)
            stack.callback(collective.close)
            carrier = TcpCarrier(link=link) if tcp else memory
            settings = ConnectionSettings(name=name, liveness=LivenessRule(heartbeat_seconds=0.2, silent_beats=50, late_beats=40))
            fabric = stack.enter_context(Fabric(name, services=[collective.service], carrier=carrier, settings=settings))
            collective.attach(fabric)
            found.fabrics[name], found.collectives[name], found.events[name] = fabric, collective, events
            for address in addresses:
                fabric.run(fabric.connect(address).connected(30))
            addresses.append(fabric.listen() if tcp else fabric.listen(name))
        eventually(lambda: all(len(fabric.peers) == len(names) - 1 for fabric in found.fabrics.values()))
        yield found


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never came to pass"
        time.sleep(0.005)
