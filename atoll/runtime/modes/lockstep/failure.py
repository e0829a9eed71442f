"""Failure: how a rank learns that another one died, hung or raised, and how it then ends within seconds.

Every rank has a `Watcher`: a thread with its own connection to the store that tells what the rank is doing and looks after its neighbours.
The first to notice a failure writes it under one key; everybody who reads it ends with `os._exit`, because a thread that is blocked in a
collective can be woken by nothing else. The sentence therefore names the rank that failed, not the ones that lost their connection to it.
"""

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

import msgspec
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from atoll.blame import in_words, own_frames
from atoll.errors import AtollError
from atoll.events import Observer, WorkerFailed
from atoll.runtime.modes.lockstep.heartbeat import (
    NOTHING,
    Heartbeat,
    StallDetector,
    blamed,
    heartbeat_key,
    name_of,
    read_heartbeat,
    read_heartbeats,
    spoken,
    whose,
)
from atoll.runtime.modes.lockstep.role import Role

__all__ = ["FAILED", "STOP", "VICTIM_EXIT_CODE", "Failure", "Freshness", "Watcher", "condemn", "prepare"]

FAILED, STOP = "atoll/failed", "atoll/stop"
_SUSPECT, _TOLD = "atoll/suspect", "atoll/told"
VICTIM_EXIT_CODE = 76  # of a rank that ended because another failed
_NEIGHBOURS = 4  # each rank looks after the next few only, so that the traffic grows with the ranks and not with their square
_SHOWN_RANKS = 16  # in an error that is about all of them
_LOOK_SECONDS = 2.0  # between two looks at all ranks
_LINGER_SECONDS = 5.0  # how long the host of the store waits for the others to read the verdict


_Kind: TypeAlias = Literal["died", "silent", "raised", "lost", "blocked"]


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that failed: who, where, doing what, and how it was noticed."""

    rank: int
    kind: _Kind
    message: str
    device: str = ""
    stage: str = ""
    step: int | None = None
    doing: str = ""
    checkpoint: int | None = None
    exit_code: int = 1  # what the run should end with

    @property
    def sentence(self) -> str:
        """Everything a user needs to know, in one sentence."""
        who = name_of(self.rank, self.device, self.stage)
        when = f" at step {self.step}" if self.step is not None else ""
        what = f" while {spoken(self.doing, self.stage)}" if self.doing else ""
        saved = f"the last checkpoint is step {self.checkpoint}" if self.checkpoint is not None else "there is no checkpoint"
        said = {
            "died": f"{who} died{when}{what} ({self.message})",
            "silent": f"{who} fell silent{when}{what} ({self.message})",
            "raised": f"{who} failed{when}{what}: {self.message}",
            "lost": f"{who}{when}{what}: {self.message}",
            "blocked": f"{who} kept the others waiting{when}{what} ({self.message})",
        }
        return f"{said[self.kind]}; every rank stops; {saved}"

    def event(self, message: str = "", generation: int = 0) -> WorkerFailed:
        """The failure as people are told of it: its sentence, or another with it."""
        return WorkerFailed(
            rank=self.rank,
            device=self.device,
            stage=self.stage,
            step=self.step,
            doing=self.doing,
            message=message or self.sentence,
            generation=generation,
        )

    @classmethod
    def of(cls, rank: int, beats: Mapping[int, Heartbeat], kind: _Kind, message: str, exit_code: int = 1) -> "Failure":
        """The failure of a rank, with what it last said of itself."""
        saved = max((beat.checkpoint for beat in beats.values() if beat.checkpoint is not None), default=None)
        beat = beats.get(rank, Heartbeat(rank=rank, device="", stage="", place="", pid=0, count=0))
        failure = cls(rank=rank, kind=kind, message=message, checkpoint=saved, exit_code=exit_code)
        return msgspec.structs.replace(failure, device=beat.device, stage=beat.stage, step=beat.step, doing=beat.doing)


def prepare(store: Store, ranks: range) -> None:
    """Make every key readable without blocking. Anybody may do it at any time: it never overwrites."""
    for key in (FAILED, STOP, _SUSPECT, *map(heartbeat_key, ranks)):
        store.compare_set(key, "", NOTHING.decode())


def condemn(store: Store, failure: Failure) -> Failure:
    """Tell everybody of the failure; the first one told stays, and is returned."""
    written = store.compare_set(FAILED, NOTHING.decode(), msgspec.json.encode(failure).decode())
    return msgspec.json.decode(written, type=Failure)


class Freshness:
    """Which ranks have been silent for too long, by this process's own clock: no clocks are compared."""

    def __init__(self, deadline_seconds: float) -> None:
        self.deadline_seconds = deadline_seconds
        self._heard: dict[int, tuple[int, float]] = {}
        self._looked_at: float | None = None

    def silent(self, counts: Mapping[int, int], now: float) -> list[int]:
        """The ranks whose count has not changed within the deadline. After a pause of its own it starts its clocks anew."""
        paused = self._looked_at is None or now - self._looked_at > self.deadline_seconds / 2
        self._looked_at = now
        for rank, count in counts.items():
            known = self._heard.get(rank)
            if paused or known is None or known[0] != count:
                self._heard[rank] = (count, now)
        return [rank for rank in counts if now - self._heard[rank][1] > self.deadline_seconds]


