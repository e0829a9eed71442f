"""Four peers of a run that never rest, ways between them that fail, and peers that leave and come back: for the soak."""

import asyncio
import concurrent.futures
import contextlib
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Protocol, Self, TypeVar

import torch

from atoll.errors import AtollError, FabricError
from atoll.fabric import Backoff, Fabric, LivenessRule, TcpCarrier
from atoll.fabric.collective import Collective, FixedCodecs, RoundMember, equal_network, make_plan
from atoll.fabric.connection import ConnectionSettings
from atoll.fabric.security import Authority, Credentials, enrol, serve
from tests.fabric.faulty_proxy import FaultyProxy
from tests.fabric.services import Count, Named, Store

__all__ = ["FaultyParty"]

_NAMES = ("a", "b", "c", "d")
_FAULT_EVERY_SECONDS = 4.0
_LONGEST_FAULT_SECONDS = 20.0
_HANG_SECONDS = 240.0
_BACKOFF = Backoff(first_seconds=0.02, largest_seconds=0.2, attempts=1_000_000)


class Links(Protocol):
    """What is looked at before things count as quiet."""

    @property
    def links(self) -> int:
        """How many."""


Looked = TypeVar("Looked", bound=Links)


class Peer:
    """One peer, with what it serves and the traffic it makes."""

    def __init__(self, credentials: Credentials, address: str = "127.0.0.1:0") -> None:
        self.name = credentials.name
        self.collective = Collective(self.name, codecs=FixedCodecs("int8"), threads=1)
        settings = ConnectionSettings(name=self.name, liveness=LivenessRule(heartbeat_seconds=0.2))
        carrier = TcpCarrier(client=credentials.client_context, server=credentials.server_context)
        self.fabric = Fabric(self.name, services=[Store(), self.collective.service], carrier=carrier, settings=settings, backoff=_BACKOFF)
        self.collective.attach(self.fabric)
        self.address = self.fabric.listen(address)

    def close(self) -> None:
        """Leaves."""
        self.fabric.close()
        self.collective.close()


