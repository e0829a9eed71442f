"""What can be called: plain async methods of a service object, typed by their annotations; who may call them; and answering calls.

```python
class Store:
    @allowed("worker", "coordinator")  # with security: what is not stated is refused
    async def fetch(self, request: Fetch, peer: CallingPeer) -> Reply: ...                      # one request, one reply
    async def scan(self, request: Scan, peer: CallingPeer) -> AsyncIterator[Row]: yield ...     # one request, many replies
    async def put(self, rows: AsyncIterator[Row], peer: CallingPeer) -> Receipt: ...            # many requests, one reply
```

Requests and replies are msgspec structs or plain values, with tensors anywhere inside. A caller names the method by the function itself,
`remote.call(Store.fetch, Fetch(...))`, so that a type checker sees what goes in and comes out. Every call is a task in the loop.
"""

import asyncio
import collections.abc
import contextlib
import inspect
import typing
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any, TypeAlias, TypeVar

import msgspec

from atoll.cluster import CONTENT_KINDS
from atoll.codec.base import Header
from atoll.errors import FabricError, RefusedError
from atoll.fabric.frame import LATE
from atoll.fabric.link import FabricLink
from atoll.fabric.payload import decode_payload, encode_payload
from atoll.fabric.stream import Inbox, IncomingMessage
from atoll.privacy.border import RELAYED, Content

__all__ = [
    "CallingPeer", "Declaration", "Method", "allowed", "authorisation", "carries", "content_of", "methods_of", "read_method", "roles_table",
    "serve_call", "take_in",
]  # fmt: skip


class CallingPeer:
    """Who calls, as its method sees it."""

    def __init__(self, name: str, role: str, release: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.role = role
        self.release: Callable[[], None] = release
        """Says that the request's memory is accounted for elsewhere: its sender may send more before this method returns."""

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, role={self.role!r})"


Declaration: TypeAlias = str | Callable[[Any], Content | None] | None
"""What messages carry: a kind of content, what tells the content of a message, or nothing said."""


class Method(msgspec.Struct, frozen=True):
    """A method as both sides know it."""

    name: str  # as it travels: "Store.fetch"
    request_type: Any
    reply_type: Any
    streams_requests: bool
    streams_replies: bool
    request_content: Declaration = None
    reply_content: Declaration = None


def read_method(function: Callable[..., Any]) -> Method:
    """What a function's annotations say; FabricError if they do not make a method."""
    name = ".".join(function.__qualname__.split(".")[-2:])
    hints = typing.get_type_hints(function)
    parameters = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    if len(parameters) != 2 or parameters[0] not in hints or "return" not in hints:
        raise FabricError(
            f"{name}: a method is annotated as `async def {function.__name__}(self, request: Request, peer: CallingPeer) -> Reply`"
        )
    request_type, streams_requests = _item_type(hints[parameters[0]])
    reply_type, streams_replies = _item_type(hints["return"])
    if streams_replies != inspect.isasyncgenfunction(function) and not getattr(function, "__isabstractmethod__", False):
        raise FabricError(f"{name}: a method that returns an AsyncIterator is an async generator, and only such a method is")
    declared = getattr(function, _CONTENT, (None, None))
    return Method(name, request_type, reply_type, streams_requests, streams_replies, *declared)


def methods_of(service: object) -> dict[str, tuple[Method, Callable[..., Any]]]:
    """Every public async method of a service, by the name it travels under: its class, and each base that declares it."""
    found: dict[str, tuple[Method, Callable[..., Any]]] = {}
    for name in dir(type(service)):
        function = getattr(type(service), name)
        if name.startswith("_") or not (inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function)):
            continue
        method = read_method(function)
        for owner in type(service).__mro__:
            if name in vars(owner):
                found[f"{owner.__name__}.{name}"] = (method, getattr(service, name))
    if not found:
        raise FabricError(f"{type(service).__name__} has no public async methods to call")
    return found


def _item_type(hint: Any) -> tuple[Any, bool]:
    """The type of a message, and whether there are many of them."""
    if typing.get_origin(hint) in (collections.abc.AsyncIterator, collections.abc.AsyncIterable, collections.abc.AsyncGenerator):
        return typing.get_args(hint)[0], True
    return hint, False


Function = TypeVar("Function", bound=Callable[..., Any])
_ATTRIBUTE = "roles_allowed"


def allowed(*roles: str) -> Callable[[Function], Function]:
    """States which roles may call a method."""

    def state(function: Function) -> Function:
        setattr(function, _ATTRIBUTE, frozenset(roles))
        return function

    return state


_CONTENT = "content_carried"


def carries(*, request: Declaration = None, reply: Declaration = None) -> Callable[[Function], Function]:
    """States what a method's messages carry: one of `CONTENT_KINDS`, or what makes a Content of a message.

    A site that may send only some kinds sends and takes no tensors whose method does not say what they are (docs/privacy.md).
    """
    for kind in (request, reply):
        if isinstance(kind, str) and kind not in (*CONTENT_KINDS, RELAYED):
            raise FabricError(f"nothing is called {kind!r}; messages carry {', '.join(CONTENT_KINDS)}")

    def state(function: Function) -> Function:
        setattr(function, _CONTENT, (request, reply))
        return function

    return state


