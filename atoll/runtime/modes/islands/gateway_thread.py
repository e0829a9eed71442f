"""A site's gateway in rank 0's process: a thread with an event loop of its own, on the fabric."""

import asyncio
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import msgspec

from atoll.control.messages import Message
from atoll.control.rounds import Gateway
from atoll.control.rounds.messages import UpdateChunk
from atoll.control.world import SwarmProcess
from atoll.errors import ClusterError, FabricError
from atoll.events import AnyEvent, CheckpointFailed, CheckpointSaved, Evaluated, EvaluationFailed, Observer, PeerRefused, StepFinished
from atoll.fabric import Remote
from atoll.fabric.deadline import Backoff
from atoll.fabric.security import Credentials, RunMember
from atoll.fabric.service import CallingPeer, allowed
from atoll.fabric.shaped import LinkChoice
from atoll.privacy.border import SiteBorder
from atoll.runtime.modes.islands.exchange import SiteExchange
from atoll.runtime.modes.islands.measured import FetchMeter, MeteredTransport, SiteMeasured, chunk_bytes
from atoll.runtime.modes.islands.spec import IslandsSpec
from atoll.runtime.modes.islands.transport import RoundService
from atoll.runtime.modes.swarm.member_process import own_hosts
from atoll.runtime.modes.swarm.transport import COORDINATOR, Directory, LoopClock, PeerAddress

__all__ = ["GatewayThread", "SiteAccount", "SiteService"]

_PATIENT = Backoff(attempts=1 << 30)
_PEERS = Backoff(attempts=1 << 30, largest_seconds=2.0)
_REGISTER_SECONDS = 5.0
_ANSWER_SECONDS = 20.0
_LINGER_SECONDS = 600.0  # at the end, for those who are behind
_LOOK_SECONDS = 0.05
_MOST_REFUSALS = 100  # that a site tells the run of, each once


class SiteAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What a site tells of itself when it has ended, and from time to time."""

    ended: str = ""  # why no step follows; empty: one does
    steps: int = 0
    waited_seconds: float = 0.0
    seconds: float = 0.0  # of training
    received_bytes: int = 0  # from other sites
    measured: SiteMeasured | None = None


SiteEvent: TypeAlias = CheckpointFailed | CheckpointSaved | Evaluated | EvaluationFailed | PeerRefused | StepFinished
"""What a site tells of itself that is the run's."""


class SiteService:
    """What sites tell the coordinator. Both are called in the fabric's loop."""

    def __init__(self, heard: Callable[[str, SiteAccount], None], told: Callable[[AnyEvent], None]) -> None:
        self._heard, self._told = heard, told

    @allowed("worker")
    async def account(self, account: SiteAccount, peer: CallingPeer) -> None:
        """What the caller's site did."""
        self._heard(peer.name, account)

    @allowed("worker")
    async def event(self, event: SiteEvent, peer: CallingPeer) -> None:
        """Something happened at the caller's site."""
        self._told(event)


