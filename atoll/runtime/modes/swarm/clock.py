"""Clock: time and taking turns, on asyncio."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

__all__ = ["LoopClock", "LoopMailbox"]


class LoopMailbox:
    """Things put in are taken out in order, by one taker. Only for the loop's own thread."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, item: Any) -> None:
        """Never waits."""
        self._queue.put_nowait(item)

    async def take(self) -> Any:
        """The oldest thing, as soon as there is one."""
        return await self._queue.get()


class LoopClock:
    """The clock of one process; what it spawned ends with `close`. `failed` is told of what ends in an error."""

    def __init__(self, failed: Callable[[BaseException], None]) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[None]] = set()

    def now(self) -> float:
        """Seconds that never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Comes back after so long, or later."""
        await asyncio.sleep(seconds)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside everything else of this process and ends with it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def mailbox(self) -> LoopMailbox:
        """A new, empty one."""
        return LoopMailbox()

    async def close(self) -> None:
        """Ends everything spawned."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)