def content_of(declared: Declaration, method: str, value: object) -> Content | None:
    """What a message carries, as its method declares it. RefusedError where that cannot be told."""
    if declared is None:
        return None
    if isinstance(declared, str):
        header = getattr(value, "header", None)
        return Content(declared, method, header.codec if isinstance(header, Header) else "none")
    try:
        return declared(value)
    except Exception as error:  # the service's own code; what is not known must not pass
        raise RefusedError(f"{method}: what a message carries cannot be told: {type(error).__name__}: {error}") from None


def roles_table(services: Iterable[object]) -> dict[str, frozenset[str]]:
    """The roles of every method of some services, by the name it travels under; none where it states none."""
    return {name: getattr(function, _ATTRIBUTE, frozenset()) for service in services for name, (_, function) in methods_of(service).items()}


def authorisation(table: Mapping[str, frozenset[str]]) -> Callable[[str, str], None]:
    """What a fabric asks before it serves a call: raises RefusedError unless the table has the role for the method."""

    def authorise(role: str, method: str) -> None:
        roles = table.get(method, frozenset())
        if role not in roles:
            who = f"only {' and '.join(f'{name}s' for name in sorted(roles))} may" if roles else "it states no roles, so nobody may"
            raise RefusedError(f"{role}s may not call {method}: {who}")

    return authorise


def take_in(link: FabricLink, message: IncomingMessage, method: str, type_: Any, declared: Declaration) -> Any:
    """The value of a message, once its type and what it carries were checked; RefusedError where it is not to be taken."""
    value = decode_payload(message.payload, message.tensors, type_)
    link.arrived(message, content_of(declared, method, value))
    return value


class _ItemTimeout:
    """How long the caller waits for an item, counted while the method works on one; not while it waits for its caller."""

    def __init__(self, loop: asyncio.AbstractEventLoop, task: "asyncio.Task[Any]", seconds: float) -> None:
        self.over = False
        self._loop, self._task, self._seconds = loop, task, seconds
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """The method works on the next item."""
        self.pause()
        self._timer = self._loop.call_later(self._seconds, self._expire)

    def pause(self) -> None:
        """It is the caller's turn: to send a request, or to take a reply."""
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        self.over = True
        self._task.cancel()


async def serve_call(link: FabricLink, inbox: Inbox, method: Method, function: Callable[..., Any], timeout_seconds: float) -> None:
    """One call, from its request to its last reply. Whatever happens its stream ends, and its memory is given back.

    `timeout_seconds` is for each item of a stream, as its caller counts it: a stream goes on for as long as items flow.
    """
    task = asyncio.current_task()
    assert task is not None

    def stop(error: FabricError) -> None:
        task.cancel(str(error))

    inbox.failed = stop
    timeout = _ItemTimeout(link.loop, task, timeout_seconds)
    timeout.begin()
    try:
        await _answer(link, inbox, method, function, timeout)
    except asyncio.CancelledError:
        if not timeout.over:
            link.cancel(inbox, f"{method.name} was cancelled by the one who serves it")
            raise
        link.fail(inbox, LATE, f"{method.name} took longer than the {timeout_seconds:.3g} s its caller waits")
    except RefusedError as error:
        link.fail(inbox, "RefusedError", str(error))
    except Exception as error:  # the service's own code: its caller is told, and nothing else ends
        link.fail(inbox, type(error).__name__, str(error))
    finally:
        timeout.pause()
        link.let_go(inbox)


async def _answer(link: FabricLink, inbox: Inbox, method: Method, function: Callable[..., Any], timeout: _ItemTimeout) -> None:
    hello = link.connection.peer
    assert hello is not None
    if method.streams_requests:
        async with contextlib.aclosing(_requests(link, inbox, method, timeout)) as requests:
            await _reply(link, inbox, method, lambda: function(requests, CallingPeer(hello.name, hello.role)), timeout)
        return
    message = await inbox.get()
    if message is None:
        raise RefusedError(f"{method.name} wants a request")
    try:
        request = take_in(link, message, method.name, method.request_type, method.request_content)
        peer = CallingPeer(hello.name, hello.role, lambda: link.taken(message))
        await _reply(link, inbox, method, lambda: function(request, peer), timeout)
    finally:
        link.taken(message)


async def _reply(link: FabricLink, inbox: Inbox, method: Method, call: Callable[[], Any], timeout: _ItemTimeout) -> None:
    """Runs the method and sends what it gives."""
    if not method.streams_replies:
        reply = await call()
        link.send_last(inbox, encode_payload(reply, content_of(method.reply_content, method.name, reply)))
        return
    async with contextlib.aclosing(call()) as replies:
        async for reply in replies:
            timeout.pause()
            await link.send(inbox, encode_payload(reply, content_of(method.reply_content, method.name, reply)))
            timeout.begin()
    link.end(inbox)


async def _requests(link: FabricLink, inbox: Inbox, method: Method, timeout: _ItemTimeout) -> AsyncGenerator[object, None]:
    """The caller's messages, each taken when the method asks for it."""
    while True:
        timeout.pause()
        message = await inbox.get()
        timeout.begin()
        if message is None:
            return
        if not message.payload:  # the opening of a call whose requests follow
            link.taken(message)
            continue
        try:
            value = take_in(link, message, method.name, method.request_type, method.request_content)
        finally:
            link.taken(message)
        yield value
