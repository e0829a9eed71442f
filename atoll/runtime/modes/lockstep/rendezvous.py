"""Rendezvous: a rank meets the others, works with them under a watcher's eye, and leaves together with them.

```
with joined(role, "oslo-1/gpu0", "stage 1") as run:
    for step in range(1, steps + 1):
        run.doing(action, step)  # for every action: an attribute is written, no more
        ...
```
"""

import contextlib
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from atoll.errors import AtollError
from atoll.events import Observer, Stalled, Wait
from atoll.runtime.modes.lockstep.failure import VICTIM_EXIT_CODE, Watcher
from atoll.runtime.modes.lockstep.heartbeat import DEFAULT_STALL_SECONDS, NOTHING, Doing, heartbeat_key
from atoll.runtime.modes.lockstep.role import Role

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "RankMembership", "joined", "own_device"]

DEFAULT_TIMEOUT_SECONDS = 600.0  # of a collective; a dead peer is noticed by the watcher long before
_LEAVING, _ALL_LEAVE, _GONE = "atoll/leaving", "atoll/all_leave", "atoll/gone"
_GOING_SECONDS = 5.0  # the host of the store waits for the last one to go
_SHOWN_RANKS = 8
_SIOCGIFADDR = 0x8915  # asks the kernel for an interface's address


def _connect(role: Role, timeout_seconds: float, *, host: bool = False, observer: Observer = lambda event: None) -> Store:
    """A connection to the store of this generation of ranks; `host` it when this rank has to."""
    try:
        with _telling_that_it_waits(role, observer):
            store = dist.TCPStore(  # type: ignore[attr-defined]
                role.master_addr,
                role.master_port,
                is_master=host,
                timeout=timedelta(seconds=timeout_seconds),
                wait_for_workers=False,
            )
    except dist.DistError as error:
        where = f"{role.master_addr}:{role.master_port}"
        what = "cannot be hosted there" if host else f"does not answer within {timeout_seconds:g} s"
        raise AtollError(
            f"rank {role.rank}: the store at {where} {what} ({_first_line(error)}); check MASTER_ADDR, MASTER_PORT and rank 0"
        ) from error
    return PrefixStore(f"generation-{role.generation}", store)


@contextmanager
def _telling_that_it_waits(role: Role, observer: Observer) -> Iterator[None]:
    """Around connecting: after a while, and then once a minute, people are told what this rank waits for."""
    over, began = threading.Event(), time.monotonic()
    whose = "its supervisor" if role.store_outside else "rank 0"

    def say() -> None:
        pause = DEFAULT_STALL_SECONDS
        while not over.wait(pause):
            doing, seconds = f"waiting for {whose} at {role.master_addr}:{role.master_port} to answer", time.monotonic() - began
            waits = Wait(name=f"rank {role.rank}", doing=doing, seconds=seconds, waits_for=(whose,))
            observer(Stalled(seconds=seconds, members=(waits,)))
            pause = 60.0

    thread = threading.Thread(target=say, daemon=True, name="atoll-connect")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _join_process_group(role: Role, store: Store, timeout_seconds: float, device: torch.device) -> None:
    """Make this process a member of the default process group."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)
    interface = _own_interface(role.master_addr)
    if interface is not None and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # else it takes that of the host's name, which may be one that no other host reaches
    try:
        dist.init_process_group(
            _backend(device),
            store=store,
            rank=role.rank,
            world_size=role.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=device if device.type != "cpu" else None,
        )
    except dist.DistError as error:
        raise AtollError(
            f"rank {role.rank}: the {role.world_size} ranks did not meet within {timeout_seconds:g} s{_absent(role, store)} "
            f"({_first_line(error)})"
        ) from error


def _own_interface(master: str) -> str | None:
    """The network interface on this host's way to another; None where it cannot be told."""
    for *_, target in _found(master):
        family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)  # sends nothing; only asks which way it would go
            return _interface_of(str(probe.getsockname()[0]))
    return None


def _found(name: str) -> list[Any]:
    try:
        return socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)
    except OSError:
        return []


