"""Launching: the processes of a swarm on the machine where it is started, looked after until the run is over.

The coordinator and the feeder are started again whenever they die: nothing is lost with them. Workers are started again as often as
asked for; the run goes on without them, and others may join at any time. Ctrl-C asks the coordinator, by a file, to end the run after
a checkpoint; the second one ends everything at once, and so does the first one before the coordinator is there to be asked.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from atoll.errors import JobFailedError
from atoll.fabric.address import split_address
from atoll.fabric.security import Authority
from atoll.runtime.swarm.run_files import STOP

__all__ = ["TOKEN", "SwarmProcesses", "free_address"]

TOKEN = "ATOLL_TOKEN"  # how a process this machine starts gets its token: not in its arguments, which others see
_LOOK_SECONDS = 0.1
_TELL_SECONDS = 2.0  # of waiting for the coordinator before people are told
_LEAVE_SECONDS = 30.0
_MOST_RESTARTS = 1000  # of the coordinator and the feeder: more is no accident
_MOST_ERRORS = 3  # of the feeder: what it complains of again and again is the job's own
_TOKEN_SECONDS = 600.0
_INTERRUPTED = 130  # the exit code of a run that was stopped before its last step


def free_address(host: str) -> str:
    """A port nobody listens at. The coordinator that is started again after a kill must find it free, so it is chosen once."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


@dataclass
class _Child:
    name: str
    role: str
    process: "subprocess.Popen[bytes]"
    restarts: int = 0
    errors: int = 0


class SwarmProcesses:
    """The processes of this machine. `workers` are what each worker has and hosts (`OwnDevices`, as JSON); without any the coordinator is
    alone, to write what a run that has made its last step may still lack. `say` tells people; `generation`
    is another whenever the run is resumed; `place` makes of a worker's number and command the command that runs it elsewhere.
    """

    def __init__(
        self,
        run: Path,
        address: str,
        *,
        workers: Sequence[str],
        max_restarts: int,
        say: Callable[[str], None],
        generation: int = 0,
        place: Callable[[int, list[str]], list[str]] = lambda number, command: command,
        standby: tuple[str, ...] = (),
    ) -> None:
        self._everywhere = ",".join((address, *standby))  # where whoever coordinates may be
        self._run, self._address, self._say, self._place = run, address, say, place
        self._workers, self._restarts_left, self._generation = workers, max_restarts, generation
        self._begun = False  # whether there is a coordinator to be asked
        self._asked_to_stop = False
        self._authority = Authority.open(run)
        self._children: dict[str, _Child] = {}

    def run(self) -> int:
        """Starts everything and returns the exit code of the run."""
        (self._run / STOP).unlink(missing_ok=True)
        before = {number: signal.signal(number, self._asked) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start("coordinator", "coordinator")
            if not self._wait_for_coordinator():
                return _INTERRUPTED
            self._begun = True
            if self._workers:
                self._start("feeder", "feeder")
            for number in range(len(self._workers)):
                self._start(f"worker-{number}", "worker")
            return self._look_after()
        finally:
            self._end()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self, number: int, frame: FrameType | None) -> None:
        """The first time: politely."""
        if self._asked_to_stop:
            raise KeyboardInterrupt
        self._asked_to_stop = True
        if not self._begun:
            self._say("the run ends before it has begun")
            return
        self._say("the run stops after this step, if one is under way, once its state is stored; Ctrl-C again ends it at once")
        (self._run / STOP).touch()

    def _start(self, name: str, role: str, restarts: int = 0) -> None:
        environment = dict(os.environ)
        called = name if not self._generation else f"{name}-r{self._generation}"  # a name belongs to one member at a time
        called = called if not restarts else f"{called}-{restarts}"
        if role != "coordinator":
            environment[TOKEN] = self._authority.issue_token(role, lifetime_seconds=_TOKEN_SECONDS)
        address = self._address if role == "coordinator" else self._everywhere
        number = int(name.removeprefix("worker-")) if role == "worker" else -1
        devices = [self._workers[number] if not restarts else _for_any_stage(self._workers[number])] if role == "worker" else []
        command = [sys.executable, "-m", "atoll.cli.swarm_process", role, str(self._run.resolve()), address, *devices, called]
        if role == "worker":
            command = self._place(number, command)
        self._children[name] = _Child(name, role, subprocess.Popen(command, env=environment, start_new_session=True), restarts)

    def _wait_for_coordinator(self) -> bool:
        """Until it listens, or another that coordinates while it stands by. False: somebody wants the run to end before that."""
        tell_at: float | None = time.monotonic() + _TELL_SECONDS
        while not self._asked_to_stop:
            if tell_at is not None and time.monotonic() >= tell_at:
                self._say("waiting for the coordinator, which loads PyTorch and the job")
                tell_at = None
            for address in self._everywhere.split(","):
                with suppress(OSError), socket.create_connection(split_address(address), timeout=1.0):
                    return True
            code = self._children["coordinator"].process.poll()
            if code is not None:
                raise JobFailedError("") if code > 0 else JobFailedError(f"the coordinator died (signal {-code}) before it listened")
            time.sleep(_LOOK_SECONDS)
        return False

    def _look_after(self) -> int:
        while True:
            time.sleep(_LOOK_SECONDS)
            for child in list(self._children.values()):
                code = child.process.poll()
                if code is None:
                    continue
                if child.role == "coordinator" and code >= 0:
                    return code  # done, or it said why not
                self._ended(child, code)

    def _ended(self, child: _Child, code: int) -> None:
        del self._children[child.name]
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        if child.role != "worker":
            if code == 0:
                return
            errors = child.errors + 1 if code > 0 else 0
            if errors >= _MOST_ERRORS:
                raise JobFailedError(f"the {child.role} failed {errors} times one after another; what it said is above")
            if child.restarts >= _MOST_RESTARTS:
                raise JobFailedError(f"the {child.role} died {_MOST_RESTARTS} times; the last time by {how}")
            self._say(f"the {child.role} died ({how}) and is started again")
            self._start(child.name, child.role, child.restarts + 1)
            self._children[child.name].errors = errors
        elif code:
            again = self._restarts_left > 0
            self._say(f"{child.name} died ({how}); " + ("it is started again" if again else "the run goes on without it"))
            if again:
                self._restarts_left -= 1
                self._start(child.name, child.role, child.restarts + 1)

    def _end(self) -> None:
        """Members leave when the run is over; whoever does not is killed, and everybody where the coordinator still runs."""
        coordinator = self._children.get("coordinator")
        try:
            if coordinator is not None and coordinator.process.poll() is not None:
                self._let_leave()
        finally:  # Ctrl-C may have ended the waiting
            for child in self._children.values():
                if child.process.poll() is None:
                    child.process.kill()
                    child.process.wait()

    def _let_leave(self) -> None:
        """The signal ends at once who is still loading, before it dials somebody who is gone; who works has heard of the end and leaves."""
        for child in self._children.values():
            child.process.terminate()
        until = time.monotonic() + _LEAVE_SECONDS
        for child in self._children.values():
            with suppress(subprocess.TimeoutExpired):
                child.process.wait(max(0.0, until - time.monotonic()))


def _for_any_stage(devices: str) -> str:
    """One that is started again goes where it is needed by then, not where the plan meant it for."""
    own = json.loads(devices)
    own.pop("planned", None)
    return json.dumps(own)
