"""The hub: where the parts of a run meet. It tells them of the run and of each other, when to begin and when to stop, and hears of steps.

It lives in the process that started them, on its fabric; what it hears is for that process's main thread.
"""

import asyncio
import queue
from collections.abc import Callable, Mapping
from typing import Any

from atoll.errors import RefusedError
from atoll.fabric.service import CallingPeer, allowed
from atoll.runtime.modes.parts.exchange import POLL_SECONDS, computed_part
from atoll.runtime.modes.parts.messages import Begin, HubQuestion, Instruction, PartEntry, PartEvent, PartsSpec, PartStep, Place, Told

__all__ = ["HubState", "PartsHub"]

_AHEAD = 2  # a part begins a step when the hub has heard of the one before the last


class HubState:
    """Who is there and how far they are. Its coroutines run in the fabric's loop; `heard` has what parts tell."""

    def __init__(self, trained: frozenset[str], steps: int) -> None:
        self._trained, self._steps = trained, steps
        self.heard: queue.SimpleQueue[tuple[str, PartEvent]] = queue.SimpleQueue()
        self._members: dict[str, str] = {}
        self._entries: dict[str, tuple[str, PartEntry]] = {}
        self._last: dict[str, int] = {}  # step of each part that trains
        self._start: int | None = None
        self._stop_after: int | None = None
        self._gone: set[str] = set()
        self._over = False
        self._changed = asyncio.Condition()

    async def expect(self, part: str, member: str) -> None:
        """A process was started for a part, under this name."""
        async with self._changed:
            self._members[part] = member
            self._gone.discard(part)
            self._entries.pop(part, None)
            self._last.pop(part, None)
            if part in self._trained:
                self._start = None
            self._changed.notify_all()

    async def lose(self, part: str) -> None:
        """Its process has ended, and no other is started."""
        async with self._changed:
            self._gone.add(part)
            self._entries.pop(part, None)
            self._changed.notify_all()

    async def stop(self) -> int:
        """All stop after the same step, which none can have passed; returns it."""
        async with self._changed:
            if self._stop_after is None:
                last = max((self._last.get(part, self._start or 0) for part in self._trained), default=0)
                self._stop_after = min(self._steps, last + _AHEAD)
            return self._stop_after

    async def end(self) -> None:
        """The run is over: parts leave."""
        async with self._changed:
            self._over = True
            self._changed.notify_all()

    def entries(self) -> Mapping[str, PartEntry]:
        """Of the parts that are there."""
        return {part: entry for part, (_, entry) in dict(self._entries).items()}

    @property
    def start(self) -> int | None:
        """The step after which the parts that train began, or went on; None while they are not all there."""
        return self._start

    async def enter(self, part: str, entry: PartEntry, member: str) -> Begin:
        """A part is ready. Those who train begin together, after the newest step that all of them have a checkpoint of."""
        async with self._changed:
            self._entries[part] = (member, entry)
            entries = [self._entries[name][1] for name in self._trained if name in self._entries]
            if len(entries) == len(self._trained) and self._start is None:
                self._start = max(set.intersection(*(set(one.steps) for one in entries)), default=0)
                self._last = dict.fromkeys(self._trained, self._start)
            self._changed.notify_all()
            if part not in self._trained:
                return Begin(0)
            await self._until(lambda: self._start is not None)
            return Begin(-1 if self._start is None else self._start)

    async def find(self, part: str) -> Place:
        """Where a part is reached, once it is ready."""
        async with self._changed:
            await self._until(lambda: part in self._entries or part in self._gone)
            if part in self._gone:
                return Place(gone=True)
            member, entry = self._entries.get(part, ("", None))
            return Place(entry.address, member) if entry is not None else Place()

    def tell(self, part: str, told: Told) -> Instruction:
        """What happened there."""
        for event in told.events:
            if isinstance(event, PartStep):
                self._last[part] = event.step
            self.heard.put((part, event))
        return Instruction(self._stop_after)

    async def over(self) -> bool:
        """Whether the run is over, as soon as it is."""
        async with self._changed:
            await self._until(lambda: self._over)
            return self._over

    def part(self, peer: CallingPeer) -> str:
        """The part that a member computes; RefusedError unless it is the one that was started last for it."""
        part = computed_part(peer.name)
        if self._members.get(part) != peer.name:
            raise RefusedError(f"{peer.name} is not the process that was started last for its part")
        return part

    async def _until(self, condition: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(POLL_SECONDS):
                await self._changed.wait_for(condition)
        except TimeoutError:
            return


class PartsHub:
    """What parts ask of the hub. An answer of "not yet" comes after a while: ask again."""

    def __init__(self, spec: PartsSpec, state: HubState) -> None:
        self._spec, self._state = spec, state

    @allowed("worker")
    async def describe(self, request: HubQuestion, peer: CallingPeer) -> PartsSpec:
        """The run."""
        return self._spec

    @allowed("worker")
    async def enter(self, entry: PartEntry, peer: CallingPeer) -> Begin:
        """The caller is ready: when to begin."""
        return await self._state.enter(self._state.part(peer), entry, peer.name)

    @allowed("worker")
    async def find(self, part: str, peer: CallingPeer) -> Place:
        """Where a part is reached."""
        self._state.part(peer)
        return await self._state.find(part)

    @allowed("worker")
    async def tell(self, told: Told, peer: CallingPeer) -> Instruction:
        """What happened in a part."""
        return self._state.tell(self._state.part(peer), told)

    @allowed("worker")
    async def over(self, request: HubQuestion, peer: CallingPeer) -> bool:
        """Whether the run is over."""
        self._state.part(peer)
        return await self._state.over()
