"""Own devices: which of its machine's devices a worker has, and which workers a plan means. The devices of a replica are one worker's."""

import math
import os

import msgspec
import torch

from atoll.errors import AtollError
from atoll.plan import Plan, Replica
from atoll.units import plural

__all__ = ["OwnDevices", "check_devices", "devices_here", "planned_workers"]


class OwnDevices(msgspec.Struct, frozen=True):
    """A worker's devices, by their numbers on its machine, how it divides samples among them, and how many stages it hosts on them.

    `planned` are the stages a plan means them for; without a plan the coordinator says which.
    """

    numbers: tuple[int, ...] = (0,)
    shares: tuple[int, ...] = ()  # in proportion to these; equally if not given
    stages: int = 1
    planned: tuple[int, ...] = ()

    def find(self) -> list[torch.device]:
        """This machine's accelerators of these numbers, or so many times its processor where it has none."""
        if not torch.accelerator.is_available():
            return [torch.device("cpu")] * len(self.numbers)
        there, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
        assert kind is not None
        if max(self.numbers) >= there:
            raise AtollError(f"device {max(self.numbers)} was asked for (they count from 0); this machine has {there} of kind {kind.type}")
        return [torch.device(kind.type, number) for number in self.numbers]


def devices_here() -> tuple[int, str]:
    """How many devices this machine has and what they are called: its accelerators, or the cores it may use."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        assert kind is not None
        return torch.accelerator.device_count(), kind.type
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, "core"


def check_devices(asked: int, there: int, kind: str) -> str | None:
    """What to warn of where so many devices are asked for; None where they are there. AtollError where they cannot be had (cores can)."""
    if asked <= there:
        return None
    if kind != "core":
        raise AtollError(f"--devices {asked}: this machine has {there} of kind {kind}; ask for as many or fewer")
    return (
        f"--devices {asked}: this machine has {plural(there, 'core')}, which they share: --devices {there} is as fast and takes less memory"
    )


def planned_workers(plan: Plan) -> list[tuple[str, OwnDevices]]:
    """A worker for every replica of a plan that a swarm can run: its host and devices. Replicas of the same devices are one worker's."""
    hosted: dict[tuple[str, ...], list[tuple[int, Replica]]] = {}
    for number, stage in enumerate(plan.stages):
        for replica in stage.replicas:
            hosted.setdefault(replica.devices, []).append((number, replica))
    return [(_host(devices[0]), _own(rows[0][1], tuple(number for number, _ in rows))) for devices, rows in hosted.items()]


def _own(replica: Replica, planned: tuple[int, ...]) -> OwnDevices:
    words = [device.rpartition("/")[2] for device in replica.devices]
    numbers = tuple(int(word) if word.isdecimal() else index for index, word in enumerate(words))
    common = math.gcd(*replica.samples) or 1
    shares = tuple(samples // common for samples in replica.samples)
    return OwnDevices(numbers, shares if len(set(shares)) > 1 else (), len(planned), planned)


def _host(device: str) -> str:
    return device.rpartition("/")[0]
