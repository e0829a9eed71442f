"""The supervisor: one process per device, and what the end of one means: everybody ends, and starts anew where that is asked for.

The launcher hosts the store, so that any rank may die; it sees how each process ends, tells the others at once, and leaves nobody behind.
"""

import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple, TypeAlias

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from atoll.errors import AtollError
from atoll.events import MemberChanged, MemberState, Note, Observer, Restarted
from atoll.runtime.modes.lockstep.failure import STOP, Failure, condemn, prepare
from atoll.runtime.modes.lockstep.heartbeat import DEFAULT_STALL_SECONDS, Heartbeat, StallDetector, read_heartbeats, state_of
from atoll.runtime.modes.lockstep.rendezvous import DEFAULT_TIMEOUT_SECONDS
from atoll.runtime.modes.lockstep.role import GENERATION
from atoll.runtime.supervise.hosts import ProcessHost, ProcessSpec, ThisMachine
from atoll.runtime.supervise.supervisor import INTERRUPTED, Supervisor

__all__ = ["CommandOfRank", "LaunchResult", "LockstepRanks", "StoreOfRanks", "host_store", "launch"]

CommandOfRank: TypeAlias = Callable[[int, int], Sequence[str]]

_LISTEN_SECONDS = 1.0  # between two looks at what ranks say they do
_TELL_SECONDS = 2.0  # of doing the same before the first step
_GRACE_SECONDS = 3.0  # for the others to end by themselves after a failure
_WRONG_INPUT = 2  # exit code of a user's mistake: trying again would not help


class LaunchResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a launched run ended."""

    exit_code: int  # 0: every rank ended well
    failure: Failure | None = None  # the one that ended it
    restarts: int = 0
    interrupted: bool = False  # somebody asked it to stop, by Ctrl-C or a signal


def launch(
    command_of_rank: CommandOfRank,
    world_size: int,
    *,
    observer: Observer = lambda event: None,
    devices: Sequence[str] = (),
    hosts: Sequence[ProcessHost] = (),
    max_restarts: int = 0,
    environ: Mapping[str, str] | None = None,
    terminal_for_rank_0: bool = True,
    stall_seconds: float = DEFAULT_STALL_SECONDS,
    address: str = "127.0.0.1",
    newest_checkpoint: Callable[[], int | None] = lambda: None,
) -> LaunchResult:
    """Run `command_of_rank(rank, generation)` for every rank on its host and wait for all of them.

    When one dies, the others learn it through the store and are killed after some seconds; then everybody is started anew under the
    next generation number, at most `max_restarts` times (the command of a generation above 0 should resume). However this function ends,
    and even if the launcher itself is killed, no rank outlives it. When nobody gets on for `stall_seconds` (or ten steps, if they are
    longer), an event a minute says who keeps the others waiting. `newest_checkpoint` says what there is to go on from when a rank fails.
    `environ` is what ranks have on top of their host's environment. All of them must reach this process at `address`.
    """
    if world_size < 1:
        raise AtollError(f"launch: there must be at least one rank, got {world_size}")
    if devices and len(devices) != world_size:
        raise AtollError(f"launch: {len(devices)} devices named for {world_size} ranks")
    server, port = host_store(address)
    supervisor = Supervisor(observer)
    generation = 0
    with supervisor.obeying_signals():
        while True:
            ranks = LockstepRanks(
                supervisor,
                StoreOfRanks(server, address, port, generation),
                list(devices) or [""] * world_size,
                list(hosts) or [ThisMachine()] * world_size,
                observer,
                stall_seconds=stall_seconds,
                newest_checkpoint=newest_checkpoint,
            )
            failure = _run(supervisor, ranks, lambda rank: command_of_rank(rank, generation), environ or {}, terminal_for_rank_0)  # noqa: B023
            if failure is None:
                break
            if generation == max_restarts or supervisor.asked or failure.exit_code == _WRONG_INPUT:
                interrupted = supervisor.asked > 0
                return LaunchResult(exit_code=failure.exit_code, failure=failure, restarts=generation, interrupted=interrupted)
            generation += 1
            observer(Restarted(generation=generation, max_restarts=max_restarts, reason=failure.sentence))
    return LaunchResult(exit_code=INTERRUPTED if supervisor.killed else 0, restarts=generation, interrupted=supervisor.asked > 0)


class StoreOfRanks(NamedTuple):
    """Where the ranks of one generation meet: a store of this process."""

    server: Store
    address: str
    port: int
    generation: int = 0

    @property
    def store(self) -> Store:
        """This generation's part of it."""
        return PrefixStore(f"generation-{self.generation}", self.server)

    @property
    def environment(self) -> dict[str, str]:
        """How ranks find it."""
        number = str(self.generation)
        elastic = {GENERATION: number, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": number}
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port), **elastic}


