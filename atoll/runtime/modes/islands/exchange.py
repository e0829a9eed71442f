"""What a site's training and its gateway have in common, in the process of rank 0: two threads, one state.

The training asks between two steps what is to be done (`next_order`): take the update of a round's border, change the weights, go on, end.
The gateway (`atoll.control.rounds`) has it done: it waits in `make_offer`, `advance` and `adopt` until the training has come that far. All
that the protocol sees changes in its own event loop.

Which steps these are is said by the round's choice, so that runs can be repeated: the border comes `inner_steps` after the one before, and
the new state `delay_steps` after the border, and not before where the exchange is early. Where it is late it is waited for if every site is
to make all steps; else the site trains on, for a round's steps at most, and a site that others wait for offers what it has (`hurry`).
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from atoll.codec.registry import make_codec
from atoll.control.rounds import GatewayReplacedError, RoundTerms
from atoll.control.rounds.messages import Offer, Position, SiteJoined, UpdateId
from atoll.control.rounds.site import Kept
from atoll.errors import JobFailedError
from atoll.runtime.modes.islands.aggregate import MEAN, Aggregation, aggregate
from atoll.runtime.modes.islands.chunks import ChunkForm, digest_of_tensors, packed
from atoll.runtime.modes.islands.measured import StepClock
from atoll.runtime.modes.islands.saved import SavedExchange
from atoll.runtime.modes.islands.spec import RoundChoice
from atoll.runtime.outer_update import Border, OuterState, outer_step, reach_border

__all__ = ["SiteOrder", "SiteExchange", "SiteTimes"]

_WAIT_SECONDS = 0.2  # between looks at whether somebody asked to stop
_SLACK = 0.1  # of a round: a site that is slower by no more still makes all steps of it


@dataclass(frozen=True)
class SiteOrder:
    """What the training does now."""

    kind: Literal["go on", "border", "change", "end", "interrupted", "grow"]
    weights: Tensor | None = None  # the new common ones
    base: Tensor | None = None  # since which progress is kept; None: since the border
    fresh: bool = False  # there is no progress to keep
    cursor: int = 0  # of the new state
    joined: tuple[SiteJoined, ...] = ()  # sites by which batches grow


@dataclass
class SiteTimes:
    """What a site did with its time."""

    waited_seconds: float = 0.0  # for rounds that were late
    rounds: int = 0
    steps: StepClock = field(default_factory=StepClock)


@dataclass
class _Change:
    """A new common state, on its way to the training."""

    position: Position
    state: OuterState
    kept: Kept
    cursor: int
    done: "asyncio.Future[None]"


@dataclass
class _Border:
    """The weights at a round's border."""

    step: int
    weights: Tensor
    losses: tuple[tuple[float, float], ...]
    delay: int
    residual: list[Tensor] = field(default_factory=list)


