"""Round: one reduction at one member, in the fabric's loop. Everything is pulled, so nobody holds what it did not ask for.

A head pulls contributions and sums them chunk by chunk; members pull reduced chunks as they become ready. Encoding, decoding and sums run
in worker threads; sending, receiving and summing of different chunks overlap.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar

import torch

from atoll.codec.base import Codec
from atoll.errors import CodecError, FabricError, NonFiniteTensorError, RefusedError
from atoll.fabric.collective.link_codecs import LinkCodecs
from atoll.fabric.collective.messages import CellProgress, EncodedChunk, Failed, Item, PullChunks
from atoll.fabric.collective.plan import Cell, RoundPlan
from atoll.fabric.collective.pull import Arrivals, Child, Pacing, Pulling, Watch
from atoll.fabric.collective.result import PartOutcome, ReductionResult, SumFeedback
from atoll.fabric.collective.sums import ACCUMULATED, ReducedCell, Scratch, Summand, chunk_digest, make_chunk, open_chunk, weighted_sum
from atoll.fabric.payload import DTYPES

__all__ = ["Peers", "Round"]

Result = TypeVar("Result")
_SALVAGE_SECONDS = 0.05


class Peers:
    """What a round needs of its surroundings."""

    def contributions(self, peer: str, pull: PullChunks) -> AsyncIterator[Item]:
        """Asks a peer for its contribution to a cell, or its site's."""
        raise NotImplementedError

    def reduced(self, peer: str, pull: PullChunks) -> AsyncIterator[Item]:
        """Asks a peer for a reduced cell."""
        raise NotImplementedError

    async def progress(self, peer: str, pull: PullChunks) -> CellProgress:
        """Asks a peer how much of a reduced cell it holds."""
        raise NotImplementedError

    def watched(self, peer: str, limit_seconds: float, first_seconds: float) -> Pulling:
        """A pull from a peer that is about to begin."""
        raise NotImplementedError

    def clock(self) -> float:
        """Seconds."""
        raise NotImplementedError

    def sent(self, peer: str, begin: float, end: float, nbytes: int) -> None:
        """Bytes went to a peer between two times."""

    def received(self, begin: float, end: float, nbytes: int) -> None:
        """Bytes came in between two times."""


