"""Building the model that ranks take their parts from: all at once where memory allows it, else one rank of each host at a time."""

import socket
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from atoll.cluster.memory import host_memory
from atoll.runtime.checkpoint.exchange import CheckpointRanks

__all__ = ["build_in_turn", "turns"]

T = TypeVar("T")
_SHARE = 0.5  # of a host's free memory that whole models may take while ranks pick their parts


def turns(hosts: list[str], free_bytes: list[float], model_bytes: float) -> list[int]:
    """In which turn each rank builds: all in turn 0, unless a host could not hold a whole model for each of its ranks. Pure."""
    counts = Counter(hosts)
    free = {host: min(amount for name, amount in zip(hosts, free_bytes, strict=True) if name == host) for host in counts}
    if all(counts[host] * model_bytes <= _SHARE * free[host] for host in counts):
        return [0] * len(hosts)
    seen: Counter[str] = Counter()
    order = []
    for host in hosts:
        order.append(seen[host])
        seen[host] += 1
    return order


def build_in_turn(build: Callable[[], T], model_bytes: float) -> T:
    """What `build` returns; it must have dropped the whole model by then. All ranks call it together."""
    said = CheckpointRanks(dist.group.WORLD).gather((socket.gethostname(), host_memory().available_bytes), tuple[str, float])
    order = turns([host for host, _ in said], [free for _, free in said], model_bytes)
    own, built = order[dist.get_rank()], None
    for turn in range(max(order) + 1):
        if turn == own:
            built = build()
        if max(order):
            dist.barrier()
    assert built is not None, "every rank has a turn"
    return built
