"""Supervisor: the processes of a run, looked after from the first to the last, whatever hosts they are on and whatever mode they run.

It starts them, passes on what they print, sees how each ends, obeys signals and leaves nobody behind. What the end of a process means is
the mode's to say: its `Policy` starts it again, ends the others or goes on without it. One thread does everything.
"""

import os
import selectors
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Literal, NamedTuple, Protocol

from atoll.events import Observer, ProcessEnded, ProcessStarted
from atoll.runtime.signals import signals_to_stop
from atoll.runtime.supervise.hosts import OutputSource, ProcessSpec, StartedProcess

__all__ = ["INTERRUPTED", "Policy", "Supervisor"]

INTERRUPTED = 130  # exit code after Ctrl-C, as a shell would say it
_LOOK_SECONDS = 0.05  # between two looks at the processes
_DRAIN_SECONDS = 1.0  # for what a dead process has printed to arrive
_KILL_SECONDS = 60.0  # for a killed process to be gone, or the connection to its host


class Policy(Protocol):
    """What a mode makes of what happens to its processes. Each may start others, signal or kill them, and finish."""

    def ended(self, spec: ProcessSpec, code: int, how: str) -> None:
        """A process has ended, with this code, and in words."""

    def asked_to_stop(self, number: int) -> None:
        """Somebody sent the first signal that asks to stop; the second kills everybody."""

    def look(self, now: float) -> None:
        """Called many times a second."""


class _Running(NamedTuple):
    spec: ProcessSpec
    process: StartedProcess


class Supervisor:
    """The processes of a run. However `run` ends, and even if this process is killed, none of them outlives it."""

    def __init__(self, observer: Observer = lambda event: None) -> None:
        self._observer = observer
        self.asked = 0  # how often somebody asked to stop
        self.killed = False  # because somebody asked twice
        self._signal = signal.SIGINT.value  # the first that asked
        self._running: dict[str, _Running] = {}
        self._starts: dict[str, int] = {}
        self._selector = selectors.DefaultSelector()
        self._finished = False

    def start(self, spec: ProcessSpec) -> None:
        """Starts a process; its name must be free."""
        assert spec.name not in self._running, f"{spec.name} runs already"
        process, sources = spec.host.start(spec)
        self._running[spec.name] = _Running(spec, process)
        restarts = self._starts[spec.name] = self._starts.get(spec.name, -1) + 1
        self._observer(ProcessStarted(name=spec.name, role=spec.role, host=spec.host.name, restarts=restarts))
        known = {id(key.data) for key in self._selector.get_map().values()}
        for source in sources:
            if id(source) not in known:
                self._selector.register(source, selectors.EVENT_READ, source)

    @property
    def running(self) -> tuple[str, ...]:
        """Names of the processes that run."""
        return tuple(self._running)

    def tell_end(self, spec: ProcessSpec, code: int, how: str, then: Literal["done", "restart", "continue", "stop"]) -> None:
        """A process has ended, and this is what follows."""
        self._observer(ProcessEnded(name=spec.name, role=spec.role, how=how, exit_code=code, host=spec.host.name, then=then))

    def signal(self, number: int, *names: str) -> None:
        """Sends a signal to these processes, or to all of them."""
        for name in names or self.running:
            if name in self._running:
                self._running[name].process.signal(number)

    def finish(self) -> None:
        """The run is over, whoever still runs."""
        self._finished = True

    def run(self, policy: Policy) -> None:
        """Looks after the processes until the policy finishes or somebody asked twice; then `leave` or `end` is for who still runs."""
        self._finished = False
        told = False
        while not self._finished and not self.killed:
            self._look(policy)
            if self.asked and not told:
                told = True
                policy.asked_to_stop(self._signal)
            policy.look(time.monotonic())

    def leave(self, seconds: float) -> None:
        """Asks everybody to end (SIGTERM) and waits so long for it; who does not is killed."""
        self.signal(signal.SIGTERM)
        until = time.monotonic() + seconds
        while self._running and not self.killed and time.monotonic() < until:
            self._look(None)

    def end(self) -> None:
        """Kills everybody who still runs, and passes on their last words."""
        self.signal(signal.SIGKILL)
        until = time.monotonic() + _KILL_SECONDS
        while self._running and time.monotonic() < until:
            self._look(None)
        until = time.monotonic() + _DRAIN_SECONDS
        while self._selector.get_map() and time.monotonic() < until:
            self._read(_LOOK_SECONDS)
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.data.close()

    def _look(self, policy: Policy | None) -> None:
        self._read(_LOOK_SECONDS)
        for name, running in list(self._running.items()):
            code = running.process.poll()
            if code is not None:
                del self._running[name]
                if policy is not None:
                    policy.ended(running.spec, code, running.process.how())
                else:
                    self.tell_end(running.spec, code, running.process.how(), "done")
        if self.asked > 1 and not self.killed:
            self.killed = True
            self.signal(signal.SIGKILL)

    def _read(self, seconds: float) -> None:
        if not self._selector.get_map():
            time.sleep(seconds)  # select returns at once when there is nothing to read from
            return
        for key, _ in self._selector.select(seconds):
            source: OutputSource = key.data
            if not source.read():
                self._selector.unregister(key.fileobj)
                source.close()

    @contextmanager
    def obeying_signals(self) -> Iterator[None]:
        """Requests to stop are counted; a stop from the terminal (Ctrl-Z) stops the processes too, and so does going on."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(number: int, frame: FrameType | None) -> None:
            self._signal = number if not self.asked else self._signal
            self.asked += 1

        def pause(number: int, frame: FrameType | None) -> None:
            self.signal(signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGSTOP)
            self.signal(signal.SIGCONT)

        handlers = {**dict.fromkeys(signals_to_stop(), ask), signal.SIGTSTP: pause}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