def _interface_of(address: str) -> str | None:
    """The interface that has this address, on Linux."""
    if sys.platform != "linux":
        return None
    if ":" in address:
        wanted = ipaddress.IPv6Address(address.partition("%")[0]).exploded.replace(":", "")
        rows = [row.split() for row in Path("/proc/net/if_inet6").read_text().splitlines()]
        return next((row[-1] for row in rows if row[0] == wanted), None)
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no such address
                answer = fcntl.ioctl(asking.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def _absent(role: Role, store: Store) -> str:
    """In words, which ranks have not been seen at all."""
    ranks = range(role.world_size)
    seen = [rank for rank in ranks if store.check([heartbeat_key(rank)]) and store.get(heartbeat_key(rank)) != NOTHING]
    absent = [rank for rank in ranks if rank not in seen] if seen else []
    more = f" and {len(absent) - _SHOWN_RANKS} more" if len(absent) > _SHOWN_RANKS else ""
    return f": of {', '.join(f'rank {rank}' for rank in absent[:_SHOWN_RANKS])}{more} nothing was heard" if absent else ""


def own_device(role: Role) -> torch.device:
    """The accelerator with this rank's local number, or the CPU."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, role.local_rank % torch.accelerator.device_count())


def _backend(device: torch.device) -> str:
    """Tensors of the CPU travel too: counters, flags and what is checkpointed."""
    if device.type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"


class RankMembership:
    """A rank's membership in a run: it says what it does, and hears when to stop."""

    def __init__(self, role: Role, store: Store, watcher: Watcher) -> None:
        self.role, self.store, self._watcher = role, store, watcher

    def doing(self, action: object, step: int | None = None) -> None:
        """This rank does `action` now. Cheap: its `str()` is taken by the watcher's thread, every half a second."""
        self._watcher.action = action
        if step is not None:
            self._watcher.step = step

    @contextmanager
    def still_doing(self) -> Iterator[None]:
        """For what is done after a failure: what failed stays what this rank was doing."""
        action, step = self._watcher.action, self._watcher.step
        try:
            yield
        finally:
            self._watcher.action, self._watcher.step = action, step

    def saved(self, step: int) -> None:
        """The checkpoint after `step` steps is complete: a failure's sentence will say so."""
        self._watcher.checkpoint = step

    @property
    def stop_asked(self) -> bool:
        """Whether somebody asked this rank to stop politely. Ranks hear it at different moments, and agree when they do."""
        return self._watcher.stop_asked


@contextmanager
def joined(
    role: Role,
    device_name: str,
    stage: str = "",
    *,
    device: torch.device | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    deadline_seconds: float = 10.0,
    observer: Observer = lambda event: None,
) -> Iterator[RankMembership]:
    """Meet the other ranks, work with them, and leave when all are ready to leave.

    When another rank dies, hangs or raises, this process ends within seconds (a silent one is borne for `deadline_seconds`) and says who it
    was. When this one raises, the others are told and the error goes on; if another was first, this one exits instead. `observer` hears, in
    other threads too, what keeps this process waiting and why it ends; nobody else tells where there is no supervisor.
    """
    store = _connect(role, timeout_seconds, host=role.hosts_store, observer=observer)
    watcher = Watcher(
        role,
        _connect(role, timeout_seconds),
        device=device_name,
        stage=stage,
        deadline_seconds=deadline_seconds,
        give_up_seconds=timeout_seconds,
        observer=observer,
    )
    watcher.action = Doing("waiting for the other ranks", "others")
    watcher.start()
    with _telling(watcher):
        _join_process_group(role, store, timeout_seconds, device or own_device(role))
    with _polite_signals(watcher), _telling(watcher):
        watcher.action = "starting"
        yield RankMembership(role, store, watcher)
        watcher.action = Doing("waiting for the others to end", "others")
        _wait_for_all(role, store)
        dist.destroy_process_group()
    watcher.leave()
    _go(role, store)


@contextmanager
def _telling(watcher: Watcher) -> Iterator[None]:
    """What is raised here is told to the other ranks; who was not the first to fail exits without a word."""
    try:
        yield
    except BaseException as error:
        if watcher.failed_here(error).rank != watcher.role.rank:
            raise SystemExit(VICTIM_EXIT_CODE) from error
        raise


def _wait_for_all(role: Role, store: Store) -> None:
    """Nobody closes its connections while another still works; the watcher goes on looking meanwhile."""
    if store.add(_LEAVING, 1) == role.world_size:
        store.set(_ALL_LEAVE, "1")
    store.wait([_ALL_LEAVE])


def _go(role: Role, store: Store) -> None:
    """The host of the store goes last."""
    store.add(_GONE, 1)
    until = time.monotonic() + _GOING_SECONDS
    while role.hosts_store and store.add(_GONE, 0) < role.world_size and time.monotonic() < until:
        time.sleep(0.02)


@contextmanager
def _polite_signals(watcher: Watcher) -> Iterator[None]:
    """The first Ctrl-C, and every SIGTERM, let the step end on all ranks; a second Ctrl-C interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and watcher.stop_asked:
            raise KeyboardInterrupt
        watcher.stop_asked = True

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except BaseException:
        del before[signal.SIGTERM]  # launchers send it to all when one fails: it must not cut short what this one has to say
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
