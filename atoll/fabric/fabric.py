"""Fabric: everything between this process and its peers. It has an event loop of its own in a thread of its own.

```python
with Fabric("oslo-0", services=[Store()]) as fabric:
    address = fabric.listen("0.0.0.0:7000")
    rome = fabric.connect("rome:7000")
    reply = rome.call_sync(Store.fetch, Fetch("layer.0"))      # from training code
    future = rome.call_soon(Store.fetch, Fetch("layer.1"))     # without waiting
    fabric.run(coroutine())                                    # inside: await rome.call(...)
```
"""

import asyncio
import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from atoll.errors import FabricError, FrameError, RefusedError
from atoll.events import AnyEvent, Observer, PeerChanged, PeerRefused, PeerRetried
from atoll.fabric.carrier import Carrier, Listener, Wire
from atoll.fabric.connection import Connection, ConnectionSettings
from atoll.fabric.deadline import Backoff
from atoll.fabric.fingerprint import check_fingerprint
from atoll.fabric.frame import Hello, TensorHeader
from atoll.fabric.link import FabricLink
from atoll.fabric.liveness import Verdict
from atoll.fabric.payload import Payload, tensor_header
from atoll.fabric.remote import Dial, Remote
from atoll.fabric.service import Method, methods_of, read_method, serve_call
from atoll.fabric.stream import Inbox, IncomingMessage
from atoll.fabric.tcp import TcpCarrier
from atoll.privacy.border import PLAIN_BYTES, BorderGuard, Content, Passage

__all__ = ["Fabric"]

Result = TypeVar("Result")
_CLOSE_SECONDS = 5.0
_HELLO_SECONDS = 20.0  # the TLS hand-shake included
_MOST_STRANGERS = 512


