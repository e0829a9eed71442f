"""RunMember: a process in a run, on a fabric where everybody proves who they are. It keeps its certificate fresh and knows who is shut out.

```python
authority = Authority.create(run_directory)                       # where the run is started
coordinator, address = serve(authority, "0.0.0.0:7000", services=[…])
with coordinator:
    token = authority.issue_token("worker", uses=8)

with RunMember(enrol("host:7000", token, "rome"), services=[…]) as rome:   # elsewhere
    coordinator = rome.join("host:7000")
    oslo = rome.reach("oslo", coordinator)                        # through the coordinator, where neither can be dialled
```
"""

import asyncio
import random
import ssl
import time
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, Literal, Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from atoll.errors import FabricError, RefusedError
from atoll.events import AnyEvent, CertificateIssued, CertificateRevoked, Observer, PeerChanged, PeerRefused, RenewalFailed
from atoll.fabric.connection import ConnectionSettings
from atoll.fabric.deadline import Backoff
from atoll.fabric.fabric import Fabric
from atoll.fabric.frame import Hello
from atoll.fabric.relay import Relay, RelayEnd
from atoll.fabric.remote import Remote
from atoll.fabric.security.authority import Authority, Certified
from atoll.fabric.security.certificates import (
    ROLES,
    Revocations,
    SignedRevocations,
    identity_of,
    load_certificate,
    make_request,
    read_revocations,
)
from atoll.fabric.security.credentials import Credentials
from atoll.fabric.security.enrolment import Door
from atoll.fabric.service import CallingPeer, allowed, authorisation, roles_table
from atoll.fabric.shaped import LinkChoice
from atoll.fabric.tcp import TcpCarrier
from atoll.privacy.border import BorderGuard

__all__ = ["AuthorityService", "RunMember", "MemberService", "serve"]

_WATCH_SECONDS = 0.5  # between looks at the ledger for what other processes did
_LONGEST_NAP_SECONDS = 30.0  # a machine may sleep: wall clocks go on, timers do not
_PASS_ON_ATTEMPTS = 5
_ROLE_BYTES = {"observer": 1 << 20}  # who only looks has nothing large to say
_RENEWALS = Backoff(first_seconds=1.0, largest_seconds=60.0, attempts=1 << 30)  # it ends when the certificate does


class AuthorityService:
    """What members ask of the run's authority."""

    def __init__(self, authority: Authority, issued: Callable[[Certified], None], refused: Callable[[str, str], None]) -> None:
        self._authority, self._issued, self._refused = authority, issued, refused

    @allowed(*ROLES)
    async def renew(self, request: bytes, peer: CallingPeer) -> bytes:
        """A certificate (DER) for the same member and the key of a signing request. Name and role are those of the one it showed."""
        try:
            certified = await asyncio.to_thread(self._authority.renew, peer.name, peer.role, request)
        except RefusedError as error:
            self._refused(peer.name, str(error))
            raise
        self._issued(certified)
        return certified.certificate


class MemberService:
    """What members tell one another."""

    def __init__(self, learn: Callable[[SignedRevocations], None]) -> None:
        self._learn = learn

    @allowed(*ROLES)
    async def revoked(self, signed: SignedRevocations, peer: CallingPeer) -> None:
        """A list of revocations, which anybody may pass on, since the authority signed it."""
        self._learn(signed)


