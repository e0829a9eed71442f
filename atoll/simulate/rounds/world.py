"""Several sites and their coordinators on the virtual clock, running the code of `atoll.control.rounds`."""

import random
from collections.abc import Callable
from typing import cast

import msgspec

from atoll.control import SwarmProcess
from atoll.control.rounds import Gateway, RoundCoordinator, RoundSettings, RoundTerms
from atoll.control.rounds.history import RoundHistory
from atoll.control.rounds.messages import SiteJoined, why_no_round_message
from atoll.control.rounds.site import RoundJournal
from atoll.simulate.disks import JournalDisk, JournalHandle
from atoll.simulate.loop import Loop, Process
from atoll.simulate.network import SimulatedNetwork
from atoll.simulate.rounds.checker import RoundChecker, site_number
from atoll.simulate.rounds.exact_site import CHUNKS, ExactMemory, ExactTraining, SiteDisk

__all__ = ["HUBS", "RoundRoles", "SitesSize", "SitesWorld"]

HUBS = ("c0", "c1")


class SitesSize(msgspec.Struct, frozen=True, kw_only=True):
    """How large a simulated run is."""

    sites: int = 3
    processes: int = 2  # of each site
    quorum: int = 1
    in_flight: int = 4
    recent: int = 2
    waits: bool = False  # sites train nothing between their border and the end of a round
    save_every: int = 2
    late: tuple[float, ...] = ()  # when each of the first sites begins
    joiners: int = 0  # sites that join; of them there is but the change of everybody's data


class RoundRoles(msgspec.Struct, frozen=True, kw_only=True):
    """What the processes run; tests of the checker have others than those of production."""

    coordinator: type[RoundCoordinator] = RoundCoordinator
    gateway: type[Gateway] = Gateway
    training: type[ExactTraining] = ExactTraining
    fenced: bool = True


class SitesWorld:
    """Processes by name: coordinators, and `s1.0` is the first of site `s1`."""

    def __init__(self, size: SitesSize, seed: int, roles: RoundRoles | None = None) -> None:
        self.size, self.roles = size, roles or RoundRoles()
        self.settings = RoundSettings(
            rounds=1_000_000, chunks=CHUNKS, quorum=size.quorum, grace_seconds=4.0, heartbeat_seconds=2.0, silent_beats=3,
            listen_seconds=3.0, patience_seconds=3.0, exchange_seconds=15.0, lost_seconds=20.0,
            recent=size.recent, in_flight=size.in_flight,
        )  # fmt: skip
        self.random = random.Random(seed)
        self._draw = random.Random(f"what coordinators choose {seed}")
        self.loop = Loop()
        self.network = SimulatedNetwork(self.loop, self.random)
        self.network.refuse = lambda message: why_no_round_message(message, self.settings)
        self.checker = RoundChecker(self.loop, size.quorum)
        self.journal = JournalDisk(self.loop, self.random, fence=self.roles.fenced, on_record=self.checker.on_record)
        self.disks = {site: SiteDisk() for site in self.sites()}
        self.processes: dict[str, Process] = {}
        self.coordinators: dict[str, RoundCoordinator] = {}
        self.gateways: dict[str, Gateway] = {}
        self.step_seconds = {site: 0.6 + self.random.random() for site in self.sites()}
        self._starts = 0

    def sites(self) -> list[str]:
        """Their names."""
        return [f"s{number}" for number in range(self.size.sites)]

    def names(self, site: str | None = None) -> list[str]:
        """The processes of a site, or of all."""
        sites = self.sites() if site is None else [site]
        return [f"{each}.{number}" for each in sites for number in range(self.size.processes)]

    def start_all(self) -> None:
        """The first coordinator and all sites, some of them late."""
        self.start(HUBS[0])
        for number, site in enumerate(self.sites()):
            at = self.size.late[number] if number < len(self.size.late) else 0.0
            for name in self.names(site):
                self.loop.at(at, self.start, name)
            self.loop.at(at, self._train, site)

    def alive(self, name: str) -> bool:
        """Whether a process of that name runs."""
        process = self.processes.get(name)
        return process is not None and process.alive

    def start(self, name: str) -> None:
        """A new process of that name, with nothing in memory; a site's first one has the site's memory made."""
        if self.alive(name):
            return
        self._starts += 1
        process = self.processes[name] = Process(name, self.loop)
        port = self.network.open(process)
        node = SwarmProcess(name, process, port, port.inbox, self._starts, random.Random(self.random.getrandbits(32)))
        if name in HUBS:
            journal = cast(RoundJournal, JournalHandle(self.journal, process))
            coordinator = self.coordinators[name] = self.roles.coordinator(node, journal, self.settings, self._terms, joining=self._joining)
            process.spawn(coordinator.run())
            return
        site = name.partition(".")[0]
        memory = self.checker.memories.get(site)
        if memory is None:
            memory = self.checker.memories[site] = ExactMemory(site_number(site), self.disks[site], self.size.save_every)
        training = self.roles.training(process, site, memory, node.random, self.checker.watch)
        gateway = self.gateways[name] = self.roles.gateway(node, site, training, self.settings, HUBS)
        process.spawn(gateway.run())

    def _terms(self, history: RoundHistory) -> RoundTerms:
        """Another length and another outer learning rate whenever a coordinator chooses, also where one before it chose for that round."""
        joined = ",".join(str(one.first) for one in history.joined)
        return RoundTerms(4.0 + self._draw.randrange(3), f"{2 + self._draw.randrange(5)};{joined}")

    def _joining(self, history: RoundHistory) -> list[SiteJoined]:
        """Now and then a site joins, at a batch that no update of any site has reached; a site itself may have been there."""
        if len(history.joined) >= self.size.joiners or self._draw.random() < 0.7:
            return []
        last = max((one.first for one in history.joined), default=0)
        furthest = max(history.first_unnamed(site) for site in self.sites())
        return [SiteJoined(f"j{len(history.joined)}", 1, max(last, furthest + self._draw.randrange(15)))]

    def _train(self, site: str) -> None:
        """One inner step, as long as there is a process of the site that computes."""
        memory = self.checker.memories.get(site)
        computes = any(self.alive(name) and not self.processes[name].stopped for name in self.names(site))
        if memory is not None and computes and not (self.size.waits and memory.offer is not None):
            memory.train()
        self.loop.at(self.loop.now + self.step_seconds[site], self._train, site)

    def kill(self, name: str) -> None:
        """Ends a process at once; a site's memory goes with its last one."""
        if not self.alive(name):
            return
        self.processes[name].kill()
        site = name.partition(".")[0]
        if name not in HUBS and not any(self.alive(other) for other in self.names(site)):
            del self.checker.memories[site]

    def stop(self, name: str) -> None:
        """As SIGSTOP does."""
        if self.alive(name):
            self.processes[name].stop()

    def go_on(self, name: str) -> None:
        """As SIGCONT does."""
        if self.alive(name) and self.processes[name].stopped:
            self.processes[name].go_on()

    def coordinator(self) -> RoundCoordinator | None:
        """The one with the newest term that still runs."""
        running = [each for name, each in self.coordinators.items() if self.alive(name) and not each.deposed]
        return max(running, key=lambda each: each.term, default=None)

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Runs on until a time, a wish or a violation."""
        violations = self.checker.violations
        self.loop.run(until, lambda: bool(violations) or stop())
