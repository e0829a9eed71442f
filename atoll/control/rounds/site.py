"""What a gateway sees of its site: a training that goes on by itself, whose weights, optimizer and unsent rest nobody else knows."""

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias

from atoll.control.rounds.messages import Offer, Position, RoundRecord, RoundTerms
from atoll.errors import AtollError

__all__ = ["GatewayReplacedError", "Kept", "RoundJournal", "SiteTraining"]

Kept: TypeAlias = Literal["all", "since sent", "nothing"]
"""Which of a site's own steps go on counting when the common state changes: all that are not in it yet, those made since its update was
sent, or none, since it cannot be known what they were added to."""


class GatewayReplacedError(AtollError):
    """Another process of the site has become its gateway: this one must leave the site's training alone."""

    exit_code = 1


class RoundJournal(Protocol):
    """The coordinator's fenced, durable memory, as `atoll.control.world.Journal` is the swarm's."""

    async def read(self) -> Sequence[RoundRecord]:
        """All durable records, oldest first."""

    async def append(self, term: int, record: RoundRecord) -> None:
        """Comes back when the record is durable; raises `FencedError` where a newer coordinator has written."""


class SiteTraining(Protocol):
    """One site's training, as all processes of the site have it in common. Updates, sums, states and their chunks are opaque here.

    Inner steps are counted from the beginning of the site's data and go on beside all that is below, unless a round asks that they wait.
    What changes the state does so at once, when it comes back, and only for the newest gateway: others get `GatewayReplacedError`.
    """

    @property
    def position(self) -> Position | None:
        """Which common state its weights are based on; None: none yet."""

    @property
    def cursor(self) -> int:
        """The first inner step that is not in that state."""

    @property
    def steps(self) -> int:
        """The inner steps made so far."""

    @property
    def done(self) -> bool:
        """Whether it makes no more steps, and all are in that state: no update of it is waited for."""

    @property
    def offer(self) -> Offer | None:
        """The update made on the present state, if there is one."""

    def at_border(self, terms: RoundTerms, seconds: float, hurry: bool) -> bool:
        """Whether the site's update can be made: `seconds` since it made the one before. `hurry`: another site has made its own."""

    def claim(self, incarnation: int) -> None:
        """The gateway of this incarnation is the newest from now on."""

    async def restore(self) -> None:
        """Where nothing is in memory, goes on from the site's own checkpoint, if there is one, with no steps beyond its cursor."""

    async def begin(self, position: Position) -> None:
        """The state before the first round, which every site can make."""

    def relabel(self, incarnation: int, position: Position) -> None:
        """The present state is also that of another position. An update made on it is none any more; its steps go on counting."""

    async def make_offer(self, incarnation: int) -> Offer:
        """The update of all steps from the cursor to now, from the present weights and what was left out before."""

    def offered_chunk(self, chunk: int) -> Any:
        """A part of the update in `offer`."""

    def fits(self, payload: Any) -> bool:
        """Whether something that came from another site has the form of a chunk of an update."""

    def fits_state(self, payload: Any) -> bool:
        """Whether it has the form of a chunk of the common state."""

    def digest(self, chunks: Sequence[Any]) -> str:
        """A fingerprint of an update."""

    async def combine(self, updates: Sequence[tuple[Offer, Sequence[Any]]]) -> tuple[Any, str]:
        """(what updates, each with its chunks, add up to in this order by their weights; its fingerprint, bit for bit)."""

    async def advance(self, incarnation: int, mean: Any, terms: RoundTerms, kept: Kept, cursor: int) -> None:
        """The state after the round. What a codec left out counts as sent only with `since sent`."""

    def copy_state(self) -> Any:
        """A copy of the common state that later rounds do not change."""

    def read_chunk(self, state: Any, chunk: int) -> Any:
        """A part of such a copy."""

    async def adopt(self, incarnation: int, position: Position, chunks: Sequence[Any], kept: Kept, cursor: int) -> None:
        """The common state others gave, in place of the present one."""
