"""Own devices: which of its machine's devices a worker has, and which workers a plan means. The devices of a replica are one worker's."""

import math

import msgspec
import torch

from atoll.errors import AtollError, PlanError
from atoll.plan import Plan, Replica

__all__ = ["OwnDevices", "planned_workers"]


class OwnDevices(msgspec.Struct, frozen=True):
    """A worker's devices, by their numbers on its machine, how it divides samples among them, and how many stages it hosts on them."""

    numbers: tuple[int, ...] = (0,)
    shares: tuple[int, ...] = ()  # in proportion to these; equally if not given
    stages: int = 1

    def find(self) -> list[torch.device]:
        """This machine's accelerators of these numbers, or so many times its processor where it has none."""
        if not torch.accelerator.is_available():
            return [torch.device("cpu")] * len(self.numbers)
        there, kind = torch.accelerator.device_count(), torch.accelerator.current_accelerator()
        assert kind is not None
        if max(self.numbers) >= there:
            raise AtollError(f"device {max(self.numbers)} was asked for (they count from 0); this machine has {there} of kind {kind.type}")
        return [torch.device(kind.type, number) for number in self.numbers]


def planned_workers(plan: Plan) -> list[tuple[str, OwnDevices]]:
    """A worker for every replica: its host and its devices. Replicas of several stages with the same devices are one worker's."""
    hosted: dict[tuple[str, ...], list[Replica]] = {}
    for stage in plan.stages:
        for replica in stage.replicas:
            hosted.setdefault(replica.devices, []).append(replica)
    seen: dict[str, tuple[str, ...]] = {}
    for devices in hosted:
        for device in devices:
            if seen.setdefault(device, devices) != devices:
                raise PlanError(f"{device} works with other devices in one stage than in another; a swarm's worker has the same in all")
    return [(_host(devices[0]), _own(replicas[0], len(replicas))) for devices, replicas in hosted.items()]


def _own(replica: Replica, stages: int) -> OwnDevices:
    words = [device.rpartition("/")[2] for device in replica.devices]
    numbers = tuple(int(word) if word.isdecimal() else index for index, word in enumerate(words))
    common = math.gcd(*replica.samples) or 1
    shares = tuple(samples // common for samples in replica.samples)
    return OwnDevices(numbers, shares if len(set(shares)) > 1 else (), stages)


def _host(device: str) -> str:
    return device.rpartition("/")[0]
