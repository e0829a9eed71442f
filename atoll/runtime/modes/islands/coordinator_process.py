"""The process that keeps the journal of rounds, names what each is made of, and writes the events of a run of several sites.

It may be killed at any moment and started again on the same directory: sites train on meanwhile and find it at the same address.
"""

import asyncio
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from atoll.control.journal import FencedError
from atoll.control.messages import Message
from atoll.control.rounds import RoundCoordinator, RoundTerms
from atoll.control.rounds.history import RoundHistory
from atoll.control.rounds.messages import RoundRecord, SiteJoined
from atoll.control.world import SwarmProcess
from atoll.errors import JobFailedError
from atoll.events import (
    AnyEvent,
    CheckpointRestored,
    EventLog,
    MemberChanged,
    Note,
    Observer,
    OuterChosen,
    PeerRefused,
    RoundFinished,
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
from atoll.runtime.checkpoint.directory import step_path
from atoll.runtime.modes.islands.adapting import RoundAdapter
from atoll.runtime.modes.islands.borders import IslandBorders
from atoll.runtime.modes.islands.callback_memory import CallbackMemory
from atoll.runtime.modes.islands.gateway_thread import SiteAccount, SiteService
from atoll.runtime.modes.islands.joining import (
    ASKED_SECONDS,
    Admission,
    JoinService,
    SiteAsk,
    SiteJob,
    first_batch_of,
    why_not,
    with_joined,
)
from atoll.runtime.modes.islands.measured import SiteMeasured
from atoll.runtime.modes.islands.resume import read_beginning
from atoll.runtime.modes.islands.spec import ACCOUNTS, IslandsSpec, RoundChoice
from atoll.runtime.modes.islands.transport import RoundService, RoundTransport
from atoll.runtime.modes.swarm.files import FileJournal
from atoll.runtime.modes.swarm.spec import JOURNAL, Start, read_start, since_start
from atoll.runtime.modes.swarm.transport import COORDINATOR, Directory, LoopClock
from atoll.runtime.run_directory import RunDirectory

__all__ = ["coordinate_rounds"]

_LOOK_SECONDS = 0.05
_STOP = "stop-asked"  # in the run's directory: in which start of it a callback asked to stop
_RECORDS: "msgspec.json.Decoder[RoundRecord]" = msgspec.json.Decoder(RoundRecord)


def coordinate_rounds(
    directory: RunDirectory,
    spec: IslandsSpec,
    job: Job,
    address: str,
    *,
    observers: tuple[Observer, ...] = (),
    recall: Callable[[Sequence[AnyEvent]], None] = lambda events: None,
    links: LinkChoice | None = None,
) -> bool:
    """Until all sites have ended. False: they were asked to before the last round."""
    try:
        return asyncio.run(_Rounds(directory, spec, job, observers, recall, links).run(address))
    except FencedError:
        raise JobFailedError(f"{directory.path}: another coordinator runs on the same directory; this one stops") from None


class _Rounds:
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
        self._errors: list[BaseException] = []
        self._accounts: dict[str, SiteAccount] = {}  # by the sites' processes
        self._step = self._samples = 0
        self._losses: list[float] = []
        self._told_at = time.monotonic()
        self._there: frozenset[str] = frozenset()
        self._coordinator: RoundCoordinator | None = None
        self._adapter: RoundAdapter | None = None
        self._news: deque[OuterChosen | Note] = deque()  # of the round to come; told after what is told of the one before
        self._memory = CallbackMemory(directory, tuple(job.callbacks), self._start.number)
        self._interrupted = False
        stop = directory.path / _STOP
        self._stopped = stop.exists() and stop.read_text() == str(self._start.number)
        self._asked: dict[str, tuple[SiteAsk, float]] = {}  # sites that want to join, and when they asked last
        self._rounds = 0  # that there are about to be
        self._refused: set[tuple[str, str]] = set()  # updates, and why

    async def run(self, address: str) -> bool:
        loop = asyncio.get_running_loop()
        clock = LoopClock(self._errors.append)
        inbox, places = clock.mailbox(), Directory()

        def arrived(message: Message) -> None:
            loop.call_soon_threadsafe(inbox.put, message)

        def heard(name: str, account: SiteAccount) -> None:
            loop.call_soon_threadsafe(self._accounts.__setitem__, name, account)

        def told(event: AnyEvent) -> None:
            loop.call_soon_threadsafe(self._told, event)

        def tell_refusal(event: AnyEvent) -> None:
            if isinstance(event, PeerRefused) and event.what == "call":
                loop.call_soon_threadsafe(self._emit, event)

        authority = await asyncio.to_thread(Authority.open, self.directory.path)
        journal = FileJournal(self.directory.path / JOURNAL, _RECORDS)
        borders = IslandBorders(self.spec.may_send)
        guard = await asyncio.to_thread(borders.guard, self.directory, self.spec.first, COORDINATOR)
        with EventLog.join(self.directory.path) as log:
            self._log = log
            self._begin()
            joins = JoinService(self._site_job, self._ask, loop)
            services = [RoundService(arrived, self.spec.settings), SiteService(heard, told), joins, places]
            member, _ = await asyncio.to_thread(
                lambda: serve(
                    authority,
                    address,
                    services=services,
                    observer=tell_refusal,
                    fingerprint=self.spec.fingerprint,
                    links=self._links,
                    border=guard,
                )
            )
            try:
                node = SwarmProcess(
                    COORDINATOR, clock, RoundTransport(member, None, places), inbox, 0, random.Random(time.time_ns()), self._observe
                )
                coordinator = self._coordinator = RoundCoordinator(
                    node, journal, self.spec.settings, self._terms, self._is_last, self._joining, borders.gives_states
                )
                await self._until_over(asyncio.ensure_future(coordinator.run()), coordinator)
                done = coordinator.finished and not coordinator.deposed and not self._interrupted
                self._write_accounts(coordinator)
                self._tell(self._finished(done))
                return done
            finally:
                await clock.close()
                await asyncio.to_thread(member.close)

    def _write_accounts(self, coordinator: RoundCoordinator) -> None:
        """Reports read them."""
        found = {site: self._accounts.get(place.beat.process) for site, place in coordinator.places.items()}
        known = {site: account for site, account in found.items() if account is not None}
        self.directory.write(ACCOUNTS, msgspec.json.format(msgspec.json.encode(known), indent=1))

    def _terms(self, history: RoundHistory) -> RoundTerms:
        """As the last round in the journal, unless what sites measured asks for others."""
        last = history.last
        if self._adapter is None:
            choice = self.spec.choice if last is None else RoundChoice.of(last.terms)
            choice = msgspec.structs.replace(choice, joined=())
            self._adapter = RoundAdapter(self.spec.options, choice, self.spec.elements)
        if self.spec.adapts and self._coordinator is not None and not self._is_last(history):
            reasons = self._adapter.at_border(self._measured(self._coordinator))
            if reasons is not None:
                self._news.append(self._chosen(self._adapter.choice, history.round + 1, reasons))
        self._rounds = history.round + math.ceil(self._steps_left(history) / self._adapter.choice.inner_steps)
        return msgspec.structs.replace(self._adapter.choice, joined=tuple(history.joined)).terms()

    # ---- sites that join

    def _site_job(self) -> SiteJob:
        settings, start = self.directory.settings(), read_start(self.directory) or self._start
        script = Path(settings.script)
        return SiteJob(
            spec=self.spec, script_name=script.name, script=script.read_text("utf-8"), arguments=settings.arguments, start=start,
            checkpoint_every=settings.checkpoint_every,
        )  # fmt: skip

    def _ask(self, ask: SiteAsk) -> Admission:
        if self._coordinator is None:
            return Admission()
        joined = self._coordinator.history.joined
        reason = why_not(self.spec, ask, joined, self._next_batch(self._coordinator.history))
        if not reason and any(one.site == ask.site for one in joined):
            return Admission(tuple(joined))
        if not reason:
            self._asked[ask.site] = ask, time.monotonic()
        return Admission(refused=reason)

    def _joining(self, history: RoundHistory) -> Iterator[SiteJoined]:
        """Those that have asked of late: who has gone meanwhile would be waited for by its samples in vain."""
        for ask, asked_at in self._asked.values():
            first = self._next_batch(history)
            if time.monotonic() - asked_at > ASKED_SECONDS or why_not(self.spec, ask, history.joined, first) or self._is_last(history):
                continue
            whole = self.spec.batch_size + sum(one.samples for one in history.joined) + ask.samples
            sizes = f"from step {first + 1} on batches have {whole} samples, the last {ask.samples} of them its own"
            self._news.append(Note(message=f"{ask.site} joins: {sizes}"))
            yield SiteJoined(ask.site, ask.samples, first)
        self._asked.clear()

    def _next_batch(self, history: RoundHistory) -> int:
        assert self._coordinator is not None
        sites = with_joined(self.spec, history.joined).sites
        offers = {site: place.beat.offer.last for site, place in self._coordinator.places.items() if place.beat.offer is not None}
        furthest = max(site.base + max(history.first_unnamed(site.name), offers.get(site.name, 0)) for site in sites)
        choices = [self.spec.choice if self._adapter is None else self._adapter.choice]
        choices += [] if history.last is None else [RoundChoice.of(history.last.terms)]
        steps = max(choice.inner_steps for choice in choices)
        return first_batch_of(furthest, steps, self.job.num_workers, history.joined)

    def _samples_of(self, site: str) -> int:
        joined = self._coordinator.history.joined if self._coordinator is not None else ()
        own = with_joined(self.spec, joined).site(site)
        return own.stop - own.start

    # ---- what is adapted

    def _measured(self, coordinator: RoundCoordinator) -> dict[str, SiteMeasured]:
        """By the sites that are there and make steps."""
        now, found = time.monotonic(), {}
        for site, place in coordinator.places.items():
            account = self._accounts.get(place.beat.process)
            if account is not None and not account.ended and account.measured is not None and coordinator.is_live(place, now):
                found[site] = account.measured
        return found

    def _steps_left(self, history: RoundHistory) -> int:
        """Of the site that is the furthest."""
        return max(0, self.spec.steps - max(site.base + history.first_unnamed(site.name) for site in self.spec.sites))

    def _is_last(self, history: RoundHistory) -> bool:
        return self._stopped or self._steps_left(history) == 0

    async def _until_over(self, task: "asyncio.Future[None]", coordinator: RoundCoordinator) -> None:
        """Until every site that is heard has ended: after the last round, or because it was asked to."""
        while not self._is_over(coordinator):
            await asyncio.wait([task], timeout=_LOOK_SECONDS)
            if task.done():
                await task
                raise FencedError("another coordinator has taken over")
            if self._errors:
                task.cancel()
                raise self._errors[0]
            self._tell_of_sites(coordinator)
            self._end_with_its_own(coordinator)
        task.cancel()

    def _end_with_its_own(self, coordinator: RoundCoordinator) -> None:
        """When those that the run began with were asked to stop, nobody has asked the sites that joined: rounds end for them, too."""
        now, own = time.monotonic(), {site.name for site in self.spec.sites}
        live = [place.beat.process for site, place in coordinator.places.items() if site in own and coordinator.is_live(place, now)]
        if live and not coordinator.finished and all(name in self._accounts and self._accounts[name].ended for name in live):
            self._interrupted = True
            coordinator.end()

    def _is_over(self, coordinator: RoundCoordinator) -> bool:
        """Sites that have ended are still heard, until this process leaves."""
        now = time.monotonic()
        live = [place.beat.process for place in coordinator.places.values() if coordinator.is_live(place, now)]
        return bool(live) and all(name in self._accounts and self._accounts[name].ended for name in live)

    def _tell_of_sites(self, coordinator: RoundCoordinator) -> None:
        """Who came, and who is not heard any more."""
        now = time.monotonic()
        there = frozenset(site for site, place in coordinator.places.items() if coordinator.is_live(place, now))
        for site in sorted(there - self._there):
            self._emit(MemberChanged(name=site, state="active", role="site", reason="it takes part in the rounds"))
        for site in sorted(self._there - there):
            ended = self._accounts.get(coordinator.places[site].beat.process, SiteAccount()).ended
            state, reason = ("left", "") if ended else ("dead", "it is not heard any more; the others go on")
            self._emit(MemberChanged(name=site, state=state, before="active", role="site", reason=reason))  # type: ignore[arg-type]
        self._there = there

    # ---- events

    def _now(self) -> float:
        return self._start.at_seconds + max(0.0, time.time() - self._start.unix_seconds)

    def _begin(self) -> None:
        """The first coordinator since `atoll run` was started says so in the run's events; one in its place only to those who watch."""
        self._memory.remind()
        events = tuple(read_events(self.directory.events))
        told, beginning = since_start(events, self._start), read_beginning(self.directory)
        steps = [event for event in told if isinstance(event, StepFinished)]
        self._step = steps[-1].step if steps else beginning.step
        self._losses = [event.loss for event in steps]
        self._samples = sum(event.samples for event in steps)
        if told:
            self._show(self._started())
            self._recall(told)
            return
        self._tell(self._started())
        for remark in self.job.remarks(self._step):
            self._emit(Note(message=remark))
        if self._step:
            path = f"checkpoints/{step_path(self.directory.checkpoints, self._step).name}"
            self._emit(CheckpointRestored(step=self._step, path=path, notes=beginning.notes))
        self._emit(self._chosen(self.spec.choice, 0, self.spec.reasons))

    def _chosen(self, choice: RoundChoice, round: int, reasons: tuple[str, ...]) -> OuterChosen:
        return OuterChosen(
            inner_steps=choice.inner_steps, delay_steps=choice.delay_steps, codec=choice.codec, learning_rate=choice.learning_rate,
            momentum=choice.momentum, quorum=self.spec.settings.quorum, round=round, reasons=reasons,
        )  # fmt: skip

    def _tell(self, event: AnyEvent) -> None:
        self._log(event)
        self._show(event)

    def _show(self, event: AnyEvent) -> None:
        for observer in self.observers:
            try:
                observer(event)
            except StopTraining:
                self._stop()

    def _stop(self) -> None:
        """A callback asked for it: the run ends with the last round, also by another coordinator in the place of this one."""
        if not self._stopped:
            self._stopped = True
            self.directory.write(_STOP, str(self._start.number))
            if self._coordinator is not None:
                self._coordinator.end()

    def _told(self, event: AnyEvent) -> None:
        """By a site; that an update was refused each says, with the same words. Steps are the first site's, where losses do not leave."""
        if isinstance(event, PeerRefused) and event.what == "update":
            if (event.peer, event.reason) in self._refused:
                return
            self._refused.add((event.peer, event.reason))
        if isinstance(event, StepFinished):
            if self.spec.noise is None or event.step <= self._step:
                return
            self._step = event.step
            self._losses.append(event.loss)
        self._emit(event)

    def _emit(self, event: AnyEvent) -> None:
        self._tell(msgspec.structs.replace(event, at_seconds=self._now()))
        self._memory.keep(event)

    def _observe(self, event: AnyEvent) -> None:
        """What the protocol says. Of a round its steps are told one by one: the mean over the sites that made each, by weight."""
        if not isinstance(event, RoundFinished):
            self._emit(event)
            return
        now = time.monotonic()
        longest = max(len(site.losses) for site in event.sites)
        if self.spec.noise is not None:
            self._samples += sum(site.steps * self._samples_of(site.site) for site in event.sites)
        seconds, self._told_at = (now - self._told_at) / max(1, longest), now
        for index in range(longest):
            made = [(site.site, *site.losses[index]) for site in event.sites if index < len(site.losses)]
            weight = sum(each for _, _, each in made)
            loss = sum(loss * each for _, loss, each in made) / weight if weight else 0.0
            samples = sum(self._samples_of(site) for site, _, _ in made)
            self._step += 1
            self._samples += samples
            self._losses.append(loss)
            self._emit(StepFinished(step=self._step, loss=loss, samples=samples, weight=weight, seconds=seconds, learning_rate=None))
        sites = tuple(msgspec.structs.replace(site, losses=()) for site in event.sites)
        self._emit(msgspec.structs.replace(event, sites=sites, rounds=max(event.round, self._rounds)))
        while self._news:
            self._emit(self._news.popleft())

    def _started(self) -> RunStarted:
        job = self.job
        return RunStarted(
            at_seconds=self._start.at_seconds,
            name=job.name,
            mode=ISLANDS.name,
            steps=job.total_steps,
            batch_size=job.batch_size,
            samples=job.samples.length,
            num_workers=job.num_workers,
            parameters=self.spec.elements,
            devices=(),
            precision=job.precision,
            seed=job.seed,
            unix_seconds=time.time(),
        )

    def _finished(self, done: bool) -> RunFinished:
        return RunFinished(
            at_seconds=self._now(),
            reason="stopped" if self._stopped and done else "done" if done else "interrupted",
            steps=self._step,
            samples=self._samples,
            seconds=self._now() - self._start.at_seconds,
            loss=self._losses[-1] if self._losses else None,
        )
