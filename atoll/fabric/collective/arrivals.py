"""What a head (an owner, or who stands in for a site) gets from those whose contributions it sums: chunk after chunk, from all at once."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from atoll.errors import FabricError
from atoll.fabric.collective.messages import Chunk, Failed, Item

__all__ = ["Arrivals", "Child"]

AHEAD = 16  # chunks a fast child may be ahead of the slowest


class Child:
    """One that sends, and whose contributions it may bring: places among the members."""

    def __init__(self, name: str, place: int, brings: tuple[int, ...], first: int) -> None:
        self.name, self.place, self.brings, self.first = name, place, brings, first
        self.items: asyncio.Queue[Item] = asyncio.Queue(AHEAD)

    async def take(self, item: Item, last: int, check: Callable[[Chunk], None]) -> bool:
        """An item arrived; True if it was the last."""
        if isinstance(item, Chunk):
            if item.index != self.first or not item.contributors or not set(item.contributors) <= set(self.brings):
                raise FabricError(f"{self.name} sent chunk {item.index} of {item.contributors} where {self.first} of {self.brings} was due")
            check(item)
            self.first += 1
        await self.items.put(item)
        return isinstance(item, Failed) or self.first == last


Start = Callable[[Child], None]  # begins to pull a child's chunks into its items


class Arrivals:
    """Rows: for chunk after chunk, what arrived of it, in the order of addition. A child that fails is gone for good.

    With `replace`, a lost child that brought others' contributions is replaced by those others themselves.
    """

    def __init__(self, children: list[Child], start: Start, *, replace: bool) -> None:
        self._children = children
        self._start = start
        self._replace = replace
        self.lost: dict[str, Failed] = {}
        for child in children:
            start(child)

    async def row(self, index: int, others: Callable[[Child], Coroutine[Any, Any, list[Child]]]) -> list[tuple[int, Chunk]]:
        """Chunk `index` of every child that still sends: places and chunks."""
        found: list[tuple[int, Chunk]] = []
        waiting = list(self._children)
        while waiting:
            child = waiting.pop(0)
            item = await child.items.get()
            if isinstance(item, Chunk):
                assert item.index == index
                found.append((child.place, item))
                continue
            self.lost[child.name] = item
            self._children.remove(child)
            if self._replace and len(child.brings) > 1:
                new = await others(child)
                for replacement in new:
                    self._start(replacement)
                self._children += new
                waiting += new
        return sorted(found, key=lambda arrived: arrived[0])