class SiteExchange:
    """`atoll.control.rounds.SiteTraining`, and what the training's own thread calls."""

    def __init__(
        self,
        site: str,
        beginning: OuterState | None,
        form: ChunkForm,
        total_steps: int,
        *,
        owed: Tensor | None = None,
        restored: Callable[[], SavedExchange | None] = lambda: None,
        aggregation: Aggregation = MEAN,
        noised: Callable[[str, Sequence[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        """`beginning` is the state before the first round, the same at all sites, if this one knows it, and `owed` what the site's codec
        left out by then; `restored` is what the site has on its disk of these rounds; `noised` makes of an update, by its name, what may
        be sent.
        """
        self.site, self.form, self.total_steps = site, form, total_steps
        self.times = SiteTimes()
        self.finished = False  # the last round is made
        self.position: Position | None = None
        self.cursor = self.steps = 0
        self.offer: Offer | None = None
        self._initial, self._owed, self._restored = beginning, owed, restored
        self._state: OuterState | None = None
        self._residual: list[Tensor] | None = None
        self._choice: RoundChoice | None = None
        self._told_of: Position | None = None  # of which round that is
        self.joined: tuple[SiteJoined, ...] = ()  # as the training has its batches
        self._losses: dict[int, tuple[float, float]] = {}  # of own steps that are in no state yet
        self._chunks: list[Any] = []
        self._border: _Border | None = None  # made, and its round not decided
        self._since = 0  # the step at which this round began
        self._hurry_at: float | None = None
        self._round_began = time.monotonic()
        self._change: _Change | None = None
        self._begun = False
        self._failure: BaseException | None = None
        self._incarnation = 0
        self._offers_made = 0
        self._changed = threading.Condition()
        self._aggregation, self._noised = aggregation, noised
        self.on_refused: Callable[[str, str], None] = lambda site, why: None  # an update of a site is not in a round, for this reason
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], None] = lambda: None

    # ---- for the training's thread

    def start(self, stop: Callable[[], bool]) -> tuple[int, Tensor] | None:
        """Waits until there is a state to begin with: (steps that are in it, its weights). None: somebody asked to stop before."""
        with self._changed:
            while self._state is None or self._choice is None:
                self._raise_failure()
                if stop() or self.finished:
                    return None
                self._changed.wait(_WAIT_SECONDS)
            self._begun, self._since, self._round_began = True, self.cursor, time.monotonic()
            return self.cursor, self._state.weights

    def record(self, step: int, loss: float, weight: float, seconds: float = 0.0) -> None:
        """A step was made."""
        with self._changed:
            self.steps = step
            self.times.steps.add(seconds)
            self._losses[step] = (loss, weight)

    def next_order(self, stop: Callable[[], bool]) -> SiteOrder:
        """What is to be done after the last step; waits where a round is late."""
        began = None
        with self._changed:
            while (order := self._order(stop)) is None:
                began = time.monotonic() if began is None else began
                self._changed.wait(_WAIT_SECONDS)
        if began is not None:
            self.times.waited_seconds += time.monotonic() - began
        return order

    def _order(self, stop: Callable[[], bool]) -> SiteOrder | None:
        self._raise_failure()
        new = self.new_joined()
        if new:
            return SiteOrder("grow", joined=new)
        step, border, over = self.steps, self._border, self.steps >= self.total_steps
        due = border is not None and (step >= border.step + border.delay or over)
        if self._change is not None and (border is None or due or self._change.kept != "since sent"):
            return self._order_to_change(self._change)
        if self.finished:
            return SiteOrder("end")
        if stop():
            return SiteOrder("interrupted")
        if self._is_untold():
            return None
        if border is None and self._change is None and self._is_border(step, over):
            return SiteOrder("border")
        return None if over or (due and self._waits(step)) else SiteOrder("go on")

    def _is_untold(self) -> bool:
        """Where runs are to be repeated nothing is done before it is known how this round is made: its border may be due at once."""
        return self._choice is not None and self._choice.equal_steps and self._told_of != self.position

    def new_joined(self) -> tuple[SiteJoined, ...]:
        """Sites whose samples the batches do not have yet."""
        return () if self._choice is None else self._choice.joined[len(self.joined) :]

    def grown(self, joined: tuple[SiteJoined, ...]) -> None:
        """They have them now, on all ranks of the site."""
        with self._changed:
            self.joined += joined
        self._in_loop(self._wake)

    def _waits(self, step: int) -> bool:
        """Whether nothing is trained while a round is late: where runs are to be repeated, and after a round's steps in any case."""
        choice, border = self._choice, self._border
        assert choice is not None and border is not None  # noqa: PT018
        return choice.equal_steps or step >= border.step + choice.inner_steps

    def _order_to_change(self, change: _Change) -> SiteOrder:
        fresh = self._border is not None and change.kept == "since sent" and self._border.step == self.steps
        assert self._state is not None
        return SiteOrder("change", change.state.weights, self._state.weights if change.kept == "all" else None, fresh, change.cursor)

    def _is_border(self, step: int, over: bool) -> bool:
        choice = self._choice
        if choice is None or step <= self.cursor:
            return False
        if over or step >= self._since + choice.inner_steps:
            return True
        return self._hurry_at is not None and time.monotonic() >= self._hurry_at

    def put_border(self, weights: Tensor) -> None:
        """The weights now, which are the training's no more."""
        with self._changed:
            assert self._choice is not None
            losses = tuple(self._losses.get(step, (0.0, 0.0)) for step in range(self.cursor + 1, self.steps + 1))
            self._border = _Border(self.steps, weights, losses, self._choice.delay_steps)
        self._in_loop(self._wake)

    def changed(self) -> None:
        """The weights are those of the new state now."""
        done = threading.Event()

        def commit() -> None:
            with self._changed:
                self._commit()
            done.set()

        self._in_loop(commit)
        while not done.wait(_WAIT_SECONDS):
            self._raise_failure()

    def _commit(self) -> None:
        change, border = self._change, self._border
        assert change is not None
        if change.kept == "since sent":
            assert border is not None
            self._residual, self._since = border.residual, border.step
        else:
            self._since = self.steps
        self._become(change.position, change.state, change.cursor)
        self._change = None
        if not change.done.done():
            change.done.set_result(None)

    def _become(self, position: Position, state: OuterState, cursor: int) -> None:
        self.position, self._state, self.cursor = position, state, cursor
        self.offer, self._border, self._hurry_at = None, None, None
        self._round_began = time.monotonic()
        self._losses = {step: loss for step, loss in self._losses.items() if step > cursor}
        self.times.rounds += 1
        self._changed.notify_all()

    # ---- for whoever runs the gateway

    def attach(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """The gateway runs in this loop, and is woken so."""
        self._loop, self._wake = loop, wake

    def fail(self, error: BaseException) -> None:
        """The gateway has ended: the training hears it at its next step."""
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def finish(self) -> None:
        """The last round is made."""
        with self._changed:
            self.finished = True
            self._changed.notify_all()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _in_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(call)

    # ---- SiteTraining, in the gateway's loop

    @property
    def done(self) -> bool:
        """Of the steps that this site was to make."""
        return self.position is not None and self.cursor >= self.total_steps

    def claim(self, incarnation: int) -> None:
        """The newest counts."""
        self._incarnation = max(self._incarnation, incarnation)

    def _check(self, incarnation: int) -> None:
        if incarnation < self._incarnation:
            raise GatewayReplacedError(f"another process of {self.site} is its gateway")

    def at_border(self, terms: RoundTerms, seconds: float, hurry: bool) -> bool:
        """Whether the training has put its weights there. Where others wait, it is to do so soon."""
        choice = RoundChoice.of(terms)
        with self._changed:
            if (choice, self.position) != (self._choice, self._told_of):
                self._choice, self._told_of = choice, self.position
                self._changed.notify_all()
            if hurry and self._hurry_at is None and not choice.equal_steps:
                now = time.monotonic()
                self._hurry_at = now + _SLACK * (now - self._round_began)
        return self._border is not None and self._change is None and not self.new_joined()

    async def restore(self) -> None:
        """From the site's own disk."""
        saved = await asyncio.to_thread(self._restored)
        if saved is not None and self.position is None and saved.state.weights.numel() == self.form.elements:
            self._residual = self._cut(saved.residual)
            self._begin_with(saved.position, saved.state, saved.cursor)

    def _cut(self, row: Tensor | None) -> list[Tensor] | None:
        return None if row is None else [part.clone() for part in self.form.parts(row)]

    def saved(self) -> SavedExchange:
        """What is to be kept of the present state."""
        assert self._state is not None and self.position is not None  # noqa: PT018
        owed = torch.cat(self._residual) if self._residual is not None else None
        return SavedExchange(self.position, self.cursor, self._state, owed)

    async def begin(self, position: Position) -> None:
        """The state before the first round."""
        if self.position is None:
            self._residual = self._cut(self._owed)
            self._begin_with(position, self._first(), 0)

    def _first(self) -> OuterState:
        if self._initial is None:
            raise JobFailedError(f"{self.site}: no site has the common state any more, and this one joined after the run went on")
        return OuterState(self._initial.weights.clone(), self._initial.momentum.clone())

    def _begin_with(self, position: Position, state: OuterState, cursor: int) -> bool:
        """If the training has not begun, it does with this."""
        with self._changed:
            if not self._begun:
                self.steps = cursor
                self._become(position, state, cursor)
            return not self._begun

    async def make_offer(self, incarnation: int) -> Offer:
        """The update, encoded chunk by chunk beside the training."""
        self._check(incarnation)
        border, state, choice = self._border, self._state, self._choice
        assert border is not None and state is not None and choice is not None and self.position is not None  # noqa: PT018
        found = await asyncio.to_thread(self._encode, border.weights, state, choice, f"{incarnation}.{self._offers_made + 1}")
        self._check(incarnation)
        if self._border is not border or self._state is not state:
            raise GatewayReplacedError("the state changed meanwhile")
        self._chunks = [packed(part.update) for part in found]
        border.residual = [part.residual for part in found]
        self._offers_made += 1
        weight = sum(weight for _, weight in border.losses) or float(border.step - self.cursor)
        epoch, round = self.position
        identity = UpdateId(self.site, incarnation, self._offers_made)
        digest = self.digest(self._chunks)
        losses = border.losses if self._noised is None else ()
        self.offer = Offer(identity, epoch, round, self.cursor, border.step, weight, digest, losses, len(self.joined))
        return self.offer

    def _encode(self, weights: Tensor, state: OuterState, choice: RoundChoice, name: str) -> list[Border]:
        codec, parts = make_codec(choice.codec), self.form.parts
        owed: Sequence[Tensor | None] = self._residual if self._residual is not None else [None] * len(self.form.bounds)
        if self._noised is not None:
            noised = self._noised(name, parts(state.weights - weights))
            nothing = map(torch.zeros_like, noised)
            whole = zip(noised, nothing, owed, strict=True)
            return [reach_border(OuterState(d, d), zero, rest, codec, choice.feedback) for d, zero, rest in whole]
        rows = zip(parts(state.weights), parts(state.momentum), parts(weights), owed, strict=True)
        return [reach_border(OuterState(g, b), own, rest, codec, choice.feedback) for g, b, own, rest in rows]

    def offered_chunk(self, chunk: int) -> Any:
        """Of the update."""
        return self._chunks[chunk]

    def fits(self, payload: Any) -> bool:
        """Its form; `ChunkForm.why_unfit` looked at its numbers when it came in."""
        return self.form.is_update(payload)

    def fits_state(self, payload: Any) -> bool:
        """Its form."""
        return self.form.is_state(payload)

    def digest(self, chunks: Sequence[Any]) -> str:
        """Of headers and numbers."""
        heads = [torch.frombuffer(bytearray(chunk[0]), dtype=torch.uint8) for chunk in chunks]
        return digest_of_tensors([part for head, chunk in zip(heads, chunks, strict=True) for part in (head, *chunk[1:])])

    async def combine(self, updates: Sequence[tuple[Offer, Sequence[Any]]]) -> tuple[Any, str]:
        """Δ, and its fingerprint."""
        return await asyncio.to_thread(self._sum, [(offer, list(chunks)) for offer, chunks in updates])

    def _sum(self, updates: Sequence[tuple[Offer, Sequence[Any]]]) -> tuple[Tensor, str]:
        found = aggregate(updates, self.form, self._aggregation)
        for site, why in found.refused.items():
            self.on_refused(site, f"round {updates[0][0].round + 1}: {why}")
        return found.mean, digest_of_tensors([found.mean])

    async def advance(self, incarnation: int, mean: Any, terms: RoundTerms, kept: Kept, cursor: int) -> None:
        """The state after the round, once the training is where it is to have it."""
        self._check(incarnation)
        assert self._state is not None and self.position is not None  # noqa: PT018
        outer, before = RoundChoice.of(terms).outer, self._state

        def step() -> OuterState:
            return outer_step(OuterState(before.weights.clone(), before.momentum.clone()), mean, outer)

        state = await asyncio.to_thread(step)
        self._check(incarnation)
        epoch, round = self.position
        await self._bring((epoch, round + 1), state, kept, cursor)

    async def _bring(self, position: Position, state: OuterState, kept: Kept, cursor: int) -> None:
        if kept == "nothing" and not self._begun:
            self._residual = None
        if self._begin_with(position, state, cursor):
            return
        if kept == "nothing":
            self.fail(
                JobFailedError(f"{self.site}: what it has trained since step {cursor} cannot be added to the common state; it begins again")
            )
            raise GatewayReplacedError("the site begins again")
        change = _Change(position, state, kept, cursor, asyncio.get_running_loop().create_future())
        with self._changed:
            self._change = change
            self._changed.notify_all()
        await change.done

    def relabel(self, incarnation: int, position: Position) -> None:
        """The same state under another epoch's name."""
        self._check(incarnation)
        assert self._state is not None
        with self._changed:
            self._since = self.steps
            self._become(position, self._state, self.cursor)

    def copy_state(self) -> OuterState:
        """States are never changed in place."""
        assert self._state is not None
        return self._state

    def read_chunk(self, state: OuterState, chunk: int) -> Any:
        """Weights and momentum."""
        start, stop = self.form.bounds[chunk]
        return [state.weights[start:stop], state.momentum[start:stop]]

    async def adopt(self, incarnation: int, position: Position, chunks: Sequence[Any], kept: Kept, cursor: int) -> None:
        """What others gave; nothing stands for the state before the first round."""
        self._check(incarnation)
        state = self._first()
        if chunks:
            state = OuterState(torch.cat([chunk[0] for chunk in chunks]), torch.cat([chunk[1] for chunk in chunks]))
        await self._bring(position, state, kept, cursor)
