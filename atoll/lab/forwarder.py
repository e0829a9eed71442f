"""`python -m atoll.lab.forwarder NETWORK …`: what is between a lab's sites. It makes a TUN device in every site's namespace, and moves
packets from one to another when they are due. It is told the conditions as JSON lines on standard input, answers each with a line, and ends
when standard input does.

The devices hand over bundles of segments (`IFF_VNET_HDR`, `TUN_F_TSO4`), up to 64 KB each: 200 Mbit/s are then some 400 packets a second,
which Python can move with a small part of a core. While packets are to be lost they come one by one, which costs several times as much.
"""

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import select
import signal
import struct
import sys
import time
from collections.abc import Sequence

import msgspec

from atoll.lab.network import TUNNEL, ForwarderState, Pipes, wire_bytes

__all__ = ["main"]

_SET_DEVICE, _SET_OFFLOAD = 0x400454CA, 0x400454D0  # TUNSETIFF, TUNSETOFFLOAD (Linux, uapi/linux/if_tun.h)
_IS_TUN, _NO_PREFIX, _BUNDLES = 0x0001, 0x1000, 0x4000  # IFF_TUN, IFF_NO_PI, IFF_VNET_HDR
_CHECKSUMS_LATER, _TCP_BUNDLES = 0x01, 0x02 | 0x08  # TUN_F_CSUM; TUN_F_TSO4 with TUN_F_TSO_ECN
_BUNDLE_HEADER = struct.Struct("<BBHHHH")  # virtio_net_hdr: flags, kind, header bytes, segment bytes, checksum's start and offset
_LARGEST_BYTES = 65536 + _BUNDLE_HEADER.size
_TURN_PACKETS = 64  # read from one site before the others have their turn
_GATHER_SECONDS = 0.00025  # packets that come and go at nearly the same time are moved together: waking up costs more than moving one
_EARLY_SECONDS = 0.0002  # and sleepers wake late anyway
_PRIORITY = 10
_NICENESS = -15


class Forwarder:
    """The devices, and the packets that are on their way."""

    def __init__(self, devices: Sequence[int], control: int) -> None:
        self._devices, self._control = list(devices), control
        self._crossing: Pipes | None = None
        self._chance = random.Random()
        self._on_the_way: list[tuple[float, int, int, bytes]] = []  # when, a number that keeps the order, device, packet
        self._numbers = itertools.count()
        self._rest = b""
        self._loses = False

    def run(self) -> None:
        """Until standard input ends."""
        waiting = [*self._devices, self._control]
        while True:
            ready, _, _ = select.select(waiting, [], [], self._deliver())
            came = time.monotonic()
            if ready:
                time.sleep(_GATHER_SECONDS)
            for file in ready:
                if file != self._control:
                    self._take(file, came)
                elif not self._listen():
                    return

    def _deliver(self) -> float | None:
        """Hands over what is due; returns in how long the next is."""
        heap, devices, clock = self._on_the_way, self._devices, time.monotonic
        while heap:
            wait = heap[0][0] - clock()
            if wait > _EARLY_SECONDS:
                return wait - _EARLY_SECONDS
            _, _, site, packet = heapq.heappop(heap)
            with contextlib.suppress(OSError):  # the site is down, or its kernel does not like the packet: lost, as on a real network
                os.write(devices[site], packet)
        return None

    def _take(self, file: int, came: float) -> None:
        """Reads what a site sends; the first of it came at this moment."""
        crossing, heap = self._crossing, self._on_the_way
        for _ in range(_TURN_PACKETS):
            try:
                packet = os.read(file, _LARGEST_BYTES)
            except (BlockingIOError, InterruptedError):
                return
            if crossing is None or len(packet) < 30 or packet[10] >> 4 != 4:
                continue  # IPv6's housekeeping
            target = packet[26:30]
            header, segment = struct.unpack_from("<HH", packet, 2)
            size = wire_bytes(len(packet) - 10, segment if packet[1] else 0, header)
            due = crossing.leaves_at(came, packet[22:26], target, size)
            if due is not None:
                heapq.heappush(heap, (due, next(self._numbers), target[1] - 1, packet))

    def _listen(self) -> bool:
        """New conditions; False when there will be no more."""
        chunk = os.read(self._control, 1 << 20)
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._change(msgspec.json.decode(line, type=ForwarderState))
            os.write(1, b"done\n")
        return bool(chunk)

    def _change(self, state: ForwarderState) -> None:
        if self._crossing is None:
            self._crossing = Pipes(state, self._chance.random)
        self._crossing.change(state)
        if state.loses != self._loses:
            self._loses = state.loses
            for device in self._devices:
                _set_bundles(device, bundles=not state.loses)


def open_device(network: str) -> int:
    """A TUN device in a namespace, by its file."""
    _set_network(network)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_DEVICE, struct.pack("16sH22x", TUNNEL.encode(), _IS_TUN | _NO_PREFIX | _BUNDLES))
    _set_bundles(device, bundles=True)
    return device


def _set_network(name: str) -> None:
    import ctypes

    with open(f"/run/netns/{name}") as network:
        if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), 0):
            raise OSError(ctypes.get_errno(), "setns")


def _set_bundles(device: int, *, bundles: bool) -> None:
    fcntl.ioctl(device, _SET_OFFLOAD, _CHECKSUMS_LATER | (_TCP_BUNDLES if bundles else 0))


def take_priority() -> str:
    """Goes before everything that only computes, so that delays do not wander when the cores are full; says how."""
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(_PRIORITY))
        return "real time"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
        return f"nice {_NICENESS}"
    return "none"


def main(networks: Sequence[str]) -> int:
    """Opens the devices, says so, and forwards."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        devices = [open_device(network) for network in networks]
    except OSError as error:
        print(f"/dev/net/tun: {(error.strerror or str(error)).lower()}", file=sys.stderr)
        return 1
    os.write(1, f"ready {take_priority()}\n".encode())
    Forwarder(devices, 0).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
