"""The processes of a swarm that `atoll run` starts, and what the end of one means.

The coordinator and the feeder are started again whenever they die: nothing is lost with them. Workers are started again as often as
asked for; the run goes on without them, and others may join at any time. Ctrl-C asks the coordinator, by a file, to end the run after
a checkpoint; the second one ends everything at once, and so does the first one before the coordinator is there to be asked.
"""

import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from atoll.errors import AtollError, JobFailedError
from atoll.events import MemberChanged, Note, Observer, StopRequested, Warned
from atoll.fabric.address import split_address
from atoll.fabric.security import Authority
from atoll.runtime.modes.swarm.spec import STOP, OwnDevices
from atoll.runtime.supervise.hosts import ProcessHost, ProcessSpec, ThisMachine
from atoll.runtime.supervise.supervisor import INTERRUPTED, Supervisor

__all__ = ["TOKEN", "SwarmProcesses", "free_address"]

TOKEN = "ATOLL_TOKEN"  # how a process that is started here gets its token: not in its arguments, which others see
_TELL_SECONDS = 2.0  # of waiting for the coordinator before people are told
_LEAVE_SECONDS = 30.0
_MOST_RESTARTS = 1000  # of the coordinator and the feeder: more is no accident
_MOST_ERRORS = 3  # of the feeder: what it complains of again and again is the job's own
_TOKEN_SECONDS = 600.0


