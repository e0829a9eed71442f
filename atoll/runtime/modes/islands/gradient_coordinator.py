"""The process that runs beside sites whose gradients are added up at every step: it lets them find each other, and writes the run's events.

It has no part in a step. It may be killed at any moment and started again on the same directory: sites train on meanwhile.
"""

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from atoll.events import (
    AnyEvent,
    EventLog,
    MemberChanged,
    Note,
    Observer,
    OuterChosen,
    PeerRefused,
    RunFinished,
    RunStarted,
    StepFinished,
    StopTraining,
    read_events,
)
from atoll.fabric.security import Authority, serve
from atoll.fabric.shaped import LinkChoice
from atoll.job import Job
from atoll.plan.modes.islands import ISLANDS
from atoll.runtime.modes.islands.borders import IslandBorders
from atoll.runtime.modes.islands.callback_memory import CallbackMemory
from atoll.runtime.modes.islands.gateway_thread import SiteAccount
from atoll.runtime.modes.islands.gradient_gateway import SiteRecords, SiteSaid
from atoll.runtime.modes.islands.resume import read_beginning
from atoll.runtime.modes.islands.spec import ACCOUNTS, IslandsSpec
from atoll.runtime.modes.swarm.spec import Start, read_start, since_start
from atoll.runtime.modes.swarm.transport import COORDINATOR, Directory
from atoll.runtime.run_directory import RunDirectory

__all__ = ["coordinate_gradients"]

_LOOK_SECONDS = 0.05


def coordinate_gradients(
    directory: RunDirectory,
    spec: IslandsSpec,
    job: Job,
    address: str,
    *,
    observers: tuple[Observer, ...] = (),
    recall: Callable[[Sequence[AnyEvent]], None] = lambda events: None,
    links: LinkChoice | None = None,
) -> bool:
    """Until all sites have ended. False: they were interrupted."""
    return _Records(directory, spec, job, observers, recall, links).run(address)


class _Records:
    def __init__(
        self,
        directory: RunDirectory,
        spec: IslandsSpec,
        job: Job,
        observers: tuple[Observer, ...],
        recall: Callable[[Sequence[AnyEvent]], None],
        links: LinkChoice | None,
    ) -> None:
        self.directory, self.spec, self.job, self.observers, self._recall, self._links = directory, spec, job, observers, recall, links
        self._start = read_start(directory) or Start(directory.last_moment(), time.time(), "")
        self._memory = CallbackMemory(directory, tuple(job.callbacks), self._start.number)
        self._lock = threading.Lock()
        self._arrived: list[AnyEvent] = []
        self._accounts: dict[str, SiteAccount] = {}  # by site
        self._heard: dict[str, int] = {}  # how many events a process has told
        self._stop = False  # a callback asked for it
        self._losses: dict[int, float] = {}
        self._there: set[str] = set()

    def run(self, address: str) -> bool:
        authority = Authority.open(self.directory.path)
        with EventLog.join(self.directory.path) as log:
            self._log = log
            self._begin()
            services = [SiteRecords(self._tell_of), Directory()]
            borders = IslandBorders(self.spec.may_send)
            member, _ = serve(
                authority,
                address,
                services=services,
                observer=self._fabric_event,
                fingerprint=self.spec.fingerprint,
                links=self._links,
                border=borders.guard(self.directory, self.spec.first, COORDINATOR),
            )
            with member:
                while not self._is_over():
                    self._take_in()
                    time.sleep(_LOOK_SECONDS)
                self._take_in()
                known = msgspec.json.encode(self._accounts)
                self.directory.write(ACCOUNTS, msgspec.json.format(known, indent=1))
                reason = self._accounts[self.spec.first].ended
                self._tell(self._finished(reason))
                return reason != "interrupted"

    def _tell_of(self, name: str, said: SiteSaid) -> bool:
        """In the fabric's loop."""
        with self._lock:
            known = self._heard.get(name, said.before)
            self._arrived += said.events[max(0, known - said.before) :]
            self._heard[name] = said.before + len(said.events)
            if said.site in {site.name for site in self.spec.sites}:
                self._accounts[said.site] = said.account
            return self._stop

    def _fabric_event(self, event: AnyEvent) -> None:
        if isinstance(event, PeerRefused) and event.what == "call":
            with self._lock:
                self._arrived.append(event)

    def _is_over(self) -> bool:
        with self._lock:
            return len(self._accounts) == len(self.spec.sites) and all(account.ended for account in self._accounts.values())

    def _take_in(self) -> None:
        """Tells what sites have told."""
        with self._lock:
            arrived, self._arrived = self._arrived, []
            there = set(self._accounts)
        for site in sorted(there - self._there):
            self._emit(MemberChanged(name=site, state="active", role="site", reason="its gradients are part of every step"))
        self._there |= there
        for event in arrived:
            if isinstance(event, StepFinished):
                self._losses[event.step] = event.loss
            self._emit(event)

    # ---- events

    def _now(self) -> float:
        return self._start.at_seconds + max(0.0, time.time() - self._start.unix_seconds)

    def _begin(self) -> None:
        """The first coordinator since `atoll run` was started says so in the run's events; one in its place only to those who watch."""
        self._memory.remind()
        told = since_start(tuple(read_events(self.directory.events)), self._start)
        self._losses = {event.step: event.loss for event in told if isinstance(event, StepFinished)}
        if told:
            self._show(self._started())
            self._recall(told)
            return
        self._tell(self._started())
        beginning, choice = read_beginning(self.directory), self.spec.choice
        for remark in (*self.job.remarks(beginning.step), *(beginning.notes if beginning.step else ())):
            self._emit(Note(message=remark))
        self._emit(
            OuterChosen(
                inner_steps=1, delay_steps=0, codec=choice.codec, learning_rate=1.0, momentum=0.0, quorum=len(self.spec.sites),
                reasons=self.spec.reasons, exchange="gradients",
            )
        )  # fmt: skip

    def _tell(self, event: AnyEvent) -> None:
        self._log(event)
        self._show(event)

    def _show(self, event: AnyEvent) -> None:
        for observer in self.observers:
            try:
                observer(event)
            except StopTraining:
                with self._lock:
                    self._stop = True

    def _emit(self, event: AnyEvent) -> None:
        self._tell(msgspec.structs.replace(event, at_seconds=self._now()))
        self._memory.keep(event)

    def _started(self) -> RunStarted:
        job = self.job
        return RunStarted(
            at_seconds=self._start.at_seconds, name=job.name, mode=ISLANDS.name, steps=job.total_steps, batch_size=job.batch_size,
            samples=job.samples.length, num_workers=job.num_workers, parameters=self.spec.elements, devices=(), precision=job.precision,
            seed=job.seed, unix_seconds=time.time(),
        )  # fmt: skip

    def _finished(self, reason: str) -> RunFinished:
        return RunFinished(
            at_seconds=self._now(), reason=reason, steps=max(self._losses, default=read_beginning(self.directory).step),  # type: ignore[arg-type]
            samples=len(self._losses) * self.spec.batch_size, seconds=self._now() - self._start.at_seconds,
            loss=self._losses[max(self._losses)] if self._losses else None,
        )  # fmt: skip