class Watcher:
    """Tells the others what this rank does, and ends this process when one of them fails. `store` must be a connection of its own."""

    _quiet_sources: ClassVar[set[str]] = {"atoll"}  # Atoll's supervisor tells of the failure once for all

    def __init__(
        self,
        role: Role,
        store: Store,
        *,
        device: str,
        stage: str = "",
        beat_seconds: float = 0.5,
        deadline_seconds: float = 10.0,
        give_up_seconds: float = 600.0,
        end_process: Callable[[int], None] = os._exit,
        observer: Observer = lambda event: None,
    ) -> None:
        self.role, self._store = role, store
        self.device, self.stage = device, stage
        self.beat_seconds, self.deadline_seconds = beat_seconds, deadline_seconds
        self.action: object = "starting"  # plain attributes, written by the training thread and read by the watcher's
        self.step: int | None = None
        self.checkpoint: int | None = None
        self.stop_asked = False
        self._end_process, self._observer = end_process, observer
        self._place = _place()
        self._count = 0
        self._since: tuple[tuple[int | None, str], float] | None = None  # what it does, and since when
        self._stall_detector = StallDetector(role.world_size, give_up_seconds=give_up_seconds, devices={})
        self._looked_at = time.monotonic()
        self._talked_at = time.monotonic()
        self._freshness = Freshness(deadline_seconds)
        self._last_beats: dict[int, Heartbeat] = {}
        self._line: socket.socket | None = None  # never used, but it ends with the store's host: asking the store itself then is noisy
        self._suspecting = threading.Event()
        self._over = threading.Event()
        self._threads = [threading.Thread(target=run, daemon=True, name=f"atoll-{run.__name__}") for run in (self._talk, self._guard)]

    def start(self) -> None:
        """Begin to tell and to look. The process may end at any moment from now on."""
        prepare(self._store, range(self.role.world_size))
        self._store.set(heartbeat_key(self.role.rank), msgspec.json.encode(self._own_beat()).decode())
        if not self.role.hosts_store:
            self._line = socket.create_connection((self.role.master_addr, self.role.master_port), timeout=self.deadline_seconds)
            self._line.setblocking(False)
        for thread in self._threads:
            thread.start()

    def leave(self) -> None:
        """This rank ended well: its silence means nothing from now on."""
        if self._stop_threads():
            self._store.set(heartbeat_key(self.role.rank), msgspec.json.encode(self._own_beat(left=True)).decode())
        if self._line is not None:
            self._line.close()

    def failed_here(self, error: BaseException) -> Failure:
        """This rank raised. The others learn of it; if it was the victim of another's failure, this process ends here."""
        if _is_about_peers(error):
            self._suspecting.set()
            self._over.wait(self._suspect_timeout() + 4 * self.beat_seconds)  # the verdict ends this process meanwhile
        failure = Failure.of(self.role.rank, {self.role.rank: self._own_beat()}, "raised", _told(error), _exit_code(error))
        if self._stop_threads():
            with contextlib.suppress(dist.DistError):  # the launcher, or the heartbeat that stops, tells then
                if _is_about_peers(error):
                    failure = self._waited_for(failure)
                failure = condemn(self._store, failure)
                if failure.kind == "blocked":
                    self._say(failure)
                self._linger(heard=0)
        return failure

    def _waited_for(self, failure: Failure) -> Failure:
        """All ranks are alive, so it gave up waiting for one: the failure is that one's, if it can be told which it is."""
        beats = read_heartbeats(self._store, range(self.role.world_size))
        culprits = blamed(beats)
        if len(culprits) == 1 and culprits[0] != self.role.rank:
            beat = beats[culprits[0]]
            how = f"for {beat.doing_seconds:.0f} s, until rank {self.role.rank} gave up: {failure.message}"
            return Failure.of(beat.rank, beats, "blocked", how)
        return msgspec.structs.replace(failure, message=f"{failure.message} (all ranks are alive: {self._everybody(beats)})")

    @staticmethod
    def _everybody(beats: Mapping[int, Heartbeat]) -> str:
        """What every rank last said it does: who waits for whom."""
        said = [f"rank {rank} {'has left' if beat.left else f'at step {beat.step}: {beat.doing}'}" for rank, beat in beats.items()]
        return "; ".join([*said[:_SHOWN_RANKS], *(["…"] if len(said) > _SHOWN_RANKS else [])])

    def _stop_threads(self) -> bool:
        """Whether the store's connection is free again."""
        self._over.set()
        self._threads[0].join(2 * self.beat_seconds)
        return not self._threads[0].is_alive()

    def _own_beat(self, *, left: bool = False) -> Heartbeat:
        self._count += 1
        action, step, now = self.action, self.step, time.monotonic()
        doing = str(action)
        if self._since is None or self._since[0] != (step, doing):
            self._since = (step, doing), now
        return Heartbeat(
            rank=self.role.rank,
            device=self.device,
            stage=self.stage,
            place=self._place,
            pid=os.getpid(),
            count=self._count,
            step=step,
            doing=doing,
            doing_seconds=now - self._since[1],
            whose=whose(action),
            checkpoint=self.checkpoint,
            left=left,
        )

    def _talk(self) -> None:
        """The watcher's thread: one round of heartbeats after the other."""
        while not self._over.wait(self.beat_seconds):
            try:
                failure = self._round()
            except (dist.DistError, ConnectionError):
                self._end(self._store_lost("died", "no longer answers"), lost=True)
                return
            self._talked_at = time.monotonic()
            if failure is not None:
                self._end(failure)
                return

    def _guard(self) -> None:
        """A second thread: a store whose host is stopped blocks the first one for ever."""
        before = time.monotonic()
        while not self._over.wait(self.beat_seconds):
            now = time.monotonic()
            if now - before > self.deadline_seconds / 2:  # this process was stopped itself
                self._talked_at = now
            before = now
            if now - self._talked_at > self.deadline_seconds + 2 * self.beat_seconds:
                self._end(self._store_lost("silent", f"has not answered for {self.deadline_seconds:g} s"), lost=True)
                return

    def _round(self) -> Failure | None:
        """Say what this rank does; hear what the neighbours do and whether anybody failed."""
        if self._line is not None:
            _raise_if_closed(self._line)
        self._store.set(heartbeat_key(self.role.rank), msgspec.json.encode(self._own_beat()).decode())
        if self._suspecting.is_set():
            self._store.set(_SUSPECT, "1")
        watched = self._watched()
        failed, stop, suspect, *values = self._store.multi_get([FAILED, STOP, _SUSPECT, *map(heartbeat_key, watched)])
        if self.stop_asked and stop == NOTHING:
            self._store.set(STOP, "1")
        self.stop_asked = self.stop_asked or stop != NOTHING
        if failed != NOTHING:
            return msgspec.json.decode(failed, type=Failure)
        if suspect != NOTHING:
            self._freshness.deadline_seconds = self._suspect_timeout()
        beats = {rank: read_heartbeat(value) for rank, value in zip(watched, values, strict=True) if value != NOTHING}
        self._last_beats |= beats
        self._tell_of_stalling()
        return self._judge({rank: beat for rank, beat in beats.items() if not beat.left})

    def _tell_of_stalling(self) -> None:
        """Rank 0 tells people who keeps the others waiting; Atoll's launcher does it itself."""
        now = time.monotonic()
        if self.role.rank != 0 or self.role.source in self._quiet_sources or now - self._looked_at < _LOOK_SECONDS:
            return
        self._looked_at = now
        event = self._stall_detector.event(read_heartbeats(self._store, range(self.role.world_size)), now)
        if event is not None:
            self._observer(event)

    def _watched(self) -> list[int]:
        """The next few ranks, and the host of the store."""
        size, rank = self.role.world_size, self.role.rank
        neighbours = {(rank + distance) % size for distance in range(1, min(_NEIGHBOURS, size - 1) + 1)}
        host = set() if self.role.store_outside else {0}
        return sorted((neighbours | host) - {rank})

    def _suspect_timeout(self) -> float:
        """How long silence is borne once somebody lost a connection: something is wrong for certain."""
        return min(self.deadline_seconds, max(2.0, 4 * self.beat_seconds))

    def _judge(self, beats: Mapping[int, Heartbeat]) -> Failure | None:
        """The neighbour that failed, if one did; everybody is told."""
        saved = self._last_beats | {self.role.rank: self._own_beat()}
        gone = self._gone(beats)
        if gone is not None:
            return condemn(self._store, Failure.of(gone, saved, "died", "its process is gone"))
        silent = self._freshness.silent({rank: beat.count for rank, beat in beats.items()}, time.monotonic())
        if silent:
            how = f"no sign of life for {self._freshness.deadline_seconds:g} s: stopped, hung or cut off"
            return condemn(self._store, Failure.of(silent[0], saved, "silent", how))
        return None

    def _gone(self, beats: Mapping[int, Heartbeat]) -> int | None:
        """A rank of this host whose process ended without leaving. Atoll's launcher sees that itself, and knows how they ended."""
        if self.role.source == "atoll":
            return None
        for rank, beat in beats.items():
            if beat.place == self._place and not _is_alive(beat.pid) and not read_heartbeats(self._store, range(rank, rank + 1))[rank].left:
                return rank
        return None

    def _store_lost(self, kind: _Kind, how: str) -> Failure:
        """The store lives with rank 0 or with the launcher: whichever it is has failed, and nobody can be told any more."""
        saved = self._last_beats | {self.role.rank: self._own_beat()}
        where = f"{self.role.master_addr}:{self.role.master_port}"
        if not self.role.store_outside:
            return Failure.of(0, saved, kind, f"the store that it hosts at {where} {how}")
        whose = "Atoll's launcher" if self.role.source == "atoll" else "torchrun"
        return Failure.of(self.role.rank, saved, "lost", f"the store of {whose} at {where} {how}: it died or is stopped")

    def _end(self, failure: Failure, *, lost: bool = False) -> None:
        """Say why, and end this process whatever its other threads are doing."""
        printing = threading.Thread(target=self._say, args=(failure,), daemon=True)
        printing.start()
        printing.join(1.0)  # a full pipe must not keep the process alive
        if not lost:
            with contextlib.suppress(dist.DistError):
                self._linger(heard=1)
        self._end_process(VICTIM_EXIT_CODE)

    def _say(self, failure: Failure) -> None:
        with contextlib.suppress(OSError, ValueError, AtollError):
            sys.stdout.flush()
            if self.role.source not in self._quiet_sources or failure.kind == "lost":
                self._observer(failure.event(f"rank {self.role.rank} stops: {failure.sentence}", self.role.generation))

    def _linger(self, heard: int) -> None:
        """The host of the store stays, within bounds, until all but the rank that failed (which does not count itself) read the verdict."""
        told = self._store.add(_TOLD, heard)
        until = time.monotonic() + _LINGER_SECONDS
        while self.role.hosts_store and told < self.role.world_size - 1 and time.monotonic() < until:
            time.sleep(self.beat_seconds / 5)
            told = self._store.add(_TOLD, 0)


