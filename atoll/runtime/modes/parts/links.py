"""A part's links: to the hub, which it tells what happens, and to the parts that it receives from.

Training waits here for what others send. A connection that is lost is made again; who is started again is found through the hub. Only a
part that is declared optional is done without while it is away.
"""

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from torch import Tensor

from atoll.errors import AtollError, DeadlineError, FabricError, PeerLostError, RefusedError
from atoll.fabric.deadline import Backoff
from atoll.fabric.remote import Remote
from atoll.fabric.security import RunMember
from atoll.runtime.modes.parts.exchange import POLL_SECONDS, ExchangeService, Thing
from atoll.runtime.modes.parts.hub import PartsHub
from atoll.runtime.modes.parts.messages import HubQuestion, Missed, PartEntry, PartEvent, SentTensor, Told, Use, Wanted, opened

__all__ = ["HubLink", "PartPeers", "Source"]

Result = TypeVar("Result")
_ANSWER_SECONDS = POLL_SECONDS + 40.0
_FETCH_SECONDS = 600.0  # a large tensor over a slow link takes its time; that a peer is gone is noticed otherwise
_CONNECT_SECONDS = 20.0
_AGAIN_SECONDS = 0.2
_LOOK_SECONDS = 0.5
_PEERS = Backoff(largest_seconds=1.0, attempts=3)  # then the hub is asked where it is by now
_AWAY = ("dead", "stopped", "unreachable")


class HubLink:
    """The hub, as a part sees it. Losing it ends the process: it is the one that started this one."""

    def __init__(self, member: RunMember, remote: Remote) -> None:
        self.member, self.remote = member, remote
        self.stop_after: int | None = None
        self.sent = 0  # events, so far
        self._unsent: list[PartEvent] = []
        self._told = 0
        self._guard = threading.Condition()
        self._order = asyncio.Lock()
        self._failed: BaseException | None = None

    def ask(self, method: Callable[..., Coroutine[Any, Any, Result]], request: object) -> Result:
        """A call that is answered within a few seconds of the longest poll."""
        return self.remote.call_sync(method, request, timeout_seconds=_ANSWER_SECONDS)

    def enter(self, entry: PartEntry) -> int:
        """Says that this part is ready; the step to go on after, once the others are, too."""
        while (start := self.ask(PartsHub.enter, entry)).step < 0:
            pass
        return start.step

    def is_over(self) -> bool:
        """Whether the run is, waiting for a while."""
        return self.ask(PartsHub.over, HubQuestion())

    def tell(self, event: PartEvent) -> None:
        """Never waits; events arrive in order."""
        with self._guard:
            self._unsent.append(event)
            self.sent += 1
        self.member.fabric.submit(self._send()).add_done_callback(self._ended)

    def wait_until_told(self, events: int) -> None:
        """Until the hub has answered to so many of the events."""
        with self._guard:
            self._guard.wait_for(lambda: self._failed is not None or self._told >= events)
        if self._failed is not None:
            raise self._failed

    async def _send(self) -> None:
        async with self._order:
            with self._guard:
                events, self._unsent = tuple(self._unsent), []
            if not events:
                return
            instruction = await self.remote.call(PartsHub.tell, Told(events), timeout_seconds=_ANSWER_SECONDS)
            with self._guard:
                self._told += len(events)
                self.stop_after = instruction.stop_after
                self._guard.notify_all()

    def _ended(self, future: "concurrent.futures.Future[None]") -> None:
        error = None if future.cancelled() else future.exception()
        if error is not None:
            with self._guard:
                self._failed = error
                self._guard.notify_all()


