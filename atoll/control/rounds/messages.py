"""What gateways and the coordinator of rounds tell each other, and what the coordinator writes to its journal.

A position (epoch, round) names the state all sites have in common after so many rounds; an epoch begins where everybody went back to an
earlier state. An update is named by its site, the incarnation of the gateway that made it and a number; what it holds by its digest.
"""

import math
from typing import Any, NamedTuple, TypeAlias

import msgspec

from atoll.control.journal import Epoch, Term
from atoll.control.messages import Message

__all__ = [
    "FetchGlobal",
    "FetchUpdate",
    "GlobalChunk",
    "Holding",
    "Offer",
    "Position",
    "RoundAnnounce",
    "RoundCommitted",
    "RoundId",
    "RoundRecord",
    "RoundSettings",
    "RoundTerms",
    "RoundView",
    "SiteBeat",
    "SiteJoined",
    "SitePlace",
    "UpdateChunk",
    "UpdateId",
    "why_no_round_message",
]

Position: TypeAlias = tuple[int, int]
"""(epoch, round): the state before that round."""

RoundId: TypeAlias = tuple[int, int]
"""(term, seq) of the announcement that named a round's updates. A round may be named several times until one of them is committed."""


class RoundSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What all gateways and the coordinator share."""

    rounds: int  # the run is over after so many
    chunks: int = 1  # an update, and the common state, travel in so many parts
    quorum: int = 1  # updates a round has at least, and sites that hold all of them before it is committed
    grace_seconds: float = 10.0  # others are waited for so long after the quorum is reached
    heartbeat_seconds: float = 0.5
    silent_beats: int = 4  # a site that is not heard for so many is not waited for
    listen_seconds: float = 2.0  # a new coordinator listens so long before it decides
    patience_seconds: float = 5.0  # a chunk that did not come is asked of somebody else
    exchange_seconds: float = 60.0  # a round whose updates do not come is named anew without the one that most lack
    lost_seconds: float = 120.0  # a state that nobody has for so long is lost
    sites: int = 0  # a run's first coordinator waits for so many before the first round, `start_seconds` at most
    start_seconds: float = 0.0
    recent: int = 2  # rounds of which updates are kept, for sites that are behind
    in_flight: int = 16  # chunks a gateway asks for at once


class UpdateId(NamedTuple):
    """Which update: unique over the whole run."""

    site: str
    incarnation: int
    number: int


class Offer(msgspec.Struct, frozen=True, gc=False):
    """An update a site has made at a round's border: of its inner steps `first` up to, but not, `last`, which weigh so many tokens."""

    update: UpdateId
    epoch: int
    round: int
    first: int
    last: int
    weight: float
    digest: str
    losses: tuple[tuple[float, float], ...] = ()  # of its steps: loss and weight, for those who watch
    joined: int = 0  # how many sites it knew to have joined the run, each of which changes whose samples are whose


class RoundTerms(msgspec.Struct, frozen=True, gc=False):
    """How a round is made, the same for all sites: how long they train, and what their training knows how to read (codec, η, μ)."""

    seconds: float
    choice: str = ""


class RoundCommitted(msgspec.Struct, frozen=True, tag="round", gc=False):
    """A round is made of exactly these updates, in this order, and `digest` is of what they add up to."""

    epoch: int
    round: int
    id: RoundId
    named: tuple[Offer, ...]
    terms: RoundTerms
    digest: str


class SiteJoined(msgspec.Struct, frozen=True, tag="joined", gc=False):
    """A site that the run did not begin with takes part, with so many samples of every global batch from `first` on (counted from 0).

    It is never taken back, whatever becomes of the site: others have trained with the batches as it says since.
    """

    site: str
    samples: int
    first: int


RoundRecord: TypeAlias = Term | Epoch | RoundCommitted | SiteJoined
"""What the journal of rounds holds; the first two as the swarm's does."""


class Holding(msgspec.Struct, frozen=True, gc=False):
    """Which processes have all of an update."""

    update: UpdateId
    processes: tuple[str, ...]


class RoundView(msgspec.Struct, frozen=True, gc=False):
    """Where the run stands: the round under way, and the last ones. `id` is None while updates are collected."""

    order: tuple[int, int]  # (term, seq)
    epoch: int
    round: int
    origin: Epoch
    terms: RoundTerms
    offers: tuple[Offer, ...]  # those named, or those known so far
    id: RoundId | None
    recent: tuple[RoundCommitted, ...]
    holdings: tuple[Holding, ...]
    donors: tuple[str, ...]  # processes that have the state of this position
    finished: bool


class SitePlace(msgspec.Struct, frozen=True, gc=False):
    """What the coordinator says to one process, of all that are started under its name: `nonce` tells which.

    `incarnation` is above 0 where it is its site's gateway. `named` is the site's last update in the state at the view's position.
    """

    nonce: int
    incarnation: int
    named: Offer | None


class RoundAnnounce(Message, frozen=True, gc=False):
    """Coordinator → every process."""

    view: RoundView
    yours: SitePlace


class SiteBeat(Message, frozen=True, gc=False):
    """A site's process → coordinator: all of where it stands, again and again."""

    site: str
    process: str
    nonce: int
    count: int  # grows with every beat of a process
    incarnation: int
    position: Position | None
    offer: Offer | None
    gathered: RoundId | None  # it has what the updates of that naming add up to
    digest: str
    holds: frozenset[UpdateId]
    done: bool = False  # it makes no more steps, and all that it made are in its state


class FetchUpdate(Message, frozen=True, gc=False):
    """Gateway → whoever holds an update."""

    update: UpdateId
    chunk: int
    process: str


class UpdateChunk(Message, frozen=True, gc=False):
    """A part of an update."""

    update: UpdateId
    chunk: int
    payload: Any


class FetchGlobal(Message, frozen=True, gc=False):
    """Gateway → whoever has the state of a position."""

    position: Position
    chunk: int
    process: str


class GlobalChunk(Message, frozen=True, gc=False):
    """A part of the common state."""

    position: Position
    chunk: int
    payload: Any


def why_no_round_message(message: Any, settings: RoundSettings) -> str | None:
    """What is wrong with a message; None: it can be meant. Whoever takes messages in drops the others and names their sender."""
    if isinstance(message, SiteBeat):
        offer = message.offer
        if message.incarnation < 0 or message.count < 0 or (message.position is not None and min(message.position) < 0):
            return "its numbers cannot be"
        return None if offer is None else _why_no_offer(offer, message.site)
    if isinstance(message, FetchUpdate | UpdateChunk | FetchGlobal | GlobalChunk):
        return None if 0 <= message.chunk < settings.chunks else "its chunk cannot be"
    return None if isinstance(message, RoundAnnounce) else f"{type(message).__name__} is no message of rounds"


def _why_no_offer(offer: Offer, site: str) -> str | None:
    if offer.update.site != site:
        return "its update is of another site"
    if not 0 <= offer.first < offer.last:
        return "its update is of no steps"
    if len(offer.losses) > offer.last - offer.first:
        return "it tells of more steps than it has made"
    return None if 0 < offer.weight < math.inf else "its update weighs nothing"
