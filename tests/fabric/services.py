"""A service and fabrics for tests."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import torch

from atoll.fabric import CallingPeer


class Named(msgspec.Struct):
    name: str
    tensors: list[torch.Tensor] = []


class Count(msgspec.Struct):
    number: int
    seconds: float = 0.0
    size: int = 0


class Store:
    """Every shape of method."""

    def __init__(self) -> None:
        self.cancelled = 0
        self.running = 0
        self.order: list[str] = []
        self.gate = asyncio.Event()

    async def echo(self, request: Named, peer: CallingPeer) -> Named:
        self.order.append(request.name)
        return Named(f"{peer.name}:{request.name}", request.tensors)

    async def sleep(self, request: Count, peer: CallingPeer) -> Count:
        self.running += 1
        try:
            await asyncio.sleep(request.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        return request

    async def fail(self, request: Named, peer: CallingPeer) -> Named:
        raise KeyError(request.name)

    async def hold(self, request: Named, peer: CallingPeer) -> int:
        self.running += 1
        await self.gate.wait()
        self.running -= 1
        return len(request.tensors)

    async def count(self, request: Count, peer: CallingPeer) -> AsyncIterator[Named]:
        try:
            for number in range(request.number):
                self.order.append(f"made {number}")
                yield Named(str(number), [torch.full((request.size,), number)] if request.size else [])
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise

    async def pace(self, request: Count, peer: CallingPeer) -> AsyncIterator[Count]:
        self.running += 1
        try:
            for number in range(request.number):
                await asyncio.sleep(request.seconds)
                yield Count(number)
        finally:
            self.running -= 1

    async def total(self, requests: AsyncIterator[Count], peer: CallingPeer) -> Count:
        return Count(sum([request.number async for request in requests]))

    async def double(self, requests: AsyncIterator[Count], peer: CallingPeer) -> AsyncIterator[Count]:
        async for request in requests:
            yield Count(2 * request.number)
