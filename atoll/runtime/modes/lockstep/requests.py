"""What callbacks on rank 0 ask of all ranks between two steps: a snapshot, or a checkpoint that is kept.

While rank 0's callbacks run, the other ranks wait for what they ask and take part in it; without callbacks that could ask, nobody waits.
"""

from collections.abc import Callable

import torch.distributed as dist

from atoll.callbacks import Snapshot
from atoll.errors import JobError
from atoll.runtime.checkpoint.exchange import CheckpointRanks

__all__ = ["Requests"]

_NOTHING, _SNAPSHOT, _KEEP = "", "snapshot", "keep "


class Requests:
    """The other ranks' part, and how rank 0 asks for it."""

    def __init__(self, snapshot: Callable[[], Snapshot | None], keep: Callable[[str], None]) -> None:
        """Both are what every rank does when asked."""
        self._snapshot, self._keep = snapshot, keep
        self._ranks = CheckpointRanks(dist.group.WORLD)
        self._open = False

    def begin(self) -> None:
        """The callbacks of this rank are told of something from here on."""
        self._open = True

    def end(self) -> None:
        """They have been. Rank 0 asks for nothing more; the others do what it asks until then."""
        self._open = False
        if self._ranks.rank == 0:
            self._say(_NOTHING)
            return
        while request := self._say(_NOTHING):
            self._do(request)

    def snapshot(self) -> Snapshot:
        """On rank 0: weights and optimizer of all ranks."""
        self._ask(_SNAPSHOT, "run.snapshot")
        found = self._do(_SNAPSHOT)
        assert found is not None  # on rank 0
        return found

    def keep(self, name: str) -> None:
        """On rank 0: let all ranks save this step under a name."""
        self._ask(_KEEP + name, "run.keep")
        self._do(_KEEP + name)

    def _ask(self, request: str, what: str) -> None:
        if not self._open or self._ranks.rank:
            raise JobError(f"{what}: ask for it while a step or an evaluation is told (StepFinished, Evaluated), on rank 0")
        self._say(request)

    def _say(self, request: str) -> str:
        """What rank 0 asks for."""
        return self._ranks.gather(request, str)[0]

    def _do(self, request: str) -> Snapshot | None:
        if request == _SNAPSHOT:
            return self._snapshot()
        self._keep(request.removeprefix(_KEEP))
        return None
