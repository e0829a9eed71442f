"""Loop: virtual time. Coroutines are driven directly, one event after another, so that a seed gives the same run every time.

A process is a group of coroutines that can be killed (they end where they stand), stopped (nothing of it runs) and continued.
"""

import gc
import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from types import coroutine
from typing import Any

__all__ = ["Loop", "Process", "SimulatedMailbox"]

COLLECT_AFTER = 100_000
"""Objects made before the collector looks for cycles: a simulation makes very many small objects and few cycles."""


class _Task:
    """One coroutine of a process."""

    __slots__ = ("process", "send")

    def __init__(self, process: "Process", work: Coroutine[Any, Any, None]) -> None:
        self.process = process
        self.send = work.send


class SimulatedMailbox:
    """Things put in are taken out in order, by one taker."""

    __slots__ = ("items", "_loop", "_taker")

    def __init__(self, loop: "Loop") -> None:
        self.items: deque[Any] = deque()
        self._loop = loop
        self._taker: _Task | None = None

    def put(self, item: Any) -> None:
        """Never waits."""
        taker = self._taker
        if taker is None:
            self.items.append(item)
        else:
            self._taker = None
            self._loop.ready.append((taker, item))

    @coroutine
    def take(self) -> Generator[Any, Any, Any]:
        """The oldest thing, as soon as there is one."""
        if self.items:
            return self.items.popleft()
        return (yield self)

    def wakes(self, task: _Task) -> None:
        """The loop's: whatever is put in next goes to this task."""
        self._taker = task


class Process:
    """A process on the virtual clock: what `atoll.control.world.Clock` asks for."""

    __slots__ = ("name", "loop", "alive", "stopped", "_deferred", "_tasks")

    def __init__(self, name: str, loop: "Loop") -> None:
        self.name, self.loop = name, loop
        self.alive = True
        self.stopped = False
        self._deferred: list[tuple[_Task, Any]] = []
        self._tasks: list[Coroutine[Any, Any, None]] = []

    def now(self) -> float:
        """Virtual seconds."""
        return self.loop.now

    @coroutine
    def sleep(self, seconds: float) -> Generator[Any, Any, None]:
        """Comes back after so long, later if the process is stopped."""
        yield float(seconds)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs it beside everything else of this process."""
        if not self.alive:
            work.close()
            return
        self._tasks.append(work)
        if len(self._tasks) > 64:
            self._tasks = [task for task in self._tasks if task.cr_frame is not None]  # type: ignore[attr-defined]
        self.loop.ready.append((_Task(self, work), None))

    def mailbox(self) -> SimulatedMailbox:
        """A new, empty one."""
        return SimulatedMailbox(self.loop)

    def defer(self, task: _Task, value: Any) -> None:
        """The loop's: something happened to a process that is stopped."""
        self._deferred.append((task, value))

    def kill(self) -> None:
        """Ends at once; nothing of it runs again."""
        self.alive = False
        self._deferred.clear()
        for task in self._tasks:
            if task.cr_frame is not None and not task.cr_running:  # type: ignore[attr-defined]
                task.close()
        self._tasks.clear()

    def stop(self) -> None:
        """Nothing of it runs until `go_on`; the clock goes on, messages wait."""
        self.stopped = True

    def go_on(self) -> None:
        """What happened meanwhile happens to it now."""
        self.stopped = False
        self.loop.ready.extend(self._deferred)
        self._deferred.clear()


class Loop:
    """The virtual clock and its events."""

    __slots__ = ("now", "events", "ready", "_heap", "_count")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.ready: deque[tuple[_Task, Any]] = deque()
        self._heap: list[tuple[float, int, Any, Any]] = []
        self._count = 0

    def at(self, time: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Calls `call(argument)` at a time; calls for the same time come in the order they were asked for."""
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, call, argument))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Until that time, until nothing is left to happen, or until `stop` says so."""
        collecting = gc.get_threshold()
        gc.set_threshold(COLLECT_AFTER, *collecting[1:])
        try:
            self._run(until, stop)
        finally:
            gc.set_threshold(*collecting)

    def _run(self, until: float, stop: Callable[[], bool] | None) -> None:
        heap, ready = self._heap, self.ready
        pop, push = heapq.heappop, heapq.heappush
        events = 0
        while True:
            while ready:
                task, value = ready.popleft()
                events += 1
                process = task.process
                if not process.alive:
                    continue
                if process.stopped:
                    process.defer(task, value)
                    continue
                try:
                    wait = task.send(value)
                except StopIteration:
                    continue
                if wait.__class__ is float:
                    self._count += 1
                    push(heap, (self.now + wait, self._count, None, task))
                else:
                    wait.wakes(task)
            if stop is not None and stop():
                break
            if not heap or heap[0][0] > until:
                self.now = max(self.now, until)
                break
            self.now, _, call, argument = pop(heap)
            if call is None:
                ready.append((argument, None))
            else:
                events += 1
                call(argument)
        self.events += events
