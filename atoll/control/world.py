"""World: all that coordinator, feeder and worker see of clocks, networks, disks and devices, and where their events go.

The roles are coroutines that await nothing but these. Over sockets they run on asyncio with tensors; in the simulator on a virtual clock
with numbers. Whoever implements `Clock` decides how coroutines take turns; between two awaits nobody else runs.
"""

import random
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from atoll.control.journal import Record
from atoll.control.messages import Committed, Message
from atoll.events import Observer

__all__ = ["Checkpoints", "Clock", "Compute", "Journal", "Mailbox", "MicroBatchSource", "SwarmProcess", "Transport"]


class Mailbox(Protocol):
    """Things put in are taken out in order, by one taker."""

    def put(self, item: Any) -> None:
        """Never waits."""

    async def take(self) -> Any:
        """The oldest thing, as soon as there is one."""


class Clock(Protocol):
    """Time and taking turns."""

    def now(self) -> float:
        """Seconds that never go back."""

    async def sleep(self, seconds: float) -> None:
        """Comes back after so long, or later."""

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs beside everything else of this process and ends with it."""

    def mailbox(self) -> Mailbox:
        """A new, empty one."""


class Transport(Protocol):
    """Sends to whoever has a name. A message may be lost, late, doubled or overtaken; one that arrives is what was sent."""

    def send(self, to: str, message: Message) -> None:
        """Never waits and never fails: what cannot be sent is lost."""


class Journal(Protocol):
    """The coordinator's fenced, durable memory.

    A record of a term older than the newest in the journal is refused with `FencedError`, and so is a second `Term` of the same number.
    """

    async def read(self) -> Sequence[Record]:
        """All durable records, oldest first."""

    async def append(self, term: int, record: Record) -> None:
        """Comes back when the record is durable."""


class Checkpoints(Protocol):
    """Storage of stages, for all peers. It takes a state only from the worker that the coordinator has told to store it."""

    async def write(self, epoch: int, version: int, stage: int, snapshot: Any) -> None:
        """Comes back when it is durable, or refused; a second write of the same key changes nothing."""

    async def digest(self, snapshot: Any) -> str:
        """A fingerprint of a snapshot, bit for bit, as the store makes it of what it gets."""

    async def read(self, epoch: int, version: int, stage: int) -> Any:
        """What was written, or None where nothing complete is stored."""


class MicroBatchSource(Protocol):
    """Where a feeder gets its micro-batches."""

    async def load(self, version: int, micro_batch: int) -> Any:
        """What stage 0 is fed: the same for the same (version, micro_batch), whoever asks and whenever."""


class Compute(Protocol):
    """The arithmetic of one worker. States, activations, gradients and buffers are opaque to the protocol.

    Randomness is keyed by (version, micro_batch, stage), so that redone work gives the same numbers; `version` is the step's. States may be
    changed in place by `apply` only: the worker runs no kernel meanwhile. With staleness a state also holds the weights before its last
    step, and `apply` leaves those it makes of the present ones, which the step under way is computed with, as they are.
    """

    async def initial(self, stage: int) -> Any:
        """The state before step 0."""

    async def forward(self, state: Any, version: int, micro_batch: int, stage: int, entering: Any) -> Any:
        """What leaves the stage."""

    async def turn(self, state: Any, version: int, micro_batch: int, stage: int, entering: Any) -> tuple[Any, Any, float, float]:
        """Forward, loss and backward of the last stage: (gradient of what entered, contribution, loss total, weight)."""

    async def backward(self, state: Any, version: int, micro_batch: int, stage: int, entering: Any, gradient: Any) -> tuple[Any, Any]:
        """(gradient of what entered, contribution to the gradient of the weights)."""

    def buffer(self, stage: int) -> Any:
        """An empty sum of contributions."""

    async def accumulate(self, buffer: Any, contribution: Any) -> None:
        """Adds in place; the sum has landed when this comes back."""

    def part(self, buffers: Sequence[Any], stage: int, section: int, chunk: int) -> Any:
        """A copy of one chunk of the sum of buffers. Section 0 is the stage's own; the others are what it shares with tied stages."""

    def fits(self, stage: int, section: int, chunk: int, part: Any) -> bool:
        """Whether something that came from a peer has the form of that chunk of a sum."""

    def zero(self, stage: int, chunk: int) -> Any:
        """A sum of no parts."""

    def add(self, total: Any, part: Any) -> Any:
        """The sum; `total` may be changed in place."""

    def digest(self, sums: Sequence[Any]) -> str:
        """A fingerprint of a stage's reduced gradient, bit for bit."""

    def norm_squared(self, stage: int, section: int, sums: Sequence[Any]) -> float:
        """Of one section of a stage's reduced gradient, undivided; not finite when the gradient is not."""

    async def apply(self, state: Any, sums: Sequence[Any], commit: Committed) -> Any:
        """The state after the step; unchanged where the commit says the step is skipped. `sums` are the chunks of all sections."""

    def delayed(self, state: Any) -> Any:
        """The weights before the last step, to compute with; of a state before step 0, its own. Only with staleness."""

    def read_chunk(self, state: Any, chunk: int) -> Any:
        """A copy of one chunk of the state, weights and optimizer."""

    async def keep(self, state: Any) -> Any:
        """A copy that later steps do not change, made where kernels run."""

    def read_kept(self, kept: Any, chunk: int) -> Any:
        """A copy of one chunk of a state that was kept."""

    def expect(self, stage: int) -> None:
        """The stage's state is on its way: what it takes to hold it may be made ready meanwhile."""

    async def assemble(self, stage: int, chunks: Sequence[Any]) -> Any:
        """The state from all its chunks."""

    def snapshot(self, state: Any) -> Any:
        """A copy that later steps do not change."""

    async def restore(self, stage: int, snapshot: Any) -> Any:
        """The state a snapshot was taken of."""


@dataclass(slots=True, eq=False)
class SwarmProcess:
    """One process of the swarm: its name, what it hears and by what it acts."""

    name: str
    clock: Clock
    transport: Transport
    inbox: Mailbox
    nonce: int  # grows with every start of a process of this name
    random: random.Random
    emit: Observer = lambda event: None  # where its events go; it leaves their time to whoever has the run's
