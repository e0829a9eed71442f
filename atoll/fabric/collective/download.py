"""A state from several donors at once: the faster give more, what is wrong is refused and fetched elsewhere, what is there is kept."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

import msgspec
import torch

from atoll.errors import CollectiveError, FabricError, RefusedError
from atoll.events import DonorRefused, Observer, StateFetched
from atoll.fabric.collective.pieces import PieceStore
from atoll.fabric.collective.state import State, StateManifest, piece_digest
from atoll.fabric.method import Peer
from atoll.fabric.remote import Remote
from atoll.fabric.roles import allowed

__all__ = ["PieceRequest", "StateDonor", "WorkPool", "fetch_state"]

_REQUESTS = 3  # under way to a donor at once, so that its link never waits for us
_MOST_FAILURES = 3  # in a row, after which a donor is left alone


class PieceRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Asks for a piece of exactly one state."""

    state: str
    manifest: str  # its digest
    piece: int


class StateDonor:
    """A service: states this peer offers, by name. Offer one for as long as its tensors do not change."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}

    def offer(self, state: State) -> None:
        """Others may fetch it from now on."""
        self._states[state.manifest.state] = state

    def withdraw(self, name: str) -> None:
        """No longer; pieces under way still arrive, or are refused by their digest."""
        self._states.pop(name, None)

    @allowed("worker", "coordinator")
    async def manifest(self, state: str, peer: Peer) -> StateManifest:
        """What a state consists of."""
        return self._known(state).manifest

    @allowed("worker", "coordinator")
    async def piece(self, request: PieceRequest, peer: Peer) -> list[torch.Tensor]:
        """A piece's bytes."""
        state = self._known(request.state)
        if state.manifest.digest != request.manifest:
            raise RefusedError(f"state {request.state!r} is another one here by now")
        return state.piece(request.piece)

    def _known(self, name: str) -> State:
        if name not in self._states:
            raise RefusedError(f"no state {name!r} is offered; there are {', '.join(sorted(self._states)) or 'none'}")
        return self._states[name]


class WorkPool:
    """Which donor fetches which piece next. Pure.

    Whoever is free takes the next piece, so that work divides by speed. When none is left, a free donor takes one that another is still
    busy with, the longest begun first: at the end nobody waits for the slowest.
    """

    def __init__(self, pieces: Collection[int]) -> None:
        self._waiting = deque(sorted(pieces))
        self._under_way: dict[int, set[str]] = {}  # oldest first
        self._refused: dict[int, set[str]] = {}
        self.missing = set(pieces)

    def take(self, donor: str) -> int | None:
        """A piece for a donor; None: nothing it could help with."""
        for _ in range(len(self._waiting)):
            piece = self._waiting.popleft()
            if donor not in self._refused.get(piece, ()):
                self._under_way.setdefault(piece, set()).add(donor)
                return piece
            self._waiting.append(piece)
        for piece, donors in self._under_way.items():
            if len(donors) == 1 and donor not in donors and donor not in self._refused.get(piece, ()):
                donors.add(donor)
                return piece
        return None

    @property
    def busy(self) -> bool:
        """Whether a donor is busy with a piece: it may fail, and leave work to others."""
        return bool(self._under_way)

    def done(self, piece: int) -> bool:
        """A piece is verified; False if it was already."""
        new = piece in self.missing
        self.missing.discard(piece)
        self._under_way.pop(piece, None)
        return new

    def failed(self, piece: int, donor: str, *, refused: bool) -> None:
        """A donor did not give a piece, or gave a wrong one: then never again."""
        if refused:
            self._refused.setdefault(piece, set()).add(donor)
        donors = self._under_way.get(piece)
        if donors is not None:
            donors.discard(donor)
            if not donors:
                del self._under_way[piece]
                self._waiting.appendleft(piece)


