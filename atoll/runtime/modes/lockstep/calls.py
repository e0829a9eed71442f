"""Calls of a loop that is not Atoll's: every rank must make the same ones, in the same order, or all would wait for each other in vain."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.errors import JobFailedError
from atoll.runtime.training import CALLS

__all__ = ["Calls", "disagreement"]


class Calls:
    """This rank's calls, compared with the others' through a process group that nothing else waits in: made at the first call."""

    def __init__(self) -> None:
        self._group: Any = None
        self._pending: tuple[Any, list[Tensor]] | None = None

    @property
    def group(self) -> Any:
        """Of all ranks, for what is exchanged between steps; all ranks must ask for it together."""
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    def begin(self, call: str, step: int) -> None:
        """Say what this rank does, after how many steps."""
        own = torch.tensor([CALLS.index(call), step])
        heard = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        self._pending = dist.all_gather(heard, own, group=self.group, async_op=True), heard

    def check(self) -> None:
        """JobFailedError if another rank does something else. Waits for all of them, unless this rank said nothing."""
        if self._pending is None:
            return
        (work, heard), self._pending = self._pending, None
        work.wait()
        wrong = disagreement([(int(one[0]), int(one[1])) for one in heard], dist.get_rank())
        if wrong is not None:
            raise JobFailedError(wrong)


def disagreement(said: Sequence[tuple[int, int]], rank: int) -> str | None:
    """Who does something else than this rank, in words; each says its call and after how many steps."""
    for other, (call, step) in enumerate(said):
        if (call, step) != said[rank]:
            own, theirs = (f"{CALLS[kind]} after step {number}" for kind, number in (said[rank], (call, step)))
            return (
                f"the loop is not the same on all ranks: rank {rank} is about to {own}, rank {other} to {theirs}; step, evaluate, save "
                "and state_dict are for all ranks together: let no condition around them depend on the rank or on the clock"
            )
    return None
