"""What carries gradients between sites: rank 0 of each pushes what it has encoded to every other one, over the run's fabric.

A part that cannot be delivered is sent again until it is. A site of which nothing is heard for too long ends the others' step with a
sentence that names it: nobody waits for ever, and nobody goes on without it.
"""

import asyncio
import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import msgspec

from atoll.errors import CodecError, FabricError, JobFailedError, RefusedError
from atoll.events import AnyEvent, Observer
from atoll.fabric import Remote
from atoll.fabric.deadline import Backoff
from atoll.fabric.security import Credentials, RunMember
from atoll.fabric.service import CallingPeer, allowed, carries
from atoll.fabric.shaped import LinkChoice
from atoll.privacy.border import BorderGuard
from atoll.runtime.modes.islands.gateway_thread import SiteAccount
from atoll.runtime.modes.islands.gradient_sums import EncodedBucket, GradientSums, StepNumbers
from atoll.runtime.modes.swarm.member_process import own_hosts
from atoll.runtime.modes.swarm.transport import Directory, PeerAddress

__all__ = ["GradientGateway", "GradientService", "SiteRecords", "SiteSaid"]

_PATIENT = Backoff(attempts=1 << 30)
_PEERS = Backoff(attempts=1 << 30, largest_seconds=2.0)
_LOOK_SECONDS = 0.1
_TELL_SECONDS = 5.0
_ANSWER_SECONDS = 20.0
_DELIVERY_SECONDS = 300.0  # of one part, before it is sent again
_PARTING_SECONDS = 5.0
_SILENT_SECONDS = 60.0
_ABSENT_SECONDS = 600.0  # for a site that was never heard
_IN_FLIGHT = 4
_LEAVE_SECONDS = 60.0


class SiteSaid(msgspec.Struct, frozen=True, kw_only=True):
    """What a site tells the coordinator."""

    site: str
    account: SiteAccount
    events: tuple[AnyEvent, ...] = ()  # that are the run's
    before: int = 0  # events that this process has told before these


class SiteRecords:
    """What sites tell the coordinator; `heard` is called in the fabric's loop, and says whether the run is to stop."""

    def __init__(self, heard: Callable[[str, SiteSaid], bool]) -> None:
        self._heard = heard

    @allowed("worker")
    async def tell(self, said: SiteSaid, peer: CallingPeer) -> bool:
        """Whether all sites are asked to stop after their step."""
        return self._heard(peer.name, said)


class GradientService:
    """Where other sites' gradients arrive."""

    def __init__(self, sums: GradientSums, sites: Mapping[str, str]) -> None:
        """`sites` are others by the names of their processes."""
        self._sums, self._sites = sums, sites

    def _site(self, peer: CallingPeer) -> str:
        if peer.name not in self._sites:
            raise RefusedError(f"{peer.name} speaks for no other site of this run; those are {', '.join(sorted(self._sites))}")
        return self._sites[peer.name]

    @allowed("worker")
    @carries(request="gradients")
    async def bucket(self, part: EncodedBucket, peer: CallingPeer) -> None:
        """A site's sum for a bucket."""
        site = self._site(peer)
        problem = self._sums.why_unfit(part)
        if problem is None:
            try:
                values = await asyncio.to_thread(self._sums.decoded, part)
            except CodecError as error:
                problem = str(error)
        if problem is not None:
            raise RefusedError(f"{peer.name} sent gradients that cannot be meant: {problem}")
        self._sums.arrived(site, part, values)

    @allowed("worker")
    async def numbers(self, numbers: StepNumbers, peer: CallingPeer) -> None:
        """What a site says with a step."""
        self._sums.numbers_arrived(self._site(peer), numbers)