def free_address(host: str) -> str:
    """A port nobody listens at. The coordinator that is started again after a kill must find it free, so it is chosen once."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host}:{probe.getsockname()[1]}"


class SwarmProcesses:
    """Coordinator and feeder on this machine, and workers on their hosts: a supervisor's policy.

    `workers` are the hosts of the plan's workers and what each has there and hosts; without any the coordinator is alone, to write what a
    run that has made its last step may still lack. `generation` is another whenever the run is resumed; `here` is where coordinator and
    feeder are started; `scripts` is where hosts that do not see the run's directory have the script.
    """

    def __init__(
        self,
        run: Path,
        address: str,
        *,
        workers: Sequence[tuple[ProcessHost, OwnDevices]],
        max_restarts: int,
        observer: Observer,
        generation: int = 0,
        standby: tuple[str, ...] = (),
        here: ProcessHost | None = None,
        scripts: Mapping[str, str] | None = None,
    ) -> None:
        self._everywhere = ",".join((address, *standby))  # where whoever coordinates may be
        self._run, self._address, self._observer, self._here = run, address, observer, here or ThisMachine()
        self._workers, self._restarts_left, self._generation = workers, max_restarts, generation
        self._scripts = scripts or {}
        self._supervisor = Supervisor(observer)
        self._authority = Authority.open(run)
        self._restarts: dict[str, int] = {}
        self._errors: dict[str, int] = {}  # one after another
        self._code: int | None = None  # of the coordinator that ended the run
        self._begun = False  # whether there is a coordinator to be asked
        self._tell_at = float("inf")

    def run(self) -> int:
        """Starts everything and returns the exit code of the run."""
        (self._run / STOP).unlink(missing_ok=True)
        with self._supervisor.obeying_signals():
            try:
                self._start("coordinator", "coordinator")
                self._tell_at = time.monotonic() + _TELL_SECONDS
                self._supervisor.run(self)
                if self._code is not None:  # who works has heard of the end and leaves; the signal ends at once who is still loading
                    self._supervisor.leave(_LEAVE_SECONDS)
            finally:
                self._supervisor.end()
        return INTERRUPTED if self._supervisor.killed or self._code is None else self._code

    def asked_to_stop(self, number: int) -> None:
        """The first time: politely."""
        if not self._begun:
            self._observer(StopRequested(source="run", message="the run ends before it has begun"))
            self._supervisor.finish()
            return
        message = "the run stops after this step, if one is under way, once its state is stored; Ctrl-C again ends it at once"
        self._observer(StopRequested(source="run", message=message))
        (self._run / STOP).touch()

    def look(self, now: float) -> None:
        """Starts the others once there is a coordinator that listens, or another that coordinates while it stands by."""
        if self._begun or "coordinator" not in self._supervisor.running:
            return
        if now >= self._tell_at:
            self._observer(Note(message="waiting for the coordinator, which loads PyTorch and the job"))
            self._tell_at = float("inf")
        for address in self._everywhere.split(","):
            with suppress(OSError), socket.create_connection(split_address(address), timeout=1.0):
                self._begun = True
                break
        if self._begun and self._workers:
            self._start("feeder", "feeder")
            for number in range(len(self._workers)):
                self._start(f"worker-{number}", "worker")

    def ended(self, spec: ProcessSpec, code: int, how: str) -> None:
        """Starts it again, or goes on without it, or ends the run."""
        if spec.role == "coordinator" and not self._begun:
            raise JobFailedError("" if code > 0 else f"the coordinator died ({how}) before it listened")
        if (spec.role == "coordinator" and code >= 0) or not code:
            self._supervisor.tell_end(spec, code, how, "done")
        if spec.role == "coordinator" and code >= 0:
            self._code = code  # done, or it said why not
            self._supervisor.finish()
        elif spec.role == "worker":
            if code:
                self._worker_died(spec, code, how)
        elif code:
            self._died(spec, code, how)

    def _worker_died(self, spec: ProcessSpec, code: int, how: str) -> None:
        again = self._restarts_left > 0
        self._supervisor.tell_end(spec, code, how, "restart" if again else "continue")
        self._observer(MemberChanged(name=self._called(spec.name), state="dead", role="worker", host=spec.host.name, reason=how))
        if again:
            self._restarts_left -= 1
            try:
                self._start_again(spec)
            except AtollError as error:  # its host is gone
                self._observer(Note(message=f"{error}; the run goes on without {spec.name}"))
        if not any(name.startswith("worker-") for name in self._supervisor.running):
            waits = "no worker that was started here is left: the run waits for others to join"
            self._observer(Warned(message=f"{waits}; Ctrl-C ends it, and --resume starts new ones", source="run"))

    def _died(self, spec: ProcessSpec, code: int, how: str) -> None:
        errors = self._errors[spec.name] = self._errors.get(spec.name, 0) + 1 if code > 0 else 0
        if errors >= _MOST_ERRORS:
            raise JobFailedError(f"the {spec.role} failed {errors} times one after another; what it said is above")
        if self._restarts.get(spec.name, 0) >= _MOST_RESTARTS:
            raise JobFailedError(f"the {spec.role} died {_MOST_RESTARTS} times; the last time by {how}")
        self._supervisor.tell_end(spec, code, how, "restart")
        self._start_again(spec)

    def _start_again(self, spec: ProcessSpec) -> None:
        self._restarts[spec.name] = self._restarts.get(spec.name, 0) + 1
        self._start(spec.name, spec.role)

    def _called(self, name: str) -> str:
        """As a member of the swarm: a name belongs to one member at a time."""
        called = name if not self._generation else f"{name}-r{self._generation}"
        restarts = self._restarts.get(name, 0)
        return called if not restarts else f"{called}-{restarts}"

    def _start(self, name: str, role: str) -> None:
        restarts, called = self._restarts.get(name, 0), self._called(name)
        host, devices = self._here, []
        if role == "worker":
            host, own = self._workers[int(name.removeprefix("worker-"))]
            if restarts:  # it goes where it is needed by then, not where the plan meant it for
                own = msgspec.structs.replace(own, planned=())
            devices = [msgspec.json.encode(own).decode()]
        address = self._address if role == "coordinator" else self._everywhere
        token = {} if role == "coordinator" else {TOKEN: self._authority.issue_token(role, lifetime_seconds=_TOKEN_SECONDS, own=True)}
        source = self._scripts.get(host.name, str(self._run.resolve()))
        command = (host.python, "-m", "atoll.cli.swarm_process", role, source, address, *devices, called)
        self._supervisor.start(
            ProcessSpec(
                name=name,
                role=role,
                host=host,
                command=command,
                environment=token,
                defaults={"PYTHONUNBUFFERED": "1"},
                prefix=f"{called}: " if role != "coordinator" else "",
                terminal=role == "coordinator",
            )
        )