class Round:
    """At one member. `buffer`: its contribution, which nobody changes until `run` returned; it is never written to."""

    def __init__(
        self,
        plan: RoundPlan,
        name: str,
        buffer: torch.Tensor | None,
        peers: Peers,
        codecs: LinkCodecs,
        work: Executor,
        out: torch.Tensor | None,
        feedback: SumFeedback | None = None,
    ) -> None:
        self.plan, self.name = plan, name
        self.cells = [ReducedCell(plan, cell) for cell in plan.cells]
        self.settled: asyncio.Future[ReductionResult] = asyncio.get_running_loop().create_future()
        self._me = plan.member(name)
        self._buffer = _checked_buffer(plan, self._me.weight, buffer)
        self._out = _checked_out(plan, out) if self._me.receives or any(plan.wants(cell, name) for cell in plan.cells) else torch.empty(0)
        self._peers, self._work, self._codecs = peers, work, codecs
        self._feedback = _begun_feedback(plan, name, self._codecs, feedback)
        self._watch = Watch(peers.clock)
        self._scratch = Scratch()
        self._outgoing = {True: Pacing(), False: Pacing()}  # contributions, by whether they stay inside the site
        self._handing_out = {True: Pacing(), False: Pacing()}  # results, likewise
        self._arrivals: dict[int, Arrivals] = {}
        self._pulls: set[asyncio.Task[None]] = set()
        self._summed: dict[int, int] = {}  # by cell: chunks of a site's sum that were asked for
        self._unserved = {number for number, cell in enumerate(plan.cells) if self._brings(cell, name) and plan.target(cell, name)}
        self._served = asyncio.Event()
        self._began = asyncio.Event()

    # ---- the whole of it

    async def run(self) -> ReductionResult:
        """Until the result is there, or what can be had of it. Never hangs: everything waited for has an end."""
        watch = asyncio.create_task(self._watch.run())
        tasks = [watch]
        try:
            for number, cell in enumerate(self.plan.cells):
                if self.plan.head(cell, self._me.site) == self.name and self.plan.children(cell, self.name):
                    self._gather(number)
            self._began.set()
            cells = [asyncio.create_task(self._obtain(number)) for number in range(len(self.cells)) if self._concerns(number)]
            tasks += cells
            await asyncio.gather(*cells)
            if not self._me.receives:
                await self._contributed()
            reduction = self._reduction()
            self.settled.set_result(reduction)
            return reduction
        finally:
            self._buffer = None
            if self._feedback is not None:
                self._feedback.end()
            for task in [*tasks, *self._pulls]:
                task.cancel()
            await asyncio.wait([*tasks, *self._pulls])
            for state in self.cells:
                state.fail(Failed((self.name,), f"{self.name} ended the round"))
            if not self.settled.done():
                self.settled.cancel()

    def _concerns(self, number: int) -> bool:
        cell = self.plan.cells[number]
        return cell.owner == self.name or self.plan.wants(cell, self.name)

    async def _obtain(self, number: int) -> None:
        if self.plan.cells[number].owner == self.name:
            await self._reduce(number)
        else:
            await self._receive(number)

    async def _contributed(self) -> None:
        """Waits until everybody has what this member contributes, or nobody asks any more."""
        limit = self.plan.begin_seconds + self.plan.stall_seconds
        while self._unserved:
            self._served.clear()
            try:
                await asyncio.wait_for(self._served.wait(), limit)
            except TimeoutError:
                return

    def _reduction(self) -> ReductionResult:
        found: list[PartOutcome] = []
        for cell in self.cells if self._me.receives else []:
            found += cell.outcomes()
        for part in found:
            if not part.contributors:
                self._out[part.start : part.stop] = 0
        value = self._out if self._me.receives else self._out[:0]
        return ReductionResult(round=self.plan.id, value=value, parts=tuple(found), expected=self.plan.contributors)

    # ---- contributions: what this member brings

    async def contributions(self, pull: PullChunks, peer: str) -> AsyncIterator[Item]:
        """This member's contribution to a cell, or its site's if it stands in for it; the next chunk is made while one is sent."""
        number, cell = self._cell(pull)
        if peer not in (self.plan.target(cell, self.name), cell.owner) or not self._brings(cell, self.name):
            raise RefusedError(f"round {self.plan.id}: {peer} has no claim to the contribution of {self.name} to cell {number}")
        await self._began.wait()
        near = self.plan.member(peer).site == self._me.site
        last = len(self.cells[number].spans)
        pacing = self._outgoing[near]
        lane = pacing.begin(self._fraction(number, pull.first - 1))
        following = asyncio.create_task(self._bring(number, pull.first, peer, near))
        try:
            for index in range(pull.first, last):
                item = await following
                if index + 1 < last and isinstance(item, EncodedChunk):
                    following = asyncio.create_task(self._bring(number, index + 1, peer, near))
                await pacing.turn(lane)
                begin = self._peers.clock()
                yield item
                self._peers.sent(peer, begin, self._peers.clock(), _nbytes(item))
                pacing.advanced(lane, self._fraction(number, index))
                if isinstance(item, Failed):
                    break
        finally:
            following.cancel()
            following.add_done_callback(_seen)
            pacing.end(lane)
            self._unserved.discard(number)
            self._served.set()

    def _brings(self, cell: Cell, name: str) -> bool:
        stands_in = self.plan.head(cell, self.plan.member(name).site) == name
        return self.plan.member(name).weight is not None or (stands_in and bool(self.plan.children(cell, name)))

    async def _bring(self, number: int, index: int, peer: str, near: bool) -> Item:
        """One chunk of it."""
        codec = self._codecs.towards(peer, near=near)
        if number not in self._arrivals:
            return await self._run(self._encode_own, number, index, codec)
        if self._summed.get(number, 0) != index:
            raise RefusedError(f"round {self.plan.id}: chunk {index} of cell {number} was summed and sent already")
        self._summed[number] = index + 1
        terms, places, failure = await self._terms(number, index)
        if failure is not None:
            return failure
        return await self._run(self._encode_sum, number, index, places, codec, terms, 1.0)

    def _encode_own(self, number: int, index: int, codec: Codec) -> EncodedChunk:
        assert self._me.weight is not None
        own = Summand(self._own(number, index), self._me.weight)
        return self._encode_sum(number, index, (self.plan.index[self.name],), codec, [own], 1.0)

    def _encode_sum(
        self, number: int, index: int, places: tuple[int, ...], codec: Codec, terms: list[Summand], divisor: float
    ) -> EncodedChunk:
        def encode(value: torch.Tensor) -> EncodedChunk:
            begin = time.perf_counter()
            chunk = make_chunk(index, places, codec, value)
            self._codecs.timed(codec, value.nbytes, time.perf_counter() - begin)
            return chunk

        if self._feedback is None:
            return encode(weighted_sum(terms, divisor, self._scratch))
        return self._feedback.encode(self.cells[number].spans[index], weighted_sum(terms, 1.0, self._scratch), divisor, encode)

    def _own(self, number: int, index: int) -> torch.Tensor:
        start, stop = self.cells[number].spans[index]
        buffer = self._buffer
        if buffer is None:
            raise RefusedError(f"round {self.plan.id} is over at {self.name}")
        return buffer[start:stop]

    # ---- summing: what others bring

    def _gather(self, number: int) -> None:
        """Begins to pull contributions to a cell this member is head of."""
        cell, places = self.plan.cells[number], self.plan.index
        children = [
            Child(name, places[name], tuple(places[one] for one in brings), 0) for name, brings in self.plan.children(cell, self.name)
        ]
        leave_out = self.plan.missing == "leave out"
        self._arrivals[number] = Arrivals(children, lambda child: self._spawn(self._pull_child(number, child)), replace=leave_out)

    async def _pull_child(self, number: int, child: Child) -> None:
        plan, last = self.plan, len(self.cells[number].spans)
        level = 2 if len(child.brings) > 1 else 1
        pulling = self._peers.watched(child.name, level * plan.stall_seconds, level * (plan.stall_seconds + plan.begin_seconds))
        asked = self._peers.clock()

        async def take(item: Item) -> bool:
            nonlocal asked
            now = self._peers.clock()
            self._peers.received(asked, now, _nbytes(item))
            done = await child.take(item, last, lambda chunk: self._check_chunk(number, chunk))
            asked = self._peers.clock()
            return done

        error = await self._watch.pull(
            pulling, lambda: self._peers.contributions(child.name, PullChunks(plan.id, number, child.first)), take
        )
        if error is not None:
            await child.items.put(Failed((child.name,), str(error)))

    async def _replacements(self, number: int, child: Child) -> list[Child]:
        """The others of a site whose stand-in is lost, from the chunk on that it did not bring."""
        names = [member.name for member in self.plan.members]
        return [Child(names[place], place, (place,), child.first) for place in child.brings if place != child.place]

    async def _terms(self, number: int, index: int) -> tuple[list[Summand], tuple[int, ...], Failed | None]:
        """What is added for a chunk, in order of the members; whose contributions that makes; or why it cannot be."""
        arrived: list[tuple[int, EncodedChunk]] = []
        if (arrivals := self._arrivals.get(number)) is not None:
            arrived = await arrivals.row(index, lambda child: self._replacements(number, child))
            if arrivals.lost and self.plan.missing == "fail":
                blamed = tuple(name for lost in arrivals.lost.values() for name in lost.blamed)
                return [], (), Failed(blamed, "; ".join(lost.reason for lost in arrivals.lost.values()))
        terms = [(place, Summand(chunk.encoded()), chunk.contributors) for place, chunk in arrived]
        if self._me.weight is not None:
            here = self.plan.index[self.name]
            terms = sorted([*terms, (here, Summand(self._own(number, index), self._me.weight), (here,))], key=lambda term: term[0])
        if not terms:
            lost = tuple(arrivals.lost) if arrivals is not None else ()
            return [], (), Failed(lost, f"no contribution to cell {number} arrived")
        return [term for _, term, _ in terms], tuple(sorted(place for _, _, places in terms for place in places)), None

    async def _reduce(self, number: int) -> None:
        """Sums a cell this member owns. Its own copy is decoded from the same bytes everybody gets."""
        state = self.cells[number]
        others = [name for name in self.plan.receivers if name != self.name]
        while not state.over:
            index = state.held
            terms, places, failure = await self._terms(number, index)
            if failure is not None:
                state.fail(failure)
                return
            weight = sum(self.plan.members[place].weight or 0.0 for place in places)
            divisor = weight if self.plan.mean and weight > 0 else 1.0
            codec = self._codecs.for_all(others)
            try:
                chunk, digest = await self._run(self._seal, number, index, places, codec, terms, divisor)
            except NonFiniteTensorError as error:  # values that this codec cannot carry: nobody gets this part
                state.fail(Failed((self.name,), f"the sum at {self.name}: {error}"))
                return
            state.add(chunk, digest)

    def _seal(
        self, number: int, index: int, places: tuple[int, ...], codec: Codec, terms: list[Summand], divisor: float
    ) -> tuple[EncodedChunk, str]:
        chunk = self._encode_sum(number, index, places, codec, terms, divisor)
        if not self._out.numel():
            return chunk, chunk_digest(chunk)
        start, stop = self.cells[number].spans[index]
        return chunk, open_chunk(chunk, self._out[start:stop])

    # ---- the result: what others reduced

    async def reduced(self, pull: PullChunks, peer: str) -> AsyncIterator[Item]:
        """A reduced cell, chunk by chunk as it becomes ready."""
        number, _ = self._cell(pull)
        pacing = self._handing_out[self.plan.member(peer).site == self._me.site]
        state = self.cells[number]
        lane = pacing.begin(self._fraction(number, pull.first - 1))
        try:
            for index in range(pull.first, len(state.spans) if pull.until is None else min(pull.until, len(state.spans))):
                item = await state.wait(index)
                await pacing.turn(lane)
                begin = self._peers.clock()
                yield item
                self._peers.sent(peer, begin, self._peers.clock(), _nbytes(item))
                pacing.advanced(lane, self._fraction(number, index))
                if isinstance(item, Failed):
                    return
        finally:
            pacing.end(lane)

    def _fraction(self, number: int, index: int) -> float:
        """What of a cell is behind its chunk `index`."""
        cell, spans = self.plan.cells[number], self.cells[number].spans
        return (spans[min(index, len(spans) - 1)][1] - cell.start) / cell.elements if index >= 0 else 0.0

    async def _receive(self, number: int) -> None:
        plan, cell = self.plan, self.plan.cells[number]
        source = plan.source(cell, self.name)
        assert source is not None
        level = 3 if source == cell.owner else 4
        error = await self._pull_reduced(
            number, source, None, level * plan.stall_seconds, level * (plan.stall_seconds + plan.begin_seconds)
        )
        if not self.cells[number].over:
            await self._salvage(number, source, str(error))

    async def _pull_reduced(self, number: int, source: str, until: int | None, limit: float, first: float) -> FabricError | None:
        state = self.cells[number]
        pulling = self._peers.watched(source, limit, first)
        asked = self._peers.clock()

        async def take(item: Item) -> bool:
            nonlocal asked
            self._peers.received(asked, self._peers.clock(), _nbytes(item))
            if isinstance(item, Failed):
                state.fail(item)
            else:
                self._check_reduced(number, item)
                start, stop = state.spans[item.index]
                digest = await self._run(open_chunk, item, self._out[start:stop])
                state.add(item, digest)
            asked = self._peers.clock()
            return state.over or state.held == until

        request = PullChunks(self.plan.id, number, state.held, until)
        return await self._watch.pull(pulling, lambda: self._peers.reduced(source, request), take)

    async def _salvage(self, number: int, source: str, reason: str) -> None:
        """The source is lost. Any member that holds more of the cell holds the same bytes; when nobody does, the rest is missing."""
        state, plan = self.cells[number], self.plan
        state.salvaging = True
        names = [name for name in dict.fromkeys((state.cell.owner, *plan.receivers)) if name not in (self.name, source)]
        end, quiet = self._peers.clock() + 4 * plan.stall_seconds, 0
        while quiet < 2 and not state.over and self._peers.clock() < end:
            before, growing = state.held, False
            for name in names:
                growing |= await self._salvage_from(number, name)
                if state.over:
                    return
            quiet = quiet + 1 if state.held == before and not growing else 0
            await asyncio.sleep(_SALVAGE_SECONDS)
        state.fail(Failed((source,), reason))

    async def _salvage_from(self, number: int, name: str) -> bool:
        """Takes what a member has; whether it may have more later."""
        state, limit = self.cells[number], self.plan.stall_seconds
        try:
            progress = await self._peers.progress(name, PullChunks(self.plan.id, number))
        except FabricError:
            return False
        if progress.held > state.held:
            await self._pull_reduced(number, name, progress.held, limit, limit)
        return not progress.final

    # ---- checks and threads

    def _cell(self, pull: PullChunks) -> tuple[int, Cell]:
        if pull.round != self.plan.id or not 0 <= pull.cell < len(self.cells) or pull.first < 0:
            raise RefusedError(f"round {self.plan.id} has no cell {pull.cell} of round {pull.round} from chunk {pull.first} on")
        return pull.cell, self.plan.cells[pull.cell]

    def _check_chunk(self, number: int, chunk: EncodedChunk) -> None:
        """Before anything is decoded: is it so many values of a kind that is summed?"""
        start, stop = self.cells[number].spans[chunk.index]
        if chunk.header.shape != (stop - start,):
            raise CodecError(f"a chunk of shape {list(chunk.header.shape)} where {stop - start} values were due")
        if chunk.header.dtype not in {self.plan.dtype, *(str(dtype).removeprefix("torch.") for dtype in ACCUMULATED)}:
            raise CodecError(f"a chunk of {chunk.header.dtype}, which is not summed")

    def _check_reduced(self, number: int, chunk: EncodedChunk) -> None:
        state = self.cells[number]
        allowed = {self.plan.index[name] for name in self.plan.contributors}
        if chunk.index != state.held or not chunk.contributors or not set(chunk.contributors) <= allowed:
            raise CodecError(f"reduced chunk {chunk.index} of {chunk.contributors} where {state.held} was due")
        self._check_chunk(number, chunk)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coroutine)
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)

    async def _run(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._work, function, *arguments)