async def fetch_state(
    name: str,
    donors: Mapping[str, Remote],
    store: PieceStore,
    *,
    digest: str | None = None,
    observer: Observer | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> dict[str, torch.Tensor]:
    """Fetches a state (in the fabric's loop). `digest`: of the manifest, where it is known; else what most donors say.

    CollectiveError when no donor can give what is missing; `store` keeps the verified pieces for another attempt.
    """
    fetch = _Fetch(name, donors, store, observer, clock)
    manifest, willing = await fetch.agree(digest)
    return await fetch.run(manifest, willing)


class _Fetch:
    def __init__(
        self, name: str, donors: Mapping[str, Remote], store: PieceStore, observer: Observer | None, clock: Callable[[], float]
    ) -> None:
        self._name, self._donors, self._store = name, donors, store
        self._observer, self._clock, self._began = observer, clock, clock()
        self._reasons: dict[str, str] = {}  # the last one of each
        self._gone: set[str] = set()  # donors that are left alone
        self._bytes = dict.fromkeys(donors, 0)
        self._changed = asyncio.Event()

    async def agree(self, digest: str | None) -> tuple[StateManifest, list[str]]:
        """The manifest, and who holds that state."""

        async def ask(donor: str) -> StateManifest | None:
            try:
                return await self._donors[donor].call(StateDonor.manifest, self._name)
            except FabricError as error:
                self._refuse(donor, None, str(error))
                return None

        answers = dict(zip(self._donors, await asyncio.gather(*map(ask, self._donors)), strict=True))
        found: dict[str, list[str]] = {}
        for donor, manifest in answers.items():
            if manifest is not None:
                found.setdefault(manifest.digest, []).append(donor)
        chosen = digest if digest is not None else max(found, key=lambda one: len(found[one]), default="")
        for other, holders in found.items():
            for donor in holders if other != chosen else []:
                self._refuse(donor, None, f"it holds another state under that name ({other[:12]}, not {chosen[:12]})")
        if chosen not in found:
            raise self._error("nobody offers it")
        manifest = answers[found[chosen][0]]
        assert manifest is not None
        return manifest, found[chosen]

    async def run(self, manifest: StateManifest, willing: list[str]) -> dict[str, torch.Tensor]:
        """Fetches what is missing."""
        held = await asyncio.to_thread(self._store.begin, manifest)
        pool = WorkPool(set(range(len(manifest.digests))) - held)
        kept = sum(end - first for first, end in map(manifest.span, held))
        tasks = [asyncio.create_task(self._work(donor, manifest, pool)) for donor in willing for _ in range(_REQUESTS)]
        try:
            while pool.missing and not all(task.done() for task in tasks):
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in [task for task in tasks if task.done()]:
                    task.result()
                    tasks.remove(task)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        if pool.missing:
            raise self._error(f"{len(pool.missing)} of {len(manifest.digests)} pieces are missing")
        self._tell(manifest, kept)
        return self._store.tensors()

    async def _work(self, donor: str, manifest: StateManifest, pool: WorkPool) -> None:
        """Fetches pieces from a donor until there is nothing to do, or it fails too often."""
        failures = 0
        while pool.missing and failures < _MOST_FAILURES and donor not in self._gone:
            piece = pool.take(donor)
            if piece is None:
                if not pool.busy:
                    return  # what is missing was refused from this donor, and nobody else can leave it anything
                changed = self._changed
                await changed.wait()
                continue
            try:
                parts = await self._donors[donor].call(StateDonor.piece, PieceRequest(self._name, manifest.digest, piece))
                wrong = await asyncio.to_thread(_why_wrong, manifest, piece, parts)
            except FabricError as error:
                failures += 1
                pool.failed(piece, donor, refused=isinstance(error, RefusedError))
                self._refuse(donor, piece, str(error))
            except asyncio.CancelledError:
                pool.failed(piece, donor, refused=False)
                raise
            else:
                failures = await self._took(donor, manifest, pool, piece, parts, wrong, failures)
            self._wake()
        if failures >= _MOST_FAILURES and donor not in self._gone:
            self._refuse(donor, None, f"it failed {failures} times in a row")
            self._wake()

    async def _took(
        self, donor: str, manifest: StateManifest, pool: WorkPool, piece: int, parts: list[torch.Tensor], wrong: str, failures: int
    ) -> int:
        """Keeps a piece, or refuses it; the failures in a row."""
        if wrong:
            pool.failed(piece, donor, refused=True)
            self._refuse(donor, piece, wrong)
            return failures + 1
        if piece in pool.missing:
            await asyncio.to_thread(self._store.write, piece, parts)
            if pool.done(piece):
                self._bytes[donor] += sum(part.numel() for part in parts)
        return 0

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _refuse(self, donor: str, piece: int | None, reason: str) -> None:
        self._reasons[donor] = reason
        if piece is None:
            self._gone.add(donor)
        if self._observer is not None:
            self._observer(DonorRefused(at_seconds=self._clock() - self._began, peer=donor, state=self._name, piece=piece, reason=reason))

    def _error(self, what: str) -> CollectiveError:
        reasons = "; ".join(f"{donor}: {reason}" for donor, reason in sorted(self._reasons.items())) or "no donors were named"
        return CollectiveError(f"state {self._name!r}: {what}: {reasons}", tuple(sorted(self._reasons)))

    def _tell(self, manifest: StateManifest, kept_bytes: int) -> None:
        if self._observer is not None:
            event = StateFetched(
                at_seconds=self._clock() - self._began,
                state=self._name,
                size_bytes=manifest.size_bytes,
                kept_bytes=kept_bytes,
                seconds=self._clock() - self._began,
                bytes_by_donor=dict(self._bytes),
            )
            self._observer(event)


def _why_wrong(manifest: StateManifest, piece: int, parts: list[torch.Tensor]) -> str:
    """Empty: a piece is what the manifest says."""
    first, end = manifest.span(piece)
    if any(part.dtype != torch.uint8 or part.dim() != 1 for part in parts) or sum(part.numel() for part in parts) != end - first:
        return f"piece {piece} is not {end - first} bytes"
    return "" if piece_digest(parts) == manifest.digests[piece] else f"piece {piece} does not have its digest: it was changed or damaged"
