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


async def serve_call(link: Link, inbox: Inbox, method: Method, function: Callable[..., Any], timeout_seconds: float) -> None:
    """One call, from its request to its last reply. Whatever happens its stream ends, and its memory is given back."""
    task = asyncio.current_task()
    assert task is not None
    late = False

    def stop(error: FabricError) -> None:
        task.cancel(str(error))

    def expire() -> None:
        nonlocal late
        late = True
        task.cancel()

    inbox.failed = stop
    timer = link.loop.call_later(timeout_seconds, expire)
    try:
        await _answer(link, inbox, method, function)
    except asyncio.CancelledError:
        if not late:
            link.cancel(inbox, f"{method.name} was cancelled by the one who serves it")
            raise
        link.fail(inbox, LATE, f"{method.name} took longer than the {timeout_seconds:.3g} s its caller waits")
    except RefusedError as error:
        link.fail(inbox, "RefusedError", str(error))
    except Exception as error:  # the service's own code: its caller is told, and nothing else ends
        link.fail(inbox, type(error).__name__, str(error))
    finally:
        timer.cancel()
        link.let_go(inbox)


async def _answer(link: Link, inbox: Inbox, method: Method, function: Callable[..., Any]) -> None:
    hello = link.connection.peer
    assert hello is not None
    if method.streams_requests:
        async with contextlib.aclosing(_requests(link, inbox, method)) as requests:
            await _reply(link, inbox, method, function, requests, Peer(hello.name, hello.role))
        return
    message = await inbox.get()
    if message is None:
        raise RefusedError(f"{method.name} wants a request")
    try:
        request = decode_payload(message.payload, message.tensors, method.request_type)
        await _reply(link, inbox, method, function, request, Peer(hello.name, hello.role, lambda: link.taken(message)))
    finally:
        link.taken(message)


async def _reply(link: Link, inbox: Inbox, method: Method, function: Callable[..., Any], argument: object, peer: Peer) -> None:
    """Runs the method and sends what it gives."""
    if not method.streams_replies:
        link.send_last(inbox, encode_payload(await function(argument, peer)))
        return
    async with contextlib.aclosing(function(argument, peer)) as replies:
        async for reply in replies:
            await link.send(inbox, encode_payload(reply))
    link.end(inbox)


async def _requests(link: Link, inbox: Inbox, method: Method) -> AsyncGenerator[object, None]:
    """The caller's messages, each taken when the method asks for it."""
    while (message := await inbox.get()) is not None:
        if not message.payload:  # the opening of a call whose requests follow
            link.taken(message)
            continue
        value = decode_payload(message.payload, message.tensors, method.request_type)
        link.taken(message)
        yield value