class Fabric:
    """This process among its peers. Close it (or use `with`): then no thread, task or file of it is left.

    `identify(hello, certificate)` may refuse a peer, `authorise(role, method)` a call; both raise RefusedError, must be quick,
    and run in the loop or in a connection's thread.
    `border` is asked about every message with tensors, or with much else, that leaves or arrives (docs/privacy.md).
    `role_message_bytes` bounds what peers of a role may send at once. `observer` is told as Events, in the loop, what becomes of peers;
    what ends because the fabric is closed is no news.
    """

    def __init__(
        self,
        name: str,
        *,
        role: str = "worker",
        services: Sequence[object] = (),
        carrier: Carrier | None = None,
        settings: ConnectionSettings | None = None,
        backoff: Backoff | None = None,
        observer: Observer | None = None,
        identify: Callable[[Hello, bytes | None], None] | None = None,
        authorise: Callable[[str, str], None] | None = None,
        role_message_bytes: Mapping[str, int] | None = None,
        border: BorderGuard | None = None,
    ) -> None:
        self.name = name
        self.settings = settings or ConnectionSettings(name=name, role=role)
        self._carrier: Carrier = carrier or TcpCarrier()
        self._backoff = backoff or Backoff()
        self._observer, self._identify, self._authorise = observer, identify, authorise
        self._role_bytes = role_message_bytes or {}
        self._border = border
        self._methods: dict[str, tuple[Method, Callable[..., Any]]] = {}
        for service in services:
            self._methods |= methods_of(service)
        self._read: dict[Callable[..., Any], Method] = {}
        self._links: set[FabricLink] = set()
        self._strangers: dict[FabricLink, asyncio.TimerHandle] = {}  # who dialled and has not said who it is, and until when
        self._remotes: dict[FabricLink, Remote] = {}
        self._peers: dict[str, Remote] = {}
        self._listeners: list[Listener] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._started_at = time.monotonic()
        self._closing = False
        self._submitting, self._ending = threading.Lock(), threading.Lock()
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run_loop, name=f"fabric loop {name}", daemon=True)
        self.thread.start()

    # ---- for code outside the loop

    def listen(self, address: str = "127.0.0.1:0") -> str:
        """Accepts peers at an address (port 0: any); returns the address to dial."""

        async def listen() -> str:
            listener = self._carrier.listen(address, self.accept, self._loop)
            self._listeners.append(listener)
            return listener.address

        return self.run(listen())

    def connect(
        self,
        address: str,
        *,
        name: str | None = None,
        role: str | None = None,
        dial: Dial | None = None,
        backoff: Backoff | None = None,
    ) -> Remote:
        """A peer at an address. Returns at once; the connection is made, and made again when lost, in the background.

        Of several addresses, with commas between, the next is dialled whenever one is lost or does not answer.
        Given `name` or `role`, anybody else found there is refused. `dial` makes the wire where it is not the carrier's to make;
        `backoff` is for this peer alone.
        """
        if dial is None and "," in address:
            dial = self._in_turn([one.strip() for one in address.split(",") if one.strip()] or [address])

        async def connect() -> Remote:
            remote = Remote(self, address, backoff or self._backoff, expected_name=name, expected_role=role, dial=dial)
            self._spawn(remote.keep())
            return remote

        return self.run(connect())

    def _in_turn(self, addresses: Sequence[str]) -> Dial:
        turns = itertools.cycle(addresses)
        return lambda connection: self._carrier.dial(next(turns), connection, self._loop)

    def peer(self, name: str) -> Remote:
        """A peer that is or was connected, whoever dialled; RefusedError if there is none of that name."""
        if name not in self._peers:
            raise RefusedError(f"{self.name} knows no peer {name!r}; there are {', '.join(sorted(self._peers)) or 'none'}")
        return self._peers[name]

    @property
    def peers(self) -> dict[str, Remote]:
        """Every peer that is or was connected, by name."""
        return dict(self._peers)

    def recheck(self) -> None:
        """Asks `identify` again about every peer that is connected, and cuts off those it no longer accepts."""

        async def recheck() -> None:
            for link in list(self._links):
                if link.connection.peer is not None and link.connection.ended is None:
                    try:
                        self.check_peer(link, link.connection.peer)
                    except RefusedError as error:
                        link.refuse(error)

        self.submit(recheck())

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the fabric's loop and waits for it."""
        assert threading.current_thread() is not self.thread, "run would wait for itself; await it"
        return self.result_of(self.submit(coroutine))

    def result_of(self, future: "concurrent.futures.Future[Result]") -> Result:
        """Waits for what `submit` gave; FabricError where the fabric was closed before it ended."""
        try:
            return future.result()
        except concurrent.futures.CancelledError:
            if self._closing:
                raise FabricError(f"the fabric of {self.name} was closed meanwhile") from None
            raise

    def submit(self, coroutine: Coroutine[Any, Any, Result]) -> "concurrent.futures.Future[Result]":
        """Runs a coroutine in the fabric's loop; a future of its result, cancelled when the fabric is closed first."""
        with self._submitting:  # what is let through here is there when closing looks for what to cancel
            if not self._closing:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        raise FabricError(f"the fabric of {self.name} is closed")

    def close(self) -> None:
        """Says goodbye to every peer and ends all threads and tasks. Calls under way fail. Closing again does nothing."""
        with self._ending:
            with self._submitting:
                before, self._closing = self._closing, True
            if not before:
                asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
                self._loop.call_soon_threadsafe(self._loop.stop)
                self.thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ---- in the loop

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    async def _shut_down(self) -> None:
        for listener in self._listeners:
            listener.close()
        tasks = [task for task in asyncio.all_tasks(self._loop) if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        links = list(self._links)
        for link in links:
            link.close(f"{self.name} closes")
        if links:
            await asyncio.wait([link.over for link in links], timeout=_CLOSE_SECONDS)
        for link in links:
            thread = getattr(link.wire, "thread", None)
            if isinstance(thread, threading.Thread):
                await asyncio.to_thread(thread.join, _CLOSE_SECONDS)
        await self._loop.shutdown_default_executor()

    def _spawn(self, coroutine: Coroutine[Any, Any, object]) -> None:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def accept(self, make_wire: Callable[[Connection], Wire]) -> bool:
        """Somebody dialled (in the loop). Says no when too many have not yet said who they are; those who do not are cut off in time."""
        if len(self._strangers) >= _MOST_STRANGERS:
            return False
        link = FabricLink(self.settings, self, self._loop, dialled=False)
        try:
            wire = make_wire(link.connection)
        except OSError:  # no descriptors left: whoever dialled tries again
            return False
        self._links.add(link)
        text = f"it connected and did not say who it is within {_HELLO_SECONDS:.0f} s"
        self._strangers[link] = self._loop.call_later(_HELLO_SECONDS, lambda: link.refuse(RefusedError(text)))
        link.start(wire)
        return True

    # ---- for remotes

    def method(self, function: Callable[..., Any]) -> Method:
        """What a function's annotations say, read once."""
        if function not in self._read:
            self._read[function] = read_method(function)
        return self._read[function]

    def new_link(self, address: str, remote: Remote) -> FabricLink:
        """A link that begins to connect to a remote. FabricError: it never can. OSError: this process has no descriptors left."""
        link = FabricLink(self.settings, self, self._loop, dialled=True)
        wire = self._carrier.dial(address, link.connection, self._loop) if remote.dial is None else remote.dial(link.connection)
        self._remotes[link] = remote
        self._links.add(link)
        link.start(wire)
        return link

    def retried(self, peer: str, attempt: int, delay_seconds: float | None, reason: str) -> None:
        """A peer is dialled again, or given up."""
        self.tell(PeerRetried(at_seconds=self.seconds(), peer=peer, attempt=attempt, delay_seconds=delay_seconds, reason=reason))

    # ---- for links

    def check_peer(self, link: FabricLink, hello: Hello) -> None:
        """May this peer connect?"""
        remote = self._remotes.get(link)
        if remote is not None:
            remote.check_expected(hello.name, hello.role)
        if self._identify is not None:
            self._identify(hello, None if link.wire is None else link.wire.certificate)
        check_fingerprint(self.settings.fingerprint, hello.fingerprint, hello.name)
        link.connection.message_bytes = min(self.settings.message_bytes, self._role_bytes.get(hello.role, self.settings.message_bytes))

    def check_call(self, link: FabricLink, method: str) -> None:
        """Is there such a method, and may this peer call it?"""
        if method not in self._methods:
            raise RefusedError(f"{self.name} has no method {method!r}; it has {', '.join(sorted(self._methods)) or 'none'}")
        if self._authorise is not None:
            assert link.connection.peer is not None
            try:
                self._authorise(link.connection.peer.role, method)
            except RefusedError:
                raise
            except Exception as error:  # who cannot decide does not allow
                why = f"{type(error).__name__}: {error}"
                raise RefusedError(f"{method}: {self.name} could not decide whether it is allowed: {why}") from None

    def check_leaving(self, link: FabricLink, payload: Payload) -> None:
        """May this message go to this peer? In the loop, before any of it meets the connection."""
        if self._border is not None and (payload.tensors or len(payload.data) > PLAIN_BYTES):
            self._ask_border(link, "out", payload.content, payload.headers, payload.size_bytes)

    def check_arrived(self, link: FabricLink, message: IncomingMessage, content: Content | None) -> None:
        """May this message be taken? In the loop, before whoever it is for sees it."""
        if self._border is not None and (message.tensors or len(message.payload) > PLAIN_BYTES):
            self._ask_border(link, "in", content, tuple(map(tensor_header, message.tensors)), message.size_bytes)

    def _ask_border(
        self, link: FabricLink, direction: Literal["out", "in"], content: Content | None, headers: Sequence[TensorHeader], size_bytes: int
    ) -> None:
        assert self._border is not None
        tensors = tuple((header.dtype, header.shape) for header in headers)
        try:
            self._border(Passage(direction, link.peer_name, content, tensors, size_bytes))
        except RefusedError as error:
            self._refusal(link, "call", str(error))
            raise

    def called(self, link: FabricLink, inbox: Inbox, method: str, timeout_seconds: float) -> None:
        """Serves a call in a task of its own."""
        found, function = self._methods[method]
        self._spawn(serve_call(link, inbox, found, function, timeout_seconds))

    def greeted(self, link: FabricLink) -> None:
        """The peer is there: by its name from now on."""
        hello = link.connection.peer
        assert hello is not None
        self._known(link)
        remote = self._remotes.get(link) or self._peers.get(hello.name) or Remote(self, None, self._backoff)
        before = remote.state if remote.role else "new"
        remote.name, remote.role = hello.name, hello.role
        self._remotes[link] = self._peers[hello.name] = remote
        remote.attach(link)
        self._changed(remote, before, Verdict("alive", "connected"))

    def judged(self, link: FabricLink, verdict: Verdict) -> None:
        """The peer's state changed."""
        remote = self._remotes.get(link)
        if remote is not None and remote.holds(link) and remote.state != verdict.state:
            self._changed(remote, remote.state, verdict)

    def closed(self, link: FabricLink, error: FabricError) -> None:
        """The link is over."""
        self._links.discard(link)
        self._known(link)
        remote = self._remotes.pop(link, None)
        if remote is not None:
            remote.detach(link, str(error))
        if isinstance(error, (RefusedError, FrameError)):
            self._refusal(link, "connection", str(error))

    def refused(self, link: FabricLink, method: str, reason: str) -> None:
        """A call was refused; its caller is told by the connection."""
        self._refusal(link, "call", f"{method}: {reason}")

    def _refusal(self, link: FabricLink, what: Literal["connection", "call"], reason: str) -> None:
        role = "" if link.connection.peer is None else link.connection.peer.role
        self.tell(PeerRefused(at_seconds=self.seconds(), peer=link.peer_name, role=role, what=what, reason=reason))

    def _known(self, link: FabricLink) -> None:
        """It is no longer waited for."""
        timer = self._strangers.pop(link, None)
        if timer is not None:
            timer.cancel()

    def _changed(self, remote: Remote, before: Any, verdict: Verdict) -> None:
        remote.state = verdict.state
        now = self.seconds()
        self.tell(
            PeerChanged(at_seconds=now, peer=remote.name, role=remote.role, state=verdict.state, before=before, reason=verdict.reason)
        )

    # ---- events

    def tell(self, event: AnyEvent) -> None:
        """Tells the observer, in the loop, until the fabric is closed: peers would seem to die whom it says goodbye to itself."""
        if self._observer is not None and not self._closing:
            self._observer(event)

    def seconds(self) -> float:
        """Since it began: what events are dated with."""
        return time.monotonic() - self._started_at
