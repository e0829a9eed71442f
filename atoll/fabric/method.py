"""What can be called: plain async methods of a service object, typed by their annotations.

```python
class Store:
    async def fetch(self, request: Fetch, peer: Peer) -> Reply: ...                      # one request, one reply
    async def scan(self, request: Scan, peer: Peer) -> AsyncIterator[Row]: yield ...     # one request, many replies
    async def put(self, rows: AsyncIterator[Row], peer: Peer) -> Receipt: ...            # many requests, one reply
```

Requests and replies are msgspec structs or plain values, with tensors anywhere inside. A caller names the method by the function itself,
`remote.call(Store.fetch, Fetch(...))`, so that a type checker sees what goes in and comes out.
"""

import collections.abc
import inspect
import typing
from collections.abc import Callable
from typing import Any

import msgspec

from atoll.errors import FabricError

__all__ = ["Method", "Peer", "methods_of", "read_method"]


class Peer:
    """Who calls, as its method sees it."""

    def __init__(self, name: str, role: str, release: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self.role = role
        self.release: Callable[[], None] = release
        """Says that the request's memory is accounted for elsewhere: its sender may send more before this method returns."""

    def __repr__(self) -> str:
        return f"Peer({self.name!r}, role={self.role!r})"


class Method(msgspec.Struct, frozen=True):
    """A method as both sides know it."""

    name: str  # as it travels: "Store.fetch"
    request_type: Any
    reply_type: Any
    streams_requests: bool
    streams_replies: bool


def read_method(function: Callable[..., Any]) -> Method:
    """What a function's annotations say; FabricError if they do not make a method."""
    name = ".".join(function.__qualname__.split(".")[-2:])
    hints = typing.get_type_hints(function)
    parameters = [parameter for parameter in inspect.signature(function).parameters if parameter != "self"]
    if len(parameters) != 2 or parameters[0] not in hints or "return" not in hints:
        raise FabricError(f"{name}: a method is annotated as `async def {function.__name__}(self, request: Request, peer: Peer) -> Reply`")
    request_type, streams_requests = _item_type(hints[parameters[0]])
    reply_type, streams_replies = _item_type(hints["return"])
    if streams_replies != inspect.isasyncgenfunction(function) and not getattr(function, "__isabstractmethod__", False):
        raise FabricError(f"{name}: a method that returns an AsyncIterator is an async generator, and only such a method is")
    return Method(name, request_type, reply_type, streams_requests, streams_replies)


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
