"""The processes of a run of several sites: a coordinator, and the ranks of every site. What the end of one means.

A rank that dies takes its site's other ranks along, as in lockstep, and nobody else: the site is started anew as often as asked for, and
comes back into the rounds of the others. The coordinator is started again whenever it dies: sites train on meanwhile.
"""

import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from atoll.errors import JobFailedError
from atoll.events import MemberChanged, Note, Observer, Restarted, StopRequested, Warned
from atoll.fabric.address import split_address
from atoll.fabric.security import Authority
from atoll.runtime.modes.lockstep.failure import Failure
from atoll.runtime.modes.lockstep.supervisor import LockstepRanks, StoreOfRanks, host_store
from atoll.runtime.modes.swarm.supervisor import TOKEN
from atoll.runtime.run_directory import RunDirectory
from atoll.runtime.supervise.hosts import ProcessHost, ProcessSpec
from atoll.runtime.supervise.supervisor import INTERRUPTED, Supervisor

__all__ = ["IslandProcesses", "SiteProcesses"]

_LEAVE_SECONDS = 30.0
_MOST_RESTARTS = 1000  # of the coordinator
_TOKEN_SECONDS = 600.0
_TELL_SECONDS = 2.0
_WRONG_INPUT = 2  # exit code of a user's mistake: trying again would not help


class SiteProcesses(NamedTuple):
    """Where a site's ranks are started."""

    site: str
    devices: Sequence[str]
    hosts: Sequence[ProcessHost]  # of each device
    scripts: Mapping[str, str]  # on hosts that have their own files


class _Site:
    """One site's ranks, of one generation after another."""

    def __init__(self, processes: SiteProcesses, address: str) -> None:
        self.processes, self.address = processes, address
        self.server, self.port = host_store(address)
        self.generation = 0
        self.ranks: LockstepRanks | None = None
        self.over = False


