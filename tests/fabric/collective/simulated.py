"""Rounds among members in one event loop with a virtual clock: random delays, deaths, standstills and cuts, from a seed."""

import asyncio
import heapq
import random
import selectors
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

import torch

from atoll.errors import PeerLostError
from atoll.fabric.collective import FixedCodecs, ReductionResult, RoundPlan, SumFeedback
from atoll.fabric.collective.chunk import CellProgress, EncodedChunk, Item, PullChunks
from atoll.fabric.collective.pull import Pulling
from atoll.fabric.collective.round import Peers, Round

Kind = TypeVar("Kind", bound=Item)


class _Selector(selectors.SelectSelector):
    """Never sleeps: time passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "everybody waits and nothing will happen"
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to whatever is due next."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.now


def run_virtually(coroutine: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(asyncio.sleep(0))  # what was cancelled last ends
        loop.close()


class AtOnce(Executor):
    """Does the work when it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class World:
    """Who lives, who stands still, who cannot hear whom; and how long a message takes."""

    def __init__(self, seed: int, slowest_seconds: float = 0.1) -> None:
        self.random = random.Random(seed)
        self.slowest_seconds = slowest_seconds
        self.rounds: dict[str, Round] = {}
        self.dead: set[str] = set()
        self.stopped: set[str] = set()
        self.cut: set[tuple[str, str]] = set()
        self.died = asyncio.Event()

    async def hop(self, source: str, target: str) -> None:
        """A message on its way; PeerLostError when its ends learn that the other is dead. Never arrives from or to who stands still."""
        await asyncio.sleep(self.random.random() * self.slowest_seconds)
        while self.stopped & {source, target} or {(source, target), (target, source)} & self.cut:
            await self._or_death(source, target)
        if self.dead & {source, target}:
            raise PeerLostError(f"{(self.dead & {source, target}).pop()} is dead")

    async def _or_death(self, source: str, target: str) -> None:
        if self.dead & {source, target}:
            raise PeerLostError("the connection ended")
        died = self.died
        await died.wait()

    def kill(self, name: str) -> None:
        self.dead.add(name)
        self.died.set()
        self.died = asyncio.Event()


class SimulatedPeers(Peers):
    """One member's view of the world."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    async def contributions(self, peer: str, pull: PullChunks) -> AsyncIterator[EncodedChunk]:  # type: ignore[override]
        async for item in self._remote(peer, lambda round_: round_.contributions(pull, self._name)):
            yield item

    async def reduced(self, peer: str, pull: PullChunks) -> AsyncIterator[Item]:  # type: ignore[override]
        async for item in self._remote(peer, lambda round_: round_.reduced(pull, self._name)):
            yield item

    async def progress(self, peer: str, pull: PullChunks) -> CellProgress:
        try:
            async with asyncio.timeout(5.0):
                await self._world.hop(self._name, peer)
                await self._world.hop(peer, self._name)
        except TimeoutError:
            raise PeerLostError(f"{peer} does not answer") from None
        return self._world.rounds[peer].cells[pull.cell].progress

    async def _remote(self, peer: str, call: Callable[[Round], AsyncIterator[Kind]]) -> AsyncIterator[Kind]:
        await self._world.hop(self._name, peer)
        items = call(self._world.rounds[peer])
        try:
            while True:
                following = asyncio.ensure_future(anext(items))
                await self._until(following, peer)
                try:
                    item = following.result()
                except StopAsyncIteration:
                    return
                await self._world.hop(peer, self._name)
                yield item
        finally:
            await items.aclose()  # type: ignore[attr-defined]

    async def _until(self, following: "asyncio.Future[Kind]", peer: str) -> None:
        """Waits for an item, or for the peer's death."""
        try:
            while not following.done():
                died = asyncio.ensure_future(self._world.died.wait())
                try:
                    await asyncio.wait([following, died], return_when=asyncio.FIRST_COMPLETED)
                finally:
                    died.cancel()
                if peer in self._world.dead:
                    raise PeerLostError(f"{peer} is dead")
        finally:
            if not following.done():
                following.cancel()
                await asyncio.wait([following])

    def watched(self, peer: str, limit_seconds: float, first_seconds: float) -> Pulling:
        return Pulling(peer, None, limit_seconds, first_seconds, self.clock())

    def clock(self) -> float:
        return asyncio.get_running_loop().time()


Fault = tuple[float, str, str]  # when, what ("kill", "stop", "continue", "cut"), whom (two names for a cut: "a b")


async def run_round(
    plan: RoundPlan,
    buffers: dict[str, torch.Tensor],
    seed: int,
    faults: list[Fault],
    codec: str = "none",
    latest_start: float = 1.0,
    feedback: dict[str, SumFeedback] | None = None,
) -> dict[str, ReductionResult]:
    """A round with faults; results of those who lived to see one, stopped ones left out."""
    world = World(seed)
    results: dict[str, ReductionResult] = {}

    async def member(name: str) -> None:
        await asyncio.sleep(world.random.random() * latest_start)
        round_ = world.rounds[name]
        result = await round_.run()
        if name not in world.dead | world.stopped:
            results[name] = result

    for each in plan.members:
        peers = SimulatedPeers(world, each.name)
        owed = (feedback or {}).get(each.name)
        world.rounds[each.name] = Round(plan, each.name, buffers.get(each.name), peers, FixedCodecs(codec), AtOnce(), None, owed)
    tasks = {each.name: asyncio.create_task(member(each.name)) for each in plan.members}
    heap = list(faults)
    heapq.heapify(heap)
    players = asyncio.create_task(_play(world, heap, tasks))
    ending = [task for name, task in tasks.items()]
    end = asyncio.get_running_loop().time() + 10_000
    while asyncio.get_running_loop().time() < end:
        living = [task for name, task in tasks.items() if name not in world.dead | world.stopped and not task.done()]
        if not living:
            break
        await asyncio.wait(living, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    players.cancel()
    late = [name for name, task in tasks.items() if not task.done() and name not in world.dead | world.stopped]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, players, return_exceptions=True)
    assert not late, f"{late} never came to an end"
    for name, task in tasks.items():
        if name not in world.dead and not task.cancelled():
            task.result()
    return results


async def _play(world: World, faults: list[Fault], tasks: dict[str, "asyncio.Task[None]"]) -> None:
    while faults:
        when, what, whom = heapq.heappop(faults)
        await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
        if what == "kill":
            world.kill(whom)
            tasks[whom].cancel()
        elif what == "stop":
            world.stopped.add(whom)
        elif what == "continue":
            world.stopped.discard(whom)
            world.died.set()
            world.died = asyncio.Event()
        else:
            first, second = whom.split()
            world.cut.add((first, second))