class RunMember:
    """This process in its run. Close it (or use `with`).

    `services` state who may call them with `@allowed`; what they do not state is refused. `fingerprint` (of `job_fingerprint`) must be
    that of every peer that has one. With `relay`, peers that cannot be dialled reach each other through here. `links` shape what is sent.
    `border` is asked about all tensors that leave or arrive (docs/privacy.md).
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        services: Sequence[object] = (),
        observer: Observer | None = None,
        fingerprint: dict[str, str] | None = None,
        relay: Relay | None = None,
        backoff: Backoff | None = None,
        authority: Authority | None = None,
        links: LinkChoice | None = None,
        border: BorderGuard | None = None,
    ) -> None:
        self.credentials = credentials
        self.revocations = Revocations()
        self._since = time.time()  # when the certificate in use came
        self._signed: SignedRevocations | None = None
        self._observer, self._authority = observer, authority
        carrier = self._carrier(links)
        self._end, self.relay = RelayEnd(carrier), relay
        own: list[object] = [MemberService(self._learn), self._end]
        own += [] if authority is None else [self._service(authority)]
        own += [] if relay is None else [relay]
        self.fabric = Fabric(
            credentials.name,
            services=[*own, *services],
            carrier=carrier,
            settings=ConnectionSettings(name=credentials.name, role=credentials.role, fingerprint=fingerprint or {}),
            backoff=backoff,
            observer=self._observe,
            identify=self._identify,
            authorise=authorisation(roles_table([*own, *services])),
            role_message_bytes=_ROLE_BYTES,
            border=border,
        )
        self._end.fabric = self.fabric
        if relay is not None:
            relay.fabric = self.fabric

    def join(self, address: str, backoff: Backoff | None = None) -> Remote:
        """The run's coordinator: dialled, and from now on asked for new certificates and listened to about who is shut out.

        `backoff` says how long it is dialled again when it is lost; others are dialled as the member was told.
        """
        remote = self.fabric.connect(address, role="coordinator", backoff=backoff)
        self.fabric.submit(self._keep_fresh(lambda request: remote.call(AuthorityService.renew, request), lambda: remote.name))
        return remote

    def reach(self, name: str, relay: Remote) -> Remote:
        """A member through another that both have a connection with. Its bytes are TLS from end to end: the relay cannot read them."""
        return self._end.connect(relay, name)

    def close(self) -> None:
        """Leaves the run."""
        self.fabric.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- who may connect

    def _carrier(self, links: LinkChoice | None) -> TcpCarrier:
        def client() -> ssl.SSLContext:
            return self.credentials.client_context

        if self._authority is None:
            return TcpCarrier(client=client, server=lambda: self.credentials.server_context, link=links)
        door = Door(self._authority, lambda certified: self._issued(certified, "enrolled"), lambda *what: self._refused("enrolment", *what))
        return TcpCarrier(client=client, server=lambda: self.credentials.door_context, door=door, link=links)

    def _service(self, authority: Authority) -> AuthorityService:
        return AuthorityService(
            authority, lambda certified: self._issued(certified, "renewed"), lambda *what: self._refused("renewal", *what)
        )

    def _identify(self, hello: Hello, certificate: bytes | None) -> None:
        """Raises RefusedError unless the certificate is for who the peer says it is, and was not revoked. TLS checked its signature."""
        if certificate is None:
            raise RefusedError("it showed no certificate, which every member of a run must have; enrol with a token first")
        shown = load_certificate(certificate)
        identity = identity_of(shown)
        if identity.run != self.credentials.identity.run:
            raise RefusedError(f"{identity.name} is a member of run {identity.run}, and this is run {self.credentials.identity.run}")
        if (identity.name, identity.role) != (hello.name, hello.role):
            said, shown_as = f"{hello.name} ({hello.role})", f"{identity.name} ({identity.role})"
            raise RefusedError(f"it says it is {said}, but its certificate is for {shown_as}")
        self.revocations.check(shown.serial_number)

    # ---- revocations

    def _learn(self, signed: SignedRevocations) -> None:
        """In the loop. Newer lists count, and are passed on to everybody; whoever is on them is cut off."""
        revocations = read_revocations(signed, self.credentials.authority_key)
        if revocations.number <= self.revocations.number:
            return
        known = {entry.serial for entry in self.revocations.entries}
        self.revocations, self._signed = revocations, signed
        for name, reason in {entry.name: entry.reason for entry in revocations.entries if entry.serial not in known}.items():
            self.fabric.tell(CertificateRevoked(at_seconds=self.fabric.seconds(), peer=name, reason=reason))
        self.fabric.recheck()
        for remote in self.fabric.peers.values():
            if remote.state != "dead":
                self.fabric.submit(self._pass_on(remote))

    async def _pass_on(self, remote: Remote) -> None:
        """Tells a peer who is shut out, unless it leaves: then it is told when it comes back."""
        for attempt in range(_PASS_ON_ATTEMPTS):
            if self._signed is None or remote.state == "dead":
                return
            try:
                await remote.call(MemberService.revoked, self._signed)
                return
            except FabricError:
                await asyncio.sleep(attempt)

    def _observe(self, event: AnyEvent) -> None:
        if self._observer is not None:
            self._observer(event)
        if isinstance(event, PeerChanged) and event.state == "alive" and event.before in ("new", "dead") and self._signed is not None:
            self.fabric.submit(self._pass_on(self.fabric.peer(event.peer)))

    # ---- renewal

    async def _keep_fresh(self, renew: Callable[[bytes], Coroutine[Any, Any, bytes]], whom: Callable[[], str]) -> None:
        """Renews at half of the certificate's time, and until its end if need be. Connections that exist go on whatever happens."""
        failures = 0
        while True:
            await self._sleep_until(self._since + (self.credentials.expires_unix_seconds - self._since) / 2 if not failures else 0.0)
            key = Ed25519PrivateKey.generate()
            try:
                certificate = await renew(make_request(key))
                self.credentials = Credentials(key, certificate, self.credentials.authority_der)
                self._since, failures = time.time(), 0
            except FabricError as error:
                failures += 1
                left = self.credentials.expires_unix_seconds - time.time()
                delay = None if left < 0 else _RENEWALS.delay_seconds(failures, random.random())
                event = RenewalFailed(
                    at_seconds=self.fabric.seconds(), peer=whom(), expires_seconds=left, delay_seconds=delay, reason=str(error)
                )
                self.fabric.tell(event)
                if delay is None:
                    return
                await asyncio.sleep(min(delay, max(left / 4, 0.1)))

    async def _sleep_until(self, unix_seconds: float) -> None:
        while (left := unix_seconds - time.time()) > 0:
            await asyncio.sleep(min(left, _LONGEST_NAP_SECONDS))

    # ---- for the authority's process

    def watch(self, authority: Authority) -> None:
        """Follows the ledger, which other processes may change, and renews this process's own certificate."""
        self.fabric.submit(self._watch(authority))

        async def renew(request: bytes) -> bytes:
            name, role = self.credentials.name, self.credentials.role
            return (await asyncio.to_thread(authority.renew, name, role, request)).certificate

        self.fabric.submit(self._keep_fresh(renew, lambda: "the run's authority"))

    async def _watch(self, authority: Authority) -> None:
        while True:
            revocations = await asyncio.to_thread(authority.revocations)
            if revocations.number > self.revocations.number:
                self._learn(await asyncio.to_thread(authority.signed_revocations))
            await asyncio.sleep(_WATCH_SECONDS)

    def _issued(self, certified: Certified, how: Literal["enrolled", "renewed"]) -> None:
        """From any thread."""
        identity = certified.identity

        async def tell() -> None:
            event = CertificateIssued(
                at_seconds=self.fabric.seconds(),
                peer=identity.name,
                role=identity.role,
                serial=certified.serial,
                lifetime_seconds=certified.lifetime_seconds,
                how=how,
            )
            self.fabric.tell(event)

        self.fabric.submit(tell())

    def _refused(self, what: Literal["enrolment", "renewal"], who: str, reason: str) -> None:
        """From any thread."""

        async def tell() -> None:
            self.fabric.tell(PeerRefused(at_seconds=self.fabric.seconds(), peer=who, role="", what=what, reason=reason))

        self.fabric.submit(tell())


def serve(
    authority: Authority,
    address: str,
    *,
    services: Sequence[object] = (),
    observer: Observer | None = None,
    fingerprint: dict[str, str] | None = None,
    relay: Relay | None = None,
    links: LinkChoice | None = None,
    border: BorderGuard | None = None,
) -> tuple[RunMember, str]:
    """The run's coordinator, accepting members and those with tokens at one address; returns it and the address to dial.

    It relays between members that cannot be dialled, unless given a Relay with other limits.
    """
    member = RunMember(
        authority.credentials(),
        services=services,
        observer=observer,
        fingerprint=fingerprint,
        relay=relay or Relay(),
        authority=authority,
        links=links,
        border=border,
    )
    try:
        listening = member.fabric.listen(address)
    except BaseException:
        member.close()
        raise
    member.watch(authority)
    return member, listening
