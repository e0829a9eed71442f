"""Exchange: how what parts send gets to those who receive it. Receivers ask for it, step by step and some steps ahead.

So that a receiver asks for no more than it may hold is what holds its sender back: a part that does not train computes what it is asked
for and nothing else; one that trains goes on for `credits` steps beyond what all its receivers have. Who asks again, because a connection
or a process was lost, gets the same again.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from atoll.errors import RefusedError
from atoll.fabric.service import CallingPeer, allowed
from atoll.runtime.modes.parts.messages import SentTensor, Wanted

__all__ = ["POLL_SECONDS", "ExchangeService", "Outbox", "Thing", "computed_part"]

POLL_SECONDS = 20.0  # how long who is asked thinks about it before it says "not yet"


class Thing(NamedTuple):
    """What crosses under a name: the tensor, or its gradient on the way back."""

    name: str
    gradient: bool = False


def computed_part(member: str) -> str:
    """The part that a member of the run computes: its name without what tells one start from the next."""
    return member.rpartition("-")[0]


class Outbox:
    """What a part has to send, by step, until all who receive it have it. Belongs to the fabric's loop.

    With `on_demand` values are made when they are asked for (`wanted`), in any order, and those of `most` steps are kept.
    """

    def __init__(self, readers: Mapping[Thing, Sequence[str]], most: int, *, on_demand: bool = False) -> None:
        self._readers, self._most, self._on_demand = readers, most, on_demand
        self._values: dict[int, dict[Thing, SentTensor]] = {}
        self._waiting: Counter[int] = Counter()
        self._taken = {(thing, reader): 0 for thing, names in readers.items() for reader in names}
        self._changed = asyncio.Condition()

    async def begin(self, step: int) -> None:
        """The run goes on after this step: whatever was before has been taken."""
        async with self._changed:
            self._taken = dict.fromkeys(self._taken, step)
            self._changed.notify_all()

    async def put(self, step: int, values: Mapping[Thing, SentTensor]) -> None:
        """A step's values."""
        async with self._changed:
            self._values.setdefault(step, {}).update(values)
            if self._on_demand:
                for old in list(self._values)[: -self._most]:  # those that were made first
                    del self._values[old]
            self._changed.notify_all()

    async def get(self, wanted: Wanted, reader: str, seconds: float) -> SentTensor:
        """What is wanted, as soon as it is there; an empty one if that takes longer. RefusedError: it is not this reader's to have."""
        thing = Thing(wanted.name, wanted.gradient)
        if reader not in self._readers.get(thing, ()):
            raise RefusedError(f"{reader} does not receive {wanted.name!r} from here")
        async with self._changed:
            self._note(thing, reader, wanted.taken)
            self._waiting[wanted.step] += 1
            self._changed.notify_all()
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(lambda: thing in self._values.get(wanted.step, {}))
            except TimeoutError:
                return SentTensor()
            finally:
                self._waiting[wanted.step] -= 1
            return self._values[wanted.step][thing]

    async def wanted(self, seconds: float) -> int | None:
        """The first step that somebody waits for and that is not there; None where nobody does for so long."""

        def missing() -> list[int]:
            return [step for step, count in self._waiting.items() if count and step not in self._values]

        async with self._changed:
            try:
                async with asyncio.timeout(seconds):
                    await self._changed.wait_for(missing)
            except TimeoutError:
                return None
            self._waiting = +self._waiting
            return min(missing())

    async def room(self, step: int) -> None:
        """Waits until a step may be made: until no receiver is more than the credits behind."""
        async with self._changed:
            await self._changed.wait_for(lambda: all(step - taken <= self._most for taken in self._taken.values()))

    def _note(self, thing: Thing, reader: str, taken: int) -> None:
        if self._on_demand or taken <= self._taken[thing, reader]:
            return
        self._taken[thing, reader] = taken
        done = min(self._taken.values())
        for step in [step for step in self._values if step <= done]:
            del self._values[step]
        self._changed.notify_all()


class ExchangeService:
    """Where others ask for what a part sends."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    @allowed("worker")
    async def fetch(self, wanted: Wanted, peer: CallingPeer) -> SentTensor:
        """What is wanted; an empty one: not yet."""
        return await self._outbox.get(wanted, computed_part(peer.name), POLL_SECONDS)