class GradientGateway:
    """Runs from `start` to `close`, in the fabric's own thread; what goes wrong, `sums` is told."""

    def __init__(
        self,
        credentials: Credentials,
        address: str,
        others: Mapping[str, str],
        sums: GradientSums,
        fingerprint: dict[str, str],
        observer: Observer,
        links: LinkChoice | None,
        border: BorderGuard | None = None,
    ) -> None:
        """`others` are the names of other sites' processes, by site."""
        self._sums, self._address, self._others, self._links = sums, address, others, links
        self.stop_asked = False  # by a callback of the run
        self._account, self._events = SiteAccount(), deque[AnyEvent]()
        self._told: SiteAccount | None = None
        self._final = False  # nothing is expected of other sites any more
        self._waiting: set[int] = set()  # parts that nobody has confirmed yet
        self._sent = itertools.count()
        self._remotes: dict[str, Remote] = {}
        self._received: dict[str, int] = {}  # bytes from each site
        self._room = {site: asyncio.Semaphore(_IN_FLIGHT) for site in others}
        service = GradientService(sums, {name: site for site, name in others.items()})
        self._member = RunMember(
            credentials, services=[service], fingerprint=fingerprint, observer=observer, backoff=_PEERS, links=links, border=border
        )
        sums.send = self._send

    def start(self) -> None:
        """Finds the others and says where this site is."""
        host, told = own_hosts(self._address) if self._links is None else (self._links.source,) * 2
        listening = self._member.fabric.listen(f"{host}:0")
        self._coordinator = self._member.join(self._address, _PATIENT)
        place = PeerAddress(f"{told}:{listening.rpartition(':')[2]}")
        for work in (self._keep_told(place), self._look_after()):
            self._member.fabric.submit(self._guarded(work))

    def relay(self, event: AnyEvent) -> None:
        """Has the run hear of it."""
        self._events.append(event)

    def tell(self, account: SiteAccount) -> None:
        """How the site is."""
        self._account = account

    def finish(self) -> None:
        """All other sites have said the last they had to say."""
        self._final = True
        self._count()

    def _count(self) -> None:
        """Bytes that came, while who sent them is there."""
        peers = self._member.fabric.peers
        for site, name in self._others.items():
            if name in peers:
                self._received[site] = max(self._received.get(site, 0), peers[name].received_bytes)

    def close(self, polite: bool = True) -> None:
        """Ends, once all that was sent has arrived and the coordinator knows how the site ended, or nobody listens any more."""
        until = time.monotonic() + _LEAVE_SECONDS
        while polite and time.monotonic() < until and (self._waiting or self._told is not self._account or self._events):
            time.sleep(_LOOK_SECONDS / 2)
        self._sums.close()
        self._member.close()

    # ---- in the fabric's loop

    async def _guarded(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self._sums.fail(error)

    def _send(self, part: EncodedBucket | StepNumbers) -> None:
        for site in self._others:
            number = next(self._sent)
            self._waiting.add(number)
            with suppress(FabricError):
                self._member.fabric.submit(self._guarded(self._deliver(site, part, number)))

    async def _deliver(self, site: str, part: EncodedBucket | StepNumbers, number: int) -> None:
        """Until it is there."""
        method: Callable[..., Any] = GradientService.bucket if isinstance(part, EncodedBucket) else GradientService.numbers
        async with self._room[site]:
            while True:
                remote, final = await self._reach(site), self._final
                try:
                    await remote.call(method, part, timeout_seconds=_PARTING_SECONDS if final else _DELIVERY_SECONDS)
                    break
                except RefusedError as error:
                    raise JobFailedError(f"{site} refused what {self._sums.own} sent: {error}") from None
                except FabricError:
                    if final:
                        break  # it has said its last word, and has most likely heard this one and gone: only the answer is missing
                    await asyncio.sleep(_LOOK_SECONDS)
        self._waiting.discard(number)

    async def _reach(self, site: str) -> Remote:
        """Over the connection there is, whoever dialled it."""
        name = self._others[site]
        while True:
            known = self._member.fabric.peers.get(name)
            if known is not None and known.state != "dead":
                return known
            if site in self._remotes and self._remotes[site].given_up is None:
                return self._remotes[site]
            try:
                place = await self._coordinator.call(Directory.find, name, timeout_seconds=_ANSWER_SECONDS)
            except FabricError:
                await asyncio.sleep(_LOOK_SECONDS)  # it is not there yet
                continue
            if site not in self._remotes or self._remotes[site].given_up is not None:
                self._remotes[site] = await asyncio.to_thread(self._member.fabric.connect, place.address, name=name)

    async def _look_after(self) -> None:
        """Notices a site that is not heard while something of it is awaited."""
        heard: dict[str, float] = {}
        began = time.monotonic()
        while not self._final:
            now, peers = time.monotonic(), self._member.fabric.peers
            for site, name in self._others.items():
                if name in peers and peers[name].state in ("alive", "slow"):
                    heard[site] = now
            self._count()
            for site in self._sums.awaited():
                limit, since = (_SILENT_SECONDS, heard[site]) if site in heard else (_ABSENT_SECONDS, began)
                if site in self._others and now - since > limit:
                    raise JobFailedError(
                        f"nothing was heard of {site} for {limit:.0f} s while {self._sums.own} waits for its gradients; every step needs "
                        f"those of all sites, so all of them end, and begin again at the last checkpoint with --max-restarts"
                    )
            await asyncio.sleep(_LOOK_SECONDS)

    async def _keep_told(self, place: PeerAddress) -> None:
        """Where this site listens, how it is, and what happened at it."""
        registered_at, acknowledged = -math.inf, 0
        while True:
            account, events = self._account, tuple(self._events)
            with suppress(FabricError):
                if time.monotonic() - registered_at > _TELL_SECONDS:  # a coordinator that was started anew must hear it
                    await self._coordinator.call(Directory.register, place, timeout_seconds=_ANSWER_SECONDS)
                    registered_at = time.monotonic()
                said = msgspec.structs.replace(account, received_bytes=sum(self._received.values()))
                message = SiteSaid(site=self._sums.own, account=said, events=events, before=acknowledged)
                self.stop_asked |= await self._coordinator.call(SiteRecords.tell, message, timeout_seconds=_ANSWER_SECONDS)
                acknowledged += len(events)
                for _ in events:
                    self._events.popleft()
                self._told = account
            until = time.monotonic() + _TELL_SECONDS
            while account is self._account and not self._events and time.monotonic() < until:
                await asyncio.sleep(_LOOK_SECONDS)