def _is_about_peers(error: BaseException) -> bool:
    """Whether the error may be the echo of another rank's end: a lost connection or a time-out in `torch.distributed`."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and re.search(r"gloo|nccl|xccl|c10d|connection|timed out", str(error), re.IGNORECASE) is not None


def _told(error: BaseException) -> str:
    """The error in words, with the user's own line."""
    if isinstance(error, AtollError):
        return str(error)
    if isinstance(error, SystemExit):
        words = f"the script exits ({error.code}) while the run is under way"
    else:
        words = in_words(error).partition("\nException raised from")[0]  # the C++ stack that PyTorch adds to lost connections
    frames = own_frames(error)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}: {frames[-1].line})" if frames else ""
    return words + where


def _exit_code(error: BaseException) -> int:
    if isinstance(error, AtollError):
        return error.exit_code
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code:
        return error.code
    return 1


def _raise_if_closed(line: socket.socket) -> None:
    """Raise a ConnectionError if the other end is gone."""
    with contextlib.suppress(BlockingIOError):  # nothing to read: as it should be
        if not line.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError


def _place() -> str:
    """The same for processes that see each other's pids."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # no Linux: the host has one space of pids
        return f"host {os.uname().nodename}"


def _is_alive(pid: int) -> bool:
    """Whether the process runs or is stopped; one that has ended and waits for its parent to notice is not alive."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in ("Z", "X")
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's, or this is no Linux
        return True