class IslandProcesses:
    """A supervisor's policy. `number` says how often the run was before."""

    def __init__(
        self,
        run: RunDirectory,
        coordinator: str,
        sites: Sequence[SiteProcesses],
        *,
        store_address: str,
        here: ProcessHost,
        max_restarts: int,
        observer: Observer,
        number: int = 0,
        prepare_all: Callable[[], int] | None = None,
    ) -> None:
        """Where sites train as one, `prepare_all` puts everything in place for all to begin at the last checkpoint, and returns its step:
        when one fails, all are ended, and started again."""
        self._prepare_all = prepare_all
        self._failed: tuple[str, Failure] | None = None  # the site that took the others along
        self._run, self._address, self._here, self._observer, self._number = run, coordinator, here, observer, number
        self._sites = [_Site(site, store_address) for site in sites]
        self._restarts_left = max_restarts
        self._supervisor = Supervisor(observer)
        self._authority = Authority.open(run.path)
        self._coordinators = 0
        self._begun = False
        self._code: int | None = None  # of the coordinator that ended the run
        self._tell_at = float("inf")
        per_machine: dict[str, int] = {}
        for site in sites:
            for host in site.hosts:
                per_machine[host.machine] = per_machine.get(host.machine, 0) + 1
        self._threads = per_machine

    def run(self) -> int:
        """Starts everything and returns the exit code of the run."""
        with self._supervisor.obeying_signals():
            try:
                self._start_coordinator()
                self._tell_at = time.monotonic() + _TELL_SECONDS
                self._supervisor.run(self)
                if self._code is not None:
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
        message = "every site stops after its step, once its state is stored; Ctrl-C again ends them at once"
        self._observer(StopRequested(source="run", message=message))
        for site in self._sites:
            if site.ranks is not None:
                site.ranks.asked_to_stop(number)

    def look(self, now: float) -> None:
        """Starts the sites once the coordinator listens, and looks after each."""
        if not self._begun and "coordinator" in self._supervisor.running:
            if now >= self._tell_at:
                self._observer(Note(message="waiting for the coordinator, which loads PyTorch and the job"))
                self._tell_at = float("inf")
            with suppress(OSError), socket.create_connection(split_address(self._address), timeout=1.0):
                self._begun = True
            if self._begun:
                if self._prepare_all is not None:
                    self._prepare_all()
                for site in self._sites:
                    self._start(site)
        for site in self._sites:
            if site.ranks is not None:
                site.ranks.look(now)
                if not site.ranks.running and not site.over:
                    self._ended(site, site.ranks)
        if self._failed is not None and not any(site.ranks.running for site in self._sites if site.ranks is not None):
            self._begin_again(*self._failed)

    def ended(self, spec: ProcessSpec, code: int, how: str) -> None:
        """A process has ended: the coordinator, or a rank of a site."""
        if spec.name != "coordinator":
            site = next(site for site in self._sites if spec.name.startswith(f"{site.processes.site} "))
            assert site.ranks is not None
            site.ranks.ended(spec, code, how)
        elif code >= 0:
            if not self._begun:
                raise JobFailedError("")
            self._supervisor.tell_end(spec, code, how, "done")
            self._code = code
            self._supervisor.finish()
        elif not self._begun or self._coordinators > _MOST_RESTARTS:
            raise JobFailedError(f"the coordinator died ({how})")
        else:
            self._supervisor.tell_end(spec, code, how, "restart")
            self._start_coordinator()

    def _ended(self, site: _Site, ranks: LockstepRanks) -> None:
        """All ranks of a site have ended."""
        name, failure = site.processes.site, ranks.failure
        if failure is None:
            site.over = True
            return
        if self._prepare_all is not None:
            self._end_all(site, failure)
            return
        again = self._restarts_left > 0 and not self._supervisor.asked and failure.exit_code != _WRONG_INPUT
        self._observer(MemberChanged(name=name, state="dead", before="active", role="site", reason=failure.sentence))
        if again:
            self._restarts_left -= 1
            site.generation += 1
            self._observer(
                Restarted(generation=site.generation, max_restarts=self._restarts_left + site.generation, reason=failure.sentence)
            )
            self._start(site)
            return
        site.over = True
        if all(other.over for other in self._sites):
            raise JobFailedError(f"no site is left; the last one was {name}: {failure.sentence}")
        if not self._supervisor.asked:
            self._observer(Warned(message=f"the run goes on without {name}; --max-restarts lets a site come back", source="run"))

    def _end_all(self, site: _Site, failure: Failure) -> None:
        """A site that trains as one with the others has failed: no step is made without it."""
        site.over = True
        if self._failed is not None:
            return
        self._failed = site.processes.site, failure
        self._observer(MemberChanged(name=site.processes.site, state="dead", before="active", role="site", reason=failure.sentence))
        for other in self._sites:
            if other.ranks is not None and other.ranks.running:
                other.ranks.failure = other.ranks.failure or failure  # their end is not another one
                self._supervisor.signal(signal.SIGKILL, *other.ranks.running)

    def _begin_again(self, name: str, failure: Failure) -> None:
        """All sites, at the last checkpoint."""
        assert self._prepare_all is not None
        if self._restarts_left <= 0 or self._supervisor.asked or failure.exit_code == _WRONG_INPUT:
            raise JobFailedError(f"{name}: {failure.sentence}; every step needs the gradients of all sites, so the run has ended")
        self._failed = None
        self._restarts_left -= 1
        generation = self._sites[0].generation + 1
        step = self._prepare_all()
        where = f"after step {step}" if step else "at the beginning, since nothing was saved"
        self._observer(
            Restarted(
                generation=generation,
                max_restarts=self._restarts_left + generation,
                reason=f"{name}: {failure.sentence}; all sites go on {where}",
            )
        )
        for site in self._sites:
            site.generation, site.over = generation, False
            self._start(site)

    # ---- starting

    def _start_coordinator(self) -> None:
        self._coordinators += 1
        command = (self._here.python, "-m", "atoll.cli.island_process", "coordinator", str(self._run.path.resolve()), self._address)
        self._supervisor.start(
            ProcessSpec(
                name="coordinator", role="coordinator", host=self._here, command=command, defaults={"PYTHONUNBUFFERED": "1"}, terminal=True
            )
        )

    def _start(self, site: _Site) -> None:
        processes = site.processes
        name, restarts = processes.site, f"-{site.generation}" if site.generation else ""
        called = f"{name}{f'-r{self._number}' if self._number else ''}{restarts}"  # a name belongs to one member at a time
        token = self._authority.issue_token("worker", lifetime_seconds=_TOKEN_SECONDS, own=True)
        site.ranks = LockstepRanks(
            self._supervisor,
            StoreOfRanks(site.server, site.address, site.port, site.generation),
            processes.devices,
            processes.hosts,
            self._observer,
            newest_checkpoint=lambda: None,
            group=name,
        )

        def command(rank: int) -> Sequence[str]:
            host = processes.hosts[rank]
            script = processes.scripts.get(host.name)
            own = [script] if script is not None else []
            return [host.python, "-m", "atoll.cli.island_process", "rank", str(self._run.path.resolve()), self._address, name, called, *own]

        threads = max(1, processes.hosts[0].cores // self._threads[processes.hosts[0].machine])
        site.ranks.start(command, {TOKEN: token, "OMP_NUM_THREADS": str(threads)}, False)
