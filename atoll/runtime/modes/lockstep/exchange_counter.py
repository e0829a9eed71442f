"""Counting: every exchange of one step, whoever starts it — buckets, FSDP2, tensors, experts, sends — seen where PyTorch dispatches it.

All steps exchange the same, so one is counted: it alone pays for being looked at.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from atoll.runtime.modes.lockstep.measurement import Exchange, Recorder

__all__ = ["ExchangeCounter", "counted"]

_KINDS = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "alltoall_": "all_to_all",
    "broadcast_": "broadcast",
    "send": "send",
}
_SECOND = ("reduce_scatter", "all_to_all")  # their whole is what goes in, the second argument; that of the others the first


@contextmanager
def counted(recorder: Recorder, step: int, *, is_last: bool) -> Iterator[None]:
    """Counts the exchanges inside if this is the rank's second step (the first may set things up), or its only one."""
    if recorder.counted_step >= 0 or not (recorder.steps == 1 or is_last):
        yield
        return
    counter = ExchangeCounter()
    with counter:
        yield
    recorder.exchanges, recorder.counted_step = counter.exchanges(), step


class ExchangeCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside `with`, counts what this rank exchanges; `exchanges` says it, with the ranks of the whole run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted: dict[tuple[str, tuple[int, ...]], tuple[int, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """See `TorchDispatchMode`."""
        if func.namespace == "c10d":
            self._count(func.overloadpacket.__name__, args)
        return func(*args, **(kwargs or {}))

    def _count(self, operator: str, args: tuple[Any, ...]) -> None:
        kind = _KINDS.get(operator)
        if kind is None:  # receives are counted by those who send
            return
        boxed = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
        ranks = tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(boxed)))
        whole = args[1] if kind in _SECOND else args[0]
        if kind == "send":
            ranks = (dist.get_rank(), ranks[args[2]])
        calls, nbytes = self._counted.get((kind, ranks), (0, 0))
        self._counted[kind, ranks] = (calls + 1, nbytes + _bytes(whole))

    def exchanges(self) -> tuple[Exchange, ...]:
        """What was counted."""
        return tuple(
            Exchange(kind=kind, ranks=ranks, calls=calls, bytes=nbytes) for (kind, ranks), (calls, nbytes) in sorted(self._counted.items())
        )


def _bytes(value: Tensor | Iterable[Any]) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else sum(_bytes(item) for item in value)
