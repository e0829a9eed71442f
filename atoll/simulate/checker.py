"""Checker: the invariants of docs/swarm.md, looked at whenever a record becomes durable, a state is set or a hint is believed.

It sees everything at once, which nobody in the swarm can, and knows the undisturbed run.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.control.feeder import Feeder
from atoll.control.journal import Checkpointed, Epoch, Record, Term
from atoll.control.messages import Ack, BufferManifest, Committed, Manifest, Round, SumPart
from atoll.control.settings import Settings
from atoll.control.worker import Worker
from atoll.simulate import arithmetic
from atoll.simulate.arithmetic import ExactState, ExactSum
from atoll.simulate.loop import Loop

__all__ = ["Checker"]


class Checker:
    """Collects violations, each with the virtual time it was seen at."""

    def __init__(self, loop: Loop, settings: Settings, stored: Mapping[tuple[int, int, int], Any]) -> None:
        self.violations: list[str] = []
        self.commits = 0
        self.rollbacks = 0
        self.workers: dict[str, Worker] = {}
        self._loop = loop
        self._stages = settings.stages
        self._micro_batches = settings.micro_batches
        self._tied = settings.tied[0] if settings.tied else ()
        self._stored = stored
        self._reference = arithmetic.reference(settings.stages, settings.micro_batches, settings.staleness, self._tied)
        self._sums: dict[str, tuple[ExactSum, ...]] = {}
        self._cells: dict[tuple[int, int, int], tuple[ExactState, ...]] = {}
        self._committed: set[tuple[int, int]] = set()
        self._next: tuple[int, int] = (-1, 0)
        self._reported: dict[tuple[str, int], tuple[Round, tuple[BufferManifest, ...]]] = {}  # by worker and incarnation

    def wrong(self, text: str) -> None:
        """Something is."""
        self.violations.append(f"{self._loop.now:.2f}: {text}")

    def on_digest(self, digest: str, sums: Sequence[ExactSum]) -> None:
        """A worker has a reduced gradient."""
        self._sums[digest] = tuple(sums)

    # --- the journal --------------------------------------------------------------------------------------------------------

    def on_record(self, record: Record) -> None:
        """A record is durable."""
        if isinstance(record, Committed):
            self._on_commit(record)
        elif isinstance(record, Epoch):
            self._on_epoch(record)
        elif isinstance(record, Checkpointed):
            self._on_checkpoint(record)
        else:
            assert isinstance(record, Term)

    def _on_epoch(self, record: Epoch) -> None:
        if record.epoch != self._next[0] + 1:
            self.wrong(f"epoch {record.epoch} follows epoch {self._next[0]}")
        self.rollbacks += record.epoch > 0
        self._next = (record.epoch, record.version)
        for stage in range(self._stages):
            if record.version == 0:
                cells = arithmetic.initial_cells(stage, stage in self._tied)
            else:
                cells = self._cells.get((record.from_epoch, record.version, stage), ())
            self._cells[record.epoch, record.version, stage] = cells

    def _on_commit(self, record: Committed) -> None:
        where = f"commit of epoch {record.epoch}, version {record.version}"
        self.commits += 1
        if (record.epoch, record.version) in self._committed:
            self.wrong(f"a second {where}")
        elif (record.epoch, record.version) != self._next:
            self.wrong(f"{where} where {self._next} is due")
        self._committed.add((record.epoch, record.version))
        self._next = (record.epoch, record.version + 1)
        if not arithmetic.commit_matches(record, self._reference.commit(record.version), self._micro_batches):
            self.wrong(f"{where}: clip, skip, loss or weight is not that of the undisturbed run")
        for stage in range(self._stages):
            self._check_gradient(record, stage, where)

    def _check_gradient(self, record: Committed, stage: int, where: str) -> None:
        sums = self._sums.get(record.digests[stage])
        if sums is None:
            self.wrong(f"{where}: nobody has a gradient of stage {stage} with its digest")
            return
        if arithmetic.values(sums) != self._reference.gradient(record.version, stage):
            self.wrong(f"{where}: the gradient of stage {stage} is not the sum over all micro-batches, each once")
        before = self._cells.get((record.epoch, record.version, stage))
        if before:
            after = arithmetic.model_apply(before, sums, record.clip, record.skipped)
            self._cells[record.epoch, record.version + 1, stage] = after

    def _on_checkpoint(self, record: Checkpointed) -> None:
        for stage in range(self._stages):
            self._check_state(self._stored.get((record.epoch, record.version, stage)), record.epoch, record.version, stage, "a checkpoint")

    # --- states and hints ---------------------------------------------------------------------------------------------------

    def _check_state(self, state: Any, epoch: int, version: int, stage: int, whose: str) -> None:
        where = f"{whose} at epoch {epoch}, version {version}, stage {stage}"
        cells = self._cells.get((epoch, version, stage))
        if cells is None:
            self.wrong(f"{where}: no commit made this state")
        elif state is None or tuple(state) != cells:
            self.wrong(f"{where}: not the state its commits make")
        elif tuple((cell.weight, cell.momentum) for cell in state) != self._reference.weights(version, stage):
            self.wrong(f"{where}: not the weights of the undisturbed run")

    def on_state(self, worker: Worker) -> None:
        """A worker has a new state."""
        self._check_state(worker.state, worker.epoch, worker.version, worker.stage, f"the state of {worker.node.name}")

    def on_owned(self, feeder: Feeder, ack: Ack) -> None:
        """A feeder believes an acknowledgement: as far as its worker is still where it was, it must be true."""
        worker = self.workers.get(ack.worker)
        if worker is None or worker.incarnation != ack.incarnation or worker.stage != ack.stage or worker.state is None:
            return
        if worker.gave_up == feeder.round:
            return  # with staleness a commit it could not apply came in the middle of the step: what it says of its buffers later counts
        if worker.run_round == feeder.round and not worker.buffers.holds(ack.micro_batch):
            self.wrong(f"{feeder.node.name} believes that {ack.worker} owns micro-batch {ack.micro_batch}, which it does not")

    def on_message(self, message: Any) -> None:
        """A message is sent: a buffer that is summed must be what its manifest said."""
        if type(message) is Manifest:
            self._reported[message.worker, message.incarnation] = message.round, message.buffers
        elif type(message) is SumPart:
            worker = self.workers.get(message.worker)
            round, buffers = self._reported.get((message.worker, message.incarnation), (None, ()))
            if worker is not None and round == message.round and worker.to_reduce().buffers.manifests() != buffers:
                self.wrong(f"{message.worker} gives a part of buffers that are not what its manifest said")

    def at_the_end(self) -> None:
        """Every state there is."""
        for worker in self.workers.values():
            if worker.state is not None and not worker.finished:
                self.on_state(worker)
