"""Round: one reduction at one member, in the fabric's loop. Everything is pulled, so nobody holds what it did not ask for.

An owner pulls contributions and sums them chunk by chunk; members pull reduced chunks as they become ready. Encoding, decoding and sums run
in worker threads; sending, receiving and summing of different chunks overlap.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Protocol, TypeVar

import torch

from atoll.codec.base import Codec
from atoll.errors import CodecError, FabricError, NonFiniteTensorError, RefusedError
from atoll.fabric.collective.chunk import (
    CellProgress,
    EncodedChunk,
    Failed,
    Item,
    PullChunks,
    Scratch,
    Summand,
    make_chunk,
    open_chunk,
    weighted_sum,
)
from atoll.fabric.collective.link_codecs import LinkCodecs
from atoll.fabric.collective.plan import RoundPlan
from atoll.fabric.collective.pull import OpenStream, Pacing, Pulling, TakeItem, Watch
from atoll.fabric.collective.result import PartOutcome, ReducedCell, ReductionResult, SumFeedback

__all__ = ["Peers", "Round"]

Result = TypeVar("Result")
_SALVAGE_SECONDS = 0.05
_AHEAD = 16  # chunks a fast contributor may be ahead of the slowest
_SUMMED = (torch.float32, torch.bfloat16, torch.float16)  # as fp32


class Peers(Protocol):
    """What a round needs of its surroundings."""

    def contributions(self, peer: str, pull: PullChunks) -> AsyncIterator[EncodedChunk]:
        """Asks a peer for its contribution to a cell."""

    def reduced(self, peer: str, pull: PullChunks) -> AsyncIterator[Item]:
        """Asks a peer for a reduced cell."""

    async def progress(self, peer: str, pull: PullChunks) -> CellProgress:
        """Asks a peer how much of a reduced cell it holds."""

    def watched(self, peer: str, limit_seconds: float, first_seconds: float) -> Pulling:
        """A pull from a peer that is about to begin."""

    def clock(self) -> float:
        """Seconds."""

    def sent(self, peer: str, begin: float, end: float, nbytes: int) -> None:
        """Bytes went to a peer between two times."""

    def received(self, begin: float, end: float, nbytes: int) -> None:
        """Bytes came in between two times."""


class _Contributor:
    """Whose chunks an owner sums, with what came of them and is not summed yet; a failure comes last."""

    def __init__(self, name: str, place: int) -> None:
        self.name, self.place = name, place
        self.received = 0  # chunks
        self.items: asyncio.Queue[Item] = asyncio.Queue(_AHEAD)


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
        self._weight = plan.member(name).weight
        self._buffer = None if self._weight is None else _checked_buffer(plan, buffer)
        self._out = _checked_out(plan, out)
        self._peers, self._work, self._codecs = peers, work, codecs
        if feedback is None and codecs.needs_feedback:
            raise FabricError(f"round {plan.id}: its codecs leave most values out and need error feedback; give reduce a SumFeedback")
        if feedback is not None:
            feedback.begin(plan, name)
        self._feedback = feedback
        self._watch = Watch(peers.clock)
        self._scratch = Scratch()
        self._outgoing, self._handing_out = Pacing(), Pacing()  # contributions, results
        self._pulls: set[asyncio.Task[None]] = set()

    # ---- the whole of it

    async def run(self) -> ReductionResult:
        """Until the result is there, or what can be had of it. Never hangs: everything waited for has an end."""
        tasks = [asyncio.create_task(self._watch.run())]
        try:
            owned = [cell.owner == self.name for cell in self.plan.cells]
            cells = [asyncio.create_task(self._reduce(number) if mine else self._receive(number)) for number, mine in enumerate(owned)]
            tasks += cells
            await asyncio.gather(*cells)
            return self._reduction()
        finally:
            self._buffer = None
            if self._feedback is not None:
                self._feedback.end()
            for task in [*tasks, *self._pulls]:
                task.cancel()
            await asyncio.wait([*tasks, *self._pulls])
            for state in self.cells:
                state.fail(Failed((self.name,), f"{self.name} ended the round"))

    def _reduction(self) -> ReductionResult:
        found: list[PartOutcome] = [part for cell in self.cells for part in cell.outcomes()]
        for part in found:
            if not part.contributors:
                self._out[part.start : part.stop] = 0
        return ReductionResult(round=self.plan.id, value=self._out, parts=tuple(found), expected=self.plan.contributors)

    # ---- contributions: what this member brings

    async def contributions(self, pull: PullChunks, peer: str) -> AsyncIterator[EncodedChunk]:
        """This member's contribution to a cell; the next chunk is made while one is sent."""
        number = self._cell(pull)
        if peer != self.plan.cells[number].owner or self._weight is None:
            raise RefusedError(f"round {self.plan.id}: {peer} has no claim to the contribution of {self.name} to cell {number}")

        def make(index: int) -> "asyncio.Task[EncodedChunk]":
            return asyncio.create_task(self._run(self._encode_own, number, index, self._codecs.towards(peer)))

        following = make(pull.first)

        async def take(index: int) -> EncodedChunk:
            nonlocal following
            chunk = await following
            if index + 1 < len(self.cells[number].spans):
                following = make(index + 1)
            return chunk

        try:
            async with aclosing(self._serve(pull, peer, self._outgoing, take)) as chunks:
                async for chunk in chunks:
                    yield chunk
        finally:
            following.cancel()
            following.add_done_callback(lambda task: task.cancelled() or task.exception())  # how it ended does not matter

    async def _serve(
        self, pull: PullChunks, peer: str, pacing: Pacing, take: Callable[[int], Awaitable[Result]]
    ) -> AsyncGenerator[Result, None]:
        """The chunks that are asked for, in step with what else goes out."""
        state = self.cells[pull.cell]
        lane = pacing.begin(self._fraction(pull.cell, pull.first - 1))
        try:
            for index in range(pull.first, len(state.spans) if pull.until is None else min(pull.until, len(state.spans))):
                item = await take(index)
                await pacing.turn(lane)
                begin = self._peers.clock()
                yield item
                self._peers.sent(peer, begin, self._peers.clock(), _nbytes(item))
                pacing.advanced(lane, self._fraction(pull.cell, index))
                if isinstance(item, Failed):
                    return
        finally:
            pacing.end(lane)

    def _fraction(self, number: int, index: int) -> float:
        """What of a cell is behind its chunk `index`."""
        cell, spans = self.plan.cells[number], self.cells[number].spans
        return (spans[min(index, len(spans) - 1)][1] - cell.start) / cell.elements if index >= 0 else 0.0

    def _encode_own(self, number: int, index: int, codec: Codec) -> EncodedChunk:
        return self._encode(number, index, (self.plan.index[self.name],), codec, [self._own(number, index)], 1.0)

    def _own(self, number: int, index: int) -> Summand:
        start, stop = self.cells[number].spans[index]
        buffer = self._buffer
        if buffer is None or self._weight is None:
            raise RefusedError(f"round {self.plan.id} is over at {self.name}")
        return Summand(buffer[start:stop], self._weight)

    def _encode(self, number: int, index: int, places: tuple[int, ...], codec: Codec, terms: list[Summand], divisor: float) -> EncodedChunk:
        def encode(value: torch.Tensor) -> EncodedChunk:
            begin = time.perf_counter()
            chunk = make_chunk(index, places, codec, value)
            self._codecs.timed(codec, value.nbytes, time.perf_counter() - begin)
            return chunk

        if self._feedback is None:
            return encode(weighted_sum(terms, divisor, self._scratch))
        return self._feedback.encode(self.cells[number].spans[index], weighted_sum(terms, 1.0, self._scratch), divisor, encode)

    # ---- summing: what others bring

    async def _reduce(self, number: int) -> None:
        """Sums a cell this member owns. Its own copy is decoded from the same bytes everybody gets."""
        plan, state, here = self.plan, self.cells[number], self.plan.index[self.name]
        contributors = [_Contributor(name, plan.index[name]) for name in plan.contributors if name != self.name]
        for one in contributors:
            self._pulls.add(asyncio.create_task(self._pull_contribution(number, one)))
        lost: list[Failed] = []
        while not state.over:
            index, terms = state.held, {} if self._weight is None else {here: self._own(number, state.held)}
            for one in list(contributors):
                item = await one.items.get()
                if isinstance(item, Failed):
                    lost.append(item)
                    contributors.remove(one)
                else:
                    terms[one.place] = Summand(item.encoded())
            if (lost and plan.missing == "fail") or not terms:
                blamed = tuple(name for failed in lost for name in failed.blamed)
                state.fail(Failed(blamed, "; ".join(failed.reason for failed in lost)))
                return
            try:
                chunk, digest = await self._run(self._sum, number, index, terms, self._codecs.for_all(plan.others(self.name)))
            except NonFiniteTensorError as error:  # values that this codec cannot carry: nobody gets this part
                state.fail(Failed((self.name,), f"the sum at {self.name}: {error}"))
                return
            state.add(chunk, digest)

    def _sum(self, number: int, index: int, terms: dict[int, Summand], codec: Codec) -> tuple[EncodedChunk, str]:
        """In order of the members, whoever came first."""
        places = tuple(sorted(terms))
        weight = sum(self.plan.members[place].weight or 0.0 for place in places)
        divisor = weight if self.plan.mean and weight > 0 else 1.0
        chunk = self._encode(number, index, places, codec, [terms[place] for place in places], divisor)
        start, stop = self.cells[number].spans[index]
        return chunk, open_chunk(chunk, self._out[start:stop])

    async def _pull_contribution(self, number: int, one: _Contributor) -> None:
        plan, last = self.plan, len(self.cells[number].spans)

        async def take(item: Item) -> bool:
            assert isinstance(item, EncodedChunk)
            if item.index != one.received or item.contributors != (one.place,):
                raise FabricError(f"{one.name} sent chunk {item.index} of {item.contributors} where {one.received} of {one.place} was due")
            self._check_chunk(number, item)
            one.received += 1
            await one.items.put(item)
            return one.received == last

        request, limit = PullChunks(plan.id, number), plan.stall_seconds
        error = await self._pull(one.name, limit, limit + plan.begin_seconds, lambda: self._peers.contributions(one.name, request), take)
        if error is not None:
            await one.items.put(Failed((one.name,), str(error)))

    async def _pull(self, peer: str, limit: float, first: float, items: OpenStream, take: TakeItem) -> FabricError | None:
        """Takes items while they come, and tells the peers' rates; why it ended too soon. Waits so long for the first and for others."""
        asked = self._peers.clock()

        async def measured(item: Item) -> bool:
            nonlocal asked
            self._peers.received(asked, self._peers.clock(), _nbytes(item))
            last = await take(item)
            asked = self._peers.clock()
            return last

        return await self._watch.pull(self._peers.watched(peer, limit, first), items, measured)

    # ---- the result: what others reduced

    async def reduced(self, pull: PullChunks, peer: str) -> AsyncIterator[Item]:
        """A reduced cell, chunk by chunk as it becomes ready."""
        state = self.cells[self._cell(pull)]
        async with aclosing(self._serve(pull, peer, self._handing_out, state.wait)) as items:
            async for item in items:
                yield item

    async def _receive(self, number: int) -> None:
        """Pulls a reduced cell. Its owner waits for contributors itself, so it is waited for three times as long as they are."""
        owner, stall = self.plan.cells[number].owner, self.plan.stall_seconds
        error = await self._pull_reduced(number, owner, None, 3 * stall, 3 * (stall + self.plan.begin_seconds))
        if not self.cells[number].over:
            await self._salvage(number, str(error))

    async def _pull_reduced(self, number: int, source: str, until: int | None, limit: float, first: float) -> FabricError | None:
        state = self.cells[number]

        async def take(item: Item) -> bool:
            if isinstance(item, Failed):
                state.fail(item)
            else:
                self._check_reduced(number, item)
                start, stop = state.spans[item.index]
                state.add(item, await self._run(open_chunk, item, self._out[start:stop]))
            return state.over or state.held == until

        request = PullChunks(self.plan.id, number, state.held, until)
        return await self._pull(source, limit, first, lambda: self._peers.reduced(source, request), take)

    async def _salvage(self, number: int, reason: str) -> None:
        """The owner is lost. Any member that holds more of the cell holds the same bytes; when nobody does, the rest is missing."""
        state = self.cells[number]
        state.salvaging = True
        names = [name for name in self.plan.others(self.name) if name != state.cell.owner]
        end, quiet = self._peers.clock() + 4 * self.plan.stall_seconds, 0
        while quiet < 2 and not state.over and self._peers.clock() < end:
            before, growing = state.held, False
            for name in names:
                growing |= await self._salvage_from(number, name)
                if state.over:
                    return
            quiet = quiet + 1 if state.held == before and not growing else 0
            await asyncio.sleep(_SALVAGE_SECONDS)
        state.fail(Failed((state.cell.owner,), reason))

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

    def _cell(self, pull: PullChunks) -> int:
        if pull.round != self.plan.id or not 0 <= pull.cell < len(self.cells) or pull.first < 0:
            raise RefusedError(f"round {self.plan.id} has no cell {pull.cell} of round {pull.round} from chunk {pull.first} on")
        return pull.cell

    def _check_chunk(self, number: int, chunk: EncodedChunk) -> None:
        """Before anything is decoded: is it so many values of the kind that is summed?"""
        start, stop = self.cells[number].spans[chunk.index]
        if chunk.header.shape != (stop - start,):
            raise CodecError(f"a chunk of shape {list(chunk.header.shape)} where {stop - start} values were due")
        if chunk.header.dtype != "float32":
            raise CodecError(f"a chunk of {chunk.header.dtype}, which is not summed")

    def _check_reduced(self, number: int, chunk: EncodedChunk) -> None:
        due = self.cells[number].held
        allowed = {self.plan.index[name] for name in self.plan.contributors}
        if chunk.index != due or not chunk.contributors or not set(chunk.contributors) <= allowed:
            raise CodecError(f"reduced chunk {chunk.index} of {chunk.contributors} where {due} was due")
        self._check_chunk(number, chunk)

    async def _run(self, function: Callable[..., Result], *arguments: object) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._work, function, *arguments)


def _nbytes(item: object) -> int:
    return sum(part.nbytes for part in item.parts) if isinstance(item, EncodedChunk) else 0


def _checked_buffer(plan: RoundPlan, buffer: torch.Tensor | None) -> torch.Tensor:
    """The contribution as a flat tensor on the host; FabricError if it is not what the plan says."""
    if buffer is None or buffer.numel() != plan.elements:
        size = "none" if buffer is None else str(buffer.numel())
        raise FabricError(f"round {plan.id}: a contribution of {plan.elements} values was due, got {size}")
    if buffer.dtype not in _SUMMED:
        raise FabricError(f"round {plan.id}: {buffer.dtype} cannot be summed; contribute float32, bfloat16 or float16")
    return buffer.detach().cpu().contiguous().view(-1)


def _checked_out(plan: RoundPlan, out: torch.Tensor | None) -> torch.Tensor:
    """Where the result goes: never where the contribution lies."""
    if out is None:
        return torch.empty(plan.elements)
    if out.numel() != plan.elements or out.dtype != torch.float32 or not out.is_contiguous() or out.device.type != "cpu":
        raise FabricError(f"round {plan.id}: the result needs {plan.elements} values of float32, contiguous on the host")
    return out.detach().view(-1)
