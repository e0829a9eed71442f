"""Gradients over all sites as a rank's training sees them: buckets that are added up, totals of a step, and when all sites save.

A site's ranks add a bucket up to rank 0, which exchanges it with the other sites' while backward goes on, and sends the sum to all of them.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from atoll.runtime.modes.islands.gradient_sums import GradientSums, Slot
from atoll.runtime.modes.lockstep.gradients import Pending

__all__ = ["AllSites", "GradientExchange"]

_PATIENCE = timedelta(days=30)  # ranks wait for their site's rank 0, which waits for other sites
_SQUARES = 2  # where the trainer's totals have the squared norm, which is of the sum over all sites already


class AllSites(NamedTuple):
    """What all sites know after they have agreed on something."""

    values: list[float]  # the same at all of them
    flag: bool  # the first site's


class _Reducing:
    """A bucket on its way."""

    def __init__(self, exchange: "GradientExchange", bucket: int) -> None:
        self._exchange, self._bucket = exchange, bucket

    def wait(self) -> None:
        """Until the sum over all sites is in the buffer."""
        self._exchange.finish(self._bucket)


class GradientExchange:
    """An `OuterReduction`. `sums` are rank 0's; `batch_size` is that of all sites together."""

    def __init__(self, sums: GradientSums | None, batch_size: int, bucket_bytes: int) -> None:
        self.sums, self.batch_size, self.bucket_bytes = sums, batch_size, bucket_bytes
        self.flag: Callable[[], bool] = lambda: False  # what the first site has to say to all with the totals of a step
        self.told = False  # what it said last
        self._buffers: dict[int, Tensor] = {}
        self._begun: dict[int, dist.Work | None] = {}
        self._group: dist.ProcessGroup | None = None

    def meet(self) -> None:
        """The site's ranks make a group of their own; all call this together."""
        if dist.get_world_size() > 1:
            self._group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def add(self, bucket: int, slots: Sequence[Slot], buffer: Tensor) -> None:
        """There is such a bucket."""
        self._buffers[bucket] = buffer
        if self.sums is not None:
            self.sums.add(bucket, slots, buffer)

    def begin(self, bucket: int) -> Pending:
        """The rank has its gradients in the buffer."""
        work = dist.reduce(self._buffers[bucket], dst=0, async_op=True) if dist.get_world_size() > 1 else None
        self._begun[bucket] = work
        if self.sums is not None:
            self.sums.begin(bucket, work.wait if work is not None else lambda: None)
        return _Reducing(self, bucket)

    def finish(self, bucket: int) -> None:
        """The sum over all sites comes to this rank."""
        work, buffer = self._begun.pop(bucket), self._buffers[bucket]
        if self.sums is not None:
            self.sums.finish(bucket)
        elif work is not None:
            work.wait()
        if self._group is not None:
            arriving = buffer.cpu()  # the same memory, where it is the CPU's
            dist.broadcast(arriving, group=self._group, group_src=0)
            if arriving is not buffer and self.sums is None:
                buffer.copy_(arriving)

    def totals(self, vector: Tensor) -> Tensor:
        """What all sites saw of a step, from what this one did. The squared norm is the first site's, so that all clip alike."""
        agreed = self.agree(vector.tolist(), self.flag)
        self.told = agreed.flag
        return torch.tensor(agreed.values, dtype=vector.dtype, device=vector.device)

    def agree(self, values: Sequence[float], flag: Callable[[], bool] = lambda: False) -> AllSites:
        """Numbers added up over the sites, in their order, and a flag of the first site, whose squared norm counts. All ranks call it."""
        row = torch.zeros(len(values) + 1, dtype=torch.float64)
        if self.sums is not None:
            said = self.sums.share([*values, float(flag())])
            row = torch.tensor(said[0].values, dtype=torch.float64)
            for each in said[1:]:
                row[:-1] += torch.tensor(each.values[:-1], dtype=torch.float64)
            if len(values) > _SQUARES:
                row[_SQUARES] = said[0].values[_SQUARES]
        if self._group is not None:
            dist.broadcast(row, group=self._group, group_src=0)
        return AllSites(row[:-1].tolist(), bool(row[-1]))

    def differ(self, digest: str) -> list[str]:
        """Sites whose digest is not the first site's, on rank 0. All ranks call it together."""
        found: list[str] = []
        if self.sums is not None:
            said = self.sums.share([], digest)
            found = [site for site, each in zip(self.sums.sites, said, strict=True) if each.text != said[0].text]
        self.wait_for_rank_0()
        return found

    def wait_for_rank_0(self) -> None:
        """Which waits for other sites."""
        if self._group is not None:
            dist.broadcast(torch.zeros(1), group=self._group, group_src=0)