def _run(
    supervisor: Supervisor,
    ranks: "LockstepRanks",
    command_of_rank: Callable[[int], Sequence[str]],
    environ: Mapping[str, str],
    terminal: bool,
) -> Failure | None:
    """From start to end; the failure that ended them, if one did."""
    try:
        ranks.start(command_of_rank, environ, terminal)
        supervisor.run(_OnlyThese(supervisor, ranks))
    finally:
        supervisor.end()
    return ranks.failure


class _OnlyThese:
    """A supervisor's policy: it looks after nobody but these ranks."""

    def __init__(self, supervisor: Supervisor, ranks: "LockstepRanks") -> None:
        self._supervisor, self._ranks = supervisor, ranks
        self.ended, self.asked_to_stop = ranks.ended, ranks.asked_to_stop

    def look(self, now: float) -> None:
        if not self._supervisor.running:
            self._supervisor.finish()
        self._ranks.look(now)


class LockstepRanks:
    """All ranks of one generation. After a failure the others have a moment to end by themselves.

    `group` is what they are called by where one supervisor looks after several such groups.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        meeting: StoreOfRanks,
        devices: Sequence[str],
        hosts: Sequence[ProcessHost],
        observer: Observer,
        *,
        stall_seconds: float = DEFAULT_STALL_SECONDS,
        newest_checkpoint: Callable[[], int | None],
        group: str = "",
    ) -> None:
        self.failure: Failure | None = None  # the first
        self._group, self._meeting, store = f"{group} " if group else "", meeting, meeting.store
        self._newest_checkpoint = newest_checkpoint  # asked when a rank fails: what ranks last said of it may be old
        self._supervisor, self._store, self._devices, self._hosts, self._observer = supervisor, store, devices, hosts, observer
        self._ranks = range(len(devices))
        self._kill_at = float("inf")
        self._listened = self._began = time.monotonic()
        self._told: set[str] = set()  # what ranks were said to do before the first step
        self._states: dict[int, MemberState] = {}
        self._stalling = StallDetector(
            len(devices), least_seconds=stall_seconds, give_up_seconds=DEFAULT_TIMEOUT_SECONDS, devices=dict(enumerate(devices))
        )

    def start(self, command_of_rank: Callable[[int], Sequence[str]], environ: Mapping[str, str], terminal: bool) -> None:
        """All of them."""
        prepare(self._store, self._ranks)
        for rank in self._ranks:
            environment = {**environ, **self._meeting.environment}
            self._supervisor.start(self._spec(rank, command_of_rank(rank), environment, terminal and rank == 0))

    @property
    def running(self) -> tuple[str, ...]:
        """Names of those that run."""
        own = {self._name(rank) for rank in self._ranks}
        return tuple(name for name in self._supervisor.running if name in own)

    def _name(self, rank: int) -> str:
        return f"{self._group}rank {rank}"

    def _spec(self, rank: int, command: Sequence[str], environ: Mapping[str, str], terminal: bool) -> ProcessSpec:
        host = self._hosts[rank]
        beside = [other for other in self._ranks if self._hosts[other].machine == host.machine]
        defaults = {
            "OMP_NUM_THREADS": str(max(1, host.cores // len(beside))),
            "PYTHONUNBUFFERED": "1",  # lines arrive when they are printed
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # what broken connections mean is said in one sentence
        }
        if _is_loopback(environ["MASTER_ADDR"]):
            defaults["GLOO_SOCKET_IFNAME"] = _loopback_interface()
        role = {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(self._ranks)),
            "LOCAL_RANK": str(beside.index(rank)),
            "LOCAL_WORLD_SIZE": str(len(beside)),
        }
        return ProcessSpec(
            name=self._name(rank),
            role="rank",
            host=host,
            command=tuple(command),
            environment={**environ, **role},
            defaults=defaults,
            prefix="" if terminal else f"[{' '.join(filter(None, (f'{self._group}{rank}', self._devices[rank])))}] ",
            terminal=terminal,
        )

    def ended(self, spec: ProcessSpec, code: int, how: str) -> None:
        """What the end of a rank means. Whoever wrote a failure first is believed: the rank itself knows its own error best."""
        failed = self.failure is None and self._failed(spec, code, how)
        self._supervisor.tell_end(spec, code, how, "stop" if failed else "done")
        if self.failure is None or not failed:
            return
        self._change(int(spec.environment["RANK"]), "dead", how)
        self._kill_at = time.monotonic() + _GRACE_SECONDS
        self._observer(self.failure.event(generation=int(spec.environment[GENERATION])))
        if self.failure.kind == "silent":  # it cannot end by itself
            self._supervisor.signal(signal.SIGKILL, self._name(self.failure.rank))

    def _failed(self, spec: ProcessSpec, code: int, how: str) -> bool:
        rank = int(spec.environment["RANK"])
        beats = read_heartbeats(self._store, self._ranks)
        beat = beats.get(rank)
        if beat is not None:
            self._hear(beat)  # what it was before it ended may be newer than the last look
        if code == 0 and (beat is None or beat.left):
            return False
        what = how if code else "it ended before the run did, with exit code 0"
        beats.setdefault(rank, Heartbeat(rank=rank, device=self._devices[rank], stage="", place="", pid=0, count=0))
        failure = condemn(self._store, Failure.of(rank, beats, "died", what, max(1, code)))
        newest = self._newest_checkpoint()
        self.failure = failure if newest is None else msgspec.structs.replace(failure, checkpoint=newest)
        return True

    def _hear(self, beat: Heartbeat) -> None:
        """Tell what a rank says of its state. Who left after steps was active, even if that was too short for a heartbeat to say it."""
        state = state_of(beat)
        if state == "left" and beat.step is not None and self._states.get(beat.rank) != "left":
            self._change(beat.rank, "active", stage=beat.stage)
        self._change(beat.rank, state, stage=beat.stage)

    def _change(self, rank: int, state: MemberState, reason: str = "", stage: str = "") -> None:
        """A rank is in another state than when it was last looked at."""
        before = self._states.get(rank)
        if state == before:
            return
        self._states[rank] = state
        host, device = self._hosts[rank].name, self._devices[rank]
        stages = tuple(map(int, re.findall(r"\d+", stage)))
        event = MemberChanged(name=self._name(rank), state=state, before=before, role="rank", stages=stages, host=host, device=device)
        self._observer(msgspec.structs.replace(event, reason=reason))

    def asked_to_stop(self, number: int) -> None:
        """Lets the step end."""
        self._store.set(STOP, "1")

    def look(self, now: float) -> None:
        """Kills who does not end after a failure; tells what ranks do, and who keeps the others waiting."""
        if now > self._kill_at and self.running:
            self._supervisor.signal(signal.SIGKILL, *self.running)
        if self.failure is None and now - self._listened > _LISTEN_SECONDS:
            self._listened = now
            beats = read_heartbeats(self._store, self._ranks)
            for beat in beats.values():
                self._hear(beat)
            self._tell_start(beats, now)
            event = self._stalling.event(beats, now)
            if event is not None:
                self._observer(event)

    def _tell_start(self, beats: Mapping[int, Heartbeat], now: float) -> None:
        """Before the first step, what takes longer than a moment is told, each once."""
        first = beats.get(min(beats)) if beats else None
        doing = first.doing if first is not None else "loading PyTorch and the script"
        seconds = first.doing_seconds if first is not None else now - self._began
        if (first is None or first.step is None) and seconds >= _TELL_SECONDS and doing not in self._told:
            self._told.add(doing)
            self._observer(Note(message=f"{self._name(first.rank) if first is not None else f'{self._group}ranks'}: {doing} …"))


def host_store(address: str) -> tuple[Store, int]:
    """A store of this process. It listens on the loopback interface only, unless ranks of other hosts have to reach it."""
    listener = socket.create_server((address if _is_loopback(address) else "", 0), backlog=1024)
    port = int(listener.getsockname()[1])
    store: Store = dist.TCPStore(  # type: ignore[attr-defined]
        address, port, is_master=True, timeout=timedelta(seconds=30), wait_for_workers=False, master_listen_fd=listener.detach()
    )
    return store, port


def _is_loopback(address: str) -> bool:
    return address in ("localhost", "::1") or address.startswith("127.")


def _loopback_interface() -> str:
    """`lo` on Linux, `lo0` on macOS."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