class PartPeers:
    """The other parts, found through the hub by their names."""

    def __init__(self, hub: HubLink) -> None:
        self._hub = hub
        self._remotes: dict[str, Remote] = {}
        self._attempts: dict[str, asyncio.Task[Remote]] = {}
        self._lost: set[str] = set()

    def is_away(self, part: str) -> bool:
        """Whether a part that was there, or should be, is not."""
        remote = self._remotes.get(part)
        return part in self._lost or (remote is not None and remote.role != "" and remote.state in _AWAY)

    def received_bytes(self, part: str) -> int:
        """Over the connection with it."""
        remote = self._remotes.get(part)
        return 0 if remote is None else remote.received_bytes

    async def fetch(self, part: str, wanted: Wanted) -> SentTensor:
        """What is wanted of a part, however long that takes and however often it is lost meanwhile."""
        while True:
            try:
                remote = await self._remote(part)
                found = await remote.call(ExchangeService.fetch, wanted, timeout_seconds=_FETCH_SECONDS)
                if found.header is not None:
                    return found
            except (PeerLostError, DeadlineError):
                self._lost.add(part)
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _remote(self, part: str) -> Remote:
        """A connection that is up; whoever asks meanwhile waits for the same attempt."""
        known = self._remotes.get(part)
        if known is not None and known.given_up is None and known.state != "dead":
            return known
        task = self._attempts.get(part)
        if task is None or task.done():
            task = self._attempts[part] = asyncio.get_running_loop().create_task(self._reach(part))
        return await asyncio.shield(task)

    async def _reach(self, part: str) -> Remote:
        while True:
            place = await self._hub.remote.call(PartsHub.find, part, timeout_seconds=_ANSWER_SECONDS)
            if place.gone:
                self._lost.add(part)
                await asyncio.sleep(_AGAIN_SECONDS)
            elif place.address:
                break
        known = self._remotes.get(part)
        if known is None or known.address != place.address or known.given_up is not None:
            known = await asyncio.to_thread(self._hub.member.fabric.connect, place.address, name=place.member, backoff=_PEERS)
            self._remotes[part] = known
        try:
            await known.connected(_CONNECT_SECONDS)
        except RefusedError as error:  # somebody else listens where it was
            raise PeerLostError(str(error)) from error
        self._lost.discard(part)
        return known


class Source:
    """What a part receives under one name from another, in the order of steps, asked for some steps ahead."""

    def __init__(
        self,
        hub: HubLink,
        peers: PartPeers,
        thing: Thing,
        sender: str,
        receiver: str,
        *,
        codec: str,
        window: int,
        last: int,
        optional: bool,
    ) -> None:
        self._hub, self._peers, self._thing, self._sender, self._codec = hub, peers, thing, sender, codec
        self._window, self._last, self._optional = window, last, optional
        self._futures: dict[int, concurrent.futures.Future[SentTensor]] = {}
        self._taken = 0
        self._missing = False
        self.use = Use(name=thing.name, gradient=thing.gradient, sender=sender, receiver=receiver)
        self._link_bytes = [0, 0]  # over connections that were lost, and the one that is up
        self.loss: float | None = None  # that the last gradient was of

    def begin(self, step: int) -> None:
        """The run goes on after this step."""
        self._taken = step

    def take(self, step: int) -> Tensor | None:
        """A step's tensor, as soon as it is there; None where it can be done without and its sender is away."""
        began = time.perf_counter()
        for old in [old for old in self._futures if old < step]:
            self._futures.pop(old).cancel()
        found = self._wait(step)
        self._taken = step
        self._count(found, time.perf_counter() - began)
        if (found is None) != self._missing:
            self._missing = found is None
            self._hub.tell(Missed(name=self._thing.name, step=step, again=not self._missing))
        if found is None:
            return None
        self.loss = found.loss
        return opened(self._thing.name, found, self._codec)

    def _wait(self, step: int) -> SentTensor | None:
        for ahead in range(step, min(step + self._window, self._last + 1)):
            if ahead not in self._futures:
                wanted = Wanted(name=self._thing.name, gradient=self._thing.gradient, step=ahead, taken=self._taken)
                self._futures[ahead] = self._hub.member.fabric.submit(self._peers.fetch(self._sender, wanted))
        future = self._futures[step]
        while True:
            if self._optional and not future.done() and self._peers.is_away(self._sender):
                return None
            try:
                found = future.result(timeout=_LOOK_SECONDS)
                del self._futures[step]
                return found
            except TimeoutError:
                if future.done():
                    raise
            except concurrent.futures.CancelledError:
                raise FabricError(f"waiting for {self._thing.name!r} of {self._sender} ended") from None
            if self._hub.remote.given_up is not None:
                raise AtollError("the process that started this one is gone")

    def _count(self, found: SentTensor | None, seconds: float) -> None:
        now = self._peers.received_bytes(self._sender)
        if now < self._link_bytes[1]:  # another connection
            self._link_bytes[0] += self._link_bytes[1]
        self._link_bytes[1] = now
        use, added = self.use, {"missed": int(found is None), "waited_seconds": seconds, "link_bytes": 0}
        if found is not None and found.header is not None:
            shape, narrow = found.header.shape, found.header.dtype.startswith(("float", "bfloat"))
            rows = found.header.elements // shape[-1] if narrow and len(shape) > 1 and shape[-1] else found.header.elements
            added |= {"messages": 1, "bytes": sum(part.nbytes for part in found.parts), "positions": rows}
        fields: Mapping[str, Any] = {name: getattr(use, name) + value for name, value in added.items()}
        self.use = Use(**{**{name: getattr(use, name) for name in use.__struct_fields__}, **fields, "link_bytes": sum(self._link_bytes)})