class GatewayThread:
    """Runs from `start` to `close`; what goes wrong in it, the exchange is told. `border` guards what it sends and takes, and `no_state`
    says why no other site may give this one the common state, if none may."""

    def __init__(
        self,
        credentials: Credentials,
        address: str,
        spec: IslandsSpec,
        exchange: SiteExchange,
        observer: Observer,
        links: LinkChoice | None,
        border: SiteBorder | None = None,
        no_state: str | None = None,
    ) -> None:
        self._border, self._no_state = border, no_state
        self._refusals: set[tuple[str, str]] = set()
        self._credentials, self._address, self._spec, self._exchange = credentials, address, spec, exchange
        self._observer, self._links = observer, links
        self._closing, self._over = threading.Event(), threading.Event()
        self._account = SiteAccount()
        self._meter = FetchMeter(spec.settings.patience_seconds)
        self._events: deque[SiteEvent] = deque()
        exchange.on_refused = self._refused_update
        self._thread = threading.Thread(target=self._run, name="atoll-gateway", daemon=True)

    def start(self) -> None:
        """Returns at once."""
        self._thread.start()

    def tell(self, account: SiteAccount) -> None:
        """How the site is."""
        self._account = account

    def relay(self, event: AnyEvent) -> None:
        """Has the run hear what concerns it."""
        if isinstance(event, SiteEvent) and (self._spec.noise is not None or not isinstance(event, StepFinished)):
            self._events.append(event)

    def _heard(self, event: AnyEvent) -> None:
        """Of the fabric: what was refused concerns the run."""
        self._observer(event)
        if isinstance(event, PeerRefused) and event.what in ("call", "message") and len(self._refusals) < _MOST_REFUSALS:
            if (event.peer, event.reason) not in self._refusals:
                self.relay(event)
            self._refusals.add((event.peer, event.reason))

    def _refused_update(self, site: str, why: str) -> None:
        """All sites find the same; the run says it once."""
        self.relay(PeerRefused(peer=site, role="site", what="update", reason=why))

    def _refused(self, name: str, role: str, why: str) -> None:
        self._heard(PeerRefused(peer=name, role=role, what="message", reason=f"{self._exchange.site} takes no {why}"))

    def close(self, seconds: float = _LINGER_SECONDS) -> None:
        """Serves the others until the run is over, but no longer than that, and ends."""
        until = time.monotonic() + seconds
        while self._thread.is_alive() and time.monotonic() < until and not self._over.is_set():
            self._thread.join(_LOOK_SECONDS)
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as error:  # the training would wait for ever
            self._exchange.fail(error)

    async def _serve(self) -> None:
        errors: list[BaseException] = []
        loop, clock = asyncio.get_running_loop(), LoopClock(errors.append)
        inbox = clock.mailbox()

        def arrived(message: Message) -> None:
            loop.call_soon_threadsafe(take, message, time.monotonic())

        def take(message: Message, now: float) -> None:
            if isinstance(message, UpdateChunk):
                self._meter.came(message.update, message.chunk, chunk_bytes(message), now)
            inbox.put(message)

        spec = self._spec
        member = await asyncio.to_thread(
            RunMember,
            self._credentials,
            services=[RoundService(arrived, spec.settings, self._exchange.form.why_unfit, self._refused)],
            fingerprint=spec.fingerprint,
            observer=self._heard,
            backoff=_PEERS,
            links=self._links,
            border=self._border,
        )
        try:
            host, told = own_hosts(self._address) if self._links is None else (self._links.source,) * 2
            listening = await asyncio.to_thread(member.fabric.listen, f"{host}:0")
            coordinator = await asyncio.to_thread(member.join, self._address, _PATIENT)
            clock.spawn(self._keep_told(member, coordinator, PeerAddress(f"{told}:{listening.rpartition(':')[2]}")))
            transport = MeteredTransport(member, coordinator, self._meter)
            node = SwarmProcess(
                self._credentials.name, clock, transport, inbox, time.time_ns(), random.Random(secrets.randbits(64)), self._observer
            )
            gateway = Gateway(node, self._exchange.site, self._exchange, spec.settings, (COORDINATOR,))
            self._exchange.attach(loop, gateway.wake)
            clock.spawn(gateway.run())
            while not self._closing.is_set() and not errors:
                await asyncio.sleep(_LOOK_SECONDS)
                if gateway.finished:
                    self._exchange.finish()
                if self._no_state is not None and gateway.lacks_state:
                    raise ClusterError(f"{self._exchange.site} needs the common state, which no other site may send it: {self._no_state}")
                if coordinator.state == "dead" and " left: " in coordinator.lost_because:
                    self._over.set()
            if errors:
                self._exchange.fail(errors[0])
        finally:
            await clock.close()
            await asyncio.to_thread(member.close)

    async def _keep_told(self, member: RunMember, coordinator: Remote, place: PeerAddress) -> None:
        """Where this site listens, and how it is."""
        while True:
            account, count = self._account, self._meter.count
            with suppress(FabricError):
                await self._ask(coordinator, Directory.register, place)
                while self._events:
                    await self._ask(coordinator, SiteService.event, self._events[0])
                    self._events.popleft()
                others = [remote for name, remote in member.fabric.peers.items() if name != COORDINATOR]
                received = sum(remote.received_bytes for remote in others)
                account_now = msgspec.structs.replace(account, received_bytes=received, measured=self._measured(others))
                await self._ask(coordinator, SiteService.account, account_now)
            until = time.monotonic() + _REGISTER_SECONDS
            while (account, count) == (self._account, self._meter.count) and not self._events and time.monotonic() < until:
                await asyncio.sleep(_LOOK_SECONDS)

    def _measured(self, others: Sequence[Remote]) -> SiteMeasured | None:
        """Of the last exchange; None before the first one."""
        ways = [remote.estimate.latency_seconds for remote in others if remote.estimate is not None]
        round_trip, step = max(ways, default=0.0), self._exchange.times.steps.median
        rate = self._meter.bytes_per_s(round_trip)
        if not rate or not step:
            return None
        return SiteMeasured(count=self._meter.count, bytes_per_s=rate, round_trip_s=round_trip, step_s=step)

    @staticmethod
    async def _ask(coordinator: Remote, method: Callable[..., Any], request: object) -> None:
        await asyncio.wrap_future(coordinator.call_soon(method, request, timeout_seconds=_ANSWER_SECONDS))
