"""The processes of a run of parts, and what the end of one means.

Parts that train go on together: when one of them dies, all of them are started again after the newest step that all have saved. One that
does not train is started again by itself, while the others wait for it or go on without it, as they declare.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import NamedTuple

from atoll.blame import users_code
from atoll.collaboration import Collaboration
from atoll.errors import JobFailedError
from atoll.events import AnyEvent, MemberChanged, Restarted, StopRequested, StopTraining, Warned
from atoll.fabric.security import Authority, RunMember
from atoll.runtime.modes.parts.hub import HubState
from atoll.runtime.modes.parts.run_events import RunEvents
from atoll.runtime.supervise.hosts import ProcessHost, ProcessSpec
from atoll.runtime.supervise.supervisor import Supervisor

__all__ = ["TOKEN", "PartPlace", "PartsProcesses"]

TOKEN = "ATOLL_TOKEN"  # how a process gets its token: not in its arguments, which others see
_TOKEN_SECONDS = 600.0
_LEAVE_SECONDS = 30.0


class PartPlace(NamedTuple):
    """Where a part is computed."""

    host: ProcessHost
    source: str  # the run's directory, or the script on a host that does not see it


class PartsProcesses:
    """One process for each part: a supervisor's policy. `emit` tells an event of the run; StopTraining in it stops the run."""

    def __init__(
        self,
        job: Collaboration,
        places: Mapping[str, PartPlace],
        hub: HubState,
        member: RunMember,
        address: str,
        authority: Authority,
        events: RunEvents,
        *,
        max_restarts: int,
        emit: Callable[[AnyEvent], None],
        begun: Callable[[int], None],
    ) -> None:
        """`begun` is called with the step after which the parts that train begin."""
        self._job, self._places, self._hub, self._member = job, places, hub, member
        self._address, self._authority, self._events = address, authority, events
        self._restarts_left, self._emit, self._begun = max_restarts, emit, begun
        self._supervisor = Supervisor(emit)
        self._trained = [name for name, part in job.parts.items() if part.trains]
        self._generation = 0
        self._ending: set[str] = set()  # parts that are ended, to be started again together
        self._told_begin = False
        self._interrupted = False
        self._over = False

    @property
    def interrupted(self) -> bool:
        """Whether somebody asked the run to stop."""
        return self._interrupted

    def run(self) -> None:
        """Starts all parts and comes back when the run is over. JobFailedError where a part failed."""
        with self._supervisor.obeying_signals():
            try:
                for name in self._job.parts:
                    self._start(name)
                self._supervisor.run(self)
                self._hear()
                self._member.fabric.run(self._hub.end())
                if not self._supervisor.killed:
                    self._leave()
            finally:
                self._supervisor.end()
        self._interrupted = self._interrupted or self._supervisor.killed

    def _leave(self) -> None:
        """All have heard that the run is over, and end; who does not is asked to, and then killed."""
        self._over = True
        self._supervisor.leave(_LEAVE_SECONDS)

    def asked_to_stop(self, number: int) -> None:
        """Politely: after a step that all can make."""
        self._interrupted = True
        self._stop("the run stops after the next steps, once they are saved; Ctrl-C again ends it at once")

    def look(self, now: float) -> None:
        """Hears what parts tell."""
        if not self._told_begin and self._hub.start is not None:
            self._told_begin = True
            self._events.begin(self._hub.start)
            self._begun(self._hub.start)
        self._hear()
        if self._events.ending() is not None:
            self._supervisor.finish()

    def _hear(self) -> None:
        while not self._hub.heard.empty():
            part, event = self._hub.heard.get()
            if part in self._ending:
                continue  # it is made again
            for told in self._events.add(part, event):
                if self._asks_to_stop(told):
                    self._stop("a callback stops the run after the next steps")

    def _asks_to_stop(self, event: AnyEvent) -> bool:
        with users_code(f"step {self._events.step}: a callback, told of {event.kind},", JobFailedError):
            try:
                self._emit(event)
            except StopTraining:
                return True
        return False

    def _stop(self, message: str) -> None:
        self._emit(StopRequested(source="run", message=message))
        self._member.fabric.run(self._hub.stop())

    def ended(self, spec: ProcessSpec, code: int, how: str) -> None:
        """Starts it again, or all that train, or goes on without it, or fails."""
        part = spec.name
        if part in self._ending:
            self._supervisor.tell_end(spec, code, how, "restart")
            self._ending.discard(part)
            if not self._ending:
                self._start_trained()
            return
        self._hear()  # what it said before
        if code > 0:
            self._supervisor.tell_end(spec, code, how, "stop")
            raise JobFailedError(f"{part} failed, and the run with it; what it said is above")
        again = self._restarts_left > 0 and code < 0
        if self._job.parts[part].trains:
            self._trained_died(spec, code, how, again)
        else:
            self._teacher_died(spec, code, how, again)

    def _trained_died(self, spec: ProcessSpec, code: int, how: str, again: bool) -> None:
        part = spec.name
        self._supervisor.tell_end(spec, code, how, "restart" if again else "stop")
        if not again:
            advice = "--max-restarts has all parts started again from the last checkpoint"
            raise JobFailedError(f"{part} died ({how}), which the others wait for; {advice}, and --resume goes on from it")
        self._restarts_left -= 1
        self._generation += 1
        self._emit(
            Restarted(generation=self._generation, max_restarts=self._restarts_left + self._generation, reason=f"{part} died ({how})")
        )
        others = [name for name in self._trained if name != part and name in self._supervisor.running]
        self._ending = set(others)
        if not others:
            self._start_trained()
        for name in others:
            self._supervisor.signal(9, name)

    def _start_trained(self) -> None:
        while not self._hub.heard.empty():
            self._hub.heard.get()  # of steps that are made again
        self._told_begin = False
        for name in self._trained:
            self._start(name)

    def _teacher_died(self, spec: ProcessSpec, code: int, how: str, again: bool) -> None:
        part = spec.name
        waiting = [name for name in self._trained if self._needs(name, part)]
        self._supervisor.tell_end(spec, code, how, "restart" if again else "stop" if waiting else "continue")
        self._emit(MemberChanged(name=part, state="dead", role="part", host=spec.host.name, reason=how))
        if again:
            self._restarts_left -= 1
            self._start(part)
            return
        if waiting:
            what = f"{' and '.join(waiting)} cannot do without what it sends (atoll.Receive(optional=True) says otherwise)"
            raise JobFailedError(f"{part} died ({how}), and {what}; --max-restarts has it started again")
        self._emit(Warned(message=f"{part} died ({how}) and is not started again: the others go on without it", source="run"))
        self._member.fabric.run(self._hub.lose(part))

    def _needs(self, name: str, sender: str) -> bool:
        wanted = self._job.parts[name].wanted
        return any(self._job.senders[sent] == sender and not how.optional for sent, how in wanted.items())

    def _start(self, name: str) -> None:
        called, place = f"{name}-{secrets.token_hex(3)}", self._places[name]
        self._member.fabric.run(self._hub.expect(name, called))
        self._supervisor.start(
            ProcessSpec(
                name=name,
                role="part",
                host=place.host,
                command=(place.host.python, "-m", "atoll.cli.part_process", place.source, self._address, called),
                environment={TOKEN: self._authority.issue_token("worker", lifetime_seconds=_TOKEN_SECONDS, own=True)},
                defaults={"PYTHONUNBUFFERED": "1"},
                prefix=f"{name}: ",
            )
        )