def _seen(task: "asyncio.Task[Item]") -> None:
    """Nobody waits for it any more: how it ended does not matter."""
    if not task.cancelled():
        task.exception()


def _nbytes(item: Item) -> int:
    return sum(part.nbytes for part in item.parts) if isinstance(item, EncodedChunk) else 0


def _checked_buffer(plan: RoundPlan, weight: float | None, buffer: torch.Tensor | None) -> torch.Tensor | None:
    """The contribution as a flat tensor on the host; FabricError if it is not what the plan says."""
    if weight is None:
        return None
    if buffer is None or buffer.numel() != plan.elements:
        size = "none" if buffer is None else str(buffer.numel())
        raise FabricError(f"round {plan.id}: a contribution of {plan.elements} values was due, got {size}")
    if buffer.dtype not in ACCUMULATED:
        raise FabricError(f"round {plan.id}: {buffer.dtype} cannot be summed; contribute float32, bfloat16 or float16")
    return buffer.detach().cpu().contiguous().view(-1)


def _begun_feedback(plan: RoundPlan, name: str, codecs: LinkCodecs, feedback: SumFeedback | None) -> SumFeedback | None:
    """The feedback, in use from now on."""
    if feedback is None and codecs.needs_feedback:
        raise FabricError(f"round {plan.id}: its codecs leave most values out and need error feedback; give reduce a SumFeedback")
    if feedback is not None:
        feedback.begin(plan, name)
    return feedback


def _checked_out(plan: RoundPlan, out: torch.Tensor | None) -> torch.Tensor:
    """Where the result goes: never where the contribution lies."""
    if plan.dtype not in DTYPES:
        raise FabricError(f"round {plan.id}: there is no dtype {plan.dtype!r}")
    dtype = DTYPES[plan.dtype]
    if out is None:
        return torch.empty(plan.elements, dtype=dtype)
    if out.numel() != plan.elements or out.dtype != dtype or not out.is_contiguous() or out.device.type != "cpu":
        raise FabricError(f"round {plan.id}: the result needs {plan.elements} values of {dtype}, contiguous on the host")
    return out.detach().view(-1)
