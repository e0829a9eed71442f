"""Hosts on this machine joined by links of a given bandwidth: network namespaces on a bridge, shaped both ways. Needs root and Linux.

What is made carries this process's number in its name and is removed whatever ends the block; what a killed process left behind is removed
by the next one.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["Hosts", "cannot_shape", "joined_hosts", "rate_bits", "sent_bytes"]

_PREFIX = "atb"  # names of interfaces have 15 characters at most
_NETWORK = "10.214.73"
_INTERFACE = "v0"  # the one a host has, inside it


class Hosts:
    """Some hosts, numbered from 0."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def address(self, host: int) -> str:
        """Where the others reach it."""
        return f"{_NETWORK}.{host + 1}"

    def inside(self, host: int) -> list[str]:
        """What a command is started by to run on the host."""
        quiet = "TORCH_CPP_LOG_LEVEL=ERROR"  # no look-up of names works there, which torch says of every connection
        return ["ip", "netns", "exec", self.names[host], "env", f"GLOO_SOCKET_IFNAME={_INTERFACE}", quiet]


def cannot_shape() -> str | None:
    """Why links cannot be made here; None if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"there is no {' and no '.join(missing)}; install iproute2" if missing else None


def rate_bits(rate: str) -> float:
    """Bits a second of tc's `"1gbit"` or `"200mbit"`; ValueError where it is neither."""
    for unit, factor in (("gbit", 1e9), ("mbit", 1e6)):
        if rate.endswith(unit):
            return float(rate.removesuffix(unit)) * factor
    raise ValueError(f"a rate is a number and gbit or mbit, got {rate!r}")


def sent_bytes() -> int:
    """What the host this runs on has sent so far, headers included."""
    return int(Path(f"/sys/class/net/{_INTERFACE}/statistics/tx_bytes").read_text("utf-8"))


@contextmanager
def joined_hosts(count: int, rate: str) -> Iterator[Hosts]:
    """So many hosts, each behind a link of the rate in either direction."""
    _remove_left_behind()
    bridge = f"{_PREFIX}{os.getpid()}"
    hosts = Hosts([f"{bridge}-{number}" for number in range(count)])
    before = signal.signal(signal.SIGTERM, _end)
    try:
        _run("ip", "link", "add", bridge, "type", "bridge")
        _run("ip", "link", "set", bridge, "up")
        for number, name in enumerate(hosts.names):
            _add_host(bridge, name, f"{_PREFIX}{os.getpid()}p{number}", hosts.address(number), rate)
        yield hosts
    finally:
        _remove(bridge, hosts.names)
        signal.signal(signal.SIGTERM, before)


def _add_host(bridge: str, name: str, port: str, address: str, rate: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "link", "add", port, "type", "veth", "peer", "name", _INTERFACE, "netns", name)
    _run("ip", "link", "set", port, "master", bridge, "up")
    _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", _INTERFACE)
    for interface in (_INTERFACE, "lo"):
        _run("ip", "-n", name, "link", "set", interface, "up")
    shape = ("root", "tbf", "rate", rate, "burst", "256kb", "latency", "50ms")
    _run("tc", "qdisc", "replace", "dev", port, *shape)  # to the host
    _run("tc", "-n", name, "qdisc", "replace", "dev", _INTERFACE, *shape)  # from it


def _remove(bridge: str, names: Sequence[str]) -> None:
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    subprocess.run(["ip", "link", "delete", bridge], check=False, capture_output=True)


def _remove_left_behind() -> None:
    """What processes that no longer live have made and not removed."""
    listed = subprocess.run(["ip", "netns", "list"], check=False, capture_output=True, text=True).stdout.split()
    ours = [name for name in listed if name.startswith(_PREFIX) and "-" in name]
    for bridge in {name.partition("-")[0] for name in ours}:
        number = bridge.removeprefix(_PREFIX)
        if number.isdigit() and not Path(f"/proc/{number}").exists():
            _remove(bridge, [name for name in ours if name.startswith(f"{bridge}-")])


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
