"""Answers calls: runs a service's methods as tasks in the loop, one per call, and sends what they return, yield or raise."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable
from typing import Any

from atoll.errors import FabricError, RefusedError
from atoll.fabric.headers import LATE
from atoll.fabric.inbox import Inbox
from atoll.fabric.link import Link
from atoll.fabric.method import Method, Peer
from atoll.fabric.payload import decode_payload, encode_payload

__all__ = ["serve_call"]


class _Patience:
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


async def serve_call(link: Link, inbox: Inbox, method: Method, function: Callable[..., Any], timeout_seconds: float) -> None:
    """One call, from its request to its last reply. Whatever happens its stream ends, and its memory is given back.

    `timeout_seconds` is for each item of a stream, as its caller counts it: a stream goes on for as long as items flow.
    """
    task = asyncio.current_task()
    assert task is not None

    def stop(error: FabricError) -> None:
        task.cancel(str(error))

    inbox.failed = stop
    patience = _Patience(link.loop, task, timeout_seconds)
    patience.begin()
    try:
        await _answer(link, inbox, method, function, patience)
    except asyncio.CancelledError:
        if not patience.over:
            link.cancel(inbox, f"{method.name} was cancelled by the one who serves it")
            raise
        link.fail(inbox, LATE, f"{method.name} took longer than the {timeout_seconds:.3g} s its caller waits")
    except RefusedError as error:
        link.fail(inbox, "RefusedError", str(error))
    except Exception as error:  # the service's own code: its caller is told, and nothing else ends
        link.fail(inbox, type(error).__name__, str(error))
    finally:
        patience.pause()
        link.let_go(inbox)


async def _answer(link: Link, inbox: Inbox, method: Method, function: Callable[..., Any], patience: _Patience) -> None:
    hello = link.connection.peer
    assert hello is not None
    if method.streams_requests:
        async with contextlib.aclosing(_requests(link, inbox, method, patience)) as requests:
            await _reply(link, inbox, method, lambda: function(requests, Peer(hello.name, hello.role)), patience)
        return
    message = await inbox.get()
    if message is None:
        raise RefusedError(f"{method.name} wants a request")
    try:
        request = decode_payload(message.payload, message.tensors, method.request_type)
        peer = Peer(hello.name, hello.role, lambda: link.taken(message))
        await _reply(link, inbox, method, lambda: function(request, peer), patience)
    finally:
        link.taken(message)


async def _reply(link: Link, inbox: Inbox, method: Method, call: Callable[[], Any], patience: _Patience) -> None:
    """Runs the method and sends what it gives."""
    if not method.streams_replies:
        link.send_last(inbox, encode_payload(await call()))
        return
    async with contextlib.aclosing(call()) as replies:
        async for reply in replies:
            patience.pause()
            await link.send(inbox, encode_payload(reply))
            patience.begin()
    link.end(inbox)


async def _requests(link: Link, inbox: Inbox, method: Method, patience: _Patience) -> AsyncGenerator[object, None]:
    """The caller's messages, each taken when the method asks for it."""
    while True:
        patience.pause()
        message = await inbox.get()
        patience.begin()
        if message is None:
            return
        if not message.payload:  # the opening of a call whose requests follow
            link.taken(message)
            continue
        value = decode_payload(message.payload, message.tensors, method.request_type)
        link.taken(message)
        yield value