class FaultyParty:
    """Use it in `with`. `happened` counts what was done and how it ended."""

    FAULTS: ClassVar[Sequence[str]] = ("cut", "hold", "refuse", "spoil", "restart")

    def __init__(self, directory: Path, draw: random.Random) -> None:
        self.happened: Counter[str] = Counter()
        self._draw = draw
        authority = Authority.create(directory)
        coordinator, address = serve(authority, "127.0.0.1:0")
        with coordinator:
            self._credentials = {name: enrol(address, authority.issue_token(), name) for name in _NAMES}
        self._peers = {name: Peer(self._credentials[name]) for name in _NAMES}
        self._addresses = {name: peer.address for name, peer in self._peers.items()}
        self._ways = {pair: FaultyProxy(self._addresses[pair[1]]) for pair in itertools.combinations(_NAMES, 2)}
        for name in _NAMES:
            self._dial(name)
        self._changing = threading.Lock()  # who holds it may use or replace peers
        self._numbers = itertools.count()
        self._faults_over: list[tuple[float, Callable[[], None]]] = []  # when a fault ends, and how

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for peer in self._peers.values():
            peer.close()
        for way in self._ways.values():
            way.close()

    def fabrics(self) -> list[Fabric]:
        """Of those that are there now."""
        return [peer.fabric for peer in self._peers.values()]

    def _dial(self, name: str) -> None:
        for (source, target), way in self._ways.items():
            if source == name:
                self._peers[name].fabric.connect(way.address, name=target)

    # ---- faults

    def play(self, fault_seconds: float, speed: float) -> None:
        """Traffic, and as many faults as so many seconds would have, `speed` times as often."""
        over = threading.Event()
        traffic = threading.Thread(target=self._traffic, args=(over,), name="traffic")
        traffic.start()
        try:
            for _ in range(round(fault_seconds / _FAULT_EVERY_SECONDS)):
                time.sleep(self._draw.expovariate(1.0) * _FAULT_EVERY_SECONDS / speed)
                self._end_faults(time.monotonic())
                what = self._draw.choices(self.FAULTS, weights=(3, 3, 2, 2, 1))[0]
                self._fault(what, self._draw.random() * _LONGEST_FAULT_SECONDS / speed)
        finally:
            self._end_faults(float("inf"))
            over.set()
            traffic.join()

    def _fault(self, what: str, seconds: float) -> None:
        way = self._ways[self._draw.choice(list(self._ways))]
        self.happened[what] += 1
        end = time.monotonic() + seconds
        if what == "cut":
            way.cut()
        elif what == "spoil":
            way.spoil()
        elif what == "hold":
            way.hold(True)
            self._faults_over.append((end, lambda: way.hold(False)))
        elif what == "refuse":
            way.refuse(True)
            self._faults_over.append((end, lambda: way.refuse(False)))
        else:
            self._restart(self._draw.choice(_NAMES))

    def _end_faults(self, now: float) -> None:
        for end, stop in [fault for fault in self._faults_over if fault[0] <= now]:
            stop()
            self._faults_over.remove((end, stop))

    def _restart(self, name: str) -> None:
        """A peer leaves in the middle of everything, and another of its name comes."""
        with self._changing:
            self._peers[name].close()
            self._peers[name] = Peer(self._credentials[name], self._addresses[name])
            self._dial(name)

    # ---- traffic

    def _traffic(self, over: threading.Event) -> None:
        while not over.is_set():
            with self._changing:
                peers = dict(self._peers)
                futures = [peer.fabric.submit(self._talk(peer)) for peer in peers.values()]
                if next(self._numbers) % 4 == 0:
                    futures += self._reduce(peers)
            for future in futures:
                try:
                    future.result(_HANG_SECONDS)
                except concurrent.futures.TimeoutError:
                    raise AssertionError("something hangs") from None
                except (AtollError, concurrent.futures.CancelledError):
                    self.happened["futures failed"] += 1

    async def _talk(self, peer: Peer) -> None:
        others = [name for name in _NAMES if name != peer.name]
        await asyncio.gather(*(self._one(peer, name) for name in others))

    async def _one(self, peer: Peer, other: str) -> None:
        """Something a peer does with another: it works, or fails with an error of ours."""
        try:
            remote = peer.fabric.peer(other)
            what = self._draw.randrange(4)
            if what == 0:
                await remote.call(Store.echo, Named("x", [torch.ones(self._draw.randrange(300_000))]), timeout_seconds=2.0)
            elif what == 1:
                replies = remote.stream(Store.count, Count(20, size=30_000), timeout_seconds=2.0)
                async with contextlib.aclosing(replies):  # type: ignore[type-var]
                    async for reply in replies:
                        if int(reply.name) == self._draw.randrange(20):
                            break
            elif what == 2:
                async with asyncio.timeout(self._draw.random() * 0.02):
                    await remote.call(Store.sleep, Count(1, seconds=100.0), timeout_seconds=100.0)
            else:
                await remote.call(Store.fail, Named("x"), timeout_seconds=2.0)
            self.happened["calls done"] += 1
        except TimeoutError:
            self.happened["calls cancelled"] += 1
        except FabricError as error:
            self.happened[f"calls: {type(error).__name__}"] += 1

    def _reduce(self, peers: dict[str, Peer]) -> "list[concurrent.futures.Future[None]]":
        members = [RoundMember(name=name) for name in _NAMES]
        round_id = f"round {next(self._numbers)}"
        plan = make_plan(round_id, 60_000, members, equal_network(_NAMES, 1e8), missing="leave out", begin_seconds=1.0)

        async def take_part(peer: Peer) -> None:
            reduction = await peer.collective.reduce(plan, torch.ones(60_000))
            if reduction.complete:
                assert float((reduction.value - 4.0).abs().max()) < 0.1, "a complete sum is the sum"
            self.happened["reductions complete" if reduction.complete else "reductions incomplete"] += 1

        return [peer.fabric.submit(take_part(peer)) for peer in peers.values()]

    # ---- rest

    def quiet(self, look: Callable[[], Looked]) -> Looked:
        """Waits until everybody is connected with everybody again, then looks."""
        end = time.monotonic() + _HANG_SECONDS
        wanted = len(_NAMES) * (len(_NAMES) - 1)
        while True:
            alive = sum(remote.estimate is not None for fabric in self.fabrics() for remote in fabric.peers.values())
            found = look()
            if alive == wanted and found.links == wanted:
                return found
            assert time.monotonic() < end, f"{alive} of {wanted} ways came back, {found.links} links"
            time.sleep(0.2)
